"""A module's buffers in flat memory, even if the module replaces them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from hpcdist.errors import ConfigError
from hpcdist.model.slots import bind, flatten, getter


class FlatBuffers:
    """The buffers of a module in flat memory.

    Attributes:
        flats: one tensor for each (dtype, device).
        joint: buffers that may change in a batch of weight 0 too, because they come from all ranks' batches.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._kept: list[Tensor] = []  # values from before a batch of weight 0
        self.joint: list[Tensor] = []
        self.slots, self.flats = flatten(module.named_buffers())
        slots = {id(slot.tensor): slot for slot in self.slots}
        # A buffer registered under several names has several places and one slot.
        self._places = [(name, owner, key, slots[id(t)]) for name, owner, key, t in _buffer_places(module)]

    def tensors(self) -> list[Tensor]:
        """Return the buffers as the module has them now, each once, with or without `sync`."""
        now = {slot.name: getter(owner._buffers)(key) for _, owner, key, slot in self._places}
        return [slot.tensor if (tensor := now[slot.name]) is None else tensor for slot in self.slots]

    def sync(self) -> None:
        """Copy buffers that the module has replaced (`self.mean = new`) into flat memory and bind them again.

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
            if current[slot.name] is not slot.tensor or slot.moved():
                flat = self.flats[slot.group]
                slot.move_in(current[slot.name], flat, "buffer", "", "Change it first, wrap after.")
        self._restore_places()

    def bind(self, flats: tuple[Tensor, ...]) -> None:
        """Make `flats` the buffers' memory."""
        self.flats = flats
        bind(self.slots, flats)
        self._restore_places()

    # --- batches of weight 0 --------------------------------------------------------------------------------------
    def keep(self) -> None:
        """Remember the values for `restore`."""
        self.sync()
        self._kept = [flat.clone() for flat in self.flats]

    def restore(self) -> None:
        """Restore the remembered values once, except those of `joint`."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        self.sync()
        joint = [tensor.clone() for tensor in self.joint]
        for flat, values in zip(self.flats, kept, strict=True):
            flat.copy_(values)
        for tensor, values in zip(self.joint, joint, strict=True):
            tensor.copy_(values)

    def forget(self) -> None:
        """Drop the remembered values."""
        self._kept = []

    def _restore_places(self) -> None:
        for _, owner, key, slot in self._places:
            if getattr(owner, key, None) is not slot.tensor:
                setattr(owner, key, slot.tensor)


def _buffer_places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (full name, owner, attribute, tensor) of every buffer, and of a tensor registered twice both."""
    for prefix, owner in module.named_modules():
        for key, tensor in owner.named_buffers(prefix, recurse=False, remove_duplicate=False):
            yield key, owner, key.removeprefix(f"{prefix}."), tensor
