"""A model's parameters, gradients and buffers as flat views of the module's own memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpcdist.buckets import Announcer, Bucket, check_caps, make_buckets
from hpcdist.errors import ConfigError
from hpcdist.layout import (
    FlatBuffers,
    check_flattenable,
    check_memory,
    check_parameters,
    check_values,
    describe,
    describe_difference,
    flatten,
)

__all__ = ["Bucket", "FlatModel", "describe_difference"]


class FlatModel:
    """A module whose tensors lie in flat memory: what changes there changes the module, and the other way round.

    Tensors are grouped by (dtype, device), groups in order of first appearance. Within a group they lie in the order
    of `module.parameters()` (or `.buffers()`), row-major and without padding; a tied parameter lies there once.
    Parameter objects stay the same, so an optimiser made before or after wrapping works. Shapes and values stay.
    Strides become contiguous (a channels_last or transposed parameter is row-major from here on) and a parameter may
    start at any element. Training is to the bit that of the plain module wherever torch's kernels don't look at these
    two; MKL's matrix-vector product does look at 16-byte alignment, which changes last bits for batches of one.

    Gradients: `p.grad` is a view of `grads`. After `zero_grad(set_to_none=True)` autograd makes a fresh tensor, which
    a hook copies into the flat gradient: a read and a write per element, against a write, two reads and a write for
    zeroing and adding to the view, as `set_to_none=False` does. Both modes accumulate over several backward passes.
    Sparse gradients (`nn.Embedding(sparse=True)`) are made dense, so use a dense optimiser. At a step: `collect()` or
    `flush()`, communicate `grads`, `release(used)`, let the optimiser step.

    Autograd does not notice writes to flat memory between a forward pass and its backward pass.

    Attributes:
        params: flat trainable parameters, one 1-D tensor per group; complex ones as (real, imaginary) pairs.
        grads: their flat gradients, same shapes; zero at first.
        frozen: flat parameters with requires_grad=False, integer ones included.
        buffers: flat buffers, non-persistent and integer ones (num_batches_tracked) included.
        buckets: ranges of `grads` in the order in which the backward pass completes them.
        names: names of the trainable parameters, in the order of `module.parameters()`.
        n_params, n_bytes: elements and bytes of all trainable parameters.
        weight: this rank's number of samples in the step over the workers' mean number. Strategies that average
            gradients weight by it; whoever draws the batch sets it. 1.0 where all batches are equal.

    Args:
        module: initialised, dense, on its device, in its dtype: move it first, wrap it after.
        bucket_bytes: cap of a bucket. first_bucket_bytes: cap of each group's first one, if smaller.

    Raises ConfigError where a cap is no positive integer, or a tensor can't lie in flat memory.

    Reference: for buckets, Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """

    def __init__(self, module: nn.Module, *, bucket_bytes: int = 25 << 20, first_bucket_bytes: int = 1 << 20):
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module must be a torch.nn.Module; got {type(module).__name__}. Pass the model itself.")
        check_caps(bucket_bytes, first_bucket_bytes)
        named = list(module.named_parameters())
        check_flattenable(named, module.named_buffers())
        self.module = module
        self.weight = 1.0
        self._slots, self.params = flatten((name, p) for name, p in named if p.requires_grad)
        self._frozen_slots, self.frozen = flatten((name, p) for name, p in named if not p.requires_grad)
        self._buffers = FlatBuffers(module)
        by_name = {slot.name: slot for slot in self._slots + self._frozen_slots}
        self._all_slots = [by_name[name] for name, _ in named]  # in the module's order
        self.grads = tuple(torch.zeros_like(flat) for flat in self.params)
        self._grad_views: list[Tensor] = []
        self._grad_pointers: list[int] = []
        self._bind_grads()
        self.names = tuple(slot.name for slot in self._slots)
        self.n_params = sum(slot.tensor.numel() for slot in self._slots)
        self.n_bytes = sum(flat.numel() * flat.element_size() for flat in self.params)
        self.buckets = make_buckets(self._slots, self.grads, bucket_bytes, first_bucket_bytes)
        self._announcer = Announcer(self.buckets, self.names)
        self._hooks = [
            slot.tensor.register_post_accumulate_grad_hook(self._make_hook(position))
            for position, slot in enumerate(self._slots)
        ]

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return self._buffers.flats

    # --- gradients ------------------------------------------------------------------------------------------------
    def _make_hook(self, position: int) -> Callable[[Tensor], None]:
        views, pointers, announcer = self._grad_views, self._grad_pointers, self._announcer

        def hook(parameter: Tensor) -> None:
            grad = parameter.grad
            if grad is not views[position] or grad.data_ptr() != pointers[position]:
                self._take(position, grad)
            if announcer.armed:
                announcer.arrive(position)

        return hook

    def _take(self, position: int, grad: Tensor | None) -> None:
        """Copies a gradient that lies elsewhere into its flat slice, and makes the slice the parameter's gradient."""
        slot, view = self._slots[position], self._grad_views[position]
        if grad is None or grad.requires_grad:
            flaw = "one with a graph; use torch.autograd.grad(..., create_graph=True) for inner gradients"
            taken = "none; let no other hook take it away (optimiser steps during the backward pass do)"
            got = taken if grad is None else flaw
            raise ConfigError(f"the gradient of {slot.name!r} must be a plain tensor after backward(); got {got}.")
        if grad is view:  # `p.grad.data = ...` has given the view itself other memory
            view = self._grad_views[position] = slot.view(self.grads[slot.group])
        view.copy_(grad if grad.layout is torch.strided else grad.to_dense())
        slot.tensor.grad = view

    def collect(self) -> Tensor:
        """Makes every element of `grads` valid: zero where a parameter has no gradient, else its gradient.

        Returns:
            bool tensor on the CPU, one per trainable parameter: True where it has a gradient.

        Raises:
            ConfigError: a gradient was replaced after its bucket was announced, so others got the old one.
        """
        used = [True] * len(self._slots)
        for position, (slot, view) in enumerate(zip(self._slots, self._grad_views, strict=True)):
            grad = slot.tensor.grad
            if grad is view and grad.data_ptr() == self._grad_pointers[position]:
                continue
            used[position] = grad is not None
            if self._announcer.announced(position):
                if grad is not None or self._announcer.arrived[position]:
                    raise ConfigError(
                        f"the gradient of {slot.name!r} must be changed in place once its bucket is announced; got "
                        f"{'None' if grad is None else 'another tensor'}. Use p.grad.mul_(), not p.grad = ..., or "
                        "turn overlap off."
                    )
            elif grad is None:
                view.zero_()
            else:
                self._take(position, grad)
        return torch.tensor(used, dtype=torch.bool)

    def release(self, used: Tensor | Sequence[bool]) -> None:
        """Gives the view to each parameter with a True in `used`, and no gradient (None) to the others.

        `used` is in the order of `names`: what `collect()` returned, or'ed over the ranks. An optimiser then skips
        exactly the parameters that a plain run on the ranks' joint batch would skip.
        """
        flags = torch.as_tensor(used).tolist()
        if len(flags) != len(self._slots):
            raise ConfigError(f"used must be {len(self._slots)} flags, one per trainable parameter; got {len(flags)}.")
        for slot, view, flag in zip(self._slots, self._grad_views, flags, strict=True):
            slot.tensor.grad = view if flag else None

    def nonfinite(self, bucket: Bucket | None = None) -> list[str]:
        """Names of the parameters whose gradient holds NaN or infinity; empty as a rule.

        One read of the gradients (of `bucket`, or of all after `collect()`): a NaN or an infinity survives in the
        sum. Only where the sum is not finite (it may also have overflowed) is each gradient looked at. Waits for the
        device.
        """
        flats, names = (self.grads, self.names) if bucket is None else ((bucket.grads,), bucket.params)
        if all(math.isfinite(flat.sum().item()) for flat in flats):
            return []
        within = set(names)
        suspects = (slot for slot in self._slots if slot.name in within and slot.tensor.grad is not None)
        return [slot.name for slot in suspects if not torch.isfinite(slot.tensor.grad).all()]

    # --- buckets --------------------------------------------------------------------------------------------------
    def on_bucket_ready(self, callback: Callable[[Bucket], None] | None) -> None:
        """Sets what is called with each bucket, in order, once all of its parameters have their gradient.

        It runs during the backward pass, on autograd's thread and with the stream that the gradient was written on.
        """
        self._announcer.callback = callback

    def begin(self, announce: bool = True, passes: int = 1) -> None:
        """Begins a step of `passes` backward passes, in the last of which buckets are announced; or not at all."""
        self._announcer.begin(announce, passes)

    def flush(self) -> Tensor:
        """Collects, announces every bucket not yet announced, and returns which parameters have a gradient.

        Until the next `begin()` a further gradient is refused, whatever the last pass was armed for.
        """
        used = self.collect()
        self._announcer.flush()
        return used

    # --- values ---------------------------------------------------------------------------------------------------
    def copy_params(self) -> tuple[Tensor, ...]:
        """Clones of `params`."""
        return tuple(flat.clone() for flat in self.params)

    def load_params(self, tensors: Sequence[Tensor]) -> None:
        """Copies `tensors` (as from `copy_params`, on any device) into `params`."""
        check_values("tensors", tensors, self.params)
        for flat, tensor in zip(self.params, tensors, strict=True):
            flat.copy_(tensor.detach())

    @contextmanager
    def swapped(
        self, params: Sequence[Tensor] | None = None, buffers: Sequence[Tensor] | None = None
    ) -> Iterator[None]:
        """Inside the context the module has other values; afterwards its own again, to the bit.

        The tensors given (shapes and dtypes as `params` and `buffers`, same device) become the module's memory, so
        that nothing is copied and the original memory, which other ranks may be reading, is never written. Changes
        made inside the context land in the tensors given and end with it. None: keep one's own.
        """
        self._buffers.sync()
        own_params, own_buffers = self.params, self.buffers
        new_params = own_params if params is None else tuple(params)
        new_buffers = own_buffers if buffers is None else tuple(buffers)
        check_memory("params", new_params, own_params, self._slots)
        check_memory("buffers", new_buffers, own_buffers, self._buffers.slots)
        try:
            self._bind_params(new_params)
            self._buffers.bind(new_buffers)
            yield
        finally:
            self._bind_params(own_params)
            self._buffers.bind(own_buffers)

    def named_slices(self) -> Iterator[tuple[str, int, int, int, torch.Size]]:
        """(name, group, start, stop, shape) of each trainable parameter in `params[group]`."""
        for slot in self._slots:
            yield slot.name, slot.group, slot.start, slot.stop, slot.shape

    def views(self, flats: Sequence[Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each trainable parameter, in the order of `names`, and its elements of `flats`, tensors like `params`."""
        for slot in self._slots:
            yield slot.tensor, slot.view(flats[slot.group])

    # --- memory ---------------------------------------------------------------------------------------------------
    def move_params(self, group: int, memory: Tensor) -> None:
        """Moves `params[group]` into `memory` (overwritten; same length, dtype, device), e.g. that of a window."""
        self._bind_params(self._moved(self.params, group, memory))

    def move_grads(self, group: int, memory: Tensor) -> None:
        """Moves `grads[group]` into `memory` (overwritten; same length, dtype, device); buckets follow."""
        old_views = list(self._grad_views)
        self.grads = self._moved(self.grads, group, memory)
        self._bind_grads()
        for slot, old, new in zip(self._slots, old_views, self._grad_views, strict=True):
            if slot.tensor.grad is old:
                slot.tensor.grad = new
        for bucket in self.buckets:
            bucket.grads = self.grads[bucket.group][bucket.start : bucket.stop]

    def _moved(self, flats: tuple[Tensor, ...], group: int, memory: Tensor) -> tuple[Tensor, ...]:
        if group not in range(len(flats)):
            raise ConfigError(f"group must be an index of the {len(flats)} groups of params; got {group!r}.")
        new = (*flats[:group], memory, *flats[group + 1 :])
        check_memory("memory", new, flats, self._slots)
        memory.copy_(flats[group])
        return new

    def _bind_params(self, flats: tuple[Tensor, ...]) -> None:
        self.params = flats
        for slot in self._slots:
            slot.bind(flats[slot.group])

    def _bind_grads(self) -> None:
        # In place, as the hooks hold these two lists.
        self._grad_views[:] = [slot.view(self.grads[slot.group]) for slot in self._slots]
        self._grad_pointers[:] = [view.data_ptr() for view in self._grad_views]

    # --- agreement ------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raises ConfigError where a parameter was moved, converted, replaced, added, removed, frozen or unfrozen."""
        check_parameters(self.module, self._all_slots)

    def sync_buffers(self) -> None:
        """Takes buffers that the module has replaced (`self.mean = new`) into `buffers`. Call before reading these.

        Raises ConfigError where a buffer is new, gone, of another shape, dtype or device, or no longer tied.
        """
        self._buffers.sync()

    def description(self) -> str:
        """Name, kind, dtype, shape and group of each tensor, a line each; `describe_difference` compares two."""
        return describe(self._all_slots, self._buffers.slots)

    def signature(self) -> str:
        """sha256 of the description, in hexadecimal. Equal on two ranks where their flat memory means the same."""
        return hashlib.sha256(self.description().encode()).hexdigest()

    def close(self) -> None:
        """Removes the hooks. The module goes on alone, in the same memory. May be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._announcer.callback = None
