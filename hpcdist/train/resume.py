"""Save and load all that a run needs to continue as if it had not been interrupted, also with other settings."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcdist import checkpoint, strategies
from hpcdist.config.job import JobConfig
from hpcdist.config.merge import Changes, by_value, changes, describe_changes
from hpcdist.config.optimizer import OWN_RATES, optimizers, rescale, schedules
from hpcdist.config.settings import without_changeable
from hpcdist.errors import CheckpointError
from hpcdist.session import state as states
from hpcdist.session.resharding import SavedState, SavedWorld
from hpcdist.session.world import current

_logger = logging.getLogger(__name__)
Trainer = Any  # hpcdist.train.loop.Trainer, or that of a baseline, which import this module


@dataclass
class Position:
    """The position of a run; only `step` depends on the number of ranks."""

    epoch: int = 0
    consumed: int = 0  # samples of this epoch, of all ranks
    step: int = 0  # since the start of the run


def capture(trainer: Trainer) -> dict[str, Any]:
    """Collective. Return this rank's state: model, optimiser, schedule, strategy, position in the data, energy..."""
    return {
        **states.capture(trainer.optimizer),
        "schedule": None if trainer.schedule is None else trainer.schedule.state_dict(),
        "rate_factor": trainer.rate_factor,
        "precision": trainer.precision.scaler.state_dict(),
        "average": _average(trainer),
        "position": vars(trainer.position),
        "random": checkpoint.random_state(),
        "train_s": trainer.log.train_s,
        "energy": trainer.log.energy.state(),
    }


def save(trainer: Trainer, folder: Path, **options: Any) -> Path:
    """Collective. Save the run after its current step; for the options see `checkpoint.Saver`."""
    meta: dict[str, Any] = {"model": trainer.model.description(), "settings": all_settings(trainer)}
    if not trainer.config.parallel.whole:
        meta["stages"] = trainer.config.parallel.stages
        meta["cut"] = list(trainer.replica.cut)
    return current().saver.save(trainer.comm, folder, trainer.position.step, capture(trainer), meta=meta, **options)


def saved_cut(folder: Path) -> list[int] | None:
    """Return the numbers of layers of the newest checkpoint's stages; None without checkpoint or stages."""
    newest = checkpoint.latest(folder, fallback=True)
    return None if newest is None else checkpoint.read_manifest(newest).meta.get("cut")


def load(trainer: Trainer, path: Path) -> None:
    """Collective. Load a checkpoint, to continue on the same or another number of ranks.

    On the same number every rank loads its state, and continues bitwise. On another number all ranks start from the
    mean of the saved parameters and buffers (with servers: from the servers') with rank 0's optimiser; the remaining
    samples of the epoch are distributed again, and a learning rate that depends on the global batch is rescaled.
    A model in stages may be cut differently, or be whole, with the same optimiser's state; replicas count as ranks.
    If settings have changed, the trainer's are used.

    Raises:
        CheckpointError: it is damaged, or has another model, or another class of optimiser or schedule.
    """
    session, saved = current(), SavedWorld(path, checkpoint.verify(path, trainer.comm))
    raise_on_all_ranks = partial(saved.raise_on_all_ranks, session)
    changed = raise_on_all_ranks(lambda: _compare(trainer, saved))
    same = saved.is_same(session, {"": (trainer.optimizer, ())})
    state = raise_on_all_ranks(
        lambda: saved.rank(trainer.comm.rank).at() if same else _resharded(trainer, saved.of(), saved)
    )
    raise_on_all_ranks(lambda: _apply(trainer, state, same))
    states.restore(trainer.optimizer, state, raise_on_all_ranks)
    factor = raise_on_all_ranks(lambda: trainer.rate_factor / state.get("rate_factor", trainer.rate_factor))
    rescale(trainer.optimizer, trainer.schedule, factor * rate_ratio(trainer.config, changed))
    raise_on_all_ranks(lambda: apply_changes(trainer.optimizer, trainer.schedule, changed, path))


def _compare(trainer: Trainer, saved: SavedWorld) -> Changes:
    """Return the settings that have changed since the checkpoint; raise CheckpointError if its state does not fit."""
    comm, meta = trainer.comm, saved.meta
    changed = changes_since(meta, trainer)
    states.require_state_fits(changed, saved.path)
    if changed and comm.rank == comm.failures.alive[0]:
        _logger.info(f"settings have changed since {saved.path}: {describe_changes(changed)}")
    if max(saved.stages, current().stages) == 1:  # models in stages are compared by names
        states.require_same_model(meta.get("model"), trainer.model, saved.path)
    return changed


