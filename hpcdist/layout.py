"""Where the tensors of a module lie in flat memory: slots, buffers, and the description that ranks compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpcdist.errors import ConfigError


@dataclass(eq=False)
class Slot:
    """The place of one tensor of a module: elements [start, stop) of flat tensor number `group`.

    A tensor of any shape lies there row-major (last dimension fastest). A complex one lies there as pairs (real part,
    imaginary part), so that whoever sends, sums or compresses flat memory meets real numbers only.
    """

    name: str
    tensor: Tensor  # the module's own Parameter or buffer object, whose memory the slot is
    group: int
    start: int
    stop: int
    dtype: torch.dtype
    shape: torch.Size
    trainable: bool
    pointer: int = 0  # address of the slot's memory, to see later whether the tensor still lies there

    def view(self, flat: Tensor) -> Tensor:
        """The slot's elements of `flat`, in the shape and dtype of the tensor."""
        return flat[self.start : self.stop].view(self.dtype).view(self.shape)

    def bind(self, flat: Tensor) -> None:
        """Makes `flat` the tensor's memory. The tensor object stays the same, so references to it stay valid."""
        self.tensor.data = self.view(flat)
        self.pointer = self.tensor.data_ptr()

    def moved(self) -> bool:
        """True where somebody gave the tensor other memory."""
        return self.tensor.data_ptr() != self.pointer


def flatten(named: Iterable[tuple[str, Tensor]]) -> tuple[list[Slot], tuple[Tensor, ...]]:
    """Moves tensors into flat memory, one per (dtype, device), in the order given and without padding; values stay."""
    groups: dict[tuple[torch.dtype, torch.device], int] = {}
    lengths: list[int] = []
    slots: list[Slot] = []
    for name, tensor in named:
        group = groups.setdefault((tensor.dtype, tensor.device), len(groups))
        if group == len(lengths):
            lengths.append(0)
        start = lengths[group]
        lengths[group] += tensor.numel() * (2 if tensor.is_complex() else 1)
        place = group, start, lengths[group]
        slots.append(Slot(name, tensor, *place, tensor.dtype, tensor.shape, tensor.requires_grad))
    flats = tuple(
        torch.empty(length, dtype=dtype.to_real(), device=device)
        for (dtype, device), length in zip(groups, lengths, strict=True)
    )
    for slot in slots:
        slot.view(flats[slot.group]).copy_(slot.tensor.detach())
        slot.bind(flats[slot.group])
    return slots, flats


