"""Read a checkpoint in any world: by names and slices, whatever ranks, stages, shards or servers have saved it.

Each rank reads the parameters that are its own now. Parameters are what the saved ranks stood for together; the
optimiser's state of a parameter is that of the first rank that has it; a strategy's values are combined as it declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hpcdist import checkpoint
from hpcdist.checkpoint import Slice, SlicePlace
from hpcdist.checkpoint.load import tensor_files
from hpcdist.checkpoint.slices import cut, join
from hpcdist.errors import CheckpointError
from hpcdist.model.flat_buffers import FlatBuffers
from hpcdist.session.state import Named, ParameterLayout, capture, order_of, places_of
from hpcdist.session.world import Session
from hpcdist.strategies import Strategy
from hpcdist.strategies.base import name_of
from hpcdist.strategies.common.state import Entry, first, mean_of_ranks

Combine = Callable[..., Any]
T = TypeVar("T")


class SavedValues(Protocol):
    """The state of one saved rank, see `hpcdist.checkpoint.SavedRank`."""

    def at(self, *keys: str, default: Any = None) -> Any: ...

    def names(self, *keys: str) -> list[str]: ...


class SavedWorld:
    """The states in a checkpoint, by rank.

    Attributes:
        meta: what `save` was given to be read first.
        stages, replicas: numbers of them; one stage if each rank has saved a whole model.
    """

    def __init__(self, path: Path, manifest: checkpoint.Manifest):
        self.path, self.meta, self.stages = path, manifest.meta, int(manifest.meta.get("stages", 1))
        self.replicas = manifest.ranks // self.stages
        files = tensor_files(path)
        self.rank = cache(lambda rank: checkpoint.SavedRank(path, rank, files))

    def of(self, *keys: str) -> SavedState:
        """Return the state of an optimiser, which the ranks have saved under these keys."""
        return SavedState(
            [_Below(self.rank(r), keys) for r in range(self.replicas * self.stages)], self.stages, self.path
        )

    def is_same(self, session: Session, states: Mapping[str, tuple[Any, tuple[str, ...]]]) -> bool:
        """Collective. Tell whether each rank has now what the same rank had when it saved.

        Args:
            states: of each optimiser: itself, and the keys of its state.
        """
        if (self.stages, self.replicas) != (session.stages, session.outer.size):
            return False
        has_same = self.together(session, lambda: all(self._has_same(session, *state) for state in states.values()))
        return all(session.comm.gather(has_same))

    def together(self, session: Session, work: Callable[[], T]) -> T:
        """Collective. Return the result of `work`, which depends on what was saved.

        Raises:
            CheckpointError: it has failed on some rank; on all ranks.
        """

        def understood() -> T:
            with checkpoint.understood(self.path, "the state of such a run"):
                return work()

        return checkpoint.together(session.comm, understood)

    def _has_same(self, session: Session, optimizer: Any, keys: tuple[str, ...]) -> bool:
        saved, own = _Below(self.rank(session.comm.rank), keys), capture(optimizer)
        same = saved.at("about", "strategy") == own["about"]["strategy"]
        return same and places_of(saved.at) == places_of(own.get)

    def module_state(self, replica: int, *keys: str) -> dict[str, Any]:
        """Join the state dicts of a module that the stages of a replica have saved."""
        joined: dict[str, Any] = {}
        for stage in range(self.stages):
            joined = self.rank(replica * self.stages + stage).at(*keys) | joined
        return joined


class _Below:
    """What a rank has saved under some keys."""

    def __init__(self, rank: SavedValues, keys: tuple[str, ...]):
        self._rank, self._keys = rank, keys

    def at(self, *keys: str, default: Any = None) -> Any:
        return self._rank.at(*self._keys, *keys, default=default)

    def names(self, *keys: str) -> list[str]:
        return self._rank.names(*self._keys, *keys)


class SavedState:
    """The state of one optimiser, its model and its strategy, on all saved ranks."""

    def __init__(self, ranks: Sequence[SavedValues], stages: int, path: Path):
        self._ranks, self._stages, self.path = ranks, stages, path
        replicas = range(len(ranks) // stages)
        self.workers = [replica for replica in replicas if ranks[replica * stages].at("works", default=True)]
        self._also: dict[str, str] = {}
        for rank in ranks:
            if not isinstance(rank.at("about", "strategy"), str):
                raise CheckpointError(f"{path} must name the strategy that has saved it; take another checkpoint.")
            self._also |= rank.at("about", "also", default={})
        self._index = cache(self._read_index)

    def reshard(self, optimizer: Any) -> dict[str, Any]:
        """Return this rank's state, as `capture` does, of the slices that it has now."""
        state, layout = self.reshard_strategy(optimizer.strategy), ParameterLayout(optimizer.strategy.model)
        return state | {"optimizer": self._optimizer_state(order_of(optimizer, layout), layout)}

    def reshard_strategy(self, strategy: Strategy) -> dict[str, Any]:
        """Return this rank's state but for the optimiser's."""
        layout = ParameterLayout(strategy.model)
        self._also |= layout.also
        self._index.cache_clear()
        same = self._ranks[0].at("about", "strategy") == name_of(strategy)

        def of_ranks(name: str) -> list[Any]:
            found = (rank.at("strategy", name, default=self) for rank in self._ranks)
            return [value for value in found if value is not self]

        def slices(entry: Entry) -> Named:
            keys, ranks, combine = [("strategy", entry.name)], strategy.comm.size, entry.reshard or first
            places = (place for _, _, place in layout.parts("params", entry.ranges))
            return {place.name: self._slice(place, keys, combine, ranks) for place in places}

        return {
            "params": self.named(layout, "params", ["masters"], ["frozen"]),
            "frozen": self.named(layout, "frozen", ["frozen"], ["masters"], combine=first),
            "buffers": self._buffers(strategy.model.flat_buffers, layout),
            "strategy": strategy.state.reshard(of_ranks, slices, same=same),
        }

    def named(
        self, layout: ParameterLayout, kind: str, *sources: Sequence[str], combine: Combine = mean_of_ranks
    ) -> Named:
        """Return this rank's slices of a kind, each found at the first of some places in the saved states."""
        return {place.name: self._slice(place, sources, combine) for _, _, place in layout.parts(kind)}

    def _buffers(self, buffers: FlatBuffers, layout: ParameterLayout) -> Named:
        """Return the means of the workers' buffers, or the first worker's, as `FlatBuffers.kinds` says."""
        return {
            place.name: self._slice(place, [["buffers"]], mean_of_ranks if buffers.kinds[group] == "mean" else first)
            for group, _, place in layout.parts("buffers")
        }

    def whole(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model."""
        beside, complex_ones, firsts, state = set(), set(), set(), dict[str, Tensor]()
        for rank in self._ranks:
            beside |= set(rank.at("about", "beside"))
            complex_ones |= set(rank.at("about", "complex"))
            firsts |= set(rank.at("about", "firsts", default=()))
        for kind in ("masters", "frozen", "buffers"):
            for counted, found in self._index(kind).items():
                place = found[0][1].place
                averaged = kind == "masters" or (kind == "buffers" and place.name not in firsts)
                combine = mean_of_ranks if averaged else first
                tensor = self._cut(found, SlicePlace.whole(place.name, place.shape), combine).clone()
                state[counted] = torch.view_as_complex(tensor) if place.name in complex_ones else tensor
        tied = {name: state[counted] for name, counted in self._also.items() if counted in state}
        return {name: tensor for name, tensor in (state | tied).items() if name not in beside}

    # --- slices ---------------------------------------------------------------------------------------------------
    def _slice(self, place: SlicePlace, sources: Sequence[Sequence[str]], combine: Combine, ranks: int = 1) -> Slice:
        """Return a slice that is read when it is needed; where values are shared out and there is none it is zero."""

        found = next(filter(None, (self._index(*keys).get(self._counted(place.name)) for keys in sources)), [])
        if not found and combine not in (first, mean_of_ranks):
            return Slice(place, partial(torch.zeros, place.part if place.span is None else (place.numel,)))
        shapes = {piece.place.shape for _, piece in found}
        if shapes != {place.shape}:
            got = "nothing of that name" if not shapes else f"one of {torch.Size(next(iter(shapes))).numel()} elements"
            raise CheckpointError(
                f"model must be that of the checkpoint to resume from it; got {place.name!r} of shape "
                f"{list(place.shape)}, for which {self.path} has {got}. Resume with the model of that run."
            )
        return Slice(place, partial(self._cut, found, place, combine, ranks))

    def _cut(self, found: Sequence[tuple[int, Slice]], place: SlicePlace, combine: Combine, ranks: int = 1) -> Tensor:
        """Combine the replicas' slices of a tensor, put them together, and cut out this rank's."""
        boxes: dict[SlicePlace, dict[int, Slice]] = {}
        for replica, piece in found:  # of several ranks of a replica that have the same the first one's counts
            boxes.setdefault(replace(piece.place, name=place.name), {}).setdefault(replica, piece)
        combined = {
            box: combine([piece.tensor for piece in pieces.values()], len(self.workers), ranks)
            for box, pieces in boxes.items()
        }
        return cut(join(combined, self.path), place, self.path)

    def _counted(self, name: str) -> str:
        """Return the name that counts of those that are tied."""
        return self._also.get(name, name)

    def _replicas(self) -> Iterator[tuple[int, SavedValues]]:
        for rank, values in enumerate(self._ranks):
            yield rank // self._stages, values

    def _read_index(self, *keys: str) -> dict[str, list[tuple[int, Slice]]]:
        """Return all ranks' slices under these keys, by name, each with its replica; of buffers the workers'."""
        found: dict[str, list[tuple[int, Slice]]] = {}
        for replica, rank in self._replicas():
            if replica in self.workers or keys[0] not in ("buffers", "frozen", "average"):
                for name, piece in (rank.at(*keys) or {}).items():
                    found.setdefault(self._counted(name), []).append((replica, piece))
        return found

    # --- the optimiser --------------------------------------------------------------------------------------------
    def _optimizer_state(self, order: Sequence[str], layout: ParameterLayout) -> dict[str, Any]:
        saved: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        groups: list[dict[str, Any]] = []
        for replica, rank in self._replicas():
            for name in rank.names("optimizer", "state"):
                held = saved.setdefault(self._counted(name), [])
                if not held or held[0][0] == replica:  # the first one that has it
                    held.append((replica, rank.at("optimizer", "state", name)))
            if replica == self.workers[0]:  # schedules change the workers' rates, which servers may be given late
                groups += rank.at("optimizer", "param_groups")
        self._take_own_numbers(groups)
        state = {}
        for name in order:
            if pieces := [values for _, values in saved.get(self._counted(name), [])]:
                state[name] = self._state_of(layout.places[name], pieces)
        named = [{**group, "params": self._names(group["params"], order)} for group in groups]
        return {"state": state, "param_groups": named}

    def _take_own_numbers(self, groups: Sequence[dict[str, Any]]) -> None:
        """Put into a worker's groups what steps change by themselves, such as a count, from the ranks that made them.

        Args:
            groups: of the first worker, one stage after the other.
        """
        begin = 0
        for stage in range(self._stages):
            ranks = self._ranks[stage :: self._stages]
            for rank in ranks:
                if own := rank.at("strategy", "own_numbers", default=()):
                    stepped = rank.at("optimizer", "param_groups")
                    for number, key in own:
                        groups[begin + number][key] = stepped[number][key]
                    break
            begin += len(ranks[self.workers[0]].at("optimizer", "param_groups"))

    def _names(self, saved: Sequence[str], order: Sequence[str]) -> list[str]:
        """Return the names that parameters of a saved group have here."""
        counted = set(map(self._counted, saved))
        return [name for name in order if self._counted(name) in counted]

    def _state_of(self, place: SlicePlace, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the optimiser's state of one parameter; `pieces` are those of a replica's ranks."""
        cut_anew = not place.is_whole or any(not v.place.is_whole for v in pieces[0].values() if isinstance(v, Slice))
        state = {}
        for key, value in pieces[0].items():
            if isinstance(value, Slice):
                found = [(rank, values[key]) for rank, values in enumerate(pieces) if isinstance(values[key], Slice)]
                value = Slice(place, partial(self._cut, found, place, first))
            elif cut_anew and isinstance(value, Tensor) and value.numel() > 1:
                raise CheckpointError(
                    f"the optimiser's state must lie along parameters to be cut into other shards; got {key!r} of "
                    f"shape {list(value.shape)} for {place.name!r} of shape {list(place.part)}. Resume on the mesh of "
                    "the checkpoint."
                )
            state[key] = value
        return state
