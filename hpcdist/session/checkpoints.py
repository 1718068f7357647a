"""Save and load checkpoints in the user's own loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hpcdist import checkpoint
from hpcdist.errors import CheckpointError
from hpcdist.model.slots import unwrapped
from hpcdist.session.consensus import begin_collective, normal_tensors
from hpcdist.session.curves import first_living
from hpcdist.session.loader.sharded import ShardedLoader
from hpcdist.session.resharding import SavedWorld
from hpcdist.session.state import capture, compare_settings, require_same_model, restore, settings_of
from hpcdist.session.world import current


class _Objects:
    """The objects that `save` or `load` is given, by name.

    Attributes:
        trained: the distributed optimisers among them, which are saved with their models.
        others: those that are saved by themselves.
    """

    def __init__(self, given: Mapping[str, Any]):
        held = current().optimizers
        self.trained = {name: value for name, value in given.items() if any(value is each for each in held)}
        models = [optimizer.strategy.model.module for optimizer in self.trained.values()]
        self.others = {
            name: value
            for name, value in given.items()
            if name not in self.trained and not any(value is model for model in models)
        }

    def kinds(self) -> dict[str, str]:
        """Return the classes of the objects whose states are saved by themselves."""
        return {name: type(value).__name__ for name, value in self.others.items() if hasattr(value, "state_dict")}

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the model's signature and the settings of each optimiser."""
        return {
            name: {"model": optimizer.strategy.model.description(), **settings_of(optimizer)}
            for name, optimizer in self.trained.items()
        }


@normal_tensors()
def save(path: str | Path, *, step: int | None = None, keep: int = 3, background: bool = False, **state: Any) -> Path:
    """Collective. Save a checkpoint of the user's own loop in folder `path`, and return its own folder.

    ::

        hpcdist.save("checkpoints", optimizer=optimizer, schedule=schedule, loader=loader, best=best)

    A DistributedOptimizer is saved with its model and its strategy's state. For other objects (schedules, GradScalers,
    other modules, sharded loaders) their `state_dict()` is saved; plain values are saved as they are. The random
    generators of Python, NumPy and torch are saved too. Every rank writes its own files; what several ranks have in
    common one of them writes. The checkpoint appears when it is whole.

    Args:
        step: orders checkpoints, and `load` returns it; by default the steps that have been taken.
        keep: number of checkpoints that stay.
        background: copy what this rank writes, and return: a thread writes the copies, for which each rank keeps
            memory, while the loop goes on. The next `save`, `load`, `finish` and the script's end wait until the
            checkpoint is there, and raise the error if it could not be written.
        state: objects to save; `load` is given the same names. The optimisers' models need not be named.

    Raises:
        CheckpointError: some rank can't save its state, or could not write the checkpoint before. Raised on all ranks.
        ConfigError: ranks that serve can't take part, inside the loop.
    """
    begin_collective("a checkpoint")
    session, objects = current(), _Objects(state)
    if session.run is not None:
        session.run.flush()
    if session.planned is not None:
        session.planned.require_own(path)
    taken = max((optimizer.strategy.steps for optimizer in objects.trained.values()), default=0)
    steps = max(each for each in session.comm.gather(taken) if each is not None)
    saved: dict[str, Any] = {name: capture(optimizer) for name, optimizer in objects.trained.items()}
    for name, value in objects.others.items():
        saved[name] = value.state_dict() if hasattr(value, "state_dict") else value
        if isinstance(value, ShardedLoader):  # of the first rank that trains: others don't know how far it is
            first = first_living(session.comm, session.workers or session.comm.failures.living)
            saved[name] = session.comm.gather(saved[name])[first or 0]
        if isinstance(value, nn.Module):
            saved[name] = dict(unwrapped(value, saved[name].items()))
    meta: dict[str, Any] = {"loop": objects.settings(), "kinds": objects.kinds()}
    if session.stages > 1:
        meta["stages"] = session.stages
    tree = {"state": saved, "random": checkpoint.random_state()}
    steps = steps if step is None else step
    return session.saver.save(path, steps, tree, background=background, meta=meta, keep=keep)


@normal_tensors()
def load(path: str | Path, **state: Any) -> dict[str, Any] | None:
    """Collective. Load the newest checkpoint in folder `path`; return the plain values and `step`, None without one.

    ::

        found = hpcdist.load("checkpoints", optimizer=optimizer, schedule=schedule, loader=loader)
        for epoch in range(loader.next_epoch, 10):  # 0, or where the saved run goes on

    On as many ranks as have saved it the run goes on to the bit with synchronous strategies; on another number all
    ranks start from the consensus of the saved ones. A model in stages or shards may be divided in another way, or be
    whole: parameters, buffers, the optimiser's state and the residuals of compression are found by their names. On one
    rank, or replica, residuals are dropped, because nothing is sent. Another strategy takes over parameters, buffers
    and the optimiser's state. Messages name settings that differ.

    Args:
        path: a folder of checkpoints, or one of them.
        state: objects by the names that `save` was given; their states are replaced.

    Raises:
        CheckpointError: all are damaged; or the newest is of another model, or of another class of optimiser or
            schedule, or lacks one of the names.
        ConfigError: ranks that serve can't take part, inside the loop.
    """
    begin_collective("a checkpoint")
    session = current()
    if session.planned is not None:
        session.planned.require_own(path)
    session.saver.wait()
    found = checkpoint.latest_together(session.comm, path)
    if found is None:
        return None
    objects, saved = _Objects(state), SavedWorld(*found)
    together = partial(saved.together, session)
    together(lambda: _require_same(objects, saved))
    same = saved.is_same(session, {name: (each, ("state", name)) for name, each in objects.trained.items()})
    states, plain = together(lambda: _read(objects, saved, same))
    for name, optimizer in objects.trained.items():
        restore(optimizer, states[name], together)
    together(lambda: _load_others(objects, states))
    return {"step": found[1].step, **plain}  # never empty, so that it is true


