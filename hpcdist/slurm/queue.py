"""Jobs in Slurm's queue: submitting, asking, waiting, cancelling, starting again."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hpcdist.errors import ConfigError, QueueError
from hpcdist.slurm import ledger
from hpcdist.slurm.ledger import Entry
from hpcdist.slurm.spec import JobSpec

ANSWERS_S = 60.0  # a busy controller's time for an answer
SHORTEST_S, LONGEST_S = 0.25, 10.0  # between questions: controllers serve all users
ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split()
FORGOTTEN = "unknown"  # a state: Slurm remembers ended jobs for minutes only, where it has no accounting


class State(NamedTuple):
    """A job, or one task of an array, as Slurm sees it now."""

    job: str  # 12, or 12_3 of an array
    state: str
    reason: str = ""  # why it waits
    nodes: str = ""
    elapsed: str = ""
    limit: str = ""
    restarts: int = 0
    status: int = 0  # exit status, of the shell's kind: 128 and the signal's number where a signal ended it

    @property
    def ended(self) -> bool:
        return self.state in (*ENDED, FORGOTTEN)


def submit(spec: JobSpec, text: str) -> Entry:
    """Gives a batch script to Slurm, and writes down what was submitted.

    Raises:
        ConfigError: the job's shape is not one for the queue.
        QueueError: there is no Slurm, or it refuses.
    """
    if spec.shape == "interactive":
        raise ConfigError(
            "shape must be one that runs by itself to be submitted; got 'interactive'. Run the script that "
            "`hpcdist slurm render` shows."
        )
    Path(spec.output).mkdir(parents=True, exist_ok=True)  # without it the job would end at once, silently
    ledger.FOLDER.mkdir(exist_ok=True)
    unnamed = ledger.FOLDER / f"submitting-{os.getpid()}.sh"
    try:
        unnamed.write_text(text)  # may fail, and does so before there is a job
        job = ask("sbatch", "--parsable", str(unnamed)).strip().partition(";")[0]
        script = unnamed.replace(ledger.FOLDER / f"{job}.sh")
    finally:
        unnamed.unlink(missing_ok=True)
    commit, dirty = ledger.commit()
    log = spec.log.replace("%%", "\0").replace("%j", job).replace("%A", job).replace("%x", spec.name)
    entry = Entry(
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
    ledger.append(entry)
    return entry


def ask(*command: str) -> str:
    """What a command of Slurm's prints.

    Raises:
        QueueError: it isn't there, fails, or does not answer.
    """
    if shutil.which(command[0]) is None:
        raise QueueError(
            f"{command[0]} must be on PATH to reach Slurm; found none. Log in to a host of the cluster, or load its "
            "module."
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ANSWERS_S)
    except subprocess.TimeoutExpired:
        raise QueueError(
            f"{command[0]} must answer within {ANSWERS_S:g} s; got nothing. The controller is down or busy: try again."
        ) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise QueueError(f"Slurm must accept `{' '.join(command)}`; got: {said}")
    return done.stdout


def states(job: str) -> list[State]:
    """A job, or all tasks of an array.

    Raises:
        QueueError: there is no Slurm, or it never had such a job.
    """
    try:
        told = ask("scontrol", "--oneliner", "show", "job", job)
    except QueueError as error:
        if "Invalid job id" not in str(error):
            raise
        return _remembered(job)
    return [_from_scontrol(line) for line in told.splitlines() if line.strip()]


def _from_scontrol(line: str) -> State:
    told = dict(word.split("=", 1) for word in line.split() if "=" in word)
    array, task = told.get("ArrayJobId"), told.get("ArrayTaskId")
    code, _, number = told["ExitCode"].partition(":")
    nodes = told.get("NodeList", "")
    return State(
        job=told["JobId"] if array is None or task is None else f"{array}_{task}",
        state=told["JobState"],
        reason="" if told["Reason"] == "None" else told["Reason"],
        nodes="" if nodes == "(null)" else nodes,
        elapsed=told["RunTime"],
        limit=told["TimeLimit"],
        restarts=int(told["Restarts"]),
        status=_status(told["JobState"], int(code), int(number)),
    )


def _status(state: str, code: int, number: int) -> int:
    """As a shell's: a job that did not complete has failed, whatever its script's last command said."""
    status = 128 + number if number else code
    return 1 if status == 0 and state in ENDED and state != "COMPLETED" else status


def _remembered(job: str) -> list[State]:
    """From the accounting, of which not every site has one; else only the ledger knows of the job."""
    form = "JobID,State,Elapsed,Timelimit,NodeList,ExitCode"
    with suppress(QueueError):
        told = ask("sacct", "--allocations", "--noheader", "--parsable2", "--jobs", job, "--format", form)
        found = [line.split("|") for line in told.splitlines()]
        if found:
            return [
                State(i, s.split()[0], "", n, e, t, 0, _status(s.split()[0], *map(int, c.split(":"))))
                for i, s, e, t, n, c in found
            ]
    if ledger.find(job) is not None:
        return [State(job, FORGOTTEN)]
    raise QueueError(
        f"job must be one that Slurm or {ledger.FOLDER}/jobs.jsonl knows; got {job}. `squeue --me` lists yours."
    )


def newest(job: str | None) -> str:
    """The job's id, or the newest submitted job's.

    Raises:
        QueueError: none was submitted from this folder.
    """
    entry = ledger.find(job)
    if job is None and entry is None:
        raise QueueError(
            f"job must be given where none was submitted; got no {ledger.FOLDER}/jobs.jsonl here. Go to the folder "
            "that it was submitted from, or give its number."
        )
    return entry.job if job is None else job


def wait(job: str, look: Callable[[Sequence[State]], None] = lambda found: None, every_s: float = 0.5) -> int:
    """Until a job, or each task of an array, has ended for good, and its exit status: the largest of an array's.

    Slurm is asked less and less often, `look` is called every `every_s` seconds with its newest answer.
    """
    pause_s = SHORTEST_S
    while True:
        found = states(job)
        look(found)
        if all(one.ended for one in found):
            return max(one.status for one in found)
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(every_s, left_s))
            look(found)
        pause_s = min(1.2 * pause_s, LONGEST_S)


def cancel(job: str) -> None:
    """Ends a job, or takes it out of the queue."""
    states(job)  # scancel says nothing of a job that Slurm does not know
    ask("scancel", job)


def requeue(job: str) -> None:
    """Starts a job again, under the same number; one that runs is ended. Its run goes on from its newest checkpoint."""
    ask("scontrol", "requeue", job)


def logs(job: str) -> list[Path]:
    """What a job has written so far: its log; of an array each task's that is there."""
    entry = ledger.find(job)
    if entry is None:  # submitted from elsewhere, or by hand
        told = ask("scontrol", "--oneliner", "show", "job", job)
        found = [word.partition("=")[2] for word in told.split() if word.startswith("StdOut=")]
        return [path for path in map(Path, found) if path.exists()]
    log, task = Path(entry.log), job.partition("_")[2]
    name = log.name.replace("%a", task) if task else log.name
    head, mark, tail = name.partition("%a")
    if not mark:
        return [log.with_name(name)] if log.with_name(name).exists() else []
    tasks = [log.with_name(f"{head}{task}{tail}") for task in range(entry.cases)]
    return [path for path in tasks if path.exists()]
