"""Declare a strategy's state: a checkpoint's entries, and how each is carried over to another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Reshard = Callable[[Sequence[Any]], Any]  # from the values of all saved ranks, the one that each new rank takes up


class Stateful(Protocol):
    """An object that can return its state, and restore it."""

    def state(self) -> Any: ...

    def load_state(self, state: Any) -> None: ...


def first(saved: Sequence[Any]) -> Any:
    """Return the first rank's value."""
    return saved[0]


@dataclass(frozen=True)
class Anew:
    """A reshard that drops the saved values: every rank of another number begins with a new one, made by `make`."""

    make: Callable[[], Any]

    def __call__(self, saved: Sequence[Any]) -> Any:
        return self.make()


def dropped(instead: Any = None) -> Anew:
    """Drop the saved values: every rank of another number begins with the value `instead`."""
    return Anew(lambda: instead)


def zeros(like: Sequence[Tensor]) -> Anew:
    """Drop the saved values: every rank of another number begins with zeros."""
    return Anew(lambda: [torch.zeros_like(tensor) for tensor in like])


def mean(columns: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Average several ranks' lists of tensors in float64; means of integers are rounded."""
    means = []
    for tensors in zip(*columns, strict=True):
        wide = torch.stack([t.to(torch.float64) for t in tensors]).mean(dim=0)
        means.append((wide if tensors[0].is_floating_point() else wide.round()).to(tensors[0].dtype))
    return means


@dataclass(frozen=True)
class Entry:
    """One entry of a strategy's state.

    Args:
        name: its key in the checkpoint.
        save: returns this rank's value.
        load: restores a value; collective where it communicates.
        reshard: chooses the value for another number of ranks, see `first`, `dropped` and `zeros`.
        optional: a checkpoint may lack it; this rank's value then stays.
        unsent: it has what compression has not sent yet.
    """

    name: str
    save: Callable[[], Any]
    load: Callable[[Any], None]
    reshard: Reshard = first
    optional: bool = False
    unsent: bool = False


def attribute(owner: object, name: str) -> Entry:
    """Declare an attribute of `owner`, under its own name; another number of ranks takes the first one's."""
    return Entry(name, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def tensors(name: str, own: Sequence[Tensor], reshard: Reshard) -> Entry:
    """Declare tensors that are taken up in their place."""

    def load(saved: Sequence[Tensor]) -> None:
        for tensor, value in zip(own, saved):
            tensor.copy_(value)

    return Entry(name, lambda: own, load, reshard, optional=True)


def part(name: str, owned: Stateful | None, reshard: Reshard, unsent: bool = False) -> Iterable[Entry]:
    """Declare the state of an object that the strategy owns; None has no entry."""
    return [] if owned is None else [Entry(name, owned.state, owned.load_state, reshard, True, unsent)]


def save_entries(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return this rank's state: the values of the entries, by name."""
    return {entry.name: entry.save() for entry in entries}


def load_entries(entries: Iterable[Entry], state: dict[str, Any]) -> None:
    """Collective. Restore a state, entry by entry in the order in which they are declared."""
    for entry in entries:
        if entry.name in state or not entry.optional:
            entry.load(state[entry.name])


def reshard_entries(entries: Iterable[Entry], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the state of every rank of another number from the states of all saved ranks."""
    values = [(entry, [state[entry.name] for state in states if entry.name in state]) for entry in entries]
    return {entry.name: entry.reshard(saved) for entry, saved in values if saved or isinstance(entry.reshard, Anew)}
