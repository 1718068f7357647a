"""Submit jobs to Slurm, query their states, wait for them, cancel and requeue them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hpcdist.comm.launch import SLURM_REPLY_S
from hpcdist.config.files import git_commit
from hpcdist.errors import ConfigError, QueueError
from hpcdist.tools.slurm import history
from hpcdist.tools.slurm.history import Submission
from hpcdist.tools.slurm.render import render
from hpcdist.tools.slurm.spec import JobSpec, Site
from hpcdist.tools.slurm.state import FORGOTTEN, State, read, status_of

SHORTEST_S, LONGEST_S = 0.25, 10.0  # between queries: the controller serves all users
NO_VALUE = 2**64 - 16  # in Slurm's accounting, numbers from here on mean "no value"


def submit(spec: JobSpec, site: Site) -> Submission:
    """Submit a job's batch script to Slurm, and record it in the history."""
    if spec.shape == "interactive":
        raise ConfigError(
            "shape must be a batch shape to be submitted; got 'interactive'. Run the script that "
            "`hpcdist slurm render` shows."
        )
    Path(spec.output).mkdir(parents=True, exist_ok=True)  # without it the job would fail immediately and silently
    history.FOLDER.mkdir(exist_ok=True)
    unnamed = history.FOLDER / f"submitting-{os.getpid()}.sh"  # until the job's number is known
    try:
        unnamed.write_text(render(spec, site).text)  # if this fails, no job was submitted
        job = ask("sbatch", "--parsable", str(unnamed)).strip().partition(";")[0]
        script = unnamed.replace(history.FOLDER / f"{job}.sh")
    finally:
        unnamed.unlink(missing_ok=True)
    commit, dirty = git_commit()
    # The log's path, as Slurm will expand it: %% stands for %, and must not be taken for the start of %j.
    log = spec.log.replace("%%", "\0").replace("%j", job).replace("%A", job).replace("%x", spec.name)
    entry = Submission(
        job=job,
        name=spec.name,
        submitted=time.time(),
        commit=commit,
        dirty=dirty,
        script=str(script),
        log=log.replace("\0", "%"),
        output=f"{spec.output}/{job}",
        cases=len(spec.cases),
        spec=spec.model_dump(mode="json", exclude_defaults=True),
    )
    history.append(entry)
    return entry


def ask(*command: str, **variables: str) -> str:
    """Run a command of Slurm, with extra environment variables, and return its output; raise QueueError if it fails."""
    if shutil.which(command[0]) is None:
        raise QueueError(
            f"{command[0]} must be on PATH to reach Slurm; found none. Log in to a host of the cluster, or load its "
            "module."
        )
    try:
        environ = os.environ | variables
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace", timeout=SLURM_REPLY_S
        )
    except subprocess.TimeoutExpired:
        raise QueueError(
            f"{command[0]} must answer within {SLURM_REPLY_S:g} s; got nothing. The controller is down or busy: retry."
        ) from None
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())
        raise QueueError(f"Slurm must accept `{' '.join(command)}`; got: {message}")
    return done.stdout


def states(job: str) -> list[State]:
    """Return the state of a job, or of an array's tasks; raise QueueError if Slurm is missing or the job unknown."""
    try:
        tasks = read(ask("scontrol", "--oneliner", "show", "job", job))
    except QueueError as error:
        if not any(text in str(error) for text in ("Invalid job id", f"{job} not found")):  # the second for a task
            raise
        tasks = []
    if not tasks:
        return _forgotten(job)
    if "_" in tasks[0].job and "_" not in job:  # an array: the controller forgets finished tasks one by one
        listed_jobs = {state.job for state in tasks}
        tasks += [state for state in _from_accounting(job) if state.ended and state.job not in listed_jobs]
    return tasks


def _forgotten(job: str) -> list[State]:
    """Return the states of a job that the controller has forgotten: from the accounting, or only FORGOTTEN."""
    tasks = _from_accounting(job)
    if not tasks and "_" in job:  # tasks that never started share one line
        tasks = [state for state in _from_accounting(job.partition("_")[0]) if "[" in state.job]
    if not tasks and history.find(job) is not None:
        tasks = [State(job, FORGOTTEN)]
    if not tasks:
        raise QueueError(
            f"job must be one that Slurm or {history.FOLDER}/jobs.jsonl knows; got {job}. `squeue --me` lists yours."
        )
    return tasks


