"""Carry a checkpoint over to another grid of stages and replicas: tensors are put together and cut anew by their names.

Every rank saves its own stage. On another number of replicas, a stage's state is made of those that its replicas have
saved, as on another number of ranks without stages. Where the stages are cut otherwise, so it is for each saved stage;
of the results each rank takes up what its own layers have the names of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist import checkpoint, strategies
from hpcdist.errors import CheckpointError
from hpcdist.parallel.part import PartOfModel
from hpcdist.session.parts import cut_out, is_cut, put_together
from hpcdist.session.saved_stage import KINDS, NOTHING, Named, SavedStage, StatePath, place_of_all_groups
from hpcdist.session.state import capture, layout_of, merge
from hpcdist.session.world import Session
from hpcdist.strategies import Strategy
from hpcdist.strategies.common.state import Anew, Entry

Pick = Callable[[dict[str, Any]], dict[str, Any]]  # finds one optimiser's part (see `capture`) in a rank's state


class SavedGrid:
    """The states in a checkpoint, by replica and stage; one stage where it is of whole models.

    Attributes:
        stages, replicas: numbers of them.
    """

    def __init__(self, path: Path, manifest: checkpoint.Manifest):
        self.path = path
        self.stages: int = manifest.meta.get("stages", 1)
        self.replicas = manifest.ranks // self.stages

    def read(self, replica: int, stage: int) -> dict[str, Any]:
        """Read the state that the rank of this replica and stage has saved."""
        return checkpoint.read(self.path, replica * self.stages + stage)

    def has_cut(self, session: Session, states: Mapping[str, tuple[Any, Any]]) -> bool:
        """Collective where there are stages. Tell whether the saved stages have the layers that the ranks' have now.

        Args:
            states: of each optimiser, by name: itself, and its state on a rank of this rank's stage.
        """
        if self.stages == session.stages == 1:  # models that are whole have been compared
            return True
        mine = {name: layout_of(optimizer) for name, (optimizer, _) in states.items()}
        saved = {name: (state or {}).get("layout") for name, (_, state) in states.items()}
        return all(session.comm.gather(self.stages == session.stages and mine == saved))

    def state_for(self, optimizer: Any, pick: Pick, stage: int | None) -> dict[str, Any]:
        """Make this rank's state on another grid than the saved one.

        Args:
            pick: finds the optimiser's part in a rank's state.
            stage: this rank's stage, where the saved ones have the same layers; None: they are cut anew.
        """
        if stage is not None:
            states = [pick(self.read(replica, stage)) for replica in range(self.replicas)]
            return merge(states, optimizer.strategy)
        return _cut_anew(self, optimizer, pick)

    def module_state(self, replica: int, find: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Join the state dicts of a module's stages."""
        joined: dict[str, Any] = {}
        for stage in range(self.stages):
            joined = find(self.read(replica, stage)) | joined
        return joined


# --- this rank's stage ------------------------------------------------------------------------------------------------
def _cut_anew(saved: SavedGrid, optimizer: Any, pick: Pick) -> dict[str, Any]:
    """Make this rank's state from all saved stages, one of which is in memory at a time."""
    strategy, own = optimizer.strategy, capture(optimizer)
    layout, entries = own["layout"], [entry for entry in strategy.entries() if not entry.unsent]
    taker = _Taker(layout, strategy.model.module, saved.path)
    state_of: dict[str, Any] = {}
    groups: list[tuple[list[str], dict[str, Any]]] = []
    values: dict[str, Any] = {}
    unsent: dict[StatePath, Any] = {}
    for number in range(saved.stages):
        states = [pick(saved.read(replica, number)) for replica in range(saved.replicas)]
        stage = SavedStage(states, strategy, saved.path)
        taker.know(stage.layout, number)
        for kind in KINDS:
            taker.take(kind, stage.named[kind])
        of, groups_of_stage = stage.optimizer(strategy)
        state_of |= {name: state for name, state in of.items() if taker.wants(name)}
        groups += groups_of_stage
        for entry in entries:
            values[entry.name] = _joined(values.get(entry.name), stage.along(entry), taker)
        for path, value in stage.unsent(strategy).items():
            unsent[path] = unsent.get(path, {}) | taker.wanted(value) if isinstance(value, dict) else value
    flats = {kind: taker.flats(kind, own[kind]) for kind in KINDS}
    return {
        **own,
        **flats,
        "optimizer": _optimizer_state(own["optimizer"], layout["order"], state_of, groups, taker),
        "strategy": {
            **_strategy_state(strategy, entries, values, taker, flats["params"]),
            **_unsent_state(strategy, own["strategy"], unsent, taker, flats["params"]),
        },
    }


