"""Positions of a module's tensors in flat memory: slots, checks, and the description that ranks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpcdist.errors import ConfigError


@dataclass(eq=False)
class Slot:
    """The position of a module's tensor: elements [start, stop) of flat tensor number `group`, row-major.

    A complex tensor is stored as pairs (real part, imaginary part), so that flat memory holds only real numbers.

    Attributes:
        tensor: the module's parameter or buffer.
    """

    name: str
    tensor: Tensor
    group: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        self._shape, self._dtype = self.tensor.shape, self.tensor.dtype  # which the loop must not change

    def view(self, flats: Sequence[Tensor]) -> Tensor:
        """Return the slot's elements of flat tensors, in the tensor's shape and in the precision of `flats`."""
        flat = flats[self.group]
        dtype = flat.dtype.to_complex() if self._dtype.is_complex else flat.dtype
        return flat[self.start : self.stop].view(dtype).view(self._shape)


def fits(slot: Slot, tensor: Tensor, flats: Sequence[Tensor]) -> bool:
    """Return whether a tensor can be copied into the slot."""
    return (tensor.shape, tensor.dtype, tensor.device) == (slot._shape, slot._dtype, flats[slot.group].device)


def move_in(slot: Slot, tensor: Tensor, flats: Sequence[Tensor], role: str, advice: str) -> None:
    """Copy the values of `tensor` into the slot, and set the slot as the memory of its tensor again.

    Raises ConfigError, with `role` and `advice` in the message, if shape, dtype or device differ.
    """
    if not fits(slot, tensor, flats):
        raise ConfigError(
            f"{role} {slot.name!r} must stay {slot._dtype} of shape {tuple(slot._shape)} on "
            f"{flats[slot.group].device}; got {kind(tensor)} on {tensor.device}{advice}"
        )
    slot.view(flats).copy_(tensor.detach())
    bind([slot], flats)


def bind(slots: Iterable[Slot], flats: Sequence[Tensor]) -> None:
    """Set `flats` as the memory of the slots' tensors, which stay the same objects."""
    for slot in slots:
        slot.tensor.data = slot.view(flats)


def flatten(
    named: Iterable[tuple[str, Tensor]], kinds: Mapping[str, str] | None = None
) -> tuple[list[Slot], tuple[Tensor, ...]]:
    """Move tensors into flat memory: one flat tensor for each (dtype, device, kind), in order and without padding."""
    groups: dict[tuple[torch.dtype, torch.device, str], int] = {}
    lengths: list[int] = []
    slots: list[Slot] = []
    for name, tensor in named:
        group = groups.setdefault((tensor.dtype, tensor.device, (kinds or {}).get(name, "")), len(groups))
        if group == len(lengths):
            lengths.append(0)
        start = lengths[group]
        lengths[group] += tensor.numel() * (2 if tensor.is_complex() else 1)
        slots.append(Slot(name, tensor, group, start, lengths[group]))
    flats = tuple(
        torch.empty(length, dtype=dtype.to_real(), device=device)
        for (dtype, device, _), length in zip(groups, lengths, strict=True)
    )
    for slot in slots:
        slot.view(flats).copy_(slot.tensor.detach())
    bind(slots, flats)
    return slots, flats


