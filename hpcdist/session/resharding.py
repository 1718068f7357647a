"""Load a checkpoint on any number of ranks, stages, shards or servers, by parameter names and slices.

Each rank reads the parameters that it holds now. They are the consensus of the saved ranks; the optimiser's state of a
parameter is that of the first rank that saved it; a strategy's values are combined as its state declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpcdist import checkpoint
from hpcdist.checkpoint import Slice, SlicePosition
from hpcdist.checkpoint.load import tensor_files
from hpcdist.checkpoint.slices import cut, join
from hpcdist.errors import CheckpointError
from hpcdist.model.flat_buffers import FlatBuffers
from hpcdist.session.state import Named, ParameterLayout, capture, parameter_order, positions_of
from hpcdist.session.world import Session
from hpcdist.strategies import Strategy
from hpcdist.strategies.base import name_of
from hpcdist.strategies.common.state import StateSpec, first, mean_of_ranks

Combine = Callable[..., Any]  # (replicas' values, number of saved workers, number of ranks now) -> one value
T = TypeVar("T")


class SavedWorld:
    """The states in a checkpoint, by rank.

    Attributes:
        meta: the metadata passed to `save`.
        stages, replicas: numbers of them; one stage if each rank saved a whole model.
    """

    def __init__(self, path: Path, manifest: checkpoint.Manifest):
        self.path, self.meta, self.stages = path, manifest.meta, int(manifest.meta.get("stages", 1))
        self.replicas = manifest.ranks // self.stages
        self.rank = cache(partial(checkpoint.SavedRank, path, files=tensor_files(path)))

    def of(self, *keys: str) -> SavedState:
        """Return the state of an optimiser, saved under these keys."""
        ranks = range(self.replicas * self.stages)
        return SavedState([self.rank(rank).under(*keys) for rank in ranks], self.stages, self.path)

    def is_same(self, session: Session, states: Mapping[str, tuple[Any, tuple[str, ...]]]) -> bool:
        """Collective. Return whether each rank has now the role and holds the slices that the same rank saved.

        Args:
            states: each optimiser, with the keys of its state.
        """
        if (self.stages, self.replicas) != (session.stages, session.outer.size):
            return False
        has_same = self.raise_on_all_ranks(
            session, lambda: all(self._has_same(session, *state) for state in states.values())
        )
        return all(session.comm.gather(has_same))

    def raise_on_all_ranks(self, session: Session, work: Callable[[], T]) -> T:
        """Collective. Return the result of `work`, which reads the checkpoint.

        Raises:
            CheckpointError: it failed on some rank; raised on all ranks.
        """

        def understood() -> T:
            with checkpoint.understood(self.path, "the state of such a run"):
                return work()

        return checkpoint.raise_on_all_ranks(session.comm, understood)

    def _has_same(self, session: Session, optimizer: Any, keys: tuple[str, ...]) -> bool:
        """Return whether this rank's optimiser has the strategy, the role and the slices that this rank saved."""
        saved, local = self.rank(session.comm.rank).under(*keys), capture(optimizer)
        about = local["about"]
        same_role = (
            saved.at("works", default=True) == local["works"]
            and saved.at("about", "role", default=about["role"]) == about["role"]  # old checkpoints lack it
        )
        same = same_role and saved.at("about", "strategy") == about["strategy"]
        return same and positions_of(saved.at) == positions_of(local.get)

    def module_state(self, replica: int, *keys: str) -> dict[str, Any]:
        """Join the state dicts of a module, saved by the stages of a replica."""
        joined: dict[str, Any] = {}
        for stage in range(self.stages):
            joined = self.rank(replica * self.stages + stage).at(*keys) | joined
        return joined


