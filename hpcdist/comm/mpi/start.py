"""A time limit for the start of MPI: a rank that waits there for others that never come ends, with a message.

MPI's start has no deadline of its own, the watchdog (`comm/mpi/watchdog.py`) needs MPI, and no thread of this process
runs meanwhile, for mpi4py keeps the interpreter lock. So a process beside it watches, made before MPI starts and gone
once all ranks have met.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, none of which the watching process needs
        watcher = os.fork()
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
            with _from_fresh_memory() if task.launcher == "srun --mpi=pmi2" else nullcontext():
                yield
    finally:
        os.close(kept)
        os.waitpid(watcher, 0)


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
def _from_fresh_memory() -> Iterator[None]:
    """Let what is allocated inside the context lie where nothing has been: in memory that is zero.

    MPICH 5.0.2 sends 4096 bytes from where a shorter address lies. Slurm's PMI-2 refuses them where they hold what a
    script has left there, such as text, and the ranks then wait for ever. So all holes in the heap are taken meanwhile.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.sbrk.argtypes, libc.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)  # what the heap's end has is given back, and is zero when it comes again
    end, last = libc.sbrk(0), 0  # what is taken is a chain, for a list would leave holes as it grows
    for size in 2 * (1 << 16, 1 << 14, *range(1 << 12, 1 << 7, -16)):  # twice: Python frees some memory meanwhile
        while place := libc.malloc(size):
            ctypes.c_size_t.from_address(place).value, last = last, place
            if place >= end:  # there is no such hole any more
                break
    try:
        yield
    finally:
        while last:
            place, last = last, ctypes.c_size_t.from_address(last).value
            libc.free(place)


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


def _sentence(watched: int, limit_s: float, task: Task, place: str, advice: str) -> str:
    state = Path(f"/proc/{watched}/stat").read_text().rpartition(")")[2].split()[0]
    if state in "Tt":
        return f"rank {task.rank} is stopped, by SIGSTOP or a debugger, in {place}, and not all ranks have met."
    return (
        f"rank {task.rank} waited {limit_s:g} s in {place} for the others of {task.size} ranks. One has ended before "
        f"it came there, has not come yet, or can't be reached.{advice}"
    )
