"""A module's buffers in flat memory, even if the module replaces them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.model.slots import bind, fits, flatten, getter, move_in, unwrapped

KINDS = ("mean", "first", "own")


class FlatBuffers:
    """The buffers of a module in flat memory, with a rule for each how ranks combine it.

    By default the running statistics of normalisation layers are averaged, because each rank has those of its samples.
    For other buffers the first worker's values are used: their meaning is unknown, and some have no mean.

    Args:
        requested: kinds of buffers by name, or by pattern such as `head.*`, instead of the default.

    Attributes:
        slots: position of each buffer in the flat tensors: one for each (dtype, device, kind).
        kinds: of each flat tensor. "mean": averaged over the workers; "first": the first worker's values on all ranks;
            "own": local on each rank during training, at the end the first worker's; "count": a normalisation layer's
            number of batches.
    """

    def __init__(self, module: nn.Module, requested: Mapping[str, str] | None = None):
        self._module = module
        self._saved: list[Tensor] = []  # values before a batch of weight 0
        kinds = _kinds(module, requested or {})
        self.slots, self._flats = flatten(unwrapped(module, module.named_buffers()), kinds)
        self.kinds = [next(kinds[slot.name] for slot in self.slots if slot.group == i) for i in range(len(self._flats))]
        slots = {id(slot.tensor): slot for slot in self.slots}
        # (full name, owner, attribute, slot); a buffer registered under several names has several entries, one slot.
        self._entries = [(name, owner, key, slots[id(t)]) for name, owner, key, t in _entries_of(module)]
        self._synced: list[tuple[object, ...]] = []  # `_stamp` of the entries in flat memory

    def tensors(self) -> list[Tensor]:
        """Return the module's current buffers, each once; they may be outside of flat memory."""
        current = {slot.name: getter(owner._buffers)(key) for _, owner, key, slot in self._entries}
        return [slot.tensor if (tensor := current.get(slot.name)) is None else tensor for slot in self.slots]

    def _sync(self) -> tuple[Tensor, ...]:
        """Copy buffers that the module replaced (`self.mean = new`) into flat memory, and return its tensors.

        A non-persistent buffer is not part of the model's state, but a cache, such as angles of positions. If its shape
        changes, or it is added or removed, it becomes local to this rank: other ranks' batches may have other lengths.
        """
        entries = list(_entries_of(self._module))
        if [_stamp(name, owner, tensor) for name, owner, _, tensor in entries] == self._synced:
            return self._flats
        tensors = {name: tensor for name, *_, tensor in entries}
        for name, owner, key, slot in list(self._entries):
            tensor = tensors.get(name)
            if _is_cache(owner, key) and (tensor is None or not fits(slot, tensor, self._flats)):
                self._entries = [entry for entry in self._entries if entry[0] != name]
                slot.tensor = slot.view(self._flats)  # flat memory stays the same on all ranks
        known = {name for name, *_ in self._entries}
        entries = [entry for entry in entries if entry[0] in known or not _is_cache(*entry[1:3])]
        changed = {name for name, *_ in entries} ^ {name for name, *_ in self._entries}
        if changed:
            raise ConfigError(
                f"the module's buffers must be the same as when it was wrapped; got {min(changed)!r} added or removed. "
                "Register every buffer before wrapping; or pass persistent=False to register_buffer, if it is "
                "computed again whenever it is missing."
            )
        by_name = {name: slot for name, _, _, slot in self._entries}
        self._entries = [(name, owner, key, by_name[name]) for name, owner, key, _ in entries]
        tensor_of: dict[str, Tensor] = {}  # by slot
        for name, _, _, tensor in entries:
            slot = by_name[name]
            if tensor_of.setdefault(slot.name, tensor) is not tensor:
                raise ConfigError(
                    f"buffers {slot.name!r} and {name!r} must stay one tensor, as when wrapped; got two. "
                    "Change them in place (copy_), or untie them before wrapping."
                )
        for slot in self.slots:
            tensor = tensor_of.get(slot.name, slot.tensor)
            if tensor is not slot.tensor or tensor.data_ptr() != slot.view(self._flats).data_ptr():
                advice = ". Change it before wrapping; or pass persistent=False to register_buffer, if it may grow."
                move_in(slot, tensor, self._flats, "buffer", advice)
        self._rebind()
        return self._flats

    def _bind(self, flats: tuple[Tensor, ...]) -> None:
        """Use `flats` as the buffers' memory."""
        self._flats = flats
        bind(self.slots, flats)
        self._rebind()

    # --- batches of weight 0 --------------------------------------------------------------------------------------
    def _save(self) -> None:
        """Copy the values for `restore`."""
        self._saved = [flat.clone() for flat in self._sync()]

    def restore(self, averaged: bool = False) -> None:
        """Set the buffers to their values before a batch of weight 0; do nothing without one.

        SyncBatchNorm's keep their values, of all ranks' batches; with `averaged`, before an average, counts do, too.
        """
        saved, self._saved = self._saved, []
        if not saved:
            return
        flats = self._sync()
        kept = [slot.tensor for _, owner, _, slot in self._entries if isinstance(owner, nn.SyncBatchNorm)]
        kept += [slot.tensor for slot in self.slots if averaged and self.kinds[slot.group] == "count"]
        kept_values = [tensor.clone() for tensor in kept]
        for flat, values in zip(flats, saved, strict=True):
            flat.copy_(values)
        for tensor, values in zip(kept, kept_values, strict=True):
            tensor.copy_(values)

    def _rebind(self) -> None:
        for _, owner, key, slot in self._entries:
            if getattr(owner, key, None) is not slot.tensor:
                setattr(owner, key, slot.tensor)
        self._synced = [_stamp(name, owner, slot.tensor) for name, owner, _, slot in self._entries]