class SavedState:
    """The state of one optimiser, its model and its strategy, on all saved ranks."""

    def __init__(self, ranks: Sequence[checkpoint.SavedRank], stages: int, path: Path):
        self._ranks, self._stages, self.path = ranks, stages, path
        replicas = range(len(ranks) // stages)
        self.workers = [replica for replica in replicas if ranks[replica * stages].at("works", default=True)]
        self._also: dict[str, str] = {}  # see `ParameterLayout.also`
        for rank in ranks:
            if not isinstance(rank.at("about", "strategy"), str):
                raise CheckpointError(f"{path} must name the strategy that saved it; take another checkpoint.")
            self._also |= rank.at("about", "also", default={})
        self._index = cache(self._read_index)

    def reshard(self, optimizer: Any) -> dict[str, Any]:
        """Return this rank's state, as `capture` does, for the slices that it holds now."""
        state, layout = self.reshard_strategy(optimizer.strategy), ParameterLayout(optimizer.strategy.model)
        return state | {"optimizer": self._optimizer_state(parameter_order(optimizer, layout), layout)}

    def reshard_strategy(self, strategy: Strategy) -> dict[str, Any]:
        """Return this rank's state without the optimiser's."""
        layout = ParameterLayout(strategy.model)
        self._also |= layout.also
        self._index.cache_clear()
        same = self._ranks[0].at("about", "strategy") == name_of(strategy)

        def of_ranks(name: str) -> list[Any]:
            values = (rank.at("strategy", name, default=self) for rank in self._ranks)  # `self`: a rank has no value
            return [value for value in values if value is not self]

        def slices(spec: StateSpec) -> Named:
            keys, ranks, combine = [("strategy", spec.name)], strategy.comm.size, spec.reshard or first
            positions = (position for _, _, position in layout.parts("params", spec.ranges))
            return {position.name: self._slice(position, keys, combine, ranks) for position in positions}

        return {
            "params": self.named(layout, "params", ["masters"], ["frozen"]),
            "frozen": self.named(layout, "frozen", ["frozen"], ["masters"], combine=first),
            "buffers": self._buffers(strategy.model.flat_buffers, layout),
            "strategy": strategy.state.reshard(of_ranks, slices, same=same),
            "saved": [rank.at("strategy", "steps") for rank in self._ranks],
        }

    def named(
        self, layout: ParameterLayout, kind: str, *sources: Sequence[str], combine: Combine = mean_of_ranks
    ) -> Named:
        """Return this rank's slices of a kind, each read from the first of the saved kinds `sources` that has it."""
        return {position.name: self._slice(position, sources, combine) for _, _, position in layout.parts(kind)}

    def _buffers(self, buffers: FlatBuffers, layout: ParameterLayout) -> Named:
        """Return the means of the workers' buffers, or the first worker's buffers, by `FlatBuffers.kinds`."""
        return {
            position.name: self._slice(
                position, [["buffers"]], mean_of_ranks if buffers.kinds[group] == "mean" else first
            )
            for group, _, position in layout.parts("buffers")
        }

    def whole(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model."""
        excluded, complex_names, unaveraged, state = set(), set(), set(), dict[str, Tensor]()
        for rank in self._ranks:
            excluded |= set(rank.at("about", "beside"))
            complex_names |= set(rank.at("about", "complex"))
            unaveraged |= set(rank.at("about", "firsts", default=()))
        for kind in ("masters", "frozen", "buffers"):
            for main_name, chunks in self._index(kind).items():
                position = chunks[0][1].position
                averaged = kind == "masters" or (kind == "buffers" and position.name not in unaveraged)
                combine = mean_of_ranks if averaged else first
                tensor = self._cut(chunks, SlicePosition.whole(position.name, position.shape), combine).clone()
                state[main_name] = torch.view_as_complex(tensor) if position.name in complex_names else tensor
        tied = {name: state[main_name] for name, main_name in self._also.items() if main_name in state}
        return {name: tensor for name, tensor in (state | tied).items() if name not in excluded}

    # --- slices ---------------------------------------------------------------------------------------------------
    def _slice(
        self, position: SlicePosition, sources: Sequence[Sequence[str]], combine: Combine, ranks: int = 1
    ) -> Slice:
        """Return a slice of the first of the saved kinds `sources` that has it, read on first use.

        A missing slice is zero if the values are divided among ranks.
        """
        chunks = next(filter(None, (self._index(*keys).get(self._main_name(position.name)) for keys in sources)), [])
        if not chunks and combine not in (first, mean_of_ranks):
            return Slice(position, partial(torch.zeros, position.part if position.span is None else (position.numel,)))
        shapes = {chunk.position.shape for _, chunk in chunks}
        if shapes != {position.shape}:
            got = "nothing of that name" if not shapes else f"one of {torch.Size(next(iter(shapes))).numel()} elements"
            raise CheckpointError(
                f"model must be that of the checkpoint to resume from it; got {position.name!r} of shape "
                f"{list(position.shape)}, for which {self.path} has {got}. Resume with the model of that run."
            )
        return Slice(position, partial(self._cut, chunks, position, combine, ranks))

    def _cut(
        self, chunks: Sequence[tuple[int, Slice]], position: SlicePosition, combine: Combine, ranks: int = 1
    ) -> Tensor:
        """Combine a tensor's slices (`chunks`, by replica) over replicas, join them; return the part at `position`."""
        replicas_of: dict[SlicePosition, dict[int, Slice]] = {}
        for replica, chunk in chunks:  # if several ranks of a replica saved the same slice, the first one's
            replicas_of.setdefault(replace(chunk.position, name=position.name), {}).setdefault(replica, chunk)
        combined = {
            saved_position: combine([chunk.tensor for chunk in replicas.values()], len(self.workers), ranks)
            for saved_position, replicas in replicas_of.items()
        }
        return cut(join(combined, self.path), position, self.path)

    def _main_name(self, name: str) -> str:
        """Return the name under which a tied tensor is saved."""
        return self._also.get(name, name)

    def _replicas(self) -> Iterator[tuple[int, checkpoint.SavedRank]]:
        """Yield each saved rank's values, with the number of its replica."""
        for rank, values in enumerate(self._ranks):
            yield rank // self._stages, values

    def _read_index(self, *keys: str) -> dict[str, list[tuple[int, Slice]]]:
        """Return all ranks' slices under these keys, by name, with their replicas; for buffers, only the workers'."""
        index: dict[str, list[tuple[int, Slice]]] = {}
        for replica, rank in self._replicas():
            if replica in self.workers or keys[0] not in ("buffers", "frozen", "average"):
                for name, chunk in (rank.at(*keys) or {}).items():
                    index.setdefault(self._main_name(name), []).append((replica, chunk))
        return index

    # --- the optimiser --------------------------------------------------------------------------------------------
    def _optimizer_state(self, order: Sequence[str], layout: ParameterLayout) -> dict[str, Any]:
        """Return the state dict of this rank's optimiser, from the saved states by parameter name."""
        saved: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        groups: list[dict[str, Any]] = []
        for replica, rank in self._replicas():
            for name in rank.names("optimizer", "state"):
                states_of_name = saved.setdefault(self._main_name(name), [])
                if not states_of_name or states_of_name[0][0] == replica:  # the first replica that has it
                    states_of_name.append((replica, rank.at("optimizer", "state", name)))
            if replica == self.workers[0]:  # schedules change the workers' rates; servers may get them later
                groups += rank.at("optimizer", "param_groups")
        self._restore_counters(groups)
        state = {}
        for name in order:
            if chunks := [values for _, values in saved.get(self._main_name(name), [])]:
                state[name] = self._parameter_state(layout.positions[name], chunks)
        named = [{**group, "params": self._names(group["params"], order)} for group in groups]
        return {"state": state, "param_groups": named}

    def _restore_counters(self, groups: Sequence[dict[str, Any]]) -> None:
        """Copy numbers that steps change (counts) to the first worker's groups, from ranks that took the steps."""
        start = 0
        for stage in range(self._stages):
            ranks = self._ranks[stage :: self._stages]
            for rank in ranks:
                if counters := rank.at("strategy", "own_numbers", default=()):
                    stepped = rank.at("optimizer", "param_groups")
                    for number, key in counters:
                        groups[start + number][key] = stepped[number][key]
                    break
            start += len(ranks[self.workers[0]].at("optimizer", "param_groups"))

    def _names(self, saved: Sequence[str], order: Sequence[str]) -> list[str]:
        """Return the names of a saved group's parameters that exist here."""
        main_names = set(map(self._main_name, saved))
        return [name for name in order if self._main_name(name) in main_names]

    def _parameter_state(self, position: SlicePosition, chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the optimiser's state of one parameter, for the slice of it at `position`, which this rank holds.

        `chunks`: the parameter's state from each rank of one replica that saved a slice. Values with the parameter's
        shape (exp_avg) are slices, joined and cut when they are read; others (step) are the first rank's.
        """
        reshards = not position.is_whole or any(
            not v.position.is_whole for v in chunks[0].values() if isinstance(v, Slice)
        )
        state = {}
        for key, value in chunks[0].items():
            if isinstance(value, Slice):
                slices = [(rank, values[key]) for rank, values in enumerate(chunks) if isinstance(values[key], Slice)]
                value = Slice(position, partial(self._cut, slices, position, first))
            elif reshards and isinstance(value, Tensor) and value.numel() > 1:
                raise CheckpointError(
                    f"the optimiser's state must lie along parameters to be cut into other shards; got {key!r} of "
                    f"shape {list(value.shape)} for {position.name!r} of shape {list(position.part)}. Resume on the "
                    "mesh of the checkpoint."
                )
            state[key] = value
        return state
