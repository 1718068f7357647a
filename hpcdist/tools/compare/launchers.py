"""Launchers, which execute one run: here `mpirun` or another command of MPI or Slurm, on real ranks."""

from __future__ import annotations

import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import psutil

from hpcdist.comm.launch import unlaunched
from hpcdist.errors import LEFT, RunError
from hpcdist.tools import console
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.mpirun import find_launcher, ranks_environment
from hpcdist.tools.runs import is_done, last_lines

LOG = "output.log"  # in a run's folder: output of its processes
LAST_LINES = 12  # lines of it in the message of a failed run
ENDING_S = 20.0  # after SIGTERM, for ranks to save and exit
TRAIN = ("-m", "hpcdist", "train")
TRIAL = ("-m", "hpcdist", "trial", "--output")


class Launcher(Protocol):
    """Interface: execute a run. A study may define a launcher."""

    def run(self, run: PlannedRun, folder: Path) -> None:
        """Execute a run in its folder, until `summary.json` is there.

        Raises:
            RunError: the run failed; the message ends with its last lines.
        """


class MpiLauncher(AbstractContextManager["MpiLauncher"]):
    """Execute runs by a command that starts ranks: `mpirun -n RANKS python -m hpcdist train JOB ...`.

    Args:
        job: the job's file.
        launcher: command up to the number of ranks; empty: virtual ranks in one process.
        variables: environment of the ranks; variables of a launcher that started this process are removed.
        shares: one set of cores for each concurrent run; empty: all runs use all cores.
    """

    def __init__(
        self, job: str, launcher: Sequence[str], variables: Mapping[str, str], shares: Sequence[set[int]] = ()
    ):
        self._job, self._launcher = job, launcher
        self._variables = unlaunched(variables)
        self._shares = queue.SimpleQueue[set[int]]()  # cores that no run uses now
        for share in shares:
            self._shares.put(share)
        self._is_shared = bool(shares)
        self._starting, self._running, self._ended = threading.Lock(), set[subprocess.Popen](), False

    def run(self, run: PlannedRun, folder: Path) -> None:
        """Execute a run; an interruption ends its processes. Raises KeyboardInterrupt if the run can be resumed."""
        arguments = [*TRIAL, str(folder)] if run.by_folder else self._arguments(run, folder)
        # Without a launcher there is no number of ranks: one process runs all virtual ranks.
        command = [*self._launcher, *[str(run.ranks)] * bool(self._launcher), sys.executable, *arguments]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOG, "ab") as log, self._share():
            status = self._run(command, log)
        if status == LEFT or self._ended:  # after a signal, or near the batch job's time limit
            raise KeyboardInterrupt
        if not status and not is_done(folder):  # of a script
            started = (folder / "run.json").exists()
            lacking = "hpcdist.finish(model)" if started else "hpcdist.init() and hpcdist.DistributedOptimizer(...)"
            raise RunError(f"{self._job} must call {lacking} to be a run; it ended without that and has no result.")
        if status:
            tail = "\n".join(last_lines(folder / LOG, LAST_LINES)) or "(none)"
            raise RunError(f"exit status {status} of `{shlex.join(command)}`; its last lines:\n{tail}")

    def _arguments(self, run: PlannedRun, folder: Path) -> list[str]:
        """Return the arguments of Python that train a run of a job."""
        arguments = [*TRAIN, self._job, "--output", str(folder), "--progress", "off"]
        arguments += ["--baseline", run.name] if run.kind == "baseline" else []
        arguments += [word for setting in run.overrides for word in ("--set", setting)]
        return arguments + ["--resume"] * (folder / "checkpoints").exists()

    @contextmanager
    def _share(self) -> Iterator[None]:
        """Restrict this thread and its child processes to a share of the cores."""
        if not self._is_shared:
            yield
            return
        share = self._shares.get()
        os.sched_setaffinity(0, share)  # of this thread alone
        try:
            yield
        finally:
            self._shares.put(share)

    def _run(self, command: Sequence[str], log: BinaryIO) -> int:
        """Return a command's exit status. It runs in a new session: Ctrl-C in the terminal does not reach it."""
        earlier_children = psutil.Process().children()
        try:
            with self._starting:  # `__exit__` must see each started process
                if self._ended:
                    raise KeyboardInterrupt
                process = subprocess.Popen(
                    command, env=self._variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
                self._running.add(process)
            status = process.wait()
            self._running.discard(process)
            return status
        except BaseException:
            for child in psutil.Process().children():  # the interruption may come before Popen returns
                if child not in earlier_children:
                    end(child)
            raise

    def __exit__(self, *failure: object) -> None:
        """End the runs of other threads."""
        with self._starting:
            self._ended = True
        for process in list(self._running):
            process.terminate()
        for process in list(self._running):
            with suppress(psutil.NoSuchProcess):
                end(psutil.Process(process.pid))


def end(launcher: psutil.Process) -> None:
    """End a launcher, whose pid is its session's id, and its ranks: SIGTERM, so that ranks can save; later SIGKILL."""
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        launcher.terminate()  # it forwards SIGTERM; killed, it would leave its ranks behind
        launcher.wait(ENDING_S)
    until_s = time.monotonic() + ENDING_S
    _signal(launcher.pid, signal.SIGTERM)  # a launcher that was still starting may have exited before its ranks
    while not launcher.is_running() and _processes_of(launcher.pid) and time.monotonic() < until_s:
        time.sleep(0.05)
    _signal(launcher.pid, signal.SIGKILL)


def _processes_of(session: int) -> list[psutil.Process]:
    """List the processes of a session: a launcher puts each rank into a process group, but all into one session."""
    processes = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def _signal(session: int, number: signal.Signals) -> None:
    for process in _processes_of(session):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def share_cores(jobs: int | None, per_run: int) -> list[set[int]]:
    """Divide this process's cores among concurrent runs; return the cores of each.

    Args:
        jobs: number of runs; None: as many as fit.
        per_run: cores that one run can use.
    """
    cores = sorted(os.sched_getaffinity(0))
    count = jobs or max(1, len(cores) // per_run)
    size = max(1, len(cores) // count)
    # The first core of each run; if there are more runs than cores, from the first core again.
    starts = (size * job % (len(cores) - size + 1) for job in range(count))
    return [set(cores[start : start + size]) for start in starts]


def mpi_launcher(
    experiment: Comparison | Sweep, launcher: str | None, variables: Mapping[str, str], shares: Sequence[set[int]]
) -> MpiLauncher:
    """Return the launcher of an experiment's runs on real ranks, or of a script's on virtual ranks.

    Args:
        launcher: command chosen by the user, see `find_launcher`.
        variables: environment of the ranks.
        shares: cores of each concurrent run, see `share_cores`.
    """
    command = find_launcher(launcher, variables.get("PATH", "")) if experiment.virtual is None else ()
    max_ranks, threads = experiment.max_ranks, experiment.threads
    cores = len(shares[0]) if launcher is None else max_ranks * threads  # the user's launcher may use other nodes
    if max_ranks * threads > cores and command:
        console.note(f"{max_ranks} ranks share {cores} cores: times will differ from those of one core per rank")
    environment = ranks_environment(variables, threads, crowded=max_ranks > cores, bound=len(shares) < 2)
    return MpiLauncher(experiment.job, command, environment, shares if launcher is None else ())
