"""Submit jobs to Slurm's queue, ask for their states, wait for them, cancel them and start them again."""

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
from hpcdist.tools.slurm.spec import JobSpec
from hpcdist.tools.slurm.state import FORGOTTEN, State, read, status_of

SHORTEST_S, LONGEST_S = 0.25, 10.0  # between questions: controllers serve all users
NO_VALUE = 2**64 - 16  # from here on a number of Slurm's accounting says that there is none


def submit(spec: JobSpec, text: str) -> Submission:
    """Submit a batch script to Slurm, and record it in the history.

    Raises:
        ConfigError: the job's shape is interactive, which has no batch script.
        QueueError: there is no Slurm, or it refuses.
    """
    if spec.shape == "interactive":
        raise ConfigError(
            "shape must be one that runs by itself to be submitted; got 'interactive'. Run the script that "
            "`hpcdist slurm render` shows."
        )
    Path(spec.output).mkdir(parents=True, exist_ok=True)  # without it the job would end at once, silently
    history.FOLDER.mkdir(exist_ok=True)
    unnamed = history.FOLDER / f"submitting-{os.getpid()}.sh"
    try:
        unnamed.write_text(text)  # may fail, and does so before there is a job
        job = ask("sbatch", "--parsable", str(unnamed)).strip().partition(";")[0]
        script = unnamed.replace(history.FOLDER / f"{job}.sh")
    finally:
        unnamed.unlink(missing_ok=True)
    commit, dirty = git_commit()
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
    """Run a command of Slurm's, with more environment variables, and return its output.

    Raises:
        QueueError: the command is missing, fails, or does not answer.
    """
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
    """Return the state of a job, or those of all tasks of an array.

    Raises:
        QueueError: there is no Slurm, or Slurm never had this job.
    """
    try:
        tasks = read(ask("scontrol", "--oneliner", "show", "job", job))
    except QueueError as error:
        if not any(text in str(error) for text in ("Invalid job id", f"{job} not found")):  # the second of a task
            raise
        tasks = []
    if not tasks:
        return _forgotten(job)
    if "_" in tasks[0].job and "_" not in job:  # a whole array, whose tasks the controller forgets one by one
        known = {one.job for one in tasks}
        tasks += [one for one in _from_accounting(job) if one.ended and one.job not in known]
    return tasks


def _forgotten(job: str) -> list[State]:
    """Look for a job that the controller has forgotten: in the accounting, which not every site has, or the history."""
    tasks = _from_accounting(job)
    if not tasks and "_" in job:  # tasks that never began have one line together
        tasks = [one for one in _from_accounting(job.partition("_")[0]) if "[" in one.job]
    if not tasks and history.find(job) is not None:
        tasks = [State(job, FORGOTTEN)]
    if not tasks:
        raise QueueError(
            f"job must be one that Slurm or {history.FOLDER}/jobs.jsonl knows; got {job}. `squeue --me` lists yours."
        )
    return tasks


def _from_accounting(job: str) -> list[State]:
    """Ask the accounting for a job, or for all tasks of an array. It has one line for each start of each."""
    columns = "DBIndex,JobID,State,Elapsed,Timelimit,NodeList,ExitCode"
    options = ("--allocations", "--duplicates", "--noheader", "--parsable2", "--format", columns)
    starts: dict[str, list[State]] = {}
    with suppress(QueueError):
        output = ask("sacct", *options, "--jobs", job)
        for line in sorted(output.splitlines(), key=lambda line: int(line.partition("|")[0])):
            _, one, state, elapsed, limit, nodes, code = line.split("|")
            state = state.split()[0]  # of CANCELLED by 1000
            nodes = "" if nodes == "None assigned" else nodes
            before = starts.setdefault(one, [])
            before.append(State(one, state, "", nodes, elapsed, limit, len(before), status_of(state, code)))
    return [states[-1] for states in starts.values()]


def consumed_joules(job: str) -> float | None:
    """Return the energy of a job's steps by Slurm's accounting, for all processors of their nodes; None without one.

    Nodes count what they use while a step runs, so steps beside the others, the batch script's and Slurm's own, would
    count twice. Slurm writes it down when a step ends, and zero where a site measures nothing.
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
    """Return the id of a job; without one, that of the newest job submitted from this folder.

    Raises:
        QueueError: none was submitted from this folder.
    """
    if job is not None:
        return job
    entry = history.find(None)
    if entry is None:
        raise QueueError(
            f"job must be given where none was submitted; got no {history.FOLDER}/jobs.jsonl here. Go to the folder "
            "that it was submitted from, or give its number."
        )
    return entry.job


def wait(job: str, look: Callable[[Sequence[State]], None] = lambda tasks: None, every_s: float = 0.5) -> int:
    """Wait until a job, or each task of an array, has ended for good. Return its exit status, an array's largest.

    Slurm is asked less and less often; `look` is called with its newest answer every `every_s` seconds.
    """
    pause_s = SHORTEST_S
    ended: dict[str, State] = {}  # an array's tasks that the controller may forget before the others have ended
    while True:
        now = {one.job: one for one in states(job)}
        tasks = list({**ended, **now}.values())
        look(tasks)
        if all(one.ended for one in tasks):
            return max(one.status for one in tasks)
        ended = {one.job: one for one in tasks if one.ended}
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(every_s, left_s))
            look(tasks)
        pause_s = min(1.2 * pause_s, LONGEST_S)


def cancel(job: str) -> None:
    """End a job, or remove it from the queue."""
    states(job)  # scancel says nothing of a job that Slurm does not know
    ask("scancel", job)


def requeue(job: str) -> None:
    """Restart a job under the same number, also one that runs. Its run resumes from its newest checkpoint."""
    ask("scontrol", "requeue", job)


def logs(job: str) -> list[Path]:
    """Find the log of a job, or the logs of an array's tasks, as far as they exist."""
    entry = history.find(job)
    if entry is None:  # submitted from elsewhere, or by hand
        lines = ask("scontrol", "show", "job", job).splitlines()  # a path may have blanks; it has a line of its own
        names = [line.strip().removeprefix("StdOut=") for line in lines if line.lstrip().startswith("StdOut=")]
        return [path for path in map(Path, names) if path.exists()]
    log, task = Path(entry.log), job.partition("_")[2]
    name = log.name.replace("%a", task) if task else log.name
    head, mark, tail = name.partition("%a")
    if not mark:
        return [log.with_name(name)] if log.with_name(name).exists() else []
    tasks = [log.with_name(f"{head}{task}{tail}") for task in range(entry.cases)]
    return [path for path in tasks if path.exists()]
