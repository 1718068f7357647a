"""A run of a sweep, on its ranks: its settings are drawn when it begins, and the sweep's pruner may end it early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpcdist.comm.communicator import Communicator
from hpcdist.records import Summary
from hpcdist.tools.compare.trials import of_folder
from hpcdist.train import runs
from hpcdist.train.log import Progress


def train(
    comm: Communicator,
    folder: Path,
    show: Callable[[str, Progress], None] | None = None,
    ends_at: float | None = None,
    command: Sequence[str] = (),
) -> tuple[Path, Summary | None]:
    """Collective. Make the run of a sweep that has this folder, or go on with it; as `hpcdist.train.runs.train`.

    Rank 0 alone knows the sweep: it draws the settings, reports each evaluation, and asks whether to end the run.

    Raises:
        ConfigError: the folder is that of no sweep's run, or as for other runs.
    """

    def begin() -> tuple[str, list[str], bool, bool]:
        trials, number, seed = of_folder(folder)
        overrides = trials.run(number, seed, trials.begin(number)).overrides
        has_begun = any(folder.glob("records-rank*.jsonl"))
        return trials.sweep.job, list(overrides), has_begun, trials.sweep.pruner != "none"

    def judge(run: Path) -> str | None:
        trials, number, _ = of_folder(run)
        return trials.judge(number, run)

    job, overrides, resume, pruned = comm.gather(comm.together(lambda: begin() if comm.rank == 0 else None))[0]
    judged = judge if pruned else None
    return runs.train(comm, Path(job), None, overrides, folder, resume, show, ends_at, command, judge=judged)
