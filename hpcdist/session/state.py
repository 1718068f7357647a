"""Capture and restore all that a DistributedOptimizer needs to continue as if it had not been interrupted.

Tensors are stored by parameter name, as slices (`hpcdist.checkpoint.Slice`): the parameters and buffers of a rank, the
optimiser's state, and the sharded values of its strategy.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hpcdist.checkpoint import Slice, SlicePosition
from hpcdist.config.merge import Changes, by_value, changes
from hpcdist.errors import CheckpointError
from hpcdist.model.flat import FlatModel
from hpcdist.model.slots import Slot, describe_difference, unwrapped
from hpcdist.parallel.agreement import PartOfModel
from hpcdist.strategies import Strategy
from hpcdist.strategies.base import name_of
from hpcdist.strategies.common.state import Ranges

_log = logging.getLogger("hpcdist")
KINDS = ("params", "frozen", "buffers")  # kinds of tensors: trainable parameters, other parameters, buffers
Named = dict[str, Slice]
OnAllRanks = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class _FlatSegment:
    """A tensor of the model: elements [start, stop) of flat tensor number `group`."""

    group: int
    start: int
    stop: int
    position: SlicePosition  # in the whole model's tensor, with complex numbers as pairs of real ones
    typed: SlicePosition  # the same, with complex numbers


class ParameterLayout:
    """The positions of a model's tensors: in this rank's flat memory, and in the whole model.

    Attributes:
        also: other names of tied tensors, with the name under which each is saved.
        names: in the whole model, by the tensors' ids.
        positions: of this rank's tensors by name, see `_FlatSegment.typed`.
    """

    def __init__(self, model: FlatModel):
        module = model.module
        slots = {"params": model.slots, "frozen": model.frozen_slots, "buffers": model.flat_buffers.slots}
        names = {id(slot.tensor): slot.name for of_kind in slots.values() for slot in of_kind}
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        state_dict_ids = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
        parts = module.describe_parts() if isinstance(module, PartOfModel) else {}  # of larger tensors, by name
        stage = module.grid.stage if isinstance(module, PartOfModel) else 0
        self._model, whole = model, {name: part["of"] for name, part in parts.items()}
        self.also = {name: names[id(t)] for name, t in unwrapped(module, tensors) if name != names.get(id(t), name)}
        self.names = {key: whole.get(name, name) for key, name in names.items()}
        self._excluded = [name for key, name in self.names.items() if key not in state_dict_ids]  # such as a loss's
        self._segments = {kind: [_segment_of(slot, parts, stage) for slot in slots[kind]] for kind in KINDS}
        self.positions = {each.typed.name: each.typed for kind in KINDS for each in self._segments[kind]}

    def about(self) -> dict[str, Any]:
        """Return metadata that slices lack: tied names, names outside of the state dict, complex tensors..."""
        complex_names = [
            each.typed.name for kind in KINDS for each in self._segments[kind] if each.typed != each.position
        ]
        kinds = self._model.flat_buffers.kinds
        firsts = [each.typed.name for each in self._segments["buffers"] if kinds[each.group] != "mean"]
        return {"also": self.also, "beside": self._excluded, "complex": complex_names, "firsts": firsts}

    def parts(self, kind: str, ranges: Ranges | None = None) -> Iterator[tuple[int, int, SlicePosition]]:
        """Yield the flat tensor's number, the slice's first element in it, and the slice's position, for each slice.

        Args:
            ranges: elements [first, last) of each group that its flat tensor holds; None: all.
        """
        for each in self._segments[kind]:
            if ranges is None:
                yield each.group, each.start, each.position
                continue
            first, last = ranges[each.group]
            start, end = max(each.start, first), min(each.stop, last)
            if (start, end) == (each.start, each.stop):
                yield each.group, start - first, each.position
            elif start < end:
                yield each.group, start - first, replace(each.position, span=(start - each.start, end - each.start))

    def split(self, kind: str, flats: Sequence[Tensor], ranges: Ranges | None = None) -> Named:
        """Return slices of flat tensors, views, by name."""
        slices = {}
        for group, start, position in self.parts(kind, ranges):
            values = flats[group][start : start + position.numel]
            slices[position.name] = Slice(position, values.view(position.part) if position.span is None else values)
        return slices

    def join(self, named: Mapping[str, Slice], ranges: Ranges | None = None) -> list[Tensor]:
        """Concatenate slices of the parameters to flat tensors; an empty list if there are none."""
        if not named:
            return []
        chunks: list[list[Tensor]] = [[] for _ in self._model.params]
        for group, _, position in self.parts("params", ranges):
            chunks[group].append(_tensor_at(named, position).reshape(-1))
        return [torch.cat(values) if values else torch.zeros(0) for values in chunks]

    def fill(self, kind: str, flats: Sequence[Tensor], named: Mapping[str, Slice]) -> None:
        """Copy slices into flat tensors."""
        for group, start, position in self.parts(kind):
            flats[group][start : start + position.numel].copy_(_tensor_at(named, position).reshape(-1))


def _tensor_at(named: Mapping[str, Slice], position: SlicePosition) -> Tensor:
    """Return the tensor of the slice at `position`; raise CheckpointError if it was not saved."""
    saved = named.get(position.name)
    if saved is None or saved.position != position:
        got = (
            "nothing"
            if saved is None
            else f"the part at {saved.position.offset} of one of shape {saved.position.shape}"
        )
        raise CheckpointError(
            f"the checkpoint must hold this rank's part of {position.name!r}, at {position.offset} of one of shape "
            f"{position.shape}; got {got}. Resume with the model and the strategy of that run."
        )
    return saved.tensor


def _segment_of(slot: Slot, parts: Mapping[str, Mapping[str, Any]], rank: int) -> _FlatSegment:
    """Return the position of a tensor, which may be a part of a larger one (see `PartOfModel.describe_parts`)."""
    shape = tuple(slot.tensor.shape)
    typed = SlicePosition.whole(slot.name, shape)
    if slot.name in parts:
        part = parts[slot.name]
        whole = tuple(part["shape"])
        offset, size = (None, tuple(map(min, shape, whole))) if part["dims"] is None else _chunk_of(part, rank)
        typed = SlicePosition(part["of"], whole, offset, size, shape)
    position = typed
    if slot.tensor.is_complex():
        offset = None if typed.offset is None else (*typed.offset, 0)
        position = SlicePosition(typed.name, (*typed.shape, 2), offset, (*typed.size, 2), (*typed.part, 2))
    return _FlatSegment(slot.group, slot.start, slot.stop, position, typed)


def _chunk_of(part: Mapping[str, Any], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offset, size) of a rank's `part` (see `describe_parts`): a chunk along each divided dimension."""
    ranks = torch.tensor(part["ranks"])
    spans = [(0, size) for size in part["shape"]]
    indices = (ranks == rank).nonzero()[0].tolist() if part["dims"] else []  # empty if all ranks have the same part
    for dim, index, count in zip(part["dims"], indices, ranks.shape, strict=True):
        if dim is not None:
            start, stop = spans[dim]
            chunk = -(-(stop - start) // count)  # as in `torch.chunk`
            spans[dim] = (min(start + index * chunk, stop), min(start + (index + 1) * chunk, stop))
    return tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans)


