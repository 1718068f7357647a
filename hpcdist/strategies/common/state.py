"""Declare a strategy's state: named values, and for each how those of all saved ranks make that of another world.

An `Entry` is a number or whatever else belongs to a rank. An `Along` lies along the parameters: checkpoints store it by
parameter names and slices, so that any world reads its own part, whatever ranks, stages, shards or servers there were.
The same world takes up its own values; `combine` is for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist.compress import Feedback, Reduction
from hpcdist.compress.coding.two_way import TwoWayMean
from hpcdist.errors import CheckpointError, HpcdistError
from hpcdist.model.hyperparameters import Hyperparameters

Ranges = Sequence[tuple[int, int]]  # elements [start, stop) of each flat tensor


class Flats(NamedTuple):
    """Flat tensors along the parameters, as `model.params`; or their elements in some ranges, one for each tensor."""

    tensors: Sequence[Tensor]
    ranges: Ranges | None = None


@dataclass(frozen=True)
class Anew:
    """The rule that drops what was saved: in another world every rank begins with a new value, made by `make`."""

    make: Callable[[], Any]

    def __call__(self, *saved: Any) -> Any:
        return self.make()


def dropped(instead: Any = None) -> Anew:
    """Drop the saved values: in another world every rank begins with the value `instead`."""
    return Anew(lambda: instead)


def zeros(like: Sequence[Tensor]) -> Anew:
    """Drop the saved values: in another world every rank begins with zeros."""
    return Anew(lambda: [torch.zeros_like(tensor) for tensor in like])


def first(saved: Sequence[Any], *_: int) -> Any:
    """Take the first rank's value."""
    return saved[0]


# --- rules for tensors: (those of the ranks that have the parameter, saved workers, ranks now) -> one tensor ----------
def mean_of_ranks(saved: Sequence[Tensor], *_: int) -> Tensor:
    """Average in float64; means of integers are rounded."""
    like = saved[0]
    if all(torch.equal(like, other) for other in saved[1:]):
        return like
    wide = torch.stack([tensor.to(torch.float64) for tensor in saved]).mean(dim=0)
    return (wide if like.is_floating_point() else wide.round()).to(like.dtype)


def mean_of_workers(saved: Sequence[Tensor], workers: int, ranks: int) -> Tensor:
    """Divide the sum of all ranks' values by the number of saved workers; missing parameters have zeros."""
    return torch.stack(list(saved)).sum(dim=0) / workers


def spread(saved: Sequence[Tensor], workers: int, ranks: int) -> Tensor:
    """Divide the sum of all ranks' values among the ranks that there are now; missing parameters have zeros."""
    return torch.stack(list(saved)).sum(dim=0) / ranks


# --- declarations -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Entry:
    """One value of a strategy's state.

    Args:
        name: its key in the checkpoint.
        save: returns this rank's value.
        load: restores a value; collective where it communicates.
        combine: makes one value for another world of those that ranks have saved: `first`, `max`, or one that is new,
            see `dropped` and `zeros`.
        optional: a checkpoint may lack it; this rank's value then stays.
    """

    name: str
    save: Callable[[], Any]
    load: Callable[[Any], None]
    combine: Callable[..., Any] = first
    optional: bool = False


@dataclass(frozen=True)
class Along(Entry):
    """Flat tensors along the parameters; `save` may return an empty list, and `load` is then given one.

    Args:
        combine: makes one tensor for another world: `first`, `mean_of_ranks`, `mean_of_workers` or `spread`; or begins
            anew.
        ranges: the elements of `model.params` that this rank has, such as a server's shard; None: all.
    """

    optional: bool = True
    ranges: Ranges | None = None


def attribute(owner: object, name: str, combine: Callable[..., Any] = first) -> Entry:
    """Declare an attribute of `owner`, under its own name."""

    def load(value: Any) -> None:
        own = getattr(owner, name)
        if type(value) is not type(own):
            raise CheckpointError(
                f"the strategy's {name!r} must be of type {type(own).__name__}; got {value!r:.60}. Resume from another "
                "checkpoint."
            )
        setattr(owner, name, value)

    return Entry(name, lambda: getattr(owner, name), load, combine)


