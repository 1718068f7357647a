"""Save and load checkpoints in the user's training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from hpcdist import checkpoint
from hpcdist.errors import CheckpointError
from hpcdist.model.slots import unwrapped
from hpcdist.session.consensus import normal_tensors, prepare_collective
from hpcdist.session.curves import first_alive
from hpcdist.session.loader.sharded import ShardedLoader
from hpcdist.session.resharding import SavedWorld
from hpcdist.session.state import capture, compare_settings, require_same_model, restore, schedule_options, settings_of
from hpcdist.session.world import current


class _Objects:
    """The objects passed to `save` or `load`, by name: distributed optimisers with their models, and others."""

    def __init__(self, objects: Mapping[str, Any]):
        distributed = current().optimizers
        self.trained = {name: value for name, value in objects.items() if any(value is each for each in distributed)}
        models = [optimizer.strategy.model.module for optimizer in self.trained.values()]
        self.others = {
            name: value
            for name, value in objects.items()
            if name not in self.trained and not any(value is model for model in models)
        }

    def kinds(self) -> dict[str, str]:
        """Return the class names of `others` that have a state dict."""
        return {name: type(value).__name__ for name, value in self.others.items() if hasattr(value, "state_dict")}

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the model's signature and the settings of each optimiser."""
        return {
            name: {"model": optimizer.strategy.model.description(), **settings_of(optimizer)}
            for name, optimizer in self.trained.items()
        }


@normal_tensors()
def save(path: str | Path, *, step: int | None = None, keep: int = 3, background: bool = False, **state: Any) -> Path:
    """Collective. Save a checkpoint of the training loop in folder `path`; return the new checkpoint's folder.

    A DistributedOptimizer is saved with its model and its strategy's state. Other objects (schedules, GradScalers,
    other modules, sharded loaders) are saved by their `state_dict()`, plain values as they are. The random generators
    of Python, NumPy and torch are saved too. Every rank writes files; a checkpoint is visible when it is complete.

    Example:
        >>> distributed = hd.DistributedOptimizer(sgd, model)
        >>> hd.save("checkpoints", optimizer=distributed, best=0.9).name
        'step-00000000'

    Args:
        step: sorts the checkpoints, and is returned by `load`; by default the number of steps taken.
        keep: number of checkpoints to keep.
        background: copy what this rank writes, and return; a thread writes the copies, for which each rank keeps
            memory. The next `save`, `load` or `finish`, or the end of the script, waits until the checkpoint is there,
            and raises the error if it could not be written.
        state: objects to save, by name; pass the same names to `load`. The optimisers' models need not be passed.

    Raises:
        CheckpointError: a rank can't save its state, or could not write the last checkpoint. Raised on all ranks.
        ConfigError: server ranks can't take part, inside the loop.
    """
    prepare_collective("a checkpoint")
    session, objects = current(), _Objects(state)
    if session.run is not None:
        session.run.flush()
    if session.planned is not None:
        session.planned.require_inside(path)
    local_steps = max((optimizer.strategy.steps for optimizer in objects.trained.values()), default=0)
    number = max(each for each in session.comm.gather(local_steps) if each is not None)  # None: failed ranks
    saved: dict[str, Any] = {name: capture(optimizer) for name, optimizer in objects.trained.items()}
    for name, value in objects.others.items():
        saved[name] = value.state_dict() if hasattr(value, "state_dict") else value
        if isinstance(value, ShardedLoader):  # of the first worker: server ranks don't know the position
            first_worker = first_alive(session.comm, session.workers or session.comm.failures.alive)
            saved[name] = session.comm.gather(saved[name])[first_worker or 0]
        if isinstance(value, nn.Module):
            saved[name] = dict(unwrapped(value, saved[name].items()))
    meta: dict[str, Any] = {"loop": objects.settings(), "kinds": objects.kinds()}
    if session.stages > 1:
        meta["stages"] = session.stages
    tree = {"state": saved, "random": checkpoint.random_state()}
    number = number if step is None else step
    return session.saver.save(session.comm, path, number, tree, background=background, meta=meta, keep=keep)


@normal_tensors()
def load(path: str | Path, **state: Any) -> dict[str, Any] | None:
    """Collective. Load the newest checkpoint in folder `path`; return its plain values and `step`, or None without one.

    On the same number of ranks, synchronous strategies continue bitwise; on another number all ranks start from the
    consensus of the saved ones. A model in stages or shards may be divided differently, or be whole: parameters,
    buffers, the optimiser's state and error-feedback residuals are matched by name. On a single rank, or replica,
    residuals are dropped, because nothing is sent. Another strategy loads parameters, buffers and the optimiser's
    state. Settings that differ are logged.

    Example:
        >>> distributed = hd.DistributedOptimizer(sgd, model)
        >>> hd.load("checkpoints", optimizer=distributed) is None  # no checkpoint yet: start from the beginning
        True

    Args:
        path: a folder of checkpoints, or one checkpoint.
        state: objects by the names passed to `save`; their states are replaced.

    Raises:
        CheckpointError: all checkpoints are damaged; or the newest has another model, another class of optimiser or
            schedule, or lacks one of the names.
        ConfigError: server ranks can't take part, inside the loop.
    """
    prepare_collective("a checkpoint")
    session = current()
    if session.planned is not None:
        session.planned.require_inside(path)
    session.saver.wait()
    newest = checkpoint.latest_on_all_ranks(session.comm, path)
    if newest is None:
        return None
    objects, saved = _Objects(state), SavedWorld(*newest)
    raise_on_all_ranks = partial(saved.raise_on_all_ranks, session)
    raise_on_all_ranks(lambda: _require_same(objects, saved))
    same = saved.is_same(session, {name: (each, ("state", name)) for name, each in objects.trained.items()})
    states, plain = raise_on_all_ranks(lambda: _read(objects, saved, same))
    for name, optimizer in objects.trained.items():
        restore(optimizer, states[name], raise_on_all_ranks)
    raise_on_all_ranks(lambda: _load_others(objects, states, saved.path))
    return {"step": newest[1].step, **plain}  # never empty, so that it is true