# --- capture ----------------------------------------------------------------------------------------------------------
def capture(optimizer: Any) -> dict[str, Any]:
    """Return this rank's state: parameters, buffers, the local optimiser, the strategy."""
    captured = capture_strategy(optimizer.strategy)
    return captured | {"optimizer": _optimizer_state(optimizer, ParameterLayout(optimizer.strategy.model))}


def capture_strategy(strategy: Strategy) -> dict[str, Any]:
    """Return this rank's state without the local optimiser's, by the names in checkpoints, which `restore` reads.

    params, frozen, buffers: this rank's copies. masters: its part in the consensus, see `State.parameters`, for loading
    on other ranks. works: it is a worker. about: its role in the strategy, and names that slices lack.
    """
    model = strategy.model
    model.refresh()
    layout, values = ParameterLayout(model), strategy.state.save()
    masters = strategy.state.parameters()
    for name, spec in strategy.state.specs.items():
        if spec.sharded:
            values[name] = layout.split("params", values[name], spec.ranges) if values[name] else {}
    return {
        "params": layout.split("params", model.params),
        "frozen": layout.split("frozen", model.frozen),
        "buffers": layout.split("buffers", model.buffers),
        "masters": {} if masters is None else layout.split("params", masters.tensors, masters.ranges),
        "works": strategy.is_worker,
        "strategy": values,
        "about": {"strategy": name_of(strategy), "role": strategy.saved_role, **layout.about()},
    }