def check_flattenable(parameters: Sequence[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ConfigError if a tensor is not dense, or shares its memory with a parameter."""
    owners: dict[int, str] = {}  # address of a parameter -> its name
    for name, tensor in [*parameters, *buffers]:
        flaw = _flaw(tensor)
        if flaw:
            raise ConfigError(f"{name!r} must be a dense tensor that has its memory; got {flaw} before wrapping.")
        if tensor.numel() == 0:
            continue
        if tensor.data_ptr() in owners:
            raise ConfigError(
                f"{name!r} must not share memory; got that of parameter {owners[tensor.data_ptr()]!r}. To tie them, "
                "make both attributes one Parameter object (a.weight = b.weight); else clone one."
            )
        if isinstance(tensor, nn.Parameter):
            owners[tensor.data_ptr()] = name


def _flaw(tensor: Tensor) -> str | None:
    """Return why a tensor can't lie in flat memory, with a remedy; None if it can."""
    if is_lazy(tensor):
        return "an uninitialised one. Run one batch through the module"
    if tensor.is_meta:
        return "one on device meta. Materialise the module (to_empty, then initialise)"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}. Convert it (to_dense) or keep it in a plain attribute"
    if type(tensor.data) is not Tensor:
        return f"a {type(tensor.data).__name__}. Wrap the plain, unsharded module"
    return None


def getter(held: Any) -> Callable[[str], Tensor | None]:
    """Return a function that returns a module's parameter or buffer by name, or None.

    Args:
        held: the dict of a module, or what a torch.jit.script module has instead, which lacks `get`.
    """
    return held.get if isinstance(held, dict) else lambda key: held[key] if key in held else None  # noqa: SIM401


_WRAPPERS = {"OptimizedModule": "_orig_mod", "ActivationWrapper": "_checkpoint_wrapped_module"}
T = TypeVar("T")


def unwrapped(module: nn.Module, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield values under the names that they have without torch's wrappers of the module or its parts.

    torch.compile and torch's checkpoint_wrapper change how a module runs. Checkpoints use the plain module's names.
    """
    kinds = [(path, cls.__name__) for path, part in module.named_modules() for cls in type(part).__mro__]
    wrappers = [(f"{path}." if path else "", f"{_WRAPPERS[kind]}.") for path, kind in kinds if kind in _WRAPPERS]
    for name, value in named:
        for outer, inner in reversed(wrappers):  # the innermost one first
            if name.startswith(outer + inner):
                name = outer + name.removeprefix(outer + inner)
        yield name, value


def check_parameters(now: Sequence[tuple[str, Tensor]], slots: Sequence[Slot]) -> None:
    """Raise ConfigError unless the parameters `now` are the tensors of `slots`, the same objects in order."""
    diff = next((name for (name, tensor), slot in zip(now, slots) if tensor is not slot.tensor), None)
    if diff is None and len(now) != len(slots):  # name the first one behind the shorter list
        names = max([name for name, _ in now], [slot.name for slot in slots], key=len)
        diff = names[min(len(now), len(slots))]
    if diff is not None:
        raise ConfigError(
            f"the module's parameters must be the same as when it was wrapped; got {diff!r} added, removed or replaced "
            "(load_state_dict(assign=True) replaces). Change the module before wrapping it."
        )


def check_memory(setting: str, tensors: Sequence[Tensor], template: Sequence[Tensor], slots: Iterable[Slot]) -> None:
    """Raise ConfigError unless `tensors` can be the memory of `slots` instead of `template`."""
    if len(tensors) != len(template):
        raise ConfigError(f"{setting} must be {len(template)} flat tensors, one per group; got {len(tensors)}.")
    complex_groups = {slot.group for slot in slots if slot.tensor.is_complex()}
    for group, (tensor, old) in enumerate(zip(tensors, template, strict=True)):
        if tensor.shape != old.shape or tensor.dtype != old.dtype:
            raise ConfigError(f"{setting}, group {group}, must be {kind(old)}; got {kind(tensor)}.")
        aligned = group not in complex_groups or tensor.storage_offset() % 2 == 0
        if tensor.device != old.device or not tensor.is_contiguous() or not aligned:
            raise ConfigError(
                f"{setting}, group {group}, must be contiguous, on {old.device}, and at an even storage offset where "
                f"parameters are complex; got strides {tensor.stride()}, {tensor.device}, offset "
                f"{tensor.storage_offset()}. Allocate a separate tensor."
            )


def kind(tensor: Tensor) -> str:
    """Describe dtype and shape, for messages."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def describe_difference(a: str, b: str, here: str = "here", there: str = "there") -> str | None:
    """Return the first difference of two descriptions (`FlatModel.description`); None if they are equal."""
    for line, other in zip_longest(a.splitlines(), b.splitlines(), fillvalue="nothing"):
        if line != other:
            return f"{line!r} {here} against {other!r} {there}"
    return None