def _kinds(module: nn.Module, requested: Mapping[str, str]) -> dict[str, str]:
    """Return the kind of each buffer by name; raise ConfigError if a requested one does not exist or fit."""
    kinds: dict[str, str] = {}
    for name, (owner, tensor) in unwrapped(module, ((name, (o, t)) for name, o, _, t in _entries_of(module))):
        scripted = getattr(nn, str(getattr(owner, "original_name", None)), None)  # class before torch.jit.script
        cls = scripted if isinstance(scripted, type) else type(owner)
        normalises = getattr(owner, "normalises", False) or issubclass(cls, _NormBase)
        kind = ("mean" if tensor.is_floating_point() else "count") if normalises else "first"
        kinds[name] = next((k for pattern, k in requested.items() if fnmatchcase(name, pattern)), kind)
        if kinds[name] == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(f"buffers[{name!r}] must be first or own for {tensor.dtype}; got mean. Use one of these.")
    for pattern, kind in requested.items():
        if kind not in KINDS:
            raise UnknownNameError(f"buffers[{pattern!r}]", kind, KINDS)
        if not any(fnmatchcase(name, pattern) for name in kinds):
            raise UnknownNameError("buffers", pattern, kinds)
    return kinds


def _is_cache(owner: nn.Module, key: str) -> bool:
    """Return whether a buffer is registered with persistent=False."""
    return key in getattr(owner, "_non_persistent_buffers_set", ())


def _entries_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (full name, owner, attribute, tensor) of every buffer; a tensor registered twice has two entries."""
    for prefix, owner in module.named_modules():
        for key, tensor in owner._buffers.items():
            if tensor is not None:
                yield f"{prefix}.{key}" if prefix else key, owner, key, tensor


def _stamp(name: str, owner: nn.Module, tensor: Tensor) -> tuple[object, ...]:
    """Return values that differ once a buffer is renamed, replaced, moved or cut."""
    return name, id(owner), id(tensor), tensor.data_ptr(), tensor.shape
