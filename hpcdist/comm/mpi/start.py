"""A time limit for the start of MPI: a rank that waits there for others that never come ends, with a message.

MPI's start has no deadline of its own, the watchdog (`comm/mpi/watchdog.py`) needs MPI, and no thread of this process
runs meanwhile, for mpi4py keeps the interpreter lock. So a process beside it watches, made before MPI starts and gone
once all ranks have met.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from hpcdist.comm.launch import Task
from hpcdist.faults.turns import claim

LIMIT_S = 600.0
ENDS = signal.SIGRTMAX  # nobody else uses it
APART_S = 0.2  # a rank speaks so much later than the one before it: where the launcher ends all, one speaks
LATEST_S = 3.0
SETTLE_S = 0.3  # for the launcher to pass on what has been said
ITSELF_S = 1.0  # then for a process to end by itself
VALUE = 800  # bytes: with its key less than 1024
SPEAKS_S = 3.0  # how long the ranks of a node leave it to the one that has spoken
ADVICE = (
    " Check the last lines of each rank, that their nodes run, and with `hpcdist doctor` the network; set a longer "
    "deadline_s if so long is expected."
)


def _tell(text: str) -> None:
    os.write(2, f"hpcdist: {text} Ending the job.\n".encode())


@contextmanager
def limited(
    limit_s: float,
    task: Task | None,
    *,
    place: str = "hpcdist.init()",
    advice: str = ADVICE,
    tell: Callable[[str], None] = _tell,
    ends: Callable[[float], AbstractContextManager[None]] | None = None,
) -> Iterator[None]:
    """End this process, with a message, if it takes longer than `limit_s` inside the context.

    Args:
        task: which rank of how many this is, according to the launcher; None, or one rank alone: there is no limit.
        place: names the context.
        advice: what to do where others do not come.
        tell: shows why, from a process of its own that began as a copy of this one.
        ends: makes a context that ends this process after so many seconds; by default a signal does, its status ENDS.
    """
    if task is None or task.size == 1:
        yield
        return

    def say_why() -> None:
        tell(_sentence(watched, limit_s, task, place, advice))

    late_s = min(1.0 + APART_S * task.rank, LATEST_S) if task.rank else 0.0
    closed, kept = os.pipe()
    watched, launcher = os.getpid(), os.getppid()
    watcher = _fork()
    if watcher == 0:
        try:
            os.close(kept)
            if not select.select([closed], [], [], limit_s + late_s)[0]:  # else it is over, or that process has ended
                _end(closed, watched, launcher, SETTLE_S + ITSELF_S * bool(ends), say_why)
        finally:
            os._exit(0)
    os.close(closed)
    try:
        with _ended_by(ENDS), ends(limit_s + late_s + 2 * SETTLE_S) if ends else nullcontext():
            by_pmi2 = task.launcher == "srun --mpi=pmi2" and os.environ.get("PMI_FD")
            with _short_values(int(by_pmi2)) if by_pmi2 else nullcontext():
                yield
    finally:
        os.close(kept)
        os.waitpid(watcher, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, none of which the new process needs
        return os.fork()


@contextmanager
def _ended_by(number: int) -> Iterator[None]:
    """Let a signal end this process inside the context, even where another thread holds the interpreter lock.

    Open MPI's launcher has the status 0 where ranks may die, and all that are left were killed.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = libc.signal(number, ctypes.cast(libc._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(number, before)


@contextmanager
def _short_values(connection: int) -> Iterator[None]:
    """Let the launcher say inside the context that values it keeps for MPI have at most VALUE bytes.

    Slurm's PMI-2 says 1024, which MPICH 5 believes; but the line with a value and its key must not be longer than that.
    Slurm refuses others, and the ranks then wait for ever. (How long it gets depends on what lies in memory behind the
    address that it tells, of which there are always 4096 bytes.) So a process between them changes that one number.

    Args:
        connection: MPI's one to the launcher.
    """
    try:
        direct = os.dup(connection)
    except OSError:  # it is closed, as in a child process of a rank's: MPI will say so
        yield
        return
    ours, theirs = socket.socketpair()
    with ours, theirs:
        between = _fork()
        if between == 0:
            try:
                ours.close()
                os.close(connection)
                _pass_on(theirs.fileno(), direct)
            finally:
                os._exit(0)
        os.dup2(ours.fileno(), connection)
    try:
        yield
    finally:
        os.dup2(direct, connection)  # which closes that process's end: it goes
        os.close(direct)
        os.waitpid(between, 0)


def _pass_on(mpi: int, launcher: int) -> None:
    """Send what comes from one of the two to the other one, until one has ended."""
    other = {mpi: launcher, launcher: mpi}
    while True:
        for ready in select.select([mpi, launcher], [], [])[0]:
            if not (message := os.read(ready, 1 << 16)):
                return
            if message.startswith(b"cmd=maxes"):
                message = re.sub(rb"(?<=vallen_max=)\d+", lambda found: b"%d" % min(VALUE, int(found[0])), message)
            while message:
                message = message[os.write(other[ready], message) :]


def _end(closed: int, watched: int, launcher: int, settle_s: float, say_why: Callable[[], None]) -> None:
    """End the watched process; `closed` shows that it has ended. Of the ranks of a node one says why."""
    try:
        if claim(f"start-{launcher}"):  # else another rank of this node has spoken
            with suppress(OSError):
                say_why()
    finally:
        select.select([closed], [], [], settle_s)
        if os.getppid() == watched:  # it lives
            for number in (ENDS, signal.SIGCONT):  # a process that is stopped gets it as it continues
                os.kill(watched, number)
            if not select.select([closed], [], [], SPEAKS_S)[0]:
                os.kill(watched, signal.SIGKILL)
        time.sleep(SPEAKS_S)


def is_stopped(pid: int) -> bool:
    """Tell whether a process of this node is stopped, by SIGSTOP or a debugger; OSError: the kernel does not say."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"


def _sentence(watched: int, limit_s: float, task: Task, place: str, advice: str) -> str:
    if is_stopped(watched):
        return f"rank {task.rank} is stopped, by SIGSTOP or a debugger, in {place}, and not all ranks have met."
    return (
        f"rank {task.rank} waited {limit_s:g} s in {place} for the others of {task.size} ranks. One has ended before "
        f"it came there, has not come yet, or can't be reached.{advice}"
    )
