"""A time limit for the start of MPI: a rank that waits there for others that never start ends with a message.

MPI's start has no deadline, the watchdog (`comm/mpi/watchdog.py`) needs MPI, and no other thread runs during the start,
as mpi4py holds the interpreter lock. So a forked process watches until all ranks have started.
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
from hpcdist.faults.reporter import claim

LIMIT_S = 600.0
ENDS = signal.SIGRTMAX  # used by no other library
APART_S = 0.2  # delay between the reports of two ranks: if the launcher ends all of them, only one reports
LATEST_S = 3.0
FLUSH_S = 0.3  # for the launcher to forward the message
GRACE_S = 1.0  # then for a process to end by itself
VALUE = 800  # bytes: with its key less than 1024
REPORTED_S = 3.0  # after one rank of a node has reported, the others wait so long to be ended
ADVICE = (
    " Check the last output of each rank, that their nodes run, and the network with `hpcdist doctor`; set a longer "
    "deadline_s if the start may take that long."
)


def _report(text: str) -> None:
    os.write(2, f"hpcdist: {text} Ending the job.\n".encode())


@contextmanager
def limited(
    limit_s: float, task: Task | None, *, where: str = "hpcdist.init()", advice: str = ADVICE,
    report: Callable[[str], None] = _report, ends: Callable[[float], AbstractContextManager[None]] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Context that ends this process with a message if it takes longer than `limit_s`.

    Args:
        task: rank and size according to the launcher; None or a single rank: no limit.
        where: name of the context, for the message.
        advice: what to do if ranks are missing, for the message.
        report: prints the message; runs in a forked process.
        ends: `ends(seconds)` returns a context that ends this process after that time; by default the signal ENDS ends
            it, with that status.
    """
    if task is None or task.size == 1:
        yield
        return

    def report_reason() -> None:
        report(_reason(watched, limit_s, task, where, advice))

    delay_s = min(1.0 + APART_S * task.rank, LATEST_S) if task.rank else 0.0
    read_end, write_end = os.pipe()
    watched, launcher = os.getpid(), os.getppid()
    watcher = _fork()
    if watcher == 0:
        try:
            os.close(write_end)
            if not select.select([read_end], [], [], limit_s + delay_s)[0]:  # else the context or its process has ended
                _end(read_end, watched, launcher, FLUSH_S + GRACE_S * bool(ends), report_reason)
        finally:
            os._exit(0)
    os.close(read_end)
    try:
        with _ended_by(ENDS), ends(limit_s + delay_s + 2 * FLUSH_S) if ends else nullcontext():
            by_pmi2 = task.launcher == "srun --mpi=pmi2" and os.environ.get("PMI_FD")
            with _short_values(int(by_pmi2)) if by_pmi2 else nullcontext():
                yield
    finally:
        os.close(write_end)
        os.waitpid(watcher, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the new process does not need
        return os.fork()


@contextmanager
def _ended_by(number: int) -> Iterator[None]:
    """Context in which a signal ends this process, even while another thread holds the interpreter lock.

    SIGKILL won't do: Open MPI's launcher exits with status 0 if deaths are tolerated and the remaining ranks are
    killed.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    previous_handler = libc.signal(number, ctypes.cast(libc._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(number, previous_handler)


@contextmanager
def _short_values(connection: int) -> Iterator[None]:
    """Context in which the launcher reports VALUE as the maximum length of PMI-2 values: works around a limit of Slurm.

    Slurm's PMI-2 reports 1024 bytes, which MPICH 5 uses; but Slurm refuses a line with key and value longer than that,
    and the ranks then wait forever. (The length depends on memory behind the address that a rank publishes.) So a
    process between MPI and the launcher changes that number. `connection`: MPI's descriptor of the launcher.
    """
    try:
        to_launcher = os.dup(connection)
    except OSError:  # closed, as in a child process of a rank: MPI will report it
        yield
        return
    mpi_end, relay_end = socket.socketpair()
    with mpi_end, relay_end:
        relay = _fork()
        if relay == 0:
            try:
                mpi_end.close()
                os.close(connection)
                _relay(relay_end.fileno(), to_launcher)
            finally:
                os._exit(0)
        os.dup2(mpi_end.fileno(), connection)
    try:
        yield
    finally:
        os.dup2(to_launcher, connection)  # closes the relay's end, and so ends that process
        os.close(to_launcher)
        os.waitpid(relay, 0)


def _relay(mpi: int, launcher: int) -> None:
    """Forward messages between MPI and the launcher until one of them ends."""
    other = {mpi: launcher, launcher: mpi}
    while True:
        for ready in select.select([mpi, launcher], [], [])[0]:
            if not (message := os.read(ready, 1 << 16)):
                return
            if message.startswith(b"cmd=maxes"):  # the launcher's reply with its limits
                message = re.sub(rb"(?<=vallen_max=)\d+", lambda match: b"%d" % min(VALUE, int(match[0])), message)
            while message:
                message = message[os.write(other[ready], message) :]


def _end(closed: int, watched: int, launcher: int, flush_s: float, report_reason: Callable[[], None]) -> None:
    """End the watched process; only one rank per node reports the reason. `closed` is readable when it has ended."""
    try:
        if claim(f"start-{launcher}"):  # else another rank of this node has reported
            with suppress(OSError):
                report_reason()
    finally:
        select.select([closed], [], [], flush_s)
        if os.getppid() == watched:  # it is alive
            for number in (ENDS, signal.SIGCONT):  # a stopped process receives ENDS when it continues
                os.kill(watched, number)
            if not select.select([closed], [], [], REPORTED_S)[0]:
                os.kill(watched, signal.SIGKILL)
        time.sleep(REPORTED_S)


def is_stopped(pid: int) -> bool:
    """Return whether a process of this node is stopped, by SIGSTOP or a debugger; False if it has ended."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _reason(watched: int, limit_s: float, task: Task, where: str, advice: str) -> str:
    if is_stopped(watched):
        return f"rank {task.rank} is stopped, by SIGSTOP or a debugger, in {where}, and not all ranks have arrived."
    return (
        f"rank {task.rank} waited {limit_s:g} s in {where} for the other ranks of {task.size}. A rank ended before it "
        f"arrived there, has not arrived yet, or can't be reached.{advice}"
    )
