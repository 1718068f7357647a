"""A module's buffers in flat memory, even if the module replaces them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.model.slots import bind, flatten, getter, unwrapped

KINDS = ("mean", "first", "own")


class FlatBuffers:
    """The buffers of a module in flat memory.

    A normalisation layer's running statistics are those of its rank's samples, so that their mean is of all samples.
    What another buffer means nobody can tell: a queue of vectors of length 1 has no mean. It is the first worker's.

    Args:
        wanted: kinds of buffers by name, or by pattern such as `head.*`, in place of those that they have by default.

    Attributes:
        slots: of each buffer its place in the flat tensors, of which there is one for each (dtype, device, kind).
        kinds: of each flat tensor: mean, for those that are averaged over the workers; first, for those that are the
            first worker's on all ranks; own, for those that each rank has by itself while it trains, and of which the
            first worker's count in the end; count, for a normalisation layer's number of batches.
        warned: a warning about buffers that differ between ranks was logged.
        joint: buffers that may change in a batch of weight 0 too, because they come from all ranks' batches.
    """

    def __init__(self, module: nn.Module, wanted: Mapping[str, str] | None = None):
        self._module = module
        self._kept: list[Tensor] = []  # values from before a batch of weight 0
        self.joint: list[Tensor] = []
        self.warned = False
        kinds = _kinds(module, wanted or {})
        self.slots, self._flats = flatten(unwrapped(module, module.named_buffers()), kinds)
        self.kinds = [next(kinds[slot.name] for slot in self.slots if slot.group == i) for i in range(len(self._flats))]
        slots = {id(slot.tensor): slot for slot in self.slots}
        # A buffer registered under several names has several places and one slot.
        self._places = [(name, owner, key, slots[id(t)]) for name, owner, key, t in _buffer_places(module)]

    def tensors(self) -> list[Tensor]:
        """Return the buffers as the module has them now, each once, with or without `sync`."""
        now = {slot.name: getter(owner._buffers)(key) for _, owner, key, slot in self._places}
        return [slot.tensor if (tensor := now.get(slot.name)) is None else tensor for slot in self.slots]

    def sync(self) -> tuple[Tensor, ...]:
        """Copy buffers that the module has replaced (`self.mean = new`) into flat memory, bind them again; return it.

        One that is not persistent is no part of the model's state, but a cache, such as angles of positions. With
        another shape, new or gone, it is this rank's own from then on: others' batches may have other lengths.

        Raises:
            ConfigError: a persistent buffer is new, gone, of another shape, dtype or device, or no longer tied.
        """
        now = list(_buffer_places(self._module))
        tensors = {name: tensor for name, *_, tensor in now}
        for name, owner, key, slot in list(self._places):
            tensor = tensors.get(name)
            if _is_cache(owner, key) and (tensor is None or not slot.fits(tensor, self._flats)):
                self._places = [place for place in self._places if place[0] != name]
                slot.tensor = slot.view(self._flats)  # all ranks have this place, and it stays as it is
                slot.pointer = slot.tensor.data_ptr()
        known = {name for name, *_ in self._places}
        now = [place for place in now if place[0] in known or not _is_cache(*place[1:3])]
        odd = {name for name, *_ in now} ^ {name for name, *_ in self._places}
        if odd:
            raise ConfigError(
                f"the module's buffers must be the same as when it was wrapped; got {min(odd)!r} added or removed. "
                "Register every buffer first, wrap after; or pass persistent=False to register_buffer, if it is "
                "computed anew wherever it is missing."
            )
        by_name = {name: slot for name, _, _, slot in self._places}
        self._places = [(name, owner, key, by_name[name]) for name, owner, key, _ in now]
        current: dict[str, Tensor] = {}  # by slot
        for name, _, _, tensor in now:
            slot = by_name[name]
            if current.setdefault(slot.name, tensor) is not tensor:
                raise ConfigError(
                    f"buffers {slot.name!r} and {name!r} must stay one tensor, as when wrapped; got two. "
                    "Change them in place (copy_), or untie them first and wrap after."
                )
        for slot in self.slots:
            tensor = current.get(slot.name, slot.tensor)
            if tensor is not slot.tensor or tensor.data_ptr() != slot.pointer or tensor.dtype != slot.dtype:
                advice = ". Change it first, wrap after; or pass persistent=False to register_buffer, if it may grow."
                slot.move_in(tensor, self._flats, "buffer", advice)
        self._restore_places()
        return self._flats

    def bind(self, flats: tuple[Tensor, ...]) -> None:
        """Make `flats` the buffers' memory."""
        self._flats = flats
        bind(self.slots, flats)
        self._restore_places()

    # --- batches of weight 0 --------------------------------------------------------------------------------------
    def keep(self) -> None:
        """Remember the values for `restore`."""
        self._kept = [flat.clone() for flat in self.sync()]

    def restore(self, averaged: bool = False) -> None:
        """Restore the remembered values once, except those of `joint`, and counts where statistics are averaged."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        flats = self.sync()
        counts = [slot.tensor for slot in self.slots if averaged and self.kinds[slot.group] == "count"]
        stays = [*self.joint, *counts]
        joint = [tensor.clone() for tensor in stays]
        for flat, values in zip(flats, kept, strict=True):
            flat.copy_(values)
        for tensor, values in zip(stays, joint, strict=True):
            tensor.copy_(values)

    def _restore_places(self) -> None:
        for _, owner, key, slot in self._places:
            if getattr(owner, key, None) is not slot.tensor:
                setattr(owner, key, slot.tensor)


def _kinds(module: nn.Module, wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the kind of each buffer by name.

    Raises:
        ConfigError: there is no such kind or buffer, or numbers without a mean are to be averaged.
    """
    kinds: dict[str, str] = {}
    for name, (owner, tensor) in unwrapped(module, ((name, (o, t)) for name, o, _, t in _buffer_places(module))):
        scripted = getattr(nn, str(getattr(owner, "original_name", None)), None)  # of torch.jit.script
        cls = scripted if isinstance(scripted, type) else type(owner)
        normalises = getattr(owner, "normalises", False) or issubclass(cls, _NormBase)
        kind = ("mean" if tensor.is_floating_point() else "count") if normalises else "first"
        kinds[name] = next((k for pattern, k in wanted.items() if fnmatchcase(name, pattern)), kind)
        if kinds[name] == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(
                f"buffers[{name!r}] must be first or own for {tensor.dtype}; got mean. Take one of these."
            )
    for pattern, kind in wanted.items():
        if kind not in KINDS:
            raise UnknownNameError(f"buffers[{pattern!r}]", kind, KINDS)
        if not any(fnmatchcase(name, pattern) for name in kinds):
            raise UnknownNameError("buffers", pattern, kinds)
    return kinds


def _is_cache(owner: nn.Module, key: str) -> bool:
    """Tell whether a buffer is registered with persistent=False."""
    return key in getattr(owner, "_non_persistent_buffers_set", ())


def _buffer_places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (full name, owner, attribute, tensor) of every buffer, and of a tensor registered twice both."""
    for prefix, owner in module.named_modules():
        for key, tensor in owner.named_buffers(prefix, recurse=False, remove_duplicate=False):
            yield key, owner, key.removeprefix(f"{prefix}."), tensor
