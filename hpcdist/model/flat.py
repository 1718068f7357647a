"""Lay a model's parameters, gradients and buffers out as flat views of the module's own memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.errors import ConfigError
from hpcdist.model.buckets import Bucket, check_caps
from hpcdist.model.flat_buffers import FlatBuffers
from hpcdist.model.gradients import Gradients
from hpcdist.model.passes import Passes
from hpcdist.model.pieces import some_values, sum_and_norm, sums
from hpcdist.model.slots import (
    Structure,
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
    """Lay a module's tensors out in flat memory: a change there changes the module, and the other way round.

    Tensors are grouped by (dtype, device), groups in order of first appearance. Within a group they lie in the order
    of `module.parameters()` (or `.buffers()`), row-major and without padding; a tied parameter lies there once.
    Parameter objects stay the same, so an optimiser made before or after wrapping works. Shapes and values stay.
    Strides become contiguous (a channels_last or transposed parameter is row-major from here on) and a parameter may
    start at any element. Training is to the bit that of the plain module wherever torch's kernels don't look at these
    two; MKL's matrix-vector product does look at 16-byte alignment, which changes last bits for batches of one.

    Gradients: `p.grad` is a view of `grads`. After `zero_grad(set_to_none=True)` autograd makes a fresh tensor, which
    a hook copies into the flat gradient: a read and a write per element, against a write, two reads and a write for
    zeroing and adding to the view, as `set_to_none=False` does. Both modes accumulate over several backward passes.
    Sparse gradients (`nn.Embedding(sparse=True)`) are made dense, so use a dense optimiser. At a step: `refresh()`,
    `collect()` or `flush()`, communicate `grads`, `release(used)`, let the optimiser step, `passes.done()`. Where
    nobody but the optimiser reads gradients they need not be flat: `leave_gradients()` once, and at a step `settle()`
    in place of `collect()`, `flush()` and `release()`.

    Autograd does not notice writes to flat memory between a forward pass and its backward pass.

    Attributes:
        params: flat trainable parameters, one 1-D tensor per group; complex ones as (real, imaginary) pairs.
        grads: their flat gradients, same shapes; zero at first. Empty after `leave_gradients`, and so are buckets.
        frozen: flat parameters with requires_grad=False, integer ones included.
        buffers: flat buffers, non-persistent and integer ones (num_batches_tracked) included.
        buckets: ranges of `grads` in the order in which the backward pass completes them.
        names: names of the trainable parameters, in the order of `module.parameters()`.
        n_params, n_bytes: elements and bytes of all trainable parameters.
        passes: the backward passes since the last step.
        is_swapped: whether the module has other values meanwhile, see `swapped`.
        moves: how many parameters have been taken back from other memory so far.

    Args:
        module: initialised, dense, on its device, in its dtype: move it first, wrap it after.
        bucket_bytes: cap of a bucket. first_bucket_bytes: cap of each group's first one, if smaller.
        extra: parameters beside the module's, such as a loss function's, with names for messages.
        only: those that are to be trained; all, if None. The module's other trainable ones stay where they are.
        rest: False leaves frozen parameters and buffers to another FlatModel, that of other parameters.

    Raises:
        ConfigError: a cap is no positive integer, or a tensor can't lie in flat memory.

    Reference: for buckets, Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_bytes: int = 25 << 20,
        first_bucket_bytes: int = 1 << 20,
        extra: Sequence[tuple[str, nn.Parameter]] = (),
        only: Iterable[nn.Parameter] | None = None,
        rest: bool = True,
    ):
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module must be a torch.nn.Module; got {type(module).__name__}. Pass the model itself.")
        check_caps(bucket_bytes, first_bucket_bytes)
        self.module, self._extra, self._caps = module, tuple(extra), (bucket_bytes, first_bucket_bytes)
        self._only, self._rest = None if only is None else set(map(id, only)), rest
        self.passes = Passes()
        self.is_swapped = False
        self.moves = 0
        self._buffers: FlatBuffers | None = None
        self._gradients: Gradients | None = None
        self._lay_out(callback=None)

    def _lay_out(self, callback: Callable[[Bucket], None] | None) -> None:
        """Move all tensors into flat memory, those that are trainable now apart from the frozen ones."""
        named = self._named()
        check_flattenable(named, [] if self._buffers else self.module.named_buffers())
        self._slots, self.params = flatten((name, p) for name, p in named if p.requires_grad)
        self._frozen_slots, self.frozen = flatten((name, p) for name, p in named if not p.requires_grad)
        self._buffers = self._buffers or FlatBuffers(self.module if self._rest else nn.Module())
        by_name = {slot.name: slot for slot in self._slots + self._frozen_slots}
        self._all_slots = [by_name[name] for name, _ in named]  # in the module's order
        self._structure = Structure(self.module)
        self.names = tuple(slot.name for slot in self._slots)
        self.n_params = sum(slot.tensor.numel() for slot in self._slots)
        self.n_bytes = sum(flat.numel() * flat.element_size() for flat in self.params)
        self._watch_gradients(self._gradients is None or self._gradients.flat)
        self._gradients.announcer.callback = callback

    def _watch_gradients(self, flat: bool, flats: Sequence[Tensor] | None = None) -> None:
        if self._gradients is not None:
            self._gradients.remove_hooks()
        self._gradients = Gradients(
            self._slots, self.params, self.passes, self._caps, self.refresh, flat=flat, flats=flats
        )
        self.grads, self.buckets = self._gradients.flats, self._gradients.buckets
        self.passes.watch(self.parameters(), self.grads)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that this view is of, in the module's order."""
        named = [*self.module.named_parameters(), *self._extra]
        return [(name, p) for name, p in named if (self.trains(p) if p.requires_grad else self._rest)]

    def trains(self, parameter: nn.Parameter) -> bool:
        """Tell whether the parameter is one of those that are to be trained."""
        return self._only is None or id(parameter) in self._only

    def others(self) -> list[Tensor]:
        """Return the module's parameters that this view is not of."""
        own = {id(slot.tensor) for slot in self._all_slots}
        return [p.detach() for p in self.module.parameters() if id(p) not in own]

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Return the flat buffers, as the module has them now.

        Raises:
            ConfigError: a buffer is new, gone, of another shape, dtype or device, or no longer tied.
        """
        self._buffers.sync()
        return self._buffers.flats

    # --- batches --------------------------------------------------------------------------------------------------
    def begin_batch(self, weight: float = 1.0, *, ends_epoch: bool = False) -> None:
        """Begin a batch, before its forward pass. A loop that never says so has batches of weight 1.

        Args:
            weight: this rank's number of samples in the step over the workers' mean number. A batch of weight 0 leaves
                no trace in gradients or buffers.
            ends_epoch: it is the last one of an epoch, after which gradients may be fewer than is said.
        """
        self._buffers.restore()
        if weight == 0.0:
            self._buffers.keep()
        self.passes.begin_batch(weight, ends_epoch=ends_epoch)

    def end_batches(self) -> None:
        """End the last batch of a loop: backward passes that follow weigh 1, and count as of no new batch."""
        self._buffers.restore()
        self.passes.end_batches()

    @property
    def weight(self) -> float:
        """Return the weight of the batch that began last."""
        return self.passes.weight

    def restore_buffers(self) -> None:
        """Undo the changes of a batch of weight 0 to the buffers."""
        self._buffers.restore()

    def accept_buffers(self) -> None:
        """Leave the buffers as they are now: they are of all ranks, and a batch of weight 0 has added nothing."""
        self._buffers.forget()

    def exempt_buffers(self, tensors: Iterable[Tensor]) -> None:
        """Let buffers change also in a batch of weight 0, as they change by all ranks' batches together."""
        self._buffers.exempt(tensors)

    def admit(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train these parameters, too, from here on, once they are not frozen.

        Raises:
            ConfigError: one is not the module's, or was trainable and left out when the model was wrapped.
        """
        parameters = list(parameters)
        own = {id(slot.tensor): slot.name for slot in self._all_slots}
        if any(id(parameter) not in own for parameter in parameters):
            raise ConfigError(
                "add_param_group must get parameters that the model had, frozen or trained, when it was wrapped; got "
                "others. Give the optimiser all of them before it becomes a DistributedOptimizer."
            )
        self._only = None if self._only is None else self._only | set(map(id, parameters))

    # --- gradients ------------------------------------------------------------------------------------------------
    def leave_gradients(self) -> None:
        """Leave gradients where autograd makes them, from here on: nothing is copied, there are no `grads`."""
        self._watch_gradients(flat=False)

    def move_gradients(self, flats: Sequence[Tensor]) -> None:
        """Keep gradients in other memory from here on: tensors of zeros, like `params`. Before the first batch."""
        self._watch_gradients(flat=True, flats=flats)

    def settle(self) -> None:
        """Leave to the optimiser the gradients that count, wherever they are: none from batches of weight 0."""
        self._gradients.settle()

    def collect(self) -> Tensor:
        """Make every element of `grads` valid: zero where a parameter has no gradient, else its gradient.

        From batches of weight 0 no parameter has one.

        Returns:
            bool tensor on the CPU, one per trainable parameter: True where it has a gradient.

        Raises:
            ConfigError: a gradient was replaced after its bucket was announced, so others got the old one.
        """
        return self._gradients.collect()

    def release(self, used: Tensor | Sequence[bool]) -> None:
        """Give the view to each parameter with a True in `used`, and no gradient (None) to the others.

        `used` is in the order of `names`: the result of `collect()`, or'ed over the ranks. An optimiser then skips
        exactly the parameters that a plain run on the ranks' joint batch would skip.
        """
        self._gradients.release(used)

    def reveal(self) -> None:
        """Give back gradients that a batch of weight 0 has hidden from the optimiser, as zeros to be read."""
        self._gradients.reveal()

    def unscale(self, factor: float) -> None:
        """Multiply the gradients, which counts as no change of them."""
        self._gradients.unscale(factor)

    def changed_since_backward(self) -> bool:
        """Tell whether somebody has changed gradients since the last backward pass ended, such as by clipping them."""
        return self.passes.changed_since() or (bool(self.passes) and self._gradients.some_replaced())

    def nonfinite(self, bucket: Bucket | None = None) -> list[str]:
        """Name the parameters whose gradient holds NaN or infinity; none as a rule.

        One read of the gradients (of `bucket`, or of all, collected or settled): a NaN or an infinity survives in the
        sum. Only where the sum is not finite (it may also have overflowed) is each gradient looked at. Waits for the
        device.
        """
        return self._gradients.nonfinite(bucket)

    # --- buckets --------------------------------------------------------------------------------------------------
    def on_bucket_ready(self, callback: Callable[[Bucket], None] | None) -> None:
        """Set a callback for each bucket, in order, once all of its parameters have their gradient.

        It runs during the backward pass, on autograd's thread and with the stream that the gradient was written on.
        """
        self._gradients.announcer.callback = callback

    def begin(self, announce: bool = True, passes: int = 1) -> None:
        """Begin a step of `passes` backward passes, in the last of which buckets are announced; or not at all."""
        self._gradients.announcer.begin(announce, passes)

    def flush(self) -> Tensor:
        """Collect, announce every bucket not yet announced, and return the flags of parameters with a gradient.

        Until the next `begin()` a further gradient is refused, whatever the last pass was armed for.
        """
        used = self.collect()
        self._gradients.announcer.flush()
        return used

    # --- values ---------------------------------------------------------------------------------------------------
    def copy_params(self) -> tuple[Tensor, ...]:
        """Copy `params`, as new tensors."""
        return tuple(flat.clone() for flat in self.params)

    def load_params(self, tensors: Sequence[Tensor]) -> None:
        """Copy `tensors` (as from `copy_params`, on any device) into `params`."""
        check_values("tensors", tensors, self.params)
        for flat, tensor in zip(self.params, tensors, strict=True):
            flat.copy_(tensor.detach())

    @contextmanager
    def swapped(
        self, params: Sequence[Tensor] | None = None, buffers: Sequence[Tensor] | None = None
    ) -> Iterator[None]:
        """Give the module other values inside the context; afterwards its own again, to the bit.

        The tensors given (shapes and dtypes as `params` and `buffers`, same device) become the module's memory, so
        that nothing is copied and the original memory, which other ranks may be reading, is never written. Changes
        made inside the context land in the tensors given and end with it. None: keep one's own.
        """
        own_params, own_buffers = self.params, self.buffers
        new_params = own_params if params is None else tuple(params)
        new_buffers = own_buffers if buffers is None else tuple(buffers)
        check_memory("params", new_params, own_params, self._slots)
        check_memory("buffers", new_buffers, own_buffers, self._buffers.slots)
        try:
            self.is_swapped = True
            self._bind_params(new_params)
            self._buffers.bind(new_buffers)
            yield
        finally:
            self.is_swapped = False
            self._bind_params(own_params)
            self._buffers.bind(own_buffers)

    def named_slices(self) -> Iterator[tuple[str, int, int, int, torch.Size]]:
        """Yield (name, group, start, stop, shape) of each trainable parameter in `params[group]`."""
        for slot in self._slots:
            yield slot.name, slot.group, slot.start, slot.stop, slot.shape

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters, in the order of `names`."""
        return [slot.tensor for slot in self._slots]

    def views(self, flats: Sequence[Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each trainable parameter, in the order of `names`, and its part of `flats`, tensors like `params`."""
        for slot in self._slots:
            yield slot.tensor, slot.view(flats[slot.group])

    def mark(self) -> None:
        """Remember the parameters' values, for `touched` to compare with."""
        self._marked = sums(self.params)

    def touched(self) -> bool:
        """Tell whether the parameters have other values than at the last `mark`."""
        return self._marked != sums(self.params)

    def sketch(self) -> list[tuple[float, float]]:
        """Return the sum and the 2-norm of each of `params`: equal replicas have the same, but for rounding."""
        return [sum_and_norm(flat) for flat in self.params]

    def changes(self) -> list[int | bytes]:
        """Count changes of each parameter by torch's functions, and tell its memory; with some of the values.

        Writes into `p.data` (`p.data.clamp_()`) are not counted by torch: they are seen where one of these values, up
        to 256 of each of `params`, is another.
        """
        counts: list[int | bytes] = [self.moves]
        for slot in self._slots:
            counts += slot.tensor._version, slot.tensor.data_ptr()
        return [*counts, *map(some_values, self.params)]

    # --- memory ---------------------------------------------------------------------------------------------------
    def _bind_params(self, flats: tuple[Tensor, ...]) -> None:
        self.params = flats
        for slot in self._slots:
            slot.bind(flats[slot.group])

    # --- agreement ------------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Take in changes of the module since the last step. Costs less than a microsecond a parameter.

        Parameters that were given other memory (`p.data = ...`, `vector_to_parameters`, `.double().float()`) move back
        with their new values. One that was frozen stays where it is, and has no gradient.

        Raises:
            ConfigError: a parameter was replaced, added, removed, or given another dtype or device.
        """
        if self._structure.changed():
            self._check_structure()
        for slot in self._all_slots:
            if slot.moved():
                slot.take_back((self.params if slot.trainable else self.frozen)[slot.group])
                self.moves += 1

    def _check_structure(self) -> None:
        own = {id(slot.tensor) for slot in self._all_slots}
        known = own | {id(tensor) for tensor in self._structure.tensors}
        named = [*self.module.named_parameters(), *self._extra]
        check_parameters([(name, p) for name, p in named if id(p) in own or id(p) not in known], self._all_slots)

    @property
    def unfrozen(self) -> str | None:
        """Name a parameter to train that was frozen when the model was wrapped, and is not any more."""
        thawed = (slot for slot in self._frozen_slots if slot.tensor.requires_grad and self.trains(slot.tensor))
        return next((slot.name for slot in thawed), None)

    def buffer_tensors(self) -> list[Tensor]:
        """Return the module's own buffers, each once, in the same order until one is new or gone."""
        return self._buffers.tensors()

    def lay_out_again(self) -> None:
        """Make parameters that have been unfrozen trainable: `params`, `grads`, `buckets` and `names` are new.

        Gradients stay, those of such a parameter weighed as the others' were. Whatever holds the old memory must let
        go of it.
        """
        new = {id(slot.tensor) for slot in self._frozen_slots if slot.tensor.requires_grad}
        held = [(slot.tensor, slot.tensor.grad) for slot in self._all_slots]
        self._lay_out(self._gradients.announcer.callback)
        views = {id(parameter): view for parameter, view in self._gradients.views()}
        for tensor, grad in held:
            if grad is None:
                continue
            if self.passes.weighs and id(tensor) in new:
                tensor.grad = grad = grad * self.weight
            if id(tensor) in views:
                tensor.grad = views[id(tensor)].copy_(grad)

    def layout(self) -> dict[str, Any]:
        """Describe the places of the tensors in `params`, `frozen` and `buffers`, see `Slot.place`.

        `also` has the other names of tensors that the module has in several places, each with the one that counts;
        `beside` names those that its state dict lacks, such as parameters of a loss.
        """
        names = {id(slot.tensor): slot.name for slot in (*self._all_slots, *self._buffers.slots)}
        module, known = self.module, self.module.state_dict(keep_vars=True)
        all_names = [
            *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
        ]  # fmt: skip
        also = {name: names[id(t)] for name, t in all_names if id(t) in names and name != names[id(t)]}
        slots = {"params": self._slots, "frozen": self._frozen_slots, "buffers": self._buffers.slots}
        beside = [name for name in names.values() if name not in known]
        return {key: [slot.place() for slot in own] for key, own in slots.items()} | {"also": also, "beside": beside}

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the name of a parameter that this view is of; None for another one."""
        return next((slot.name for slot in self._all_slots if slot.tensor is parameter), None)

    def description(self) -> str:
        """Describe each tensor in a line: name, role, dtype, shape, group; `describe_difference` compares two."""
        return describe(self._all_slots, self._buffers.slots)

    def signature(self) -> str:
        """Return the description's sha256, in hexadecimal; equal on ranks whose flat memory is laid out alike."""
        return hashlib.sha256(self.description().encode()).hexdigest()

    def close(self) -> None:
        """Remove the hooks. The module goes on alone, in the same memory. May be called twice."""
        self._gradients.remove_hooks()
        self.passes.end_batches()
        self.passes.on_end(None)
        self._gradients.announcer.callback = None
