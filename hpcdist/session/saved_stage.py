"""Read what the replicas of one stage have saved: the values that they stand for together, by parameters' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcdist.errors import CheckpointError
from hpcdist.session.state import workers_of
from hpcdist.strategies import Strategy
from hpcdist.strategies.common.state import Entry, mean

Named = dict[str, Tensor]
StatePath = tuple[Any, ...]  # the place of a value in nested dicts and lists
KINDS = ("params", "frozen", "buffers")
NOTHING = object()


class SavedStage:
    """One saved stage: the values that its replicas stand for together, by the names of parameters.

    Args:
        states: of its replicas, as `capture` makes them.
        strategy: this run's, or its class.
    """

    def __init__(self, states: Sequence[dict[str, Any]], strategy: Any, path: Path):
        self._states, self._workers = states, workers_of(states)
        if not states[0].get("layout"):
            raise CheckpointError(
                f"{path} must say where each parameter lies in it, to be cut into other stages; got one of an earlier "
                "version of hpcdist. Resume on as many stages, and save once more."
            )
        self.layout = layout = states[0]["layout"]
        self.also: dict[str, str] = layout["also"]
        first = states[self._workers[0]]
        params = strategy.reshard_params([state["params"] for state in states], [s["strategy"] for s in states])
        buffers = mean([states[worker]["buffers"] for worker in self._workers])
        flats = {"params": params, "frozen": first["frozen"], "buffers": buffers}
        self.named = {kind: dict(_by_name(layout[kind], flats[kind])) for kind in KINDS}

    def optimizer(self, strategy: Strategy) -> tuple[dict[str, Any], list[tuple[list[str], dict[str, Any]]]]:
        """Return the optimiser's state of each parameter, and its groups: names, and settings."""
        whole = strategy.reshard_optimizer([state["optimizer"] for state in self._states])
        groups = self._states[self._workers[0]]["optimizer"]["param_groups"]
        order = self.layout["order"]
        of = {order[index]: state for index, state in whole["state"].items()}
        return of, [([order[index] for index in group["params"]], _settings(group)) for group in groups]

    def along(self, entry: Entry) -> Any:
        """Return an entry of the strategy's state: by kind and name where its tensors lie along the parameters.

        Numbers and the like are one of the ranks'; `NOTHING` stands for what can't be carried over.
        """
        saved = [s["strategy"][entry.name] for s in self._states if entry.name in s["strategy"]]
        if not saved or isinstance(saved[0], Tensor):
            return NOTHING
        if all(value is None or isinstance(value, (bool, int, float, str)) for value in saved):
            return max(saved) if entry.reshard is max else saved[self._workers[0] if self._all_have(saved) else 0]
        if not any(saved):
            return saved[0]
        found = self._split(saved[0])
        if found is None and all(_are_tensors(value) for value in saved):  # each server's shard
            found = self._split([torch.cat(parts) for parts in zip(*saved, strict=True)])
        return NOTHING if found is None else found

    def unsent(self, strategy: Strategy) -> dict[StatePath, Any]:
        """Return what compression has not sent, by place in the strategy's state: a value, or tensors by name."""
        found: dict[StatePath, Any] = {}
        flats: dict[StatePath, dict[int, Tensor]] = {}
        for path, value in _leaves(strategy.reshard_unsent([state["strategy"] for state in self._states])):
            if isinstance(value, Tensor):
                kind, group = place_of_all_groups(path)
                flats.setdefault(kind, {})[group] = value
            elif value is not None:
                found[path] = value
        for kind, by_group in flats.items():
            tensors = [by_group[group] for group in sorted(by_group)]
            if _fits(tensors, self.layout["params"]):
                found[kind] = dict(_by_name(self.layout["params"], tensors))
        return found

    def _all_have(self, saved: Sequence[Any]) -> bool:
        return len(saved) == len(self._states)

    def _split(self, value: Any) -> dict[str, Named] | None:
        """Divide tensors along the parameters by name; None where they are others."""
        places = self.layout["params"]
        if _are_tensors(value) and _fits(value, places):
            return {"": dict(_by_name(places, value))}
        if isinstance(value, dict) and sorted(value) == list(range(len(value))):  # a torch optimiser's, of flat tensors
            kinds = {kind: [value[group][kind] for group in range(len(value))] for kind in value[0]}
            if all(_are_tensors(flats) and _fits(flats, places) for flats in kinds.values()):
                return {kind: dict(_by_name(places, flats)) for kind, flats in kinds.items()}
        return None


def _leaves(value: Any, path: StatePath = ()) -> Iterator[tuple[StatePath, Any]]:
    """Yield all that is in nested dicts and lists, each with its place."""
    if not isinstance(value, (dict, list)):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, (*path, key))


def place_of_all_groups(path: StatePath) -> tuple[StatePath, int]:
    """Return the place that all flat tensors of a kind have in common, and the group of parameters of this one.

    The state of what compresses flat tensors is a list at some depth: the innermost place in a list is the group.
    """
    place = max((i for i, key in enumerate(path) if isinstance(key, int)), default=-1)
    return (path, -1) if place < 0 else ((*path[:place], "*", *path[place + 1 :]), path[place])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _are_tensors(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Tensor) for item in value)


def _fits(flats: Sequence[Tensor], places: Sequence[Sequence[Any]]) -> bool:
    lengths = [0] * len(flats)
    for _, group, _, stop, *_ in places:
        if group >= len(flats):
            return False
        lengths[group] = max(lengths[group], stop)
    return [flat.numel() for flat in flats] == lengths


def _by_name(places: Sequence[Sequence[Any]], flats: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, group, start, stop, *_ in places:
        yield name, flats[group][start:stop]
