"""Declare a strategy's state where it is created: how to save, load, reshard and reset each value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.compress import Feedback, Reduction, TwoWayMean
from hpcdist.errors import CheckpointError, HpcdistError
from hpcdist.model.flat import FlatModel

Ranges = Sequence[tuple[int, int]]  # elements [start, stop) of each flat tensor
Reshard = Literal["start", "first", "max", "mean", "worker mean", "divide"]
T = TypeVar("T")


class Flats(NamedTuple):
    """Flat tensors with one element per parameter element, like `model.params`; or one range of each tensor."""

    tensors: Sequence[Tensor]
    ranges: Ranges | None = None


@dataclass(frozen=True)
class StateSpec:
    """One declared value of a strategy's state.

    Attributes:
        name: key in the checkpoint.
        save: returns this rank's value; for sharded state, flat tensors with the parameters' layout or an empty list.
        load: receives the saved value.
        start: sets the initial value, on a rank with nothing to load.
        reshard: merges the saved ranks' values when the number of ranks has changed; None: use the initial value. For
            sharded state: (tensors of the ranks with this parameter, number of saved workers, number of ranks now) ->
            one tensor.
        optional: a checkpoint may lack the value.
        resets: the value is reinitialized when the loop sets new parameters.
        sharded: tensors with the parameters' layout. Checkpoints store them by parameter name and slice, so that any
            number of ranks, stages, shards or servers can read its part.
        ranges: the elements of `model.params` that the tensors cover, for example a server's shard; None: all.
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
    """The state of a strategy on this rank, in addition to parameters, buffers and the local optimiser.

    The line that creates a value declares it, under its key in checkpoints, for `save`, `load`, `reshard` and `reset`.

    `reshard` is the rule for another number of ranks: "start": use the initial value; "first", "max": take the first
    rank's or the largest value; for tensors also "mean": the mean over ranks, "worker mean": the sum divided by the
    number of saved workers, "divide": the sum divided by the number of ranks now.

    Args:
        comm: the strategy's communicator.
        model: the model, whose layout sharded values have.

    Attributes:
        specs: the declarations by name, in loading order.
        loaded: names of the values that this rank loaded from the last checkpoint; the others have initial values.
        parameters: returns this rank's contribution to the parameters in checkpoints, which are the mean over all
            contributions; None on a rank without one.
        tensors: all declared tensors, state and scratch.
    """

    def __init__(self, comm: Communicator, model: FlatModel):
        self._comm, self._model = comm, model
        self.specs: dict[str, StateSpec] = {}
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
        """Create flat tensors with the parameters' layout and declare them as state; return them. Loading fills them.

        Args:
            like: flat tensors with the shapes and dtypes to use; empty where this rank has none, as on a single rank.
            tensors: existing tensors to declare in place of new ones.
            start: initial content: zeros, a copy of the model's parameters, or any.
            reshard: the rule for another number of ranks, see `State`.
            resets: the tensors are reinitialized when the loop sets new parameters.
            ranges: the elements of `model.params` that the tensors cover; None: all.
            optional: a checkpoint may lack the tensors, because options decide whether they are declared.
            saves: returns whether to save the tensors now; None: always.
        """
        copies = start == "parameters"
        create = torch.clone if copies else torch.zeros_like
        declared = [create(tensor) for tensor in like] if tensors is None else list(tensors)
        self.tensors += declared

        def restart() -> None:
            if copies:
                copy_all(declared, self._part(ranges))
            elif start == "zeros":
                zero_all(declared)

        def load(saved: Sequence[Tensor]) -> None:
            copy_all(declared, saved) if saved else restart()

        def save() -> list[Tensor]:
            return declared if saves is None or saves() else []

        self._declare(StateSpec(name, save, load, restart, RESHARD[reshard], optional, resets, True, ranges))
        return declared

    def value(
        self, name: str, start: T | Callable[[], T], owner: object, attribute: str = "", *, reshard: Reshard = "start",
        resets: bool = False, optional: bool = False,
    ) -> T:  # fmt: skip
        """Declare an attribute of `owner` (a number, text, list or dict) as state; return its initial value.

        ::

            self.rounds = self.state.value("rounds", 0, self, reshard="max")

        Args:
            start: the initial value, or a function that creates it.
            attribute: name of the attribute; default: `name`.
        """
        attribute = attribute or name

        def make() -> T:
            return start() if callable(start) else deepcopy(start)

        def load(saved: Any) -> None:
            current = getattr(owner, attribute)
            if type(saved) is not type(current):
                raise CheckpointError(
                    f"the strategy's {name!r} must be of type {type(current).__name__}; got {saved!r:.60}. Resume from "
                    "another checkpoint."
                )
            setattr(owner, attribute, deepcopy(saved))

        self._declare(
            StateSpec(
                name, lambda: getattr(owner, attribute), load, lambda: setattr(owner, attribute, make()),
                RESHARD[reshard], optional, resets,
            )
        )  # fmt: skip
        return make()

    def by_parameter(self, name: str, owner: object, *, optional: bool = False) -> dict[str, Any]:
        """Declare attribute `name` of `owner`, a dict with parameter names as keys; return an empty dict, its start.

        With another number of ranks the dicts of all saved ranks, and of all stages of a model, are merged.
        """

        def load(saved: Mapping[str, Any]) -> None:
            local_names = {slot.name for slot in self._model.slots}
            setattr(owner, name, {key: value for key, value in saved.items() if key in local_names})

        def joined(saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            return {key: value for of_rank in saved for key, value in of_rank.items()}

        self.custom(name, lambda: dict(getattr(owner, name)), load, lambda: load({}), reshard=joined, optional=optional)
        return {}

    def flags(self, name: str, tensor: Tensor, start: bool = True) -> Tensor:
        """Declare a bool tensor with one flag per parameter and the initial value `start`; return the tensor."""

        def load(saved: Sequence[bool]) -> None:
            tensor.copy_(torch.tensor(saved, dtype=torch.bool))

        self._declare(StateSpec(name, tensor.tolist, load, lambda: tensor.fill_(start), optional=True))
        return tensor

    def rng(self, name: str, seed: int) -> torch.Generator:
        """Create this rank's random generator. Its state is not loaded with another number of ranks."""
        generator = torch.Generator().manual_seed(seed)

        def load(saved: Tensor | None) -> None:
            if saved is not None:
                generator.set_state(saved)

        self._declare(StateSpec(name, generator.get_state, load, lambda: None))
        return generator

    def custom(
        self, name: str, save: Callable[[], Any], load: Callable[[Any], None], start: Callable[[], object], *,
        reshard: Callable[..., Any] | None = None, optional: bool = False, sharded: bool = False,
    ) -> None:  # fmt: skip
        """Declare a value with functions to save and load it; see `StateSpec` for the arguments."""
        self._declare(StateSpec(name, save, load, start, reshard, optional, sharded=sharded))

    def scratch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Register work tensors that live between steps but are not saved; return them."""
        self.tensors += tensors
        return list(tensors)

    def include(self, prefix: str, other: State) -> None:
        """Declare all values of another strategy, which this one runs, under `prefix`."""
        self._included[prefix] = other
        for spec in other.specs.values():
            self._declare(replace(spec, name=f"{prefix}.{spec.name}"))
        self.tensors += other.tensors
        self._before_save += other._before_save
        self._before_load += other._before_load
        self._after_load += other._after_load

    def before_save(self, wait: Callable[[], object]) -> None:
        """Call `wait` before each save; it completes pending messages, on all ranks."""
        self._before_save.append(wait)

    def before_load(self, clear: Callable[[], object]) -> None:
        """Call `clear` before each load; it completes or drops pending messages. Collective if `clear` is."""
        self._before_load.append(clear)

    def after_load(self, follow: Callable[[], object]) -> None:
        """Call `follow` after each load; it computes values that depend on loaded ones. Collective if `follow` is."""
        self._after_load.append(follow)

    def _declare(self, spec: StateSpec) -> None:
        if spec.name in self.specs:
            raise ValueError(f"a name of the state must be declared once; got {spec.name!r} again. Rename it.")
        self.specs[spec.name] = spec

    def _part(self, ranges: Ranges | None) -> list[Tensor]:
        """Return the parameters in these ranges, as views."""
        if ranges is None:
            return list(self._model.params)
        return [flat[start:stop] for flat, (start, stop) in zip(self._model.params, ranges, strict=True)]

    # --- compression ----------------------------------------------------------------------------------------------
    def feedbacks(self, name: str, owned: Sequence[Feedback], reshard: Reshard) -> None:
        """Declare the residuals and compressors of error feedback, one `Feedback` per flat tensor."""
        if not owned:
            return
        self.tensors += [feedback.residual for feedback in owned]

        def load(saved: Sequence[Tensor]) -> None:
            for number, feedback in enumerate(owned):
                feedback.set_residual(saved[number] if saved else torch.zeros_like(feedback.residual))

        self.custom(
            f"{name}.residual", lambda: [feedback.residual for feedback in owned], load, lambda: load(()),
            reshard=RESHARD[reshard], optional=True, sharded=True,
        )  # fmt: skip
        compressors = [feedback.compressor for feedback in owned]
        elementwise = compressors[0].elementwise  # attributes that are tensors like the residual

        def coders() -> list[dict[str, Any]]:
            return [{k: v for k, v in c.state_dict().items() if k not in elementwise} for c in compressors]

        def load_coders(saved: Sequence[dict[str, Any]]) -> None:
            for compressor, state in zip(compressors, saved):
                compressor.load_state_dict(state)

        self._declare(StateSpec(f"{name}.coders", coders, load_coders, lambda: None, RESHARD["first"], optional=True))
        for key in elementwise:  # None, before the first message, is saved as zeros

            def save_tensor(key: str = key) -> list[Tensor]:
                pairs = [(getattr(f.compressor, key), f.residual) for f in owned]
                return [torch.zeros_like(residual) if value is None else value for value, residual in pairs]

            def load_tensor(saved: Sequence[Tensor], key: str = key) -> None:
                for compressor, tensor in zip(compressors, saved):
                    compressor.load_state_dict({key: tensor})

            self._declare(
                StateSpec(f"{name}.{key}", save_tensor, load_tensor, lambda: None, RESHARD[reshard], True, sharded=True)
            )

    def reduction(self, name: str, owned: Reduction | None) -> None:
        """Declare the state of a compressed all-reduce; resharding gives each rank the mean of the residuals."""
        if owned is not None:
            self.value(f"{name}.calls", 0, owned, "calls", reshard="first", optional=True)
            self.feedbacks(name, owned.feedbacks, "mean")
            self.scratch(owned.working)

    def two_way(self, name: str, owned: TwoWayMean, *, resets: bool = False) -> None:
        """Declare the residuals of a mean that is compressed in both directions."""
        self.sharded(f"{name}.left", tensors=owned.residuals, reshard="mean", resets=resets)
        self.sharded(f"{name}.owed", tensors=owned.mean_residuals, reshard="first", resets=resets, ranges=owned.ranges)
        self._declare(StateSpec(f"{name}.coders", owned.coders, owned.load_coders, lambda: None, optional=True))

    # --- save, load, reshard, reset -------------------------------------------------------------------------------
    def save(self) -> dict[str, Any]:
        """Return this rank's values by name, once pending messages are complete."""
        for wait in self._before_save:
            wait()
        return {name: spec.save() for name, spec in self.specs.items()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Collective. Restore the result of `save`; call it after loading the model's parameters.

        Raises:
            CheckpointError: on all ranks, where one rank's values are not those of this strategy.
        """
        for clear in self._before_load:
            clear()
        self._comm.raise_on_all_ranks(lambda: self._load(saved))  # before `follow` communicates
        for follow in self._after_load:
            follow()

    def _load(self, saved: Mapping[str, Any]) -> None:
        """Load all declared values; those that `saved` may lack start again."""
        self.loaded.clear()
        for name, spec in self.specs.items():
            if name in saved:
                self._load_entry(spec, saved[name])
            elif spec.reshard is None or spec.optional:
                spec.start()
            else:
                raise CheckpointError(
                    f"the strategy's state must have {name!r}; got {', '.join(sorted(saved))}. Resume with the "
                    "strategy and options of that run."
                )
        for prefix, state in self._included.items():
            state.loaded = {name.removeprefix(f"{prefix}.") for name in self.loaded if name.startswith(f"{prefix}.")}

    def _load_entry(self, spec: StateSpec, value: Any) -> None:
        """Load one value, and record its name in `loaded`; an empty sharded value is none, and starts again."""
        try:
            spec.load(value)
        except HpcdistError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the strategy's {spec.name!r} must be a value that this strategy has saved; got something else "
                f"({type(error).__name__}: {error!s:.200}). Resume from another checkpoint."
            ) from error
        if not spec.sharded or value:
            self.loaded.add(spec.name)

    def reshard(
        self, of_ranks: Callable[[str], Sequence[Any]], slices: Callable[[StateSpec], Any], *, same: bool
    ) -> dict[str, Any]:
        """Return this rank's values for `load`, merged from all saved ranks'; omit those that get initial values.

        Args:
            of_ranks: returns the saved ranks' values of a name, without ranks that lack it.
            slices: returns this rank's slices of a sharded value.
            same: the checkpoint is of this strategy; from another strategy's only the number of steps is taken.
        """
        values: dict[str, Any] = {}
        for name, spec in self.specs.items():
            if spec.reshard is None:
                continue
            saved = of_ranks(name) if same or name == "steps" else []
            if spec.sharded:
                values[name] = slices(spec) if any(saved) else {}
            elif saved:
                values[name] = spec.reshard(saved)
            elif not (same or spec.optional):
                values[name] = spec.save()  # the initial value
        return values

    def reset(self) -> None:
        """Reinitialize the values that depend on the parameters, which the loop has set on all ranks."""
        for spec in self.specs.values():
            if spec.resets:
                spec.start()

    @property
    def resets(self) -> bool:
        """Whether any value must be reinitialized when the loop sets new parameters."""
        return any(spec.resets for spec in self.specs.values())


def copy_all(own: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values into tensors; does nothing where a list is empty, as on a single rank."""
    for tensor, value in zip(own, values):
        tensor.copy_(value)


def zero_all(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


# --- rules to merge the values of saved ranks -------------------------------------------------------------------------
def first(saved: Sequence[Any], *_: int) -> Any:
    return saved[0]


def mean_of_ranks(saved: Sequence[Tensor], *_: int) -> Tensor:
    """Average in float64; means of integers are rounded."""
    template = saved[0]
    if all(torch.equal(template, other) for other in saved[1:]):
        return template
    mean = torch.stack([tensor.to(torch.float64) for tensor in saved]).mean(dim=0)
    return (mean if template.is_floating_point() else mean.round()).to(template.dtype)


RESHARD: dict[str, Callable[..., Any] | None] = {
    "start": None,
    "first": first,
    "max": max,
    "mean": mean_of_ranks,
    # Missing parameters count as zeros.
    "worker mean": lambda saved, workers, ranks: torch.stack(list(saved)).sum(dim=0) / workers,
    "divide": lambda saved, workers, ranks: torch.stack(list(saved)).sum(dim=0) / ranks,
}