def _optimizer_state(optimizer: Any, layout: ParameterLayout) -> dict[str, Any]:
    """Return the local optimiser's state dict, with parameter names instead of numbers, and tensors as slices."""
    raw, order = optimizer.attachment.local_state_dict(), parameter_order(optimizer, layout)

    def sliced(name: str, value: Any) -> Any:
        position = layout.positions.get(name)
        same_shape = position is not None and isinstance(value, Tensor) and tuple(value.shape) == position.part
        return Slice(position, value) if position is not None and same_shape else value

    state = {}
    for index, values in raw["state"].items():
        name = order[index] if isinstance(index, int) else index
        state[name] = {k: sliced(name, v) for k, v in values.items()} if isinstance(values, dict) else values
    groups = [{**group, "params": [order[index] for index in group["params"]]} for group in raw["param_groups"]]
    return {**raw, "state": state, "param_groups": groups}


def parameter_order(optimizer: Any, layout: ParameterLayout) -> list[str]:
    """Return the names of the optimiser's parameters, in its order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [layout.names.get(id(parameter), f"optimizer parameter {i}") for i, parameter in enumerate(parameters)]


def positions_of(state: Callable[..., Any]) -> list[SlicePosition]:
    """Return the positions of a rank's slices of parameters, buffers and masters.

    Args:
        state: (key) -> the part of a captured state under that key.
    """
    return [each.position for kind in (*KINDS, "masters") for each in (state(kind) or {}).values()]


# --- restore ----------------------------------------------------------------------------------------------------------
def restore(optimizer: Any, state: Mapping[str, Any], raise_on_all_ranks: OnAllRanks) -> None:
    """Collective. Restore the result of `capture`, or of `SavedState.reshard`.

    Args:
        raise_on_all_ranks: Collective. Runs a function on every rank; a failure on one rank raises an error on all
            ranks.
    """
    model = optimizer.strategy.model
    layout = ParameterLayout(model)

    def restore_here() -> None:
        for kind, tensors in (("params", model.params), ("frozen", model.frozen), ("buffers", model.buffers)):
            layout.fill(kind, tensors, state[kind])
        optimizer.load_state_dict(_with_numbers(optimizer, layout, state["optimizer"]))

    raise_on_all_ranks(restore_here)
    restore_strategy(optimizer.strategy, state["strategy"], raise_on_all_ranks)
    optimizer.strategy.records.saved = state.get("saved", ())
    model.take_snapshot()
    optimizer.attachment.take_snapshot()


def restore_strategy(
    strategy: Strategy, saved: Mapping[str, Any], raise_on_all_ranks: OnAllRanks | None = None
) -> None:
    """Collective. Restore a strategy's state, after the model's parameters.

    Args:
        raise_on_all_ranks: as in `restore`; by default that of the strategy's communicator.
    """
    raise_on_all_ranks = raise_on_all_ranks or strategy.comm.raise_on_all_ranks

    def joined() -> dict[str, Any]:
        layout, values = ParameterLayout(strategy.model), dict(saved)
        for name, entry in strategy.state.specs.items():
            if entry.sharded and name in values:
                values[name] = layout.join(values[name], entry.ranges)
        return values

    values = raise_on_all_ranks(joined)  # before ranks exchange anything while loading
    raise_on_all_ranks(lambda: strategy.state.load(values))


def _with_numbers(optimizer: Any, layout: ParameterLayout, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict for the local optimiser, with numbers instead of parameter names."""
    order, local = parameter_order(optimizer, layout), optimizer.attachment.local_state_dict()
    number_of = {name: index for index, name in enumerate(order)}
    state = {}
    for name, values in saved["state"].items():
        if isinstance(values, dict):
            values = {k: v.tensor if isinstance(v, Slice) else v for k, v in values.items()}
        state[number_of.get(name, name)] = values
    groups = []  # this rank's groups, each with the saved settings of the group that has one of its parameters
    for number, group in enumerate(local["param_groups"]):
        names = {order[index] for index in group["params"]}
        sharing = [each for each in saved["param_groups"] if not names.isdisjoint(each["params"])]
        same_number = saved["param_groups"][number : number + 1]  # for a group without parameters here
        settings = (sharing or same_number or [{}])[0]
        groups.append(group | {k: v for k, v in settings.items() if k not in ("params", "param_names")})
    return {**saved, "state": state, "param_groups": groups}


