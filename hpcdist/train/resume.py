"""Save and load all that a run needs to go on as if it had not been interrupted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpcdist import checkpoint
from hpcdist.config.optimizer import rescale
from hpcdist.session import state as states
from hpcdist.session.stages import SavedGrid
from hpcdist.session.world import current


@dataclass
class Position:
    """The position of a run, in numbers that don't depend on the number of ranks but for `step`."""

    epoch: int = 0
    consumed: int = 0  # samples of this epoch, all ranks together
    step: int = 0  # since the run began


class ResumableRun(Protocol):
    """The parts of a run that are saved and taken up again, see `hpcdist.train.loop`."""

    comm: Any
    config: Any
    model: Any
    strategy: Any
    replica: Any
    optimizer: Any
    schedule: Any
    rate_factor: float
    precision: Any
    average: Any
    position: Position
    log: Any


def capture(trainer: ResumableRun) -> dict[str, Any]:
    """Collective. Return this rank's state: model, optimiser, schedule, strategy, position in the data, energy..."""
    return {
        **states.capture(trainer.optimizer),
        "schedule": None if trainer.schedule is None else trainer.schedule.state_dict(),
        "rate_factor": trainer.rate_factor,
        "precision": trainer.precision.state(),
        "average": None if trainer.average is None else trainer.average.state(),
        "position": vars(trainer.position),
        "random": checkpoint.random_state(),
        "train_s": trainer.log.train_s,
        "energy": trainer.log.energy.state(),
    }


def save(trainer: ResumableRun, folder: Path, keep: int) -> Path:
    """Collective. Save the run after its current step."""
    meta = {
        "strategy": trainer.config.strategy.name,
        "model": trainer.model.signature(),
        "batch_size": trainer.config.batch_size,
    }
    if not trainer.config.parallel.whole:
        meta["stages"] = trainer.config.parallel.stages
        meta["cut"] = list(trainer.replica.cut)
    return checkpoint.save(trainer.comm, folder, trainer.position.step, capture(trainer), meta=meta, keep=keep)


def saved_cut(folder: Path) -> list[int] | None:
    """Read the numbers of layers of the stages of the newest checkpoint; None where there is none, or no stages."""
    newest = checkpoint.latest(folder, fallback=True)
    return None if newest is None else checkpoint.read_manifest(newest).meta.get("cut")


def load(trainer: ResumableRun, path: Path) -> None:
    """Collective. Load a checkpoint, to go on from it on the same number of ranks or on another.

    On the same number every rank gets its own state back, and goes on to the bit. On another number all ranks start
    from the mean of the saved parameters and buffers (a server's: from the server's) with rank 0's optimiser; the
    samples of the epoch that are left are dealt out anew, and a rate that follows the global batch is scaled to it.
    A model in stages may be cut into others, or be whole, with the same optimiser's state; replicas count as ranks do.

    Raises:
        CheckpointError: it is damaged, or of another model or strategy.
    """
    manifest = checkpoint.verify_together(trainer.comm, path)
    states.require_saved("strategy", manifest.meta.get("strategy"), trainer.config.strategy.name, path)
    session, saved = current(), SavedGrid(path, manifest)
    if max(saved.stages, session.stages) == 1:  # models in stages are compared by names
        states.require_saved("model", manifest.meta.get("model"), trainer.model.signature(), path)
    stage = trainer.comm.rank % session.stages
    near = saved.read(min(session.outer.rank, saved.replicas - 1), min(stage, saved.stages - 1))
    same_cut = saved.has_cut(session, {"": (trainer.optimizer, near)})
    if same_cut and saved.replicas == session.outer.size:
        checkpoint.set_random_state(near["random"])
        _apply(trainer, near)
    else:
        _apply(trainer, _carried_over(trainer, saved, stage if same_cut else None))


def _carried_over(trainer: ResumableRun, saved: SavedGrid, stage: int | None) -> dict[str, Any]:
    """Make this rank's state from those of another grid; `stage` is None where the model is cut anew."""
    of_replicas = (saved.read(replica, stage or 0) for replica in range(saved.replicas))
    worker = next(state for state in of_replicas if state["strategy"].get("works", True))
    state = worker | saved.state_for(trainer.optimizer, lambda state: state, stage)
    if stage is None and trainer.average is not None and worker["average"] is not None:
        averaged = saved.state_for(trainer.optimizer, _averaged, stage)
        state["average"] = {**worker["average"], "tensors": [*averaged["params"], *averaged["buffers"]]}
    return state


def _averaged(state: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's state with the average of its iterates for parameters and buffers."""
    tensors, params = state["average"]["tensors"], len(state["params"])
    return {**state, "params": tensors[:params], "buffers": tensors[params:]}


def _apply(trainer: ResumableRun, state: dict[str, Any]) -> None:
    if trainer.schedule is not None:
        trainer.schedule.load_state_dict(state["schedule"])
    trainer.precision.load_state(state["precision"])
    if trainer.average is not None and state.get("average") is not None:
        trainer.average.load_state(state["average"])
    vars(trainer.position).update(state["position"])
    trainer.log.train_s = state["train_s"]
    trainer.log.energy.load_state(state.get("energy"))
    states.restore(trainer.optimizer, state)
    rescale(trainer.optimizer, trainer.schedule, trainer.rate_factor / state.get("rate_factor", trainer.rate_factor))
