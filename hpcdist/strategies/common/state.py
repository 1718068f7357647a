"""Declare a strategy's state where it is created: what checkpoints keep of it, and how ranks start without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.compress import Feedback, Reduction
from hpcdist.compress.coding.two_way import TwoWayMean
from hpcdist.errors import CheckpointError, HpcdistError
from hpcdist.model.flat import FlatModel

Ranges = Sequence[tuple[int, int]]  # elements [start, stop) of each flat tensor
Reshard = Literal["start", "first", "max", "mean", "worker mean", "divide"]
T = TypeVar("T")


class Flats(NamedTuple):
    """Flat tensors along the parameters, as `model.params`; or their elements in some ranges, one for each tensor."""

    tensors: Sequence[Tensor]
    ranges: Ranges | None = None


@dataclass(frozen=True)
class Entry:
    """One declared value.

    Attributes:
        name: its key in the checkpoint.
        save: returns this rank's value; of a sharded one flat tensors along the parameters, or an empty list.
        load: receives what was saved.
        start: sets the value with which a rank starts that has nothing to load.
        reshard: makes one value for another number of ranks of those saved; None: they start. Of a sharded one
            (tensors of the ranks that have the parameter, saved workers, ranks now) -> one tensor.
        optional: a checkpoint may lack it.
        resets: it starts again where the loop has set new parameters.
        sharded: it lies along the parameters. Checkpoints store it by parameter names and slices, so that any rank
            reads its own part, whatever ranks, stages, shards or servers there were.
        ranges: the elements of `model.params` that a sharded one has, such as a server's shard; None: all.
    """

    name: str
    save: Callable[[], Any]
    load: Callable[[Any], None]
    start: Callable[[], object]
    reshard: Callable[..., Any] | None = None
    optional: bool = False
    resets: bool = False
    sharded: bool = False
    ranges: Ranges | None = None


class State:
    """The state of a rank's strategy beyond parameters, buffers and the local optimiser.

    Each value is declared once, by the line that creates it, under its key in checkpoints. One walk over these
    declarations saves, loads, reshards and resets all of them.

    `reshard` says what another number of ranks makes of the saved values: each rank starts anew ("start"), takes the
    first rank's or the largest one ("first", "max"); for tensors also the mean of all ranks ("mean"), the sum of all
    divided by the saved workers ("worker mean") or by the ranks that there are now ("divide").

    Args:
        comm: of the strategy.
        model: whose parameters sharded values lie along.

    Attributes:
        entries: the declarations by name, in the order in which they are loaded.
        loaded: names of the values that the last checkpoint has given this rank; the others have started.
        parameters: returns what this rank has of the parameters that checkpoints save. These are the mean of all that
            ranks return; None on a rank whose parameters do not count.
        tensors: all that are declared, state and scratch.
    """

    def __init__(self, comm: Communicator, model: FlatModel):
        self._comm, self._model = comm, model
        self.entries: dict[str, Entry] = {}
        self.loaded: set[str] = set()
        self.parameters: Callable[[], Flats | None] = lambda: Flats(model.params)
        self.tensors: list[Tensor] = []
        self._before_save: list[Callable[[], object]] = []
        self._before_load: list[Callable[[], object]] = []
        self._after_load: list[Callable[[], object]] = []
        self._included: dict[str, State] = {}

    # --- declarations ---------------------------------------------------------------------------------------------
    def sharded(
        self, name: str, like: Sequence[Tensor] = (), *, tensors: Sequence[Tensor] | None = None,
        start: Literal["zeros", "parameters", "any"] = "zeros", reshard: Reshard = "start", resets: bool = False,
        ranges: Ranges | None = None, optional: bool = False, saves: Callable[[], object] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Create tensors along the parameters; return them. Loading copies into them.

        Args:
            like: flat tensors of the same shapes and dtypes; empty where this rank has none, as on one rank alone.
            tensors: declare these, which exist already, in place of new ones.
            start: the tensors start as zeros, as a copy of the model's parameters, or with any content.
            resets: the tensors start again where the loop has set new parameters.
            ranges: the elements of `model.params` in the tensors; None: all.
            optional: a checkpoint may lack the tensors, because options decide whether they are declared.
            saves: returns whether the tensors are saved now; None: always.
        """
        copies = start == "parameters"
        make = torch.clone if copies else torch.zeros_like
        own = [make(tensor) for tensor in like] if tensors is None else list(tensors)
        self.tensors += own

        def restart() -> None:
            if copies:
                copy_all(own, self._part(ranges))
            elif start == "zeros":
                zero_all(own)

        def load(saved: Sequence[Tensor]) -> None:
            copy_all(own, saved) if saved else restart()

        def save() -> list[Tensor]:
            return own if saves is None or saves() else []

        self._declare(Entry(name, save, load, restart, RESHARD[reshard], optional, resets, True, ranges))
        return own

    def value(
        self, name: str, start: T | Callable[[], T], owner: object, attribute: str = "", *, reshard: Reshard = "start",
        resets: bool = False, optional: bool = False,
    ) -> T:  # fmt: skip
        """Declare an attribute of `owner`, a number, text, list or dict; return the start value.

        ::

            self.rounds = self.state.value("rounds", 0, self, reshard="max")

        Args:
            start: the start value, or a function that creates one.
            attribute: name of the attribute; by default `name`.
        """
        attribute = attribute or name

        def make() -> T:
            return start() if callable(start) else deepcopy(start)

        def load(saved: Any) -> None:
            own = getattr(owner, attribute)
            if type(saved) is not type(own):
                raise CheckpointError(
                    f"the strategy's {name!r} must be of type {type(own).__name__}; got {saved!r:.60}. Resume from "
                    "another checkpoint."
                )
            setattr(owner, attribute, deepcopy(saved))

        self._declare(
            Entry(
                name, lambda: getattr(owner, attribute), load, lambda: setattr(owner, attribute, make()),
                RESHARD[reshard], optional, resets,
            )
        )  # fmt: skip
        return make()

    def by_parameter(
        self, name: str, owner: object, attribute: str = "", *, resets: bool = False, optional: bool = False
    ) -> dict[str, Any]:
        """Declare an attribute of `owner`, a dict by names of parameters; return an empty dict, the start value.

        Another number of ranks joins the dicts of all saved ranks, and so of all stages of a model.
        """
        attribute = attribute or name

        def load(saved: Mapping[str, Any]) -> None:
            own = {slot.name for slot in self._model.slots}
            setattr(owner, attribute, {key: value for key, value in saved.items() if key in own})

        def joined(saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            return {key: value for of_rank in saved for key, value in of_rank.items()}

        def start() -> None:
            setattr(owner, attribute, {})

        self._declare(Entry(name, lambda: dict(getattr(owner, attribute)), load, start, joined, optional, resets))
        return {}

    def flags(self, name: str, tensor: Tensor, start: bool = True) -> Tensor:
        """Declare a bool tensor with one flag for each parameter, all of which start as `start`; return the tensor."""

        def load(saved: Sequence[bool]) -> None:
            tensor.copy_(torch.tensor(saved, dtype=torch.bool))

        self._declare(Entry(name, tensor.tolist, load, lambda: tensor.fill_(start), optional=True))
        return tensor

    def rng(self, name: str, seed: int) -> torch.Generator:
        """Create this rank's random generator. On another number of ranks each rank keeps the generator that it has."""
        generator = torch.Generator().manual_seed(seed)

        def load(saved: Tensor | None) -> None:
            if saved is not None:
                generator.set_state(saved)

        self._declare(Entry(name, generator.get_state, load, lambda: None))
        return generator

    def custom(
        self, name: str, save: Callable[[], Any], load: Callable[[Any], None], start: Callable[[], object], *,
        reshard: Callable[..., Any] | None = None, optional: bool = False, sharded: bool = False,
    ) -> None:  # fmt: skip
        """Declare a value that no other declaration fits; see `Entry` for the arguments."""
        self._declare(Entry(name, save, load, start, reshard, optional, sharded=sharded))

    def scratch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Declare tensors that the strategy keeps between steps, but that are no state; return them."""
        self.tensors += tensors
        return list(tensors)

    def include(self, prefix: str, other: State) -> None:
        """Declare the values of another strategy, the base of this strategy, under `prefix`."""
        self._included[prefix] = other
        for entry in other.entries.values():
            self._declare(replace(entry, name=f"{prefix}.{entry.name}"))
        self.tensors += other.tensors
        self._before_save += other._before_save
        self._before_load += other._before_load
        self._after_load += other._after_load

    def before_save(self, wait: Callable[[], object]) -> None:
        """Declare what is in flight: `wait` returns once it is complete, on all ranks."""
        self._before_save.append(wait)

    def before_load(self, clear: Callable[[], object]) -> None:
        """Declare what is in flight and must not meet what is loaded. Collective where `clear` is."""
        self._before_load.append(clear)

    def after_load(self, follow: Callable[[], object]) -> None:
        """Declare what follows from what was loaded. Collective where `follow` is."""
        self._after_load.append(follow)

    def _declare(self, entry: Entry) -> None:
        if entry.name in self.entries:
            raise ValueError(f"the name of a value must not be declared before; got {entry.name!r} again. Rename it.")
        self.entries[entry.name] = entry

    def _part(self, ranges: Ranges | None) -> list[Tensor]:
        """Return the parameters in these ranges, as views."""
        if ranges is None:
            return list(self._model.params)
        return [flat[start:stop] for flat, (start, stop) in zip(self._model.params, ranges, strict=True)]

    # --- compression ----------------------------------------------------------------------------------------------
    def feedbacks(self, name: str, owned: Sequence[Feedback], reshard: Reshard) -> None:
        """Declare the residuals and the compressors' state of error feedback: one feedback per flat tensor."""
        if not owned:
            return
        self.tensors += [feedback.residual for feedback in owned]

        def load(saved: Sequence[Tensor]) -> None:
            for number, feedback in enumerate(owned):
                feedback.set_residual(saved[number] if saved else torch.zeros_like(feedback.residual))

        self._declare(
            Entry(
                f"{name}.residual", lambda: [feedback.residual for feedback in owned], load, lambda: load(()),
                RESHARD[reshard], optional=True, sharded=True,
            )
        )  # fmt: skip
        compressors = [feedback.compressor for feedback in owned]
        along = compressors[0].along

        def coders() -> list[dict[str, Any]]:
            return [{k: v for k, v in c.state_dict().items() if k not in along} for c in compressors]

        def load_coders(saved: Sequence[dict[str, Any]]) -> None:
            for compressor, state in zip(compressors, saved):
                compressor.load_state_dict(compressor.state_dict() | state)

        self._declare(Entry(f"{name}.coders", coders, load_coders, lambda: None, RESHARD["first"], optional=True))
        for key in along:  # None, before the first message, is zeros

            def remembered(key: str = key) -> list[Tensor]:
                found = [(getattr(f.compressor, key), f.residual) for f in owned]
                return [torch.zeros_like(residual) if own is None else own for own, residual in found]

            def remember(saved: Sequence[Tensor], key: str = key) -> None:
                for compressor, tensor in zip(compressors, saved):
                    compressor.load_state_dict(compressor.state_dict() | {key: tensor})

            entry = Entry(f"{name}.{key}", remembered, remember, lambda: None, RESHARD[reshard], True, sharded=True)
            self._declare(entry)

    def reduction(self, name: str, owned: Reduction | None) -> None:
        """Declare a compressed all-reduce: with other ranks each has the mean of what was not sent."""
        if owned is not None:
            self.value(f"{name}.calls", 0, owned, "calls", reshard="first", optional=True)
            self.feedbacks(name, owned.feedbacks, "mean")
            self.scratch(owned.working)

    def two_way(self, name: str, owned: TwoWayMean, *, resets: bool = False) -> None:
        """Declare a mean that is compressed both ways: what was not sent stays as much with other ranks."""
        self.sharded(f"{name}.left", tensors=owned.left, reshard="mean", resets=resets)
        self.sharded(f"{name}.owed", tensors=owned.owed, reshard="first", resets=resets, ranges=owned.ranges)
        self._declare(Entry(f"{name}.coders", owned.coders, owned.load_coders, lambda: None, optional=True))

    # --- the walk -------------------------------------------------------------------------------------------------
    def save(self) -> dict[str, Any]:
        """Return this rank's values by name."""
        for wait in self._before_save:
            wait()
        return {name: entry.save() for name, entry in self.entries.items()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Collective. Restore the result of `save`, after the model's parameters.

        Raises:
            CheckpointError: it is none of this strategy's, on some rank; on all ranks.
        """
        for clear in self._before_load:
            clear()
        self._comm.raise_on_all_ranks(lambda: self._load(saved))  # before messages of a strategy
        for follow in self._after_load:
            follow()

    def _load(self, saved: Mapping[str, Any]) -> None:
        self.loaded.clear()
        for name, entry in self.entries.items():
            if name in saved:
                self._load_entry(entry, saved[name])
            elif entry.reshard is None or entry.optional:
                entry.start()
            else:
                raise CheckpointError(
                    f"the strategy's state must have {name!r}; got {', '.join(sorted(saved))}. Resume with the "
                    "strategy and options of that run."
                )
        for prefix, state in self._included.items():
            state.loaded = {name.removeprefix(f"{prefix}.") for name in self.loaded if name.startswith(f"{prefix}.")}

    def _load_entry(self, entry: Entry, value: Any) -> None:
        try:
            entry.load(value)
        except HpcdistError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the strategy's {entry.name!r} must be what such a strategy has saved; got something else "
                f"({type(error).__name__}: {error!s:.200}). Resume from another checkpoint."
            ) from error
        if not entry.sharded or value:
            self.loaded.add(entry.name)

    def reshard(
        self, of_ranks: Callable[[str], Sequence[Any]], slices: Callable[[Entry], Any], *, same: bool
    ) -> dict[str, Any]:
        """Return the values for this rank, made of those that other ranks have saved; those that start are missing.

        Args:
            of_ranks: returns what the saved ranks have under a name; nothing of those that lack it.
            slices: returns this rank's slices of a sharded value.
            same: the checkpoint is of this strategy. Of another strategy's only the number of steps is taken.
        """
        values: dict[str, Any] = {}
        for name, entry in self.entries.items():
            if entry.reshard is None:
                continue
            found = of_ranks(name) if same or name == "steps" else []
            if entry.sharded:
                values[name] = slices(entry) if any(found) else {}
            elif found:
                values[name] = entry.reshard(found)
            elif not (same or entry.optional):  # it starts
                values[name] = entry.save()
        return values

    def reset(self) -> None:
        """Start what follows the parameters, which the loop has set anew on all ranks."""
        for entry in self.entries.values():
            if entry.resets:
                entry.start()

    @property
    def resets(self) -> bool:
        """Whether anything follows the parameters."""
        return any(entry.resets for entry in self.entries.values())


def copy_all(own: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values into tensors; none where either list is empty, as on one rank alone."""
    for tensor, value in zip(own, values):
        tensor.copy_(value)


def zero_all(tensors: Iterable[Tensor]) -> None:
    """Set all elements to 0."""
    for tensor in tensors:
        tensor.zero_()


# --- how the values of saved ranks make one for other ranks -----------------------------------------------------------
def first(saved: Sequence[Any], *_: int) -> Any:
    """Take the first rank's value."""
    return saved[0]


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


def divide(saved: Sequence[Tensor], workers: int, ranks: int) -> Tensor:
    """Divide the sum of all ranks' values among the ranks that there are now; missing parameters have zeros."""
    return torch.stack(list(saved)).sum(dim=0) / ranks


RESHARD: dict[str, Callable[..., Any] | None] = {
    "start": None, "first": first, "max": max, "mean": mean_of_ranks, "worker mean": mean_of_workers, "divide": divide,
}  # fmt: skip
