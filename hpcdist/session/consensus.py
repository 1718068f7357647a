"""Use the model that the ranks stand for, and save and load checkpoints, in the user's own loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist import checkpoint
from hpcdist.errors import CheckpointError
from hpcdist.session import rules
from hpcdist.session.consistency import require_same_steps
from hpcdist.session.optimizer import release
from hpcdist.session.pipeline import share_tied
from hpcdist.session.resharding import SavedWorld
from hpcdist.session.state import capture, compare_settings, require_saved, restore, settings_of
from hpcdist.session.world import current
from hpcdist.strategies.common.replicas import frozen_consensus


@contextmanager
def consensus(model: nn.Module) -> Iterator[nn.Module]:
    """Collective. Give `model`, inside the context, the parameters that all ranks stand for; afterwards its own again.

    With servers these are the servers' parameters, else the mean of all ranks' parameters; buffers such as batch
    norm's statistics are the mean of the workers'. Evaluate and export there::

        with hpcdist.consensus(model):
            model.eval()
            ...

    Raises:
        ConfigError: no DistributedOptimizer trains the model; or ranks that serve can't take part, inside the loop.
    """
    with consensus_of(_holders(model)):
        yield model


@contextmanager
def consensus_of(optimizers: Iterable[Any]) -> Iterator[None]:
    """Collective. Give the models of these optimisers, inside the context, the parameters that all ranks stand for."""
    _require_all_ranks("an evaluation")
    optimizers = list(optimizers)
    stack = ExitStack()
    try:
        with _normal_tensors():
            for optimizer in optimizers:
                flat = optimizer.strategy.model
                if not flat.is_swapped:  # else within another context
                    require_same_steps(optimizer.strategy, "at an evaluation")
                    flat.refresh()
                    stack.enter_context(flat.swapped(*optimizer.strategy.consensus()))
                    stack.enter_context(_holding(flat.frozen, frozen_consensus(optimizer.strategy)))
            for optimizer in optimizers:
                share_tied(optimizer.strategy.model.module)
        yield
    finally:
        with _normal_tensors():
            stack.close()


@contextmanager
def _normal_tensors() -> Iterator[None]:
    """Make tensors that can be trained, inside of `torch.inference_mode()` too; record no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _holding(tensors: Sequence[Tensor], values: Sequence[Tensor] | None) -> Iterator[None]:
    """Give the tensors these values inside the context; None: their own."""
    kept = [] if values is None else [tensor.clone() for tensor in tensors]
    for tensor, value in zip(tensors, values or ()):
        tensor.copy_(value)
    try:
        yield
    finally:
        for tensor, value in zip(tensors, kept):
            tensor.copy_(value)


@_normal_tensors()
def finish(model: nn.Module) -> nn.Module:
    """Collective. End the training of `model`, leave the trained one on every rank, and return it.

    Its parameters and buffers become those that the ranks stand for together. Its optimisers are plain ones again.

    Raises:
        ConfigError: no DistributedOptimizer trains the model; or ranks that serve can't take part, inside the loop.
    """
    _require_all_ranks("the end of training")
    for optimizer in _holders(model):
        flat = optimizer.strategy.model
        require_same_steps(optimizer.strategy, "at the end of training")
        flat.refresh()
        params, buffers = optimizer.strategy.consensus()
        frozen = frozen_consensus(optimizer.strategy) or flat.frozen
        mine = (*flat.params, *flat.buffers, *flat.frozen)
        for own, value in zip(mine, (*params, *buffers, *frozen), strict=True):
            own.copy_(value)
        release(optimizer)
        current().optimizers.remove(optimizer)
    share_tied(model)
    return model


def _holders(model: nn.Module) -> list[Any]:
    optimizers = [o for o in current().optimizers if o.strategy.model.module is model]
    if not optimizers:
        raise rules.error("the model is trained by no distributed optimiser")
    return optimizers


def _require_all_ranks(what: str) -> None:
    if current().group is not None:
        raise rules.error("a call of all ranks stands inside the loop", call=what)


@_normal_tensors()
def save(path: str | Path, *, step: int | None = None, keep: int = 3, **state: Any) -> Path:
    """Collective. Save a checkpoint of the user's own loop in folder `path`, and return its own folder.

    ::

        hpcdist.save("checkpoints", optimizer=optimizer, schedule=schedule, loader=loader, epoch=epoch)

    A DistributedOptimizer is saved with its model and its strategy's state. Of other objects their `state_dict()` is
    saved (schedules, GradScalers, other modules, sharded loaders), and plain values as they are. The random generators
    of Python, NumPy and torch are saved too. Every rank writes its own files; the checkpoint is there whole or not.

    Args:
        step: orders checkpoints; by default the steps that have been taken.
        keep: number of checkpoints that stay.
        state: objects to save, by names that `load` is given too. Models of the optimisers may be named or not.

    Raises:
        CheckpointError: some rank can't save its state. Raised on all ranks.
        ConfigError: ranks that serve can't take part, inside the loop.
    """
    _require_all_ranks("a checkpoint")
    comm = current().comm
    trained = _trained(state)
    steps = [taken for taken in comm.gather(_steps(trained)) if taken is not None]
    saved = {name: _saved(value) for name, value in state.items() if not _belongs(value, trained)}
    meta: dict[str, Any] = {"loop": {name: _identity(optimizer) for name, optimizer in trained.items()}}
    meta["kinds"] = _kinds(state, trained)
    if current().stages > 1:
        meta["stages"] = current().stages
    saved = {"state": saved, "random": checkpoint.random_state()}
    return checkpoint.save(comm, path, max(steps) if step is None else step, saved, meta=meta, keep=keep)


