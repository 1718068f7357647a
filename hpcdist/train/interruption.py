"""Report how to resume an interrupted run: a command to copy."""

from __future__ import annotations

import logging
import shlex
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from hpcdist import checkpoint
from hpcdist.comm.launch import launch_command, task_or_none
from hpcdist.records import end_run

_logger = logging.getLogger(__name__)


class Interruption:
    """Reports an interruption, on one rank for all, and writes it into the run's folder.

    Args:
        argv: of the command line.
        environ: this process's environment, with the launcher's variables.
        processes: the process ID of each rank on this host.
    """

    def __init__(
        self, folder: Path, checkpoints: Path, argv: Sequence[str], environ: Mapping[str, str], ranks: int,
        processes: Mapping[int, int],
    ):  # fmt: skip
        self._folder, self._checkpoints = folder, checkpoints
        self._processes = {rank: pid for rank, pid in processes.items() if psutil.pid_exists(pid)}
        task = task_or_none(environ)
        self._launcher = None if task is None else task.launcher
        self.command = shlex.join([*launch_command(environ, ranks), *_train(argv, folder)])
        self._how_to_resume = f"Resume with:\n  {self.command}"

    def report_signal(self, name: str) -> None:
        """Report a signal immediately, in `run.json` too, because the ranks may be killed before they leave.

        On Ctrl-C or SIGTERM, Open MPI's mpirun sends its ranks SIGTERM, kills them a quarter of a second later, and
        drops their output; so the message is written to the terminal itself. After a rank's failure mpirun ends the
        other ranks in the same way.
        """
        failed = [f"rank {rank}" for rank, pid in self._processes.items() if not psutil.pid_exists(pid)]
        with suppress(OSError):
            end_run(self._folder, *(("failed", f"{', '.join(failed)} has failed") if failed else ("interrupted", name)))
        if name == signal.SIGTERM.name and self._launcher == "Open MPI's mpirun":
            newest = checkpoint.latest(self._checkpoints)
            saved = "no checkpoint has been saved yet" if newest is None else f"the newest checkpoint is {newest}"
            why = f"{', '.join(failed)} has failed, and mpirun ends the others" if failed else "interrupted by mpirun"
            text = f"{why}. Ranks save if mpirun leaves enough time; until then {saved}. {self._how_to_resume}"
            with suppress(OSError), open("/dev/tty", "w") as terminal:
                terminal.write(f"\nhpcdist: {text}\n")
                return
        else:
            again = "; Ctrl-C again ends them immediately" if name == signal.SIGINT.name else ""
            text = f"{name}: all ranks save a checkpoint after the next steps, and leave{again}"
        _logger.info(text)

    def report_left(self, step: int, reason: str) -> None:
        """Report that all ranks have saved and leave."""
        path = checkpoint.latest(self._checkpoints)
        _logger.info(f"left after step {step} ({reason}), saved in {path}. {self._how_to_resume}")


def _train(argv: Sequence[str], folder: Path) -> Iterable[str]:
    """Return the `hpcdist train` command that resumes the run: that of `argv`, with other --output and --resume."""
    program, *arguments = argv or ("hpcdist",)
    kept, options = [], iter(arguments)
    for argument in options:
        if argument == "--output":
            next(options, None)
        elif argument != "--resume" and not argument.startswith("--output="):
            kept.append(argument)
    start = ["python", "-m", "hpcdist"] if Path(program).name == "__main__.py" else [Path(program).name]
    return [*start, *kept, "--output", str(folder), "--resume"]