def _from_accounting(job: str) -> list[State]:
    """Return the states of a job, or an array's tasks, at their last starts; empty if the accounting has none."""
    columns = "DBIndex,JobID,State,Elapsed,Timelimit,NodeList,ExitCode"
    options = ("--allocations", "--duplicates", "--noheader", "--parsable2", "--format", columns)
    starts: dict[str, list[State]] = {}
    with suppress(QueueError):
        output = ask("sacct", *options, "--jobs", job)
        for line in sorted(output.splitlines(), key=lambda line: int(line.partition("|")[0])):
            _, task, task_state, elapsed, limit, nodes, code = line.split("|")
            task_state = task_state.split()[0]  # "CANCELLED by 1000"
            nodes = "" if nodes == "None assigned" else nodes
            prior = starts.setdefault(task, [])
            prior.append(State(task, task_state, "", nodes, elapsed, limit, len(prior), status_of(task_state, code)))
    return [task_states[-1] for task_states in starts.values()]


def consumed_joules(job: str) -> float | None:
    """Return the energy of a job's steps by Slurm's accounting, summed over all nodes; None if unknown.

    A node counts all that it consumes during a step: of concurrent steps, such as the batch script's, one counts.
    """
    output = ""
    with suppress(QueueError):
        columns = ("--format", "JobID,ConsumedEnergyRaw")
        output = ask("sacct", "--noheader", "--parsable2", *columns, "--jobs", job)
    rows = [line.split("|") for line in output.splitlines()]
    steps = [energy for name, energy in rows if name.rpartition(".")[2].isdigit() and "." in name]
    joules = [int(energy) for energy in steps if energy.isdigit() and 0 < int(energy) < NO_VALUE]
    return float(sum(joules)) if joules else None


def newest(job: str | None) -> str:
    """Return `job`, or the id of the newest job submitted from this folder; raise QueueError if there is none."""
    if job is not None:
        return job
    entry = history.find(None)
    if entry is None:
        raise QueueError(
            f"job must be given where none was submitted; got no {history.FOLDER}/jobs.jsonl here. Go to the folder of "
            "its submission, or give its number."
        )
    return entry.job


def wait(job: str, callback: Callable[[Sequence[State]], None] = lambda tasks: None, every_s: float = 0.5) -> int:
    """Wait until a job, or each task of an array, has ended and is not requeued; return the largest exit status.

    Slurm is queried with exponential backoff; `callback` gets its newest reply every `every_s` seconds.
    """
    pause_s = SHORTEST_S
    ended: dict[str, State] = {}  # of an array: the controller may forget a task before the others have ended
    while True:
        current = {state.job: state for state in states(job)}
        tasks = list({**ended, **current}.values())
        callback(tasks)
        if all(state.ended for state in tasks):
            return max(state.status for state in tasks)
        ended = {state.job: state for state in tasks if state.ended}
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(every_s, left_s))
            callback(tasks)
        pause_s = min(1.2 * pause_s, LONGEST_S)


def cancel(job: str) -> None:
    states(job)  # raises for an unknown job; scancel does not
    ask("scancel", job)


def requeue(job: str) -> None:
    """Restart a job under the same number, even if it is running. Its run resumes from its newest checkpoint."""
    ask("scontrol", "requeue", job)


def logs(job: str) -> list[Path]:
    """Return the existing log files of a job, or of an array's tasks."""
    entry = history.find(job)
    if entry is None:  # submitted from another folder, or by sbatch
        lines = ask("scontrol", "show", "job", job).splitlines()  # one value per line: a path may have blanks
        names = [line.strip().removeprefix("StdOut=") for line in lines if line.lstrip().startswith("StdOut=")]
        return [path for path in map(Path, names) if path.exists()]
    log, task = Path(entry.log), job.partition("_")[2]
    name = log.name.replace("%a", task) if task else log.name
    head, mark, tail = name.partition("%a")
    if not mark:
        return [log.with_name(name)] if log.with_name(name).exists() else []
    tasks = [log.with_name(f"{head}{task}{tail}") for task in range(entry.cases)]
    return [path for path in tasks if path.exists()]
