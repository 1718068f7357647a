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
        if "Invalid job id" not in str(error) and f"{job} not found" not in str(error):  # the latter of a task
            raise
        return _remembered(job)
    found = [_from_scontrol(line) for line in told.splitlines() if line.strip()]
    if "_" in found[0].job and "_" not in job:  # a whole array, whose tasks the controller forgets one by one
        known = {one.job for one in found}
        found += [one for one in _accounted(job) if one.ended and one.job not in known]
    return found


def _from_scontrol(line: str) -> State:
    told = dict(word.split("=", 1) for word in line.split() if "=" in word)
    array, task = told.get("ArrayJobId"), told.get("ArrayTaskId")
    nodes = told.get("NodeList", "")
    if task is not None and not task.isdigit():
        task = f"[{task}]"  # tasks that wait, named as by the accounting
    return State(
        job=told["JobId"] if array is None or task is None else f"{array}_{task}",
        state=told["JobState"],
        reason="" if told["Reason"] == "None" else told["Reason"],
        nodes="" if nodes == "(null)" else nodes,
        elapsed=told["RunTime"],
        limit=told["TimeLimit"],
        restarts=int(told["Restarts"]),
        status=_status(told["JobState"], told["ExitCode"]),
    )


def _status(state: str, code: str) -> int:
    """As a shell's: a job that did not complete has failed, whatever its script's last command said."""
    last, number = map(int, code.split(":"))
    status = 128 + number if number else last
    return 1 if status == 0 and state in ENDED and state != "COMPLETED" else status


def _remembered(job: str) -> list[State]:
    """From the accounting, of which not every site has one; else only the ledger knows of the job."""
    found = _accounted(job)
    if not found and "_" in job:  # tasks that never began have one line together
        found = [one for one in _accounted(job.partition("_")[0]) if "[" in one.job]
    if not found and ledger.find(job) is not None:
        found = [State(job, FORGOTTEN)]
    if not found:
        raise QueueError(
            f"job must be one that Slurm or {ledger.FOLDER}/jobs.jsonl knows; got {job}. `squeue --me` lists yours."
        )
    return found


def _accounted(job: str) -> list[State]:
    """What the accounting knows of a job, or of all tasks of an array: it has a line for each start of each."""
    columns = "DBIndex,JobID,State,Elapsed,Timelimit,NodeList,ExitCode"
    options = ("--allocations", "--duplicates", "--noheader", "--parsable2", "--format", columns)
    starts: dict[str, list[State]] = {}
    with suppress(QueueError):
        told = ask("sacct", *options, "--jobs", job)
        for line in sorted(told.splitlines(), key=lambda line: int(line.partition("|")[0])):
            _, one, state, elapsed, limit, nodes, code = line.split("|")
            state = state.split()[0]  # of CANCELLED by 1000
            nodes = "" if nodes == "None assigned" else nodes
            before = starts.setdefault(one, [])
            before.append(State(one, state, "", nodes, elapsed, limit, len(before), _status(state, code)))
    return [states[-1] for states in starts.values()]


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
    ended: dict[str, State] = {}  # an array's tasks that the controller may forget before the others have ended
    while True:
        now = {one.job: one for one in states(job)}
        found = list({**ended, **now}.values())
        look(found)
        if all(one.ended for one in found):
            return max(one.status for one in found)
        ended = {one.job: one for one in found if one.ended}
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