def require_same_model(saved: object, model: FlatModel, path: Path) -> None:
    """Raise CheckpointError, with the first difference, unless a saved model's description is that of `model`."""
    description = model.description()
    if saved not in (description, hashlib.sha256(description.encode()).hexdigest()):  # a hash in former checkpoints
        difference = describe_difference(description, str(saved), "here", "there")
        raise CheckpointError(
            f"model must be that of the checkpoint to resume from it; got another one than in {path}: {difference}. "
            "Resume with the configuration of that run, or start again in another output folder."
        )


# --- settings ---------------------------------------------------------------------------------------------------------
def settings_of(optimizer: Any) -> dict[str, Any]:
    """Return the settings of a DistributedOptimizer, in types that JSON has."""
    strategy = optimizer.strategy
    return {
        "strategy": {"name": name_of(strategy), **by_value(strategy.config.model_dump())},
        "optimizer": {"name": type(optimizer).__name__, **by_value(optimizer.defaults)},
    }


def schedule_options(schedule: LRScheduler, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the class of `schedule` that `state` has, and those of its inner schedules by number."""
    arguments = set(inspect.signature(type(schedule)).parameters) - {"last_epoch", "schedulers"}
    options: dict[str, Any] = {}
    for key, value in state.items():
        if key.lstrip("_") in arguments:  # MultiStepLR counts its milestones in a table
            options[key.lstrip("_")] = list(value) if isinstance(value, Mapping) else value
    inner = zip(getattr(schedule, "_schedulers", ()), state.get("_schedulers", ()), strict=False)
    return options | {str(number): schedule_options(*each) for number, each in enumerate(inner)}


def compare_settings(saved: Any, local: Mapping[str, Any], path: Path, *, logs: bool, name: str = "") -> None:
    """Log, if `logs`, how settings differ from those of a checkpoint.

    Raises:
        CheckpointError: an optimiser or a schedule has another class, so that its state does not fit.
    """
    changed = changes(saved if isinstance(saved, Mapping) else {}, local)
    require_state_fits(changed, path, name)
    for setting, (there, here) in changed.items() if logs else ():
        in_state = setting.partition(".")[0] in ("optimizer", "schedule")
        _log.warning(
            "%s%s is %r here, and %r in %s: continuing with %s.",
            name, setting, here, there, path, "the checkpoint's" if in_state else "this run's",
        )  # fmt: skip


def require_state_fits(changed: Changes, path: Path, name: str = "") -> None:
    """Raise CheckpointError if the optimiser or the schedule has another class, so that its state does not fit."""
    for kind in ("optimizer", "schedule"):
        if f"{kind}.name" in changed:
            saved, now = changed[f"{kind}.name"]
            raise CheckpointError(
                f"{name}{kind} must be that of the checkpoint to resume from it, {saved!r:.80}; got {now}. Resume with "
                f"the one of {path}; or start from the model only, by hpcdist.unsplit."
            )
