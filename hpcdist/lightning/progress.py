"""Tell server ranks what the workers have done in an epoch, so that their loops follow."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor


class WorkersProgress:
    """The steps of a Trainer: recorded on a worker, and followed on a server rank."""

    def __init__(self, trainer: Trainer, reduce: Any):
        self._trainer, self._reduce = trainer, reduce
        self._before: list[int] = []  # `global_step` before each batch since the last report
        self.remaining: list[int] = []  # on a server rank: `global_step` after each batch that it has not followed yet
        self._stops = False

    # --- on a worker --------------------------------------------------------------------------------------------------
    def start_batch(self) -> None:
        self._before.append(self._trainer.global_step)

    def report(self) -> dict[str, Any]:
        """Return what `receive` takes: `global_step` after each batch since the last report, and the logged values."""
        steps = [*self._before[1:], self._trainer.global_step] if self._before else []
        self._before = []
        logged = [_describe_metric(metric) for metric in self._results.values()]
        return {"steps": steps, "stops": self._trainer.should_stop, "logged": logged}

    # --- on a server rank ---------------------------------------------------------------------------------------------
    def receive(self, report: dict[str, Any]) -> None:
        """Load a worker's report."""
        self.remaining, self._stops = report["steps"], report["stops"]
        for described in report["logged"]:
            self._log(**described)

    def follow_step(self) -> None:
        """Advance the loop by one step, as if it had been taken here."""
        loop, step = self._trainer.fit_loop.epoch_loop, self.remaining.pop(0)
        automatic, manual = loop.automatic_optimization.optim_progress, loop.manual_optimization.optim_step_progress
        steps = automatic.optimizer.step if self._trainer.lightning_module.automatic_optimization else manual
        steps.total.ready = steps.total.completed = step
        if not self.remaining and self._stops:
            self._trainer.should_stop = True

    def _log(
        self, settings: dict[str, Any], reduce_fx: str, synced: bool, values: dict[str, Tensor], of_step: Any
    ) -> None:
        """Log a worker's value, see `_describe_metric`; values reduced over ranks have zero weight."""
        fn, attribute = getattr(torch, reduce_fx), settings["metric_attribute"]
        reduction = {"reduce_fx": fn, "sync_dist": synced, "sync_dist_fn": self._reduce, "batch_size": 1}
        module = self._trainer.lightning_module
        value = torch.tensor(0.0) if attribute is None else module.get_submodule(attribute)  # of torchmetrics
        self._results.log(value=value, **settings, **reduction)
        metric = self._results[f"{settings['fx']}.{settings['name']}"]
        for name, value in values.items():
            setattr(metric, name, torch.full_like(value, metric._defaults[name].item()) if synced else value)
        metric._forward_cache = of_step

    @property
    def _results(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results


def _describe_metric(metric: Any) -> dict[str, Any]:
    """Return the arguments of `_log`, by which a server rank logs a worker's metric."""
    meta = metric.meta
    names = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute")
    return {
        "settings": {name: getattr(meta, name) for name in names} | {"rank_zero_only": meta.sync.rank_zero_only},
        "reduce_fx": meta.reduce_fx.__name__,
        "synced": meta.sync.should,
        "values": {name: getattr(metric, name) for name in metric._defaults},
        "of_step": metric._forward_cache,
    }