def _read(objects: _Objects, saved: SavedWorld, same: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the saved state of each object, and the plain values.

    Args:
        same: each rank has now what the same rank had when it saved.
    """
    session = current()
    if same:
        mine = session.comm.rank
        checkpoint.set_random_state(saved.rank(mine).at("random"))
    else:
        first = next(iter(objects.trained), None)
        replica = 0 if first is None else saved.of("state", first).workers[0]
        mine = replica * saved.stages + min(session.comm.rank % session.stages, saved.stages - 1)
    names = set(saved.rank(mine).names("state"))
    for name in (*objects.trained, *objects.others):
        if name not in names:
            raise CheckpointError(
                f"{saved.path} must hold {name!r}; got {', '.join(sorted(names))}. Load what was saved."
            )
    states: dict[str, Any] = {}
    for name, optimizer in objects.trained.items():
        states[name] = saved.rank(mine).at("state", name) if same else saved.of("state", name).reshard(optimizer)
    for name, value in objects.others.items():
        if same or not isinstance(value, nn.Module) or saved.stages == 1:
            states[name] = saved.rank(mine).at("state", name)
        else:
            joined = saved.module_state(mine // saved.stages, "state", name)
            states[name] = {key: joined[key] for key, _ in _own_names(value) if key in joined}
    plain = sorted(names - {*objects.trained, *objects.others})
    return states, {name: saved.rank(mine).at("state", name) for name in plain}


def _load_others(objects: _Objects, states: Mapping[str, Any]) -> None:
    for name, value in objects.others.items():
        own = dict(_own_names(value)) if isinstance(value, nn.Module) else {}
        value.load_state_dict({own.get(key, key): each for key, each in states[name].items()} if own else states[name])


def _own_names(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names in a module's state dict, each after that in a checkpoint."""
    return unwrapped(module, ((key, key) for key in module.state_dict()))


def _require_same(objects: _Objects, saved: SavedWorld) -> None:
    """Check that a checkpoint is of such a loop, and log which settings differ.

    Models in stages are compared name by name later.
    """
    session, path, kinds = current(), saved.path, saved.meta.get("kinds", {})
    for name, own in objects.kinds().items():
        if kinds.get(name, own) != own:
            raise CheckpointError(
                f"{name} must be of the class that {path} has, {kinds[name]}; got {own}. Load what was saved, or leave "
                "it out."
            )
    for name, mine in objects.settings().items():
        theirs, strategy = saved.meta.get("loop", {}).get(name, {}), objects.trained[name].strategy
        mine.pop("model")
        if max(saved.stages, session.stages) == 1:
            require_same_model(theirs.get("model"), strategy.model, path)
        if isinstance(options := theirs.get("strategy"), Mapping):
            theirs = {**theirs, "strategy": strategy.config.by_names_of_now(options)}
        where = "" if name == "optimizer" else f"{name}: "
        compare_settings(theirs, mine, path, told=session.comm.rank == 0, name=where)


def unsplit(path: str | Path, optimizer: str = "optimizer") -> dict[str, Tensor]:
    """Return the state dict of a checkpoint's whole model, the consensus of its ranks, on the CPU.

    ::

        model.load_state_dict(hpcdist.unsplit("checkpoints"))

    Args:
        path: a folder of checkpoints, or one of them: of `hpcdist.save`, or of `hpcdist train`.
        optimizer: the name under which `hpcdist.save` was given the optimiser.

    Raises:
        CheckpointError: there is none, it is damaged, or lacks that name.
    """
    found = path if (Path(path) / checkpoint.MANIFEST).is_file() else checkpoint.latest(path, fallback=True)
    if found is None:
        raise CheckpointError(f"{path} must be a checkpoint, or a folder of them; got none there.")
    with checkpoint.understood(found):
        return _whole_model(SavedWorld(Path(found), checkpoint.verify(found)), optimizer)


def _whole_model(world: SavedWorld, optimizer: str) -> dict[str, Tensor]:
    keys = () if world.rank(0).at("params") is not None else ("state", optimizer)
    if world.rank(0).at(*keys, "params") is None:
        raise CheckpointError(
            f"optimizer must be a name that hpcdist.save was given; got {optimizer!r}, and {world.path} has "
            f"{', '.join(sorted(world.rank(0).at('state', default={})))}."
        )
    return world.of(*keys).whole()
