"""Capture and restore all that a DistributedOptimizer needs to go on as if it had not been interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdist.errors import CheckpointError
from hpcdist.parallel.part import PartOfModel
from hpcdist.strategies import Strategy
from hpcdist.strategies.base import name_of
from hpcdist.strategies.common.state import mean


def capture(optimizer: Any) -> dict[str, Any]:
    """Return this rank's state: parameters, buffers, the local optimiser, the strategy."""
    model = optimizer.strategy.model
    model.refresh()
    return {
        "params": list(model.params),
        "frozen": list(model.frozen),
        "buffers": list(model.buffers),
        "optimizer": optimizer.local_state_dict(),
        "strategy": optimizer.strategy.state(),
        "layout": layout_of(optimizer),
    }


def layout_of(optimizer: Any) -> dict[str, Any]:
    """Describe where each parameter lies in a state, by name, and in which order the optimiser has them."""
    model, strategy = optimizer.strategy.model, optimizer.strategy
    order = [model.name_of(p) for group in optimizer.param_groups for p in group["params"]]
    parts = model.module.describe_parts() if isinstance(model.module, PartOfModel) else {}
    return model.layout() | {"order": order, "strategy": name_of(strategy)} | ({"parts": parts} if parts else {})


def restore(optimizer: Any, state: dict[str, Any]) -> None:
    """Collective. Restore the result of `capture` or `merge`."""
    model = optimizer.strategy.model
    for own, saved in ((model.params, "params"), (model.frozen, "frozen"), (model.buffers, "buffers")):
        for tensor, value in zip(own, state[saved], strict=True):
            tensor.copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    optimizer.strategy.load_state(state["strategy"])
    model.mark()


def merge(states: Sequence[dict[str, Any]], strategy: Strategy) -> dict[str, Any]:
    """Make the state of every rank of a world of another size from those of all saved ranks.

    Whatever else the states hold (schedules, positions) is a worker's.
    """
    workers = workers_of(states)
    merged = dict(states[workers[0]])
    saved = [state["strategy"] for state in states]
    merged["params"] = strategy.reshard_params([state["params"] for state in states], saved)
    merged["buffers"] = mean([states[rank]["buffers"] for rank in workers])
    merged["optimizer"] = strategy.reshard_optimizer([state["optimizer"] for state in states])
    # Schedules change the workers' rates, and servers may have been given them late.
    merged["optimizer"] = {
        **merged["optimizer"], "param_groups": states[workers[0]]["optimizer"]["param_groups"],
    }  # fmt: skip
    merged["strategy"] = strategy.reshard_state(saved)
    return merged


def workers_of(states: Sequence[dict[str, Any]]) -> list[int]:
    """Return the ranks that took steps, of those that have saved these states."""
    return [rank for rank, state in enumerate(states) if state["strategy"].get("works", True)]


def require_saved(what: str, saved: object, own: object, path: Path) -> None:
    """Check that a saved value is this run's own; raise CheckpointError otherwise."""
    if saved != own:
        raise CheckpointError(
            f"{what} must be that of the checkpoint to resume from it; got another one than in {path}. "
            "Resume with the configuration of that run, or start anew in another output folder."
        )