def copy_all(own: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors; none where either list is empty, as on one rank alone."""
    for tensor, value in zip(own, values):
        tensor.copy_(value)


def held_tensors(
    name: str, own: Sequence[Tensor], combine: Callable[..., Any], ranges: Ranges | None = None,
    otherwise: Sequence[Tensor] = (),
) -> Along:  # fmt: skip
    """Declare tensors along the parameters that are taken up in their place; `otherwise`: those of a state without."""
    return Along(name, lambda: own, lambda saved: copy_all(own, saved or otherwise), combine, ranges=ranges)


def flags(name: str, own: Tensor, new: bool = True) -> Entry:
    """Declare flags of the parameters, a bool tensor; another world begins with `new`."""

    def load(saved: Sequence[bool]) -> None:
        own.copy_(torch.tensor(saved, dtype=torch.bool))

    return Entry(name, own.tolist, load, Anew(lambda: [new] * len(own)), optional=True)


def own_numbers(hyperparameters: Hyperparameters) -> Entry:
    """Declare which numbers in param_groups the optimiser's step changes by itself, on the ranks that run it."""

    def load(saved: Sequence[Sequence[Any]]) -> None:
        hyperparameters.own = {(number, key) for number, key in saved}

    def all_of(saved: Sequence[Any], *_: int) -> list[Any]:
        return [pair for own in saved for pair in own]

    return Entry("own_numbers", lambda: [list(pair) for pair in sorted(hyperparameters.own)], load, all_of, True)


def save_entries(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return this rank's state: the values of the entries, by name."""
    return {entry.name: entry.save() for entry in entries}


def load_entries(entries: Iterable[Entry], state: dict[str, Any]) -> None:
    """Collective. Restore a state, entry by entry in the order in which they are declared."""
    for entry in entries:
        if entry.name in state:
            _load(entry, state[entry.name])
        elif isinstance(entry.combine, Anew):
            entry.load(entry.combine.make())
        elif not entry.optional:
            raise CheckpointError(
                f"the strategy's state must have {entry.name!r}; got {', '.join(sorted(state))}. Resume with the "
                "strategy and options of that run."
            )


def _load(entry: Entry, value: Any) -> None:
    """Restore one entry; raise CheckpointError, which reaches all ranks, where the value is none of this entry's."""
    try:
        entry.load(value)
    except HpcdistError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the strategy's {entry.name!r} must be what such a strategy has saved; got something else "
            f"({type(error).__name__}: {error!s:.200}). Resume from another checkpoint."
        ) from error


# --- compression ------------------------------------------------------------------------------------------------------
def feedbacks(name: str, owned: Sequence[Feedback], combine: Callable[..., Any]) -> list[Entry]:
    """Declare what compression has not sent yet, and what the compressors remember: one feedback per flat tensor."""
    if not owned:
        return []

    def load_residuals(saved: Sequence[Tensor]) -> None:
        for feedback, residual in zip(owned, saved):
            feedback.set_residual(residual)

    def coder(feedback: Feedback) -> dict[str, Any]:
        return {k: v for k, v in feedback.compressor.state().items() if k not in feedback.compressor.along}

    def load_coders(saved: Sequence[dict[str, Any]]) -> None:
        for feedback, state in zip(owned, saved):
            feedback.compressor.load_state(feedback.compressor.state() | state)

    entries = [
        Along(f"{name}.residual", lambda: [feedback.residual for feedback in owned], load_residuals, combine),
        Entry(f"{name}.coders", lambda: [coder(feedback) for feedback in owned], load_coders, optional=True),
    ]
    return [*entries, *(_remembered(f"{name}.{key}", key, owned, combine) for key in owned[0].compressor.along)]


def _remembered(name: str, key: str, owned: Sequence[Feedback], combine: Callable[..., Any]) -> Along:
    """Declare tensors along the parameters that compressors remember; None, before the first message, is zeros."""

    def save() -> list[Tensor]:
        found = [(feedback.compressor.state()[key], feedback.residual) for feedback in owned]
        return [torch.zeros_like(residual) if tensor is None else tensor for tensor, residual in found]

    def load(saved: Sequence[Tensor]) -> None:
        for feedback, tensor in zip(owned, saved):
            feedback.compressor.load_state(feedback.compressor.state() | {key: tensor})

    return Along(name, save, load, combine)


def reduction(name: str, owned: Reduction | None) -> list[Entry]:
    """Declare the state of a compressed all-reduce: in another world each rank has the mean of what was not sent."""
    if owned is None:
        return []
    calls = Entry(f"{name}.calls", lambda: owned.calls, lambda value: setattr(owned, "calls", value), optional=True)
    return [calls, *feedbacks(name, owned.feedbacks, mean_of_ranks)]


def two_way(name: str, owned: TwoWayMean) -> list[Entry]:
    """Declare the state of a mean that is compressed both ways: what was not sent stays as much in another world."""
    return [
        held_tensors(f"{name}.left", owned.left, mean_of_ranks),
        held_tensors(f"{name}.owed", owned.owed, first, owned.ranges),
        Entry(f"{name}.coders", owned.coders, owned.load_coders, dropped([]), optional=True),
    ]


# --- values by the names of parameters --------------------------------------------------------------------------------
def joined(saved: Sequence[dict[str, Any]], *_: int) -> dict[str, Any]:
    """Join what ranks have saved by the names of their parameters, of all stages of a model."""
    return {name: value for of_rank in saved for name, value in of_rank.items()}