def _read(objects: _Objects, saved: SavedWorld, same: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return each object's state for this rank, and the plain values; `same`: each rank reads what it saved."""
    session = current()
    if same:
        saved_rank = session.comm.rank
        checkpoint.set_random_state(saved.rank(saved_rank).at("random"))
    else:
        first_name = next(iter(objects.trained), None)
        replica = 0 if first_name is None else saved.of("state", first_name).workers[0]
        # The rank with this rank's stage, or with the last one, in the first worker's replica.
        saved_rank = replica * saved.stages + min(session.comm.rank % session.stages, saved.stages - 1)
    names = set(saved.rank(saved_rank).names("state"))
    for name in (*objects.trained, *objects.others):
        if name not in names:
            raise CheckpointError(
                f"{saved.path} must hold {name!r}; got {', '.join(sorted(names))}. Load what was saved."
            )
    states: dict[str, Any] = {}
    for name, optimizer in objects.trained.items():
        states[name] = saved.rank(saved_rank).at("state", name) if same else saved.of("state", name).reshard(optimizer)
    for name, value in objects.others.items():
        if same or not isinstance(value, nn.Module) or saved.stages == 1:
            states[name] = saved.rank(saved_rank).at("state", name)
        else:
            whole_state = saved.module_state(saved_rank // saved.stages, "state", name)
            states[name] = {key: whole_state[key] for key, _ in _local_names(value) if key in whole_state}
    plain_names = sorted(names - {*objects.trained, *objects.others})
    return states, {name: saved.rank(saved_rank).at("state", name) for name in plain_names}


def _load_others(objects: _Objects, states: Mapping[str, Any], path: Path) -> None:
    """Load the states of the objects that are no DistributedOptimizers, and log which options of schedules differ."""
    for name, value in objects.others.items():
        if isinstance(value, LRScheduler):
            there, here = ({"schedule": schedule_options(value, state)} for state in (states[name], value.state_dict()))
            prefix = "" if name == "schedule" else f"{name}: "
            compare_settings(there, here, path, logs=current().comm.rank == 0, name=prefix)
        local_names = dict(_local_names(value)) if isinstance(value, nn.Module) else {}
        value.load_state_dict(
            {local_names.get(key, key): tensor for key, tensor in states[name].items()} if local_names else states[name]
        )


def _local_names(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor in a checkpoint, without torch.compile's prefix, and in the module's state dict."""
    return unwrapped(module, ((key, key) for key in module.state_dict()))


def _require_same(objects: _Objects, saved: SavedWorld) -> None:
    """Check that a checkpoint fits this loop, and log settings that differ; models in stages are compared later."""
    session, path, kinds = current(), saved.path, saved.meta.get("kinds", {})
    for name, kind in objects.kinds().items():
        if kinds.get(name, kind) != kind:
            raise CheckpointError(
                f"{name} must be of the class that {path} has, {kinds[name]}; got {kind}. Load what was saved, or do "
                "not pass it."
            )
    for name, settings in objects.settings().items():
        saved_settings, strategy = saved.meta.get("loop", {}).get(name, {}), objects.trained[name].strategy
        settings.pop("model")
        if max(saved.stages, session.stages) == 1:
            require_same_model(saved_settings.get("model"), strategy.model, path)
        if isinstance(saved_options := saved_settings.get("strategy"), Mapping):
            saved_settings = {**saved_settings, "strategy": strategy.config.with_current_names(saved_options)}
        prefix = "" if name == "optimizer" else f"{name}: "
        compare_settings(saved_settings, settings, path, logs=session.comm.rank == 0, name=prefix)


def unsplit(path: str | Path, optimizer: str = "optimizer") -> dict[str, Tensor]:
    """Return the state dict of a checkpoint's whole model, the consensus of its ranks, on the CPU.

    Example:
        >>> distributed = hd.DistributedOptimizer(sgd, model)
        >>> folder = hd.save("checkpoints", optimizer=distributed)
        >>> model.load_state_dict(hd.unsplit(folder))
        <All keys matched successfully>

    Args:
        path: a folder of checkpoints, or one checkpoint, of `hpcdist.save` or `hpcdist train`.
        optimizer: the name of the optimiser in the call of `hpcdist.save`.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or lacks that name.
    """
    folder = path if (Path(path) / checkpoint.MANIFEST).is_file() else checkpoint.latest(path, fallback=True)
    if folder is None:
        raise CheckpointError(f"{path} must be a checkpoint, or a folder of them; got none there.")
    with checkpoint.understood(folder):
        return _whole_model(SavedWorld(Path(folder), checkpoint.verify(folder)), optimizer)


def _whole_model(world: SavedWorld, optimizer: str) -> dict[str, Tensor]:
    # `hpcdist train` saves the state of its only optimiser without a name.
    keys = () if world.rank(0).at("params") is not None else ("state", optimizer)
    if world.rank(0).at(*keys, "params") is None:
        raise CheckpointError(
            f"optimizer must be a name passed to hpcdist.save; got {optimizer!r}, and {world.path} has "
            f"{', '.join(sorted(world.rank(0).at('state', default={})))}."
        )
    return world.of(*keys).whole()
