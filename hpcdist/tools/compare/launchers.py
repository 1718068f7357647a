"""Launchers: what makes a run. Here those that start real ranks by `mpirun`, or another program of MPI or Slurm."""

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

LOG = "output.log"  # in a run's folder: what its processes wrote
LAST_LINES = 12  # of them are shown where a run fails
ENDING_S = 20.0  # for which ranks may save and leave, once they are told to
TRAIN = ("-m", "hpcdist", "train")
TRIAL = ("-m", "hpcdist", "trial", "--output")


class Launcher(Protocol):
    """Make runs. A study may bring its own."""

    def run(self, run: PlannedRun, folder: Path) -> None:
        """Make a run in a folder, which has its `summary.json` then.

        Raises:
            RunError: the run failed; the message ends in its last lines.
        """


class MpiLauncher(AbstractContextManager["MpiLauncher"]):
    """Make runs by a program that starts ranks: `mpirun -n RANKS python -m hpcdist train JOB ...`.

    Args:
        job: the job's file.
        launcher: words up to the number of ranks; none for virtual ones, of one process.
        variables: of the ranks' environment, but for the variables of a launcher that has started this process.
        shares: cores of each of the runs that are made at the same time, by as many threads; empty: all have all.
    """

    def __init__(
        self,
        job: str,
        launcher: Sequence[str],
        variables: Mapping[str, str],
        shares: Sequence[set[int]] = (),
    ):
        self._job, self._launcher = job, launcher
        self._variables = unlaunched(variables)
        self._shares = queue.SimpleQueue[set[int]]()
        for share in shares:
            self._shares.put(share)
        self._is_shared = bool(shares)
        self._starting, self._running, self._ended = threading.Lock(), set[subprocess.Popen](), False

    def run(self, run: PlannedRun, folder: Path) -> None:
        """Make a run; on an interruption end its processes first."""
        words = [*TRIAL, str(folder)] if run.by_folder else self._words(run, folder)
        command = [*self._launcher, *[str(run.ranks)] * bool(self._launcher), sys.executable, *words]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOG, "ab") as log, self._share():
            status = self._run(command, log)
        if status == LEFT or self._ended:  # a signal has reached the ranks, or the batch job's time limit is near
            raise KeyboardInterrupt
        if not status and not is_done(folder):  # a script's
            started = (folder / "run.json").exists()
            lacks = "hpcdist.finish(model)" if started else "hpcdist.init() and hpcdist.DistributedOptimizer(...)"
            raise RunError(f"{self._job} must call {lacks} to be a run; it has ended without, and has no result.")
        if status:
            said = "\n".join(last_lines(folder / LOG, LAST_LINES)) or "(none)"
            raise RunError(f"exit status {status} of `{shlex.join(command)}`; its last lines:\n{said}")

    def _words(self, run: PlannedRun, folder: Path) -> list[str]:
        trains = run.kind != "baseline"  # whose programs have names of their own
        program = TRAIN if trains else ("-m", f"hpcdist.tools.baselines.{run.name}")
        words = [*program, self._job, "--output", str(folder)]
        words += [word for setting in run.overrides for word in ("--set", setting)]
        if trains:
            words += ["--progress", "off", *(["--resume"] if (folder / "checkpoints").exists() else [])]
        return words

    @contextmanager
    def _share(self) -> Iterator[None]:
        """Give this thread, and the processes that it starts, a share of the cores."""
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
        """Run a command to its end. It has a session of its own, so that a terminal's Ctrl-C does not reach it."""
        others = psutil.Process().children()
        try:
            with self._starting:
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
                if child not in others:
                    end(child)
            raise

    def __exit__(self, *failure: object) -> None:
        """End the runs that threads are still making."""
        with self._starting:
            self._ended = True
        for process in list(self._running):
            process.terminate()
        for process in list(self._running):
            with suppress(psutil.NoSuchProcess):
                end(psutil.Process(process.pid))


def end(launcher: psutil.Process) -> None:
    """End a launcher and its ranks, which may save and leave; what still runs then is killed."""
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        launcher.terminate()  # which it passes on; killed, it would leave its ranks behind
        launcher.wait(ENDING_S)
    until_s = time.monotonic() + ENDING_S
    _signal(launcher.pid, signal.SIGTERM)  # one that was still starting its ranks may have ended before them
    while not launcher.is_running() and _processes_of(launcher.pid) and time.monotonic() < until_s:
        time.sleep(0.05)
    _signal(launcher.pid, signal.SIGKILL)


def _processes_of(session: int) -> list[psutil.Process]:
    """List the processes of a session: a launcher gives each rank a process group of its own, but the same session."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _signal(session: int, number: signal.Signals) -> None:
    for process in _processes_of(session):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def share_cores(jobs: int | None, each: int) -> list[set[int]]:
    """Divide this process's cores among runs that are made at the same time; return those of each.

    Args:
        jobs: how many; None: as many as have cores of their own. Where they are too many, several have the same core.
        each: cores that a run can use.
    """
    cores = sorted(os.sched_getaffinity(0))
    count = jobs or max(1, len(cores) // each)
    size = max(1, len(cores) // count)
    starts = (size * job % (len(cores) - size + 1) for job in range(count))
    return [set(cores[start : start + size]) for start in starts]


def mpi_launcher(
    experiment: Comparison | Sweep, launcher: str | None, variables: Mapping[str, str], shares: Sequence[set[int]]
) -> MpiLauncher:
    """Return the launcher of an experiment's runs on real ranks.

    Args:
        launcher: chosen by the user, see `find_launcher`.
        variables: of the ranks' environment.
        shares: cores of each of the runs that are made at the same time, see `share_cores`.
    """
    words = find_launcher(launcher, variables.get("PATH", "")) if experiment.virtual is None else ()
    most_ranks, threads = experiment.most_ranks, experiment.threads
    cores = len(shares[0]) if launcher is None else most_ranks * threads  # the user's may have nodes
    if most_ranks * threads > cores and words:
        console.note(f"{most_ranks} ranks share {cores} cores: such times are not those of ranks with their own")
    environment = ranks_environment(variables, threads, crowded=most_ranks > cores, bound=len(shares) < 2)
    return MpiLauncher(experiment.job, words, environment, shares if launcher is None else ())