class _SavedPart(NamedTuple):
    rank: int  # of the replica
    part: dict[str, Any]  # see `PartOfModel.describe_parts`
    place: Sequence[Any]  # in flat memory


class _Taker:
    """Take what this rank's stage needs of the saved ones: tensors, or their parts."""

    def __init__(self, layout: Mapping[str, Any], module: Any, path: Path):
        self._layout, self._path = layout, path
        self._rank = module.grid.stage if isinstance(module, PartOfModel) else 0
        self._places = _places(layout)
        self._also: dict[str, str] = {}  # other names of tied tensors, now and when they were saved
        self._of: dict[str, str] = {}  # the names of those that tensors are parts of, likewise
        self._saved: dict[str, _SavedPart] = {}
        self._found: dict[str, Named] = {kind: {} for kind in KINDS}
        self._name(layout)

    def know(self, layout: Mapping[str, Any], number: int) -> None:
        """Take in the names of a saved stage, and what its tensors are parts of."""
        self._name(layout)
        places = _places(layout)
        parts = layout.get("parts", {})
        self._saved |= {name: _SavedPart(number, part, places[name]) for name, part in parts.items()}

    def _name(self, layout: Mapping[str, Any]) -> None:
        self._also |= layout["also"]
        self._of |= {name: part["of"] for name, part in layout.get("parts", {}).items()}
        self._wanted = set(map(self._whole_name, self._places))

    def _whole_name(self, name: str) -> str:
        """Return the name that a tensor has in common with those that are tied to it, and with its other parts."""
        name = self._of.get(name, name)
        return self._also.get(name, name)

    def wanted(self, named: Named) -> Named:
        """Copy what this stage needs, so that the flat memory of the saved stage can go."""
        return {name: tensor.clone() for name, tensor in named.items() if self.wants(name)}

    def wants(self, name: str) -> bool:
        """Tell whether a parameter is this stage's, or tied to one that is, or a part of it."""
        return self._whole_name(name) in self._wanted

    def take(self, kind: str, named: Named) -> None:
        self._found[kind] |= self.wanted(named)

    def share(self, names: Iterable[str], others: Iterable[str]) -> bool:
        """Tell whether some of the parameters are the same, tied, or parts of one."""
        return not set(map(self._whole_name, names)).isdisjoint(map(self._whole_name, others))

    def together(self, named: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Put what is tied, or parts of one tensor, under one name, for `find`."""
        joined: dict[str, dict[str, Any]] = {}
        for name, value in named.items():
            joined.setdefault(self._whole_name(name), {})[name] = value
        return joined

    def find(self, name: str, joined: Mapping[str, dict[str, Any]]) -> Any:
        """Return this rank's part of what is under a parameter's name: a flat tensor, or an optimiser's state.

        None where nothing is under it, or under that of one that is tied to it.
        """
        found = joined.get(self._whole_name(name))
        if not found:
            return None
        first = next(iter(found))
        value = found.get(name, found[first])
        saved, own = self._saved.get(first), self._layout.get("parts", {}).get(name)
        if saved and is_cut(saved.part):
            parts = {self._saved[other].rank: _along(each, self._saved[other].place) for other, each in found.items()}
            value = _changed(
                value,
                lambda key: put_together({r: p[key] for r, p in parts.items()}, saved.part, self._path),
                parts[saved.rank],
            )
        if own and is_cut(own):
            place = self._places[name]
            if isinstance(value, Tensor) and value.numel() != math.prod(own["shape"]) * _width(place):
                raise self._other_model(place, value)
            whole = _along(value, (*place[:-1], own["shape"]))
            value = _changed(value, lambda key: cut_out(whole[key], own, self._rank, place[-1], self._path), whole)
        return value

    def flats(
        self, kind: str, like: Sequence[Tensor], named: Named | None = None, or_zeros: bool = False
    ) -> list[Tensor]:
        """Lay tensors out as this stage's are; with `or_zeros` one that is not there is of zeros.

        Raises:
            CheckpointError: one is not there, or of another shape.
        """
        flats = [torch.empty_like(flat) for flat in like]
        known = self.together(self._found[kind] if named is None else named)
        others = (
            self.together({n: t for found in self._found.values() for n, t in found.items()}) if named is None else {}
        )
        for place in self._layout[kind]:
            name, group, start, stop, *_ = place
            value = self.find(name, known)
            if value is None:  # frozen when it was saved, or not any more
                value = self.find(name, others)
            if value is None and or_zeros:
                value = torch.zeros(stop - start)
            if value is None or value.numel() != stop - start:
                raise self._other_model(place, value)
            flats[group][start:stop] = value
        return flats

    def _other_model(self, place: Sequence[Any], value: Tensor | None) -> CheckpointError:
        name, *_, dtype, shape = place
        got = "nothing of that name" if value is None else f"one of {value.numel()} elements"
        return CheckpointError(
            f"model must be that of the checkpoint to resume from it; got {name!r} ({dtype} of shape {shape}), "
            f"for which {self._path} has {got}. Resume with the model of that run."
        )


def _places(layout: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    return {place[0]: place for kind in KINDS for place in layout[kind]}


def _width(place: Sequence[Any]) -> int:
    """Return how many numbers an element has in flat memory: complex ones are pairs there."""
    return 2 if "complex" in place[-2] else 1


def _along(value: Any, place: Sequence[Any]) -> dict[Any, Tensor]:
    """Return what lies along a parameter, in its shape: a flat tensor, or tensors of an optimiser's state by name."""
    name, *_, shape = place
    if isinstance(value, Tensor):
        return {None: value.view(*shape, *([2] if _width(place) == 2 else []))}
    tensors = {key: item for key, item in value.items() if isinstance(item, Tensor)}
    for key, tensor in tensors.items():
        if tensor.numel() > 1 and list(tensor.shape) != list(shape):
            raise CheckpointError(
                f"the optimiser's state must lie along parameters to be cut into other shards; got {key!r} of shape "
                f"{list(tensor.shape)} for {name!r} of shape {list(shape)}. Resume on the mesh of the checkpoint."
            )
    return {key: tensor for key, tensor in tensors.items() if list(tensor.shape) == list(shape)}


def _changed(value: Any, change: Callable[[Any], Tensor], keys: Iterable[Any]) -> Any:
    """Exchange what `_along` has found in a value, flat or by name."""
    return change(None).reshape(-1) if isinstance(value, Tensor) else value | {key: change(key) for key in keys}


def _joined(before: Any, now: Any, taker: _Taker) -> Any:
    """Join an entry's values of two stages."""
    if isinstance(now, dict):
        wanted = {kind: taker.wanted(named) for kind, named in now.items()}
        known = before if isinstance(before, dict) else {}
        return {kind: known.get(kind, {}) | named for kind, named in wanted.items()} | {
            kind: named for kind, named in known.items() if kind not in wanted
        }
    return now if before is None else before


def _optimizer_state(
    own: dict[str, Any],
    order: Sequence[str],
    state_of: Mapping[str, Any],
    groups: Sequence[tuple[list[str], dict[str, Any]]],
    taker: _Taker,
) -> dict[str, Any]:
    """Return the state dict of this rank's optimiser, with the saved numbers."""
    joined = taker.together(state_of)
    found = {index: taker.find(name, joined) for index, name in enumerate(order)}
    own_groups = []
    for number, group in enumerate(own["param_groups"]):
        names = [order[index] for index in group["params"]]
        fitting = [settings for members, settings in groups if taker.share(names, members)]
        numbered = [settings for _, settings in groups[number : number + 1]]  # of a group that is empty here
        own_groups.append({**group, **(fitting or numbered or [{}])[0]})
    return {**own, "state": {i: state for i, state in found.items() if state is not None}, "param_groups": own_groups}


def _strategy_state(
    strategy: Strategy, entries: Sequence[Entry], values: Mapping[str, Any], taker: _Taker, like: Sequence[Tensor]
) -> dict[str, Any]:
    """Return the strategy's state: what lies along the parameters, and numbers; the rest begins anew."""
    whole: dict[str, Any] = {}
    for entry in entries:
        value = values.get(entry.name)
        if value is NOTHING or (value is None and not isinstance(entry.reshard, Anew)):
            continue
        if isinstance(value, dict) and value:
            flats = {kind: taker.flats("params", like, named) for kind, named in value.items()}
            groups = range(len(like))
            value = flats[""] if "" in flats else {g: {kind: flats[kind][g] for kind in flats} for g in groups}
        whole[entry.name] = value
    state = strategy.reshard_state([whole])
    return {entry.name: entry.save() for entry in entries if not entry.optional} | state


def _unsent_state(
    strategy: Strategy, own: dict[str, Any], unsent: Mapping[StatePath, Any], taker: _Taker, like: Sequence[Tensor]
) -> dict[str, Any]:
    """Return what the strategy's compression has not sent; what does not lie along the parameters begins anew."""
    like = [torch.empty_like(f, dtype=torch.float64 if f.dtype == torch.float64 else torch.float32) for f in like]
    along = {kind: named for kind, named in unsent.items() if isinstance(named, dict)}
    flats = {kind: taker.flats("params", like, named, or_zeros=True) for kind, named in along.items()}

    def fill(value: Any, path: StatePath) -> Any:
        if isinstance(value, dict):
            return {key: fill(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item, (*path, place)) for place, item in enumerate(value)]
        kind, group = place_of_all_groups(path)
        return flats[kind][group] if kind in flats else unsent.get(path, value)

    return fill(strategy.reshard_unsent([own | {"works": True}]), ())


# --- the unsplit model ------------------------------------------------------------------------------------------------
def unsplit(path: str | Path, optimizer: str = "optimizer") -> dict[str, Tensor]:
    """Return the state dict of the whole model that a checkpoint's ranks stand for together, of any grid; on the CPU.

    ::

        model.load_state_dict(hpcdist.unsplit("checkpoints"))

    Args:
        path: a folder of checkpoints, or one of them: of `hpcdist.save`, or of `hpcdist train`.
        optimizer: the name under which `hpcdist.save` was given the optimiser.

    Raises:
        CheckpointError: there is none, it is damaged, lacks that name, or is of a strategy that is not installed.
    """
    found = path if (Path(path) / checkpoint.MANIFEST).is_file() else checkpoint.latest(path, fallback=True)
    if found is None:
        raise CheckpointError(f"{path} must be a checkpoint, or a folder of them; got none there.")
    manifest = checkpoint.verify(found)
    saved = SavedGrid(Path(found), manifest)

    def pick(state: dict[str, Any]) -> dict[str, Any]:
        if "params" in state:
            return state
        if optimizer not in state["state"]:
            raise CheckpointError(
                f"optimizer must be a name that hpcdist.save was given; got {optimizer!r}, and {found} has "
                f"{', '.join(sorted(state['state']))}."
            )
        return state["state"][optimizer]

    whole: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    described: dict[str, dict[str, Any]] = {}
    for number in range(saved.stages):
        states = [pick(saved.read(replica, number)) for replica in range(saved.replicas)]
        layout: dict[str, Any] = states[0].get("layout", {})
        cls = strategies.load(layout["strategy"]) if layout else Strategy
        stage = SavedStage(states, cls, saved.path)
        for kind in KINDS:
            for (name, tensor), place in zip(stage.named[kind].items(), layout[kind], strict=True):
                if name in layout["beside"]:
                    continue
                if part := layout.get("parts", {}).get(name):
                    described.setdefault(part["of"], part)
                    parts.setdefault(part["of"], {})[number] = _shaped(tensor, place)
                else:
                    whole.setdefault(name, _shaped(tensor, place))
        for name, other in stage.also.items():
            if other in whole:
                whole.setdefault(name, whole[other])
    return whole | {name: put_together(tensors, described[name], found) for name, tensors in parts.items()}


def _shaped(flat: Tensor, place: Sequence[Any]) -> Tensor:
    *_, dtype, shape = place
    return flat.view(getattr(torch, dtype.removeprefix("torch."))).view(shape).clone()