@_normal_tensors()
def load(path: str | Path, **state: Any) -> dict[str, Any] | None:
    """Collective. Load the newest checkpoint in folder `path`; return the plain values, or None if there is none.

    ::

        found = hpcdist.load("checkpoints", optimizer=optimizer, schedule=schedule, loader=loader)
        first = found["epoch"] + 1 if found else 0

    On as many ranks as have saved it the run goes on to the bit with synchronous strategies; on another number all
    start from the parameters that the saved ranks stood for together. A model in stages, or in shards, may be cut into
    others, or be whole: parameters, buffers, the optimiser's state and what compression has not sent yet are found by
    their names. A run on one rank, or replica, sends nothing: what compression had not sent is dropped there. Another
    strategy takes up parameters, buffers and the optimiser's state. Messages tell settings that differ.

    Args:
        path: a folder of checkpoints, or one of them.
        state: objects by the names that `save` was given; their states are replaced.

    Raises:
        CheckpointError: all are damaged; or the newest is of another model, or of another class of optimiser or
            schedule, or lacks one of the names.
        ConfigError: ranks that serve can't take part, inside the loop.
    """
    _require_all_ranks("a checkpoint")
    session = current()
    found = checkpoint.latest_together(session.comm, path)
    if found is None:
        return None
    newest, manifest = found
    saved = SavedWorld(newest, manifest)
    with checkpoint.understood(newest, "the state of these objects"):
        _require_same(newest, manifest.meta, state, staged=max(saved.stages, session.stages) > 1)
        return _load(saved, state)


def _load(saved: SavedWorld, state: Mapping[str, Any]) -> dict[str, Any]:
    """Collective. Load objects, and return the plain values."""
    session, trained, newest = current(), _trained(state), saved.path
    same = saved.is_same(session, {name: (optimizer, ("state", name)) for name, optimizer in trained.items()})
    if same:
        rank = session.comm.rank
        checkpoint.set_random_state(saved.rank(rank).at("random"))
    else:
        first = next(iter(trained), None)
        replica = 0 if first is None else saved.of("state", first).workers[0]
        rank = replica * saved.stages + min(session.comm.rank % session.stages, saved.stages - 1)
    plain = {name: None for name in saved.rank(rank).names("state")}
    for name, value in state.items():
        if _belongs(value, trained):
            continue
        if name not in plain:
            raise CheckpointError(f"{newest} must hold {name!r}; got {', '.join(sorted(plain))}. Load what was saved.")
        del plain[name]
        if name in trained and not same:
            restore(value, saved.of("state", name).reshard(value))
            continue
        mine = saved.rank(rank).at("state", name)
        if name in trained:
            restore(value, mine)
        elif same or not isinstance(value, nn.Module) or saved.stages == 1:
            value.load_state_dict(mine)
        else:
            joined = saved.module_state(rank // saved.stages, "state", name)
            value.load_state_dict({key: joined[key] for key in value.state_dict() if key in joined})
    return {name: saved.rank(rank).at("state", name) for name in plain}


def _trained(state: Mapping[str, Any]) -> dict[str, Any]:
    held = current().optimizers
    return {name: value for name, value in state.items() if any(value is optimizer for optimizer in held)}


def _belongs(value: Any, trained: Mapping[str, Any]) -> bool:
    """Tell whether a value is saved with an optimiser, as its model is."""
    return any(value is optimizer.strategy.model.module for optimizer in trained.values())


def _saved(value: Any) -> Any:
    if any(value is optimizer for optimizer in current().optimizers):
        return capture(value)
    return value.state_dict() if hasattr(value, "state_dict") else value


def _steps(trained: Mapping[str, Any]) -> int:
    return max((optimizer.strategy.steps for optimizer in trained.values()), default=0)


def _identity(optimizer: Any) -> dict[str, Any]:
    return {"model": optimizer.strategy.model.signature(), **settings_of(optimizer)}


def _kinds(state: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, str]:
    """Return the classes of the objects whose states are saved, beside optimisers and their models."""
    others = {name: value for name, value in state.items() if name not in trained and not _belongs(value, trained)}
    return {name: type(value).__name__ for name, value in others.items() if hasattr(value, "state_dict")}


def _require_same(path: Path, meta: Mapping[str, Any], state: Mapping[str, Any], staged: bool) -> None:
    """Check that a checkpoint is of such a loop, and log which settings differ.

    Models in stages are compared name by name later.
    """
    trained, told = _trained(state), current().comm.rank == 0
    kinds = meta.get("kinds", {})
    for name, own in _kinds(state, trained).items():
        if kinds.get(name, own) != own:
            raise CheckpointError(
                f"{name} must be of the class that {path} has, {kinds[name]}; got {own}. Load what was saved, or leave "
                "it out."
            )
    for name, optimizer in trained.items():
        saved, mine = meta.get("loop", {}).get(name, {}), _identity(optimizer)
        if not staged:
            require_saved("model", saved.get("model"), mine["model"], path)
        settings = {key: mine[key] for key in ("strategy", "optimizer")}
        compare_settings(saved, settings, path, told=told, name="" if name == "optimizer" else f"{name}: ")
