"""What a run must remember to go on as if it had not been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcdist import checkpoint
from hpcdist.errors import CheckpointError
from hpcdist.strategies import Strategy
from hpcdist.strategies.base import mean

if TYPE_CHECKING:
    from hpcdist.train.loop import Trainer


def capture(trainer: Trainer) -> dict[str, Any]:
    """This rank's state: parameters, buffers, optimiser, schedule, strategy, position in the data, generators."""
    model = trainer.model
    return {
        "params": list(model.params),
        "frozen": list(model.frozen),
        "buffers": list(model.buffers),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": None if trainer.schedule is None else trainer.schedule.state_dict(),
        "strategy": trainer.strategy.state(),
        "precision": trainer.precision.state(),
        "position": vars(trainer.position),
        "random": checkpoint.random_state(),
        "train_s": trainer.train_s,
    }


def save(trainer: Trainer, folder: Path, keep: int) -> Path:
    """Collective. Saves the run after its current step."""
    meta = {
        "strategy": trainer.config.strategy.name,
        "model": trainer.model.signature(),
        "batch_size": trainer.config.batch_size,
    }
    return checkpoint.save(trainer.comm, folder, trainer.position.step, capture(trainer), meta=meta, keep=keep)


def load(trainer: Trainer, path: Path) -> None:
    """Collective. Takes up the run where the checkpoint left it, on the same number of ranks or on another.

    On the same number every rank gets its own state back, and goes on to the bit. On another number all ranks start
    from the mean of the saved parameters and buffers (a server's: from the server's) with rank 0's optimiser; the
    samples of the epoch that are left are dealt out anew.

    Raises:
        CheckpointError: it is damaged, or of another model or strategy.
    """
    manifest = checkpoint.verify_together(trainer.comm, path)
    _require("strategy", manifest.meta.get("strategy"), trainer.config.strategy.name, path)
    _require("model", manifest.meta.get("model"), trainer.model.signature(), path)
    if manifest.ranks == trainer.comm.size:
        state = checkpoint.read(path, trainer.comm.rank)
        checkpoint.set_random_state(state["random"])
    else:
        states = [checkpoint.read(path, rank) for rank in range(manifest.ranks)]
        state = _merged(states, trainer.strategy, manifest.ranks)
    _apply(trainer, state)


def _require(what: str, saved: object, own: object, path: Path) -> None:
    if saved != own:
        raise CheckpointError(
            f"{what} must be that of the checkpoint to resume from it; got another one than in {path}. "
            "Resume with the configuration of that run, or start anew in another output folder."
        )


def _apply(trainer: Trainer, state: dict[str, Any]) -> None:
    model = trainer.model
    for own, saved in ((model.params, "params"), (model.frozen, "frozen"), (model.buffers, "buffers")):
        for tensor, value in zip(own, state[saved], strict=True):
            tensor.copy_(value)
    trainer.optimizer.load_state_dict(state["optimizer"])
    if trainer.schedule is not None:
        trainer.schedule.load_state_dict(state["schedule"])
    trainer.precision.load_state(state["precision"])
    vars(trainer.position).update(state["position"])
    trainer.train_s = state["train_s"]
    trainer.strategy.load_state(state["strategy"])


def _merged(states: list[dict[str, Any]], strategy: Strategy, ranks: int) -> dict[str, Any]:
    """One state for every rank of a world of another size."""
    merged = dict(states[0])
    workers = strategy.worker_ranks(strategy.config, ranks)
    saved = [state["strategy"] for state in states]
    merged["params"] = strategy.adapted_params([state["params"] for state in states], saved)
    merged["buffers"] = mean([states[rank]["buffers"] for rank in workers])
    merged["optimizer"] = strategy.adapted_optimizer([state["optimizer"] for state in states])
    merged["strategy"] = strategy.adapted_state(saved)
    return merged
