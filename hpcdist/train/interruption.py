"""Tell the user of a run that is interrupted how to go on with it: by a command to be copied."""

from __future__ import annotations

import logging
import shlex
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from hpcdist import checkpoint
from hpcdist.comm.launch import task_or_none
from hpcdist.records import end_run

_logger = logging.getLogger(__name__)


class Interruption:
    """Tells the user of an interruption, on one rank for all, and writes it into the run's folder.

    Args:
        words: of the command line.
        environ: this process's environment, which has the launcher's variables.
        processes: the number of each rank's process, on this host.
    """

    def __init__(
        self,
        folder: Path,
        checkpoints: Path,
        words: Sequence[str],
        environ: Mapping[str, str],
        ranks: int,
        processes: Mapping[int, int],
    ):
        self._folder, self._checkpoints = folder, checkpoints
        self._processes = {rank: pid for rank, pid in processes.items() if psutil.pid_exists(pid)}
        task = task_or_none(environ)
        self._launcher = None if task is None else task.launcher
        self.command = shlex.join([*_launch(self._launcher, ranks), *_train(words, folder)])
        self._go_on = f"Go on with:\n  {self.command}"

    def heard(self, name: str) -> None:
        """Tell at once that a signal has come; `run.json` says so, too, for the ranks may be ended before they leave.

        On Ctrl-C, or SIGTERM, Open MPI's mpirun sends its ranks SIGTERM, kills them a quarter of a second later, and
        shows none of their output any more: only the terminal itself can be written to. It does the same to the others
        where a rank has died.
        """
        died = [f"rank {rank}" for rank, pid in self._processes.items() if not psutil.pid_exists(pid)]
        with suppress(OSError):
            end_run(self._folder, *(("failed", f"{', '.join(died)} has died") if died else ("interrupted", name)))
        if name == signal.SIGTERM.name and self._launcher == "Open MPI's mpirun":
            newest = checkpoint.latest(self._checkpoints)
            saved = "no checkpoint has been saved yet" if newest is None else f"the newest checkpoint is {newest}"
            why = f"{', '.join(died)} has died, and mpirun ends the others" if died else "interrupted by mpirun"
            text = f"{why}. Ranks save if mpirun leaves them the time; until then {saved}. {self._go_on}"
            with suppress(OSError), open("/dev/tty", "w") as terminal:
                terminal.write(f"\nhpcdist: {text}\n")
                return
        else:
            again = "; Ctrl-C again ends them at once" if name == signal.SIGINT.name else ""
            text = f"{name}: all ranks save a checkpoint after the next steps, and leave{again}"
        _logger.info(text)

    def left(self, step: int, reason: str) -> None:
        """Tell that all ranks have saved and leave."""
        path = checkpoint.latest(self._checkpoints)
        _logger.info(f"left after step {step} ({reason}), saved in {path}. {self._go_on}")


def _launch(launcher: str | None, ranks: int) -> list[str]:
    """Return the words that start so many ranks as this run's were."""
    if launcher is None:
        return []
    program = launcher if launcher.startswith("srun") else launcher.rpartition(" ")[2]
    return [*program.split(), "-n", str(ranks)]


def _train(words: Sequence[str], folder: Path) -> Iterable[str]:
    """Return the words of `hpcdist train` that go on with the run."""
    program, *arguments = words or ("hpcdist",)
    kept, options = [], iter(arguments)
    for word in options:
        if word == "--output":
            next(options, None)
        elif word != "--resume" and not word.startswith("--output="):
            kept.append(word)
    start = ["python", "-m", "hpcdist"] if Path(program).name == "__main__.py" else [Path(program).name]
    return [*start, *kept, "--output", str(folder), "--resume"]