def _resharded(trainer: Trainer, values: SavedState, saved: SavedWorld) -> dict[str, Any]:
    """Return this rank's state from another number of ranks; values of the run as a whole are the first worker's."""
    worker = saved.rank(values.workers[0] * saved.stages)
    names = ("schedule", "rate_factor", "precision", "average", "position", "train_s", "energy")
    state = {name: worker.at(name) for name in names} | values.reshard(trainer.optimizer)
    if trainer.average is not None and state["average"] is not None:
        layout = states.ParameterLayout(trainer.model)
        named = {kind: values.named(layout, kind, ["average", kind]) for kind in ("params", "buffers")}
        state["average"] = {"steps": state["average"]["steps"], **named}
    return state


def _average(trainer: Trainer) -> dict[str, Any] | None:
    """Return the average of the iterates, as slices."""
    if trainer.average is None:
        return None
    layout, average = states.ParameterLayout(trainer.model), trainer.average
    named = {kind: layout.split(kind, getattr(average, kind)) for kind in ("params", "buffers")}
    return {"steps": average.steps, **named}


def _apply(trainer: Trainer, state: dict[str, Any], same: bool) -> None:
    """Restore everything except the optimiser and its strategy."""
    if same:
        checkpoint.set_random_state(state["random"])
    if trainer.schedule is not None:
        trainer.schedule.load_state_dict(state["schedule"])
    if state["precision"]:
        trainer.precision.scaler.load_state_dict(state["precision"])
    if trainer.average is not None and state.get("average") is not None:
        trainer.average.steps = state["average"]["steps"]
        for kind in ("params", "buffers"):
            states.ParameterLayout(trainer.model).fill(kind, getattr(trainer.average, kind), state["average"][kind])
    vars(trainer.position).update(state["position"])
    trainer.log.train_s = state["train_s"]
    trainer.log.energy.load_state(state.get("energy"))


# --- settings ---------------------------------------------------------------------------------------------------------
def all_settings(trainer: Trainer) -> dict[str, Any]:
    """Return every setting of a run in types that JSON has, with the defaults of torch, the strategy and the model."""
    config = trainer.config
    values = config.model_dump()
    values["data"] |= trainer.data
    values["strategy"] = {"name": config.strategy.name, **trainer.strategy_options}
    values["optimizer"] = _with_defaults(optimizers()[config.optimizer.name], values["optimizer"])
    if config.schedule.name is not None:
        values["schedule"] = _with_defaults(schedules()[config.schedule.name], values["schedule"])
    values["model"] = _with_defaults(trainer.job.model, values["model"])
    return by_value(values)


def _with_defaults(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Complete options by the function's defaults, also where an option is None."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C
        return options
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty and p.name != "optimizer"}
    return defaults | {k: value for k, value in options.items() if value is not None or defaults.get(k) is None}


def changes_since(meta: Mapping[str, Any], trainer: Trainer) -> Changes:
    """Return the settings that differ from those of a checkpoint's run, except those declared as `MayChange`."""
    saved = meta.get("settings")
    now = without_changeable(JobConfig, all_settings(trainer))
    if not isinstance(saved, Mapping):
        return {}
    config = strategies.load(trainer.config.strategy.name).Config
    return changes({**saved, "strategy": config.with_current_names(saved["strategy"])}, now)


def apply_changes(optimizer: Optimizer, schedule: LRScheduler | None, changed: Changes, path: Path) -> None:
    """Set changed options of the optimiser and of the schedule again, after loading a checkpoint's state.

    Raises CheckpointError if the schedule's state depends on the former option.
    """
    for setting, (saved, now) in changed.items():
        table, _, key = setting.partition(".")
        if table == "optimizer" and key in optimizer.defaults and key != "lr":
            for group in optimizer.param_groups:
                group[key] = optimizer.defaults[key]
        if table == "schedule":
            if type(schedule).__name__ in OWN_RATES or not hasattr(schedule, key):
                raise CheckpointError(
                    f"{setting} must be that of the checkpoint to resume from it, {saved!r:.80}; got {now!r:.80}. "
                    f"The schedule's state depends on it: resume with the one of {path}."
                )
            setattr(schedule, key, now)


def rate_ratio(config: JobConfig, changed: Changes) -> float:
    """Return the factor by which `optimizer.lr` has changed."""
    saved, now = changed.get("optimizer.lr", (None, None))
    if not saved or now is None or config.schedule.name in OWN_RATES:
        return 1.0
    return now / saved
