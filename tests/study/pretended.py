"""What stands for training in tests of comparisons and of studies: a run's files, or what was read, in no time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from hpcdist.config.merge import load
from hpcdist.errors import RunError
from hpcdist.records import Evaluation, Summary, append_evaluation, write_summary
from hpcdist.tools.compare.plan import PlannedRun
from kit.groups import EndedRun
from study import evidence


class PretendedRuns:
    """Makes runs that are the better, the nearer their rate is to 0.008; `failing` names groups whose runs fail."""

    def __init__(self, *failing: str):
        self.failing, self.made = failing, []

    def __enter__(self) -> PretendedRuns:
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def run(self, run: PlannedRun, folder: Path) -> None:
        self.made.append(run.folder)
        if run.name in self.failing:
            raise RunError("exit status 1\nerror: a rank has died")
        settings = load({"optimizer": {"lr": 0.008}}, None, run.overrides)
        steps = settings.get("budget", {}).get("steps", 2)
        accuracy = 0.9 - abs(math.log2(settings["optimizer"]["lr"] / 0.008)) / 10 + run.seed % 2 / 100
        metrics = {"accuracy": accuracy, "loss": 1 - accuracy}
        for step, part in ((steps // 2, 0.5), (steps, 1.0)):
            values = {name: value * part for name, value in metrics.items()}
            append_evaluation(folder, Evaluation(step, 0, 100 * step, 2.0 * step, values))
        shape = {"strategy": run.name, "ranks": run.ranks, "workers": run.ranks, "seed": run.seed}
        cost = {"samples": 100 * steps, "wall_s": 2.0 * steps, "metrics": metrics}
        if "checkpoint" in settings:
            (folder / "checkpoints").mkdir(exist_ok=True)
        write_summary(folder, evidence.summary(**shape, **cost))


def ended(curve: Sequence[Evaluation] = (), settings: dict | None = None, **measured: object) -> EndedRun:
    """A run that has ended so."""
    return EndedRun(settings or {}, Summary.model_validate(evidence.summary(**measured)), curve)
