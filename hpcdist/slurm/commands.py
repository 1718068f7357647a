"""`hpcdist slurm`: each command parses, builds a specification, and calls one function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from hpcdist import console
from hpcdist.slurm.site import load_site
from hpcdist.slurm.spec import JobSpec, load_spec

app = typer.Typer(no_args_is_help=True, help="Jobs under Slurm: from a specification to a script, a job, its log.")

Spec = Annotated[Optional[Path], typer.Argument(metavar="[TOML]", help="File of the job's settings.")]
SiteName = Annotated[Optional[str], typer.Option("--site", metavar="NAME|TOML", help="Profile of the cluster.")]
Overrides = Annotated[
    Optional[list[str]], typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")
]


def specification(toml: Path | None, site: str | None, overrides: list[str] | None) -> JobSpec:
    """The job that the arguments describe; the flags win over the file."""
    spec = load_spec(toml, overrides or [])
    return spec if site is None else spec.model_copy(update={"site": site})


@app.command()
def render(
    toml: Spec = None,
    site: SiteName = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why each line is there.")] = False,
    output: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Write it there.")] = None,
) -> None:
    """Show the batch script of a job."""
    from hpcdist.slurm.render import render

    spec = specification(toml, site, overrides)
    script = render(spec, load_site(spec.site))
    text = script.with_reasons() if explain else script.text
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)


@app.command()
def check(toml: Spec = None, site: SiteName = None, overrides: Overrides = None) -> None:
    """Say what is wrong with a job before the queue does. Exit status 1 where there is an error."""
    from hpcdist.slurm.check import examine

    spec = specification(toml, site, overrides)
    findings = examine(spec, load_site(spec.site))
    for finding in findings:
        print(finding)
    errors = sum(finding.level == "error" for finding in findings)
    console.note(f"{errors} errors, {len(findings) - errors} warnings")
    raise typer.Exit(int(errors > 0))


# --- jobs in the queue ------------------------------------------------------------------------------------------------
Job = Annotated[Optional[str], typer.Argument(metavar="[JOB]", help="Its number; the newest submitted from here.")]


@app.command()
def submit(
    toml: Spec = None,
    site: SiteName = None,
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show it until it ends; the exit status is the job's.")] = False,
) -> None:
    """Give a job to Slurm, after the checks of `check`, and remember it for the commands below."""
    from hpcdist.slurm import queue
    from hpcdist.slurm.check import examine
    from hpcdist.slurm.render import render

    spec = specification(toml, site, overrides)
    profile = load_site(spec.site)
    findings = examine(spec, profile)
    for finding in findings:
        console.note(str(finding))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)
    entry = queue.submit(spec, render(spec, profile).text)
    print(entry.job)
    console.note(f"job {entry.job}: its run goes to {entry.output}, its log to {entry.log}")
    if wait:
        from hpcdist.slurm import watch

        raise typer.Exit(watch.watch(entry, spec))


@app.command()
def status(job: Job = None) -> None:
    """What a job does, how far its run is, and what it was made from."""
    from hpcdist.slurm import ledger, queue, watch

    job = queue.newest(job)
    console.facts(watch.facts(job, ledger.find(job), queue.states(job)))


@app.command()
def logs(
    job: Job = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job has ended.")] = False,
) -> None:
    """Show what a job has written; of one task of an array with a number such as 12_3."""
    from hpcdist.slurm import queue, watch

    watch.show_logs(queue.newest(job), follow)


@app.command()
def cancel(job: Job = None) -> None:
    """End a job, or take it out of the queue."""
    from hpcdist.slurm import queue

    job = queue.newest(job)
    queue.cancel(job)
    console.note(f"job {job} is cancelled")


@app.command()
def requeue(job: Job = None) -> None:
    """Start a job again under its number: its run goes on from its newest checkpoint."""
    from hpcdist.slurm import queue

    job = queue.newest(job)
    queue.requeue(job)
    console.note(f"job {job} is in the queue again")