def check_flattenable(parameters: Sequence[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ConfigError where a tensor has no dense memory, or a parameter shares its memory with another tensor."""
    owners: dict[int, str] = {}  # address of a parameter -> its name
    for name, tensor in [*parameters, *buffers]:
        flaw = _flaw(tensor)
        if flaw:
            raise ConfigError(f"{name!r} must be a dense tensor that has its memory; got {flaw} before wrapping.")
        if tensor.numel() == 0:
            continue
        if tensor.data_ptr() in owners:
            raise ConfigError(
                f"{name!r} must have memory of its own; got that of parameter {owners[tensor.data_ptr()]!r}. To tie "
                "them, make both attributes one Parameter object (a.weight = b.weight); else clone one."
            )
        if isinstance(tensor, nn.Parameter):
            owners[tensor.data_ptr()] = name


def _flaw(tensor: Tensor) -> str | None:
    """What keeps a tensor out of flat memory, and what to do about it."""
    if is_lazy(tensor):
        return "an uninitialised one. Run one batch through the module"
    if tensor.is_meta:
        return "one on device meta. Materialise the module (to_empty, then initialise)"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}. Convert it (to_dense) or keep it in a plain attribute"
    if type(tensor.data) is not Tensor:
        return f"a {type(tensor.data).__name__}. Wrap the plain, unsharded module"
    return None


def check_parameters(module: nn.Module, slots: Sequence[Slot]) -> None:
    """Raises ConfigError unless the module's parameters are those of `slots`, in memory and requires_grad too."""
    now = list(module.named_parameters())
    odd = next((name for (name, tensor), slot in zip(now, slots) if tensor is not slot.tensor), None)
    if odd is None and len(now) != len(slots):
        names = max([name for name, _ in now], [slot.name for slot in slots], key=len)
        odd = names[min(len(now), len(slots))]
    if odd is not None:
        raise ConfigError(
            f"the module's parameters must be the same as when it was wrapped; got {odd!r} added, removed or replaced "
            "(load_state_dict(assign=True) replaces). Change the module first, wrap it after."
        )
    for slot in slots:
        if slot.moved():
            raise ConfigError(
                f"parameter {slot.name!r} must stay in flat memory; got other memory (by module.to(), .half(), "
                "p.data = ... or the like). Move or convert the module first, wrap it after."
            )
        if slot.tensor.requires_grad != slot.trainable:
            raise ConfigError(
                f"requires_grad of {slot.name!r} must stay {slot.trainable}; got {slot.tensor.requires_grad}. "
                "Freeze or unfreeze first, wrap after."
            )


def check_values(setting: str, tensors: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """Raises ConfigError unless `tensors` match `like` in number, shape and dtype."""
    if len(tensors) != len(like):
        raise ConfigError(f"{setting} must be {len(like)} flat tensors, one per group; got {len(tensors)}.")
    for group, (tensor, own) in enumerate(zip(tensors, like, strict=True)):
        if tensor.shape != own.shape or tensor.dtype != own.dtype:
            raise ConfigError(f"{setting}, group {group}, must be {_kind(own)}; got {_kind(tensor)}.")


def check_memory(setting: str, tensors: Sequence[Tensor], like: Sequence[Tensor], slots: Iterable[Slot]) -> None:
    """Raises ConfigError unless `tensors` can be the memory of `slots` in place of `like`."""
    check_values(setting, tensors, like)
    complex_groups = {slot.group for slot in slots if slot.dtype.is_complex}
    for group, (tensor, own) in enumerate(zip(tensors, like, strict=True)):
        aligned = group not in complex_groups or tensor.storage_offset() % 2 == 0
        if tensor.device != own.device or not tensor.is_contiguous() or not aligned:
            raise ConfigError(
                f"{setting}, group {group}, must be contiguous, on {own.device}, and at an even storage offset where "
                f"parameters are complex; got strides {tensor.stride()}, {tensor.device}, offset "
                f"{tensor.storage_offset()}. Allocate a tensor for it alone."
            )


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


class FlatBuffers:
    """The buffers of a module in flat memory. `flats` holds one tensor per (dtype, device)."""

    def __init__(self, module: nn.Module):
        self._module = module
        self.slots, self.flats = flatten(module.named_buffers())
        slots = {id(slot.tensor): slot for slot in self.slots}
        # A buffer registered under several names has several places and one slot.
        self._places = [(name, owner, key, slots[id(t)]) for name, owner, key, t in _buffer_places(module)]

    def sync(self) -> None:
        """Copies buffers that the module has replaced (`self.mean = new`) into flat memory and binds them again.

        Raises:
            ConfigError: a buffer is new, gone, of another shape, dtype or device, or no longer tied.
        """
        now = list(_buffer_places(self._module))
        odd = {name for name, *_ in now} ^ {name for name, *_ in self._places}
        if odd:
            raise ConfigError(
                f"the module's buffers must be the same as when it was wrapped; got {min(odd)!r} added or removed. "
                "Register every buffer first, wrap after."
            )
        by_name = {name: slot for name, _, _, slot in self._places}
        self._places = [(name, owner, key, by_name[name]) for name, owner, key, _ in now]
        current: dict[str, Tensor] = {}
        for name, _, _, tensor in now:
            slot = by_name[name]
            if current.setdefault(slot.name, tensor) is not tensor:
                raise ConfigError(
                    f"buffers {slot.name!r} and {name!r} must stay one tensor, as when wrapped; got two. "
                    "Change them in place (copy_), or untie them first and wrap after."
                )
        for slot in self.slots:
            self._take(slot, current[slot.name])
        self._restore_places()

    def _take(self, slot: Slot, tensor: Tensor) -> None:
        if tensor is slot.tensor and not slot.moved():
            return
        flat = self.flats[slot.group]
        if tensor.shape != slot.shape or tensor.dtype != slot.dtype or tensor.device != flat.device:
            raise ConfigError(
                f"buffer {slot.name!r} must stay {slot.dtype} of shape {tuple(slot.shape)} on {flat.device}; got "
                f"{_kind(tensor)} on {tensor.device}. Change it first, wrap after."
            )
        slot.view(flat).copy_(tensor.detach())
        slot.bind(flat)

    def bind(self, flats: tuple[Tensor, ...]) -> None:
        """Makes `flats` the buffers' memory."""
        self.flats = flats
        for slot in self.slots:
            slot.bind(flats[slot.group])
        self._restore_places()

    def _restore_places(self) -> None:
        for _, owner, key, slot in self._places:
            if getattr(owner, key, None) is not slot.tensor:
                setattr(owner, key, slot.tensor)


def _buffer_places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(full name, owner, attribute, tensor) of every buffer; a tensor that is registered twice comes twice."""
    for prefix, owner in module.named_modules():
        for key, tensor in owner.named_buffers(prefix, recurse=False, remove_duplicate=False):
            yield key, owner, key.removeprefix(f"{prefix}."), tensor


def describe(parameters: Iterable[Slot], buffers: Iterable[Slot]) -> str:
    """One line per tensor: equal texts mean equal flat memory, element by element. The device doesn't matter."""
    kinds = [("trainable" if slot.trainable else "frozen", slot) for slot in parameters]
    return "\n".join(
        f"{slot.name}: {kind} {str(slot.dtype).removeprefix('torch.')} {list(slot.shape)} in group {slot.group}"
        for kind, slot in kinds + [("buffer", slot) for slot in buffers]
    )


def describe_difference(mine: str, theirs: str) -> str | None:
    """The first line in which two descriptions (`FlatModel.description`) differ, or None where they are equal."""
    for one, other in zip_longest(mine.splitlines(), theirs.splitlines(), fillvalue="nothing"):
        if one != other:
            return f"{one!r} here against {other!r} there"
    return None
