"""`hpcdist slurm`: each command parses, builds a specification, and calls one function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.tools import console
from hpcdist.tools.cli.base import Overrides
from hpcdist.tools.slurm import history, queue, watch
from hpcdist.tools.slurm import render as rendering
from hpcdist.tools.slurm.check import examine
from hpcdist.tools.slurm.spec import JobSpec, Site, load_site, load_spec

app = typer.Typer(
    name="slurm", no_args_is_help=True, help="Jobs under Slurm: from a specification to a script, a job, its log."
)

Spec = Annotated[Path | None, typer.Argument(metavar="[TOML]", help="File of the job's settings.")]
SiteName = Annotated[str | None, typer.Option("--site", metavar="NAME|TOML", help="Profile of the cluster.")]


def _load(toml: Path | None, site: str | None, overrides: list[str] | None) -> tuple[JobSpec, Site]:
    """Load the job that the arguments describe, and its cluster's profile; flags win over the file."""
    spec = load_spec(toml, overrides or [])
    if site is not None:
        spec = spec.model_copy(update={"site": site})
    return spec, load_site(spec.site)


@app.command()
def render(
    toml: Spec = None,
    site: SiteName = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why each line is there.")] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there.")] = None,
) -> None:
    """Show the batch script of a job."""
    script = rendering.render(*_load(toml, site, overrides))
    text = script.with_reasons() if explain else script.text
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)


@app.command()
def check(toml: Spec = None, site: SiteName = None, overrides: Overrides = None) -> None:
    """Check a job before it waits in the queue. Exit status 1 where there is an error."""
    findings = examine(*_load(toml, site, overrides))
    for finding in findings:
        print(finding)
    errors = sum(finding.level == "error" for finding in findings)
    console.note(f"{errors} errors, {len(findings) - errors} warnings")
    raise typer.Exit(int(errors > 0))


# --- jobs in the queue ------------------------------------------------------------------------------------------------
Job = Annotated[str | None, typer.Argument(metavar="[JOB]", help="Its number; the newest submitted from here.")]


@app.command()
def submit(
    toml: Spec = None,
    site: SiteName = None,
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show it until it ends; the exit status is the job's.")] = False,
) -> None:
    """Submit a job to Slurm, after the checks of `check`, and record it for the commands below."""
    spec, profile = _load(toml, site, overrides)
    findings = examine(spec, profile)
    for finding in findings:
        console.note(str(finding))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)
    entry = queue.submit(spec, rendering.render(spec, profile).text)
    print(entry.job)
    console.note(f"job {entry.job}: its run goes to {entry.output}, its log to {entry.log}")
    if wait:
        raise typer.Exit(watch.watch(entry))


@app.command()
def status(job: Job = None) -> None:
    """Show a job's state, the progress of its run, its energy, and the script and commit that it was submitted from."""
    job = queue.newest(job)
    states = queue.states(job)
    console.facts(watch.facts(job, history.find(job), states))
    joules = queue.consumed_joules(job) if all(one.ended for one in states) else None
    if joules is not None:
        console.facts({"energy": f"{joules:.4g} J by Slurm's accounting"})


@app.command()
def logs(
    job: Job = None, follow: Annotated[bool, typer.Option("--follow", help="Go on until the job has ended.")] = False
) -> None:
    """Show a job's log, or that of one task of an array, such as 12_3."""
    watch.show_logs(queue.newest(job), follow)


@app.command()
def cancel(job: Job = None) -> None:
    """End a job, or remove it from the queue."""
    job = queue.newest(job)
    queue.cancel(job)
    console.note(f"job {job} is cancelled")


@app.command()
def requeue(job: Job = None) -> None:
    """Restart a job under its number: its run goes on from its newest checkpoint."""
    job = queue.newest(job)
    queue.requeue(job)
    console.note(f"job {job} is in the queue again")
