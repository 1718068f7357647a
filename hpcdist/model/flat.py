"""A model's parameters, gradients and buffers in flat memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_

from torch import Tensor, nn

from hpcdist.comm.chunks import some_values, sums
from hpcdist.errors import ConfigError
from hpcdist.model.buckets import check_caps
from hpcdist.model.flat_buffers import FlatBuffers
from hpcdist.model.gradients import Gradients
from hpcdist.model.slots import bind, check_flattenable, check_memory, check_parameters, flatten, move_in, unwrapped

_MOVED = " (by module.to(), .half(), p.data = ... or similar). Move or convert the module before wrapping it."


@contextmanager
def zeroed(parts: Sequence[Tensor], *, adds: bool = False) -> Iterator[None]:
    """Set tensors to zero inside the context; afterwards restore their values or, if `adds`, add them to the new ones.

    Without a gradient on any rank a parameter must not change, as torch's optimisers skip a parameter whose gradient is
    None. So state from earlier steps waits for its next gradient: momentum of an outer step (`FlatModel.skip_unused`),
    and error-feedback residuals (`compress.only_used`).
    """
    before = [part.clone() for part in parts]
    for part in parts:
        part.zero_()
    try:
        yield
    finally:  # also if a rank has failed, and the others continue
        for part, value in zip(parts, before, strict=True):
            part.add_(value) if adds else part.copy_(value)


class FlatModel:
    """A module whose tensors are views of flat memory: a change in one changes the other.

    Tensors are grouped by (dtype, device), in order of first appearance. A group has the order of `module.parameters()`
    (or `.buffers()`), row-major and without padding; a tied parameter is stored once. Parameter objects, shapes and
    values stay, so that an optimiser may be created before or after wrapping. Strides become contiguous (a
    channels_last parameter is row-major afterwards), and a parameter may start at any element. Training is bitwise that
    of the plain module, unless a kernel of torch depends on strides or alignment, as MKL's matrix-vector product does
    for batches of one sample.

    Gradients: `p.grad` is a view of `grads`. After `zero_grad(set_to_none=True)` autograd creates a new tensor, which a
    hook copies into the flat gradient: one read and one write for each element. `set_to_none=False` zeroes the view and
    adds to it: two reads and two writes. Both accumulate over several backward passes. Sparse gradients
    (`nn.Embedding(sparse=True)`) become dense, so use a dense optimiser. At a step call `refresh()`,
    `gradients.collect()`, communicate `grads`, then `gradients.release(used)`, the optimiser's step and
    `gradients.done()`. If only the optimiser reads gradients, they need not be flat: call `keep_gradients(None)` once,
    and at a step `gradients.collect()` before the optimiser's step and `done()` after it.

    Example:
        >>> from hpcdist.model import FlatModel
        >>> [flat.shape for flat in FlatModel(model).params]  # 4 x 2 weights and 2 biases
        [torch.Size([10])]

    Autograd does not notice writes to flat memory between a forward pass and its backward pass.

    Attributes:
        params: flat trainable parameters, one 1-D tensor per group; complex ones as (real, imaginary) pairs.
        grads: the flat gradients, like `params`; zero at first. Empty if autograd stores gradients itself.
        frozen: flat parameters with requires_grad=False, integer ones included.
        slots: name, tensor and position in `params` of each trainable parameter, in the order of `module.parameters()`;
            `slot.view(flats)` is the parameter's part of tensors like `params`.
        frozen_slots: the same for frozen parameters and `frozen`.
        gradients: the trainable parameters' gradients, their buckets, and the backward passes since the last step.
        flat_buffers: the buffers, and their values before a batch of weight 0.
        is_swapped: the module currently has other values, see `swapped`.

    Args:
        module: initialised, dense, on its device, in its dtype.
        bucket_bytes, first_bucket_bytes: maximum size of a bucket, and of the first bucket of each group.
        extra: further parameters, such as a loss function's, with names for messages.
        only: the parameters to train; None: all. Other trainable parameters stay outside of flat memory.
        buffers: kinds of buffers, see FlatBuffers.
        rest: False leaves frozen parameters and buffers to another FlatModel of the same module.
        watched: False leaves it to `gradients.watch` to add the hooks.

    Raises:
        ConfigError: a cap is not a positive integer, or a tensor can't lie in flat memory.

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
        buffers: Mapping[str, str] | None = None,
        rest: bool = True,
        watched: bool = True,
    ):
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module must be a torch.nn.Module; got {type(module).__name__}. Pass the model itself.")
        check_caps(bucket_bytes, first_bucket_bytes)
        self.module, self._extra = module, tuple(extra)
        self._only, self._rest = None if only is None else set(map(id, only)), rest
        self.is_swapped = False
        self._moves = 0  # number of times that a parameter was moved back from other memory
        check_flattenable(self._named(), module.named_buffers())
        self.flat_buffers = FlatBuffers(module, buffers) if rest else FlatBuffers(nn.Module())
        self.gradients = Gradients((bucket_bytes, first_bucket_bytes), self.refresh, self.flat_buffers, watched)
        self._has_grads = True
        self._lay_out()

    def _lay_out(self) -> None:
        """Move parameters into flat memory: the trainable ones to `params`, the others to `frozen`."""
        named = self._named()
        self.slots, self.params = flatten((name, p) for name, p in named if p.requires_grad)
        self.frozen_slots, self.frozen = flatten((name, p) for name, p in named if not p.requires_grad)
        by_name = {slot.name: slot for slot in self.slots + self.frozen_slots}
        self._all_slots = [by_name[name] for name, _ in named]  # in the module's order
        self._tensors = [slot.tensor for slot in self.slots + self.frozen_slots]
        self._pointers = [*map(Tensor.data_ptr, self._tensors)]
        parts = [(module._parameters, module._modules) for module in self.module.modules()]
        self._parts = [part for both in parts for part in both]  # each module's parameters, and its layers
        self._counts = [*map(len, self._parts)]
        self._holders = [parameters.values for parameters, _ in parts if parameters]
        self._held = [parameter for values in self._holders for parameter in values()]
        self.keep_gradients([flat.new_zeros(len(flat)) for flat in self.params] if self._has_grads else None)

    def keep_gradients(self, flats: Sequence[Tensor] | None) -> None:
        """Store gradients in `flats`, zeros like `params`. Call it before the first batch.

        None: autograd stores gradients itself; nothing is copied, and there is no flat memory.
        """
        self._has_grads, self.grads = flats is not None, tuple(flats or ())
        self.gradients._watch(self.slots, flats)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of this FlatModel, in the module's order."""
        named = [*unwrapped(self.module, self.module.named_parameters()), *self._extra]
        return [(name, p) for name, p in named if (self._trains(p) if p.requires_grad else self._rest)]

    def _trains(self, parameter: Tensor) -> bool:
        """Return whether the parameter is to be trained."""
        return self._only is None or id(parameter) in self._only

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Return the flat buffers with the module's current values, non-persistent and integer ones included.

        Raises:
            ConfigError: a buffer is new, removed, no longer tied, or has another shape, dtype or device.
        """
        return self.flat_buffers._sync()

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let `relayout` train these parameters once they are not frozen: those of `add_param_group`.

        Raises:
            ConfigError: one does not belong to this FlatModel.
        """
        parameters = list(parameters)
        known = {id(slot.tensor): slot.name for slot in self._all_slots}
        if any(id(parameter) not in known for parameter in parameters):
            raise ConfigError(
                "add_param_group must get parameters that the model had, frozen or trained, when it was wrapped; got "
                "others. Pass all of them to the optimiser before it becomes a DistributedOptimizer."
            )
        self._only = None if self._only is None else self._only | set(map(id, parameters))

    def move_params(self, flats: Sequence[Tensor]) -> None:
        """Move the trainable parameters into `flats`, which replace `params`."""
        for flat, own in zip(flats, self.params, strict=True):
            flat.copy_(own)
        self._bind(tuple(flats), self.buffers, self.frozen)

    def _bind(self, params: tuple[Tensor, ...], buffers: tuple[Tensor, ...], frozen: tuple[Tensor, ...]) -> None:
        """Use these tensors as the module's memory."""
        self.params, self.frozen = params, frozen
        bind(self.slots, params)
        bind(self.frozen_slots, frozen)
        self.flat_buffers._bind(buffers)
        self._pointers = [*map(Tensor.data_ptr, self._tensors)]

    # --- values ---------------------------------------------------------------------------------------------------
    @contextmanager
    def swapped(
        self, params: Sequence[Tensor] | None = None, buffers: Sequence[Tensor] | None = None,
        frozen: Sequence[Tensor] | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Replace the module's values inside the context; restore them bitwise afterwards.

        The tensors (like the attributes of these names, on the same device) become the module's memory. Nothing is
        copied, and the original memory, which other ranks may be reading, is never written. Changes inside the context
        go to the new tensors. None keeps the module's values.
        """
        old = self.params, self.buffers, self.frozen
        new = [was if now is None else tuple(now) for was, now in zip(old, (params, buffers, frozen), strict=True)]
        slots = self.slots, self.flat_buffers.slots, self.frozen_slots
        for i, name in enumerate(("params", "buffers", "frozen")):
            check_memory(name, new[i], old[i], slots[i])
        try:
            self.is_swapped = True
            self._bind(*new)
            yield
        finally:
            self.is_swapped = False
            self._bind(*old)

    @contextmanager
    def skip_unused(
        self, used: Iterable[bool], momentum: Sequence[Tensor], ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[None]:
        """Set the momentum of parameters that are not `used` to zero inside the context; restore it afterwards.

        Args:
            used: a flag for each parameter: some rank has a gradient of it.
            momentum: tensors like `params`, or none.
            ranges: the elements of `params` that the tensors hold; None: all.
        """
        spans = ranges or [(0, flat.numel()) for flat in self.params]
        parts = []
        unused = (slot for slot, is_used in zip(self.slots, used, strict=True) if not is_used)
        for slot in unused if momentum else ():
            first, last = spans[slot.group]
            parts.append(momentum[slot.group][max(slot.start - first, 0) : max(min(slot.stop, last) - first, 0)])
        with zeroed(parts):
            yield

    def take_snapshot(self) -> None:
        """Store checksums of the parameters, for `touched`."""
        self._snapshot = sums(self.params)

    def touched(self) -> bool:
        """Return whether the parameters have changed since `take_snapshot`."""
        return self._snapshot != sums(self.params)

    def changes(self) -> list[int | bytes]:
        """Return values that differ once parameters have changed: torch's version counters, addresses, some elements.

        torch does not count writes to `p.data` (`p.data.clamp_()`); they are found if they change one of the up to 256
        elements that are compared of each of `params`.
        """
        counts: list[int | bytes] = [self._moves]
        for slot in self.slots:
            counts += slot.tensor._version, slot.tensor.data_ptr()
        return [*counts, *map(some_values, self.params)]

    # --- changes of the module ------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Move parameters back to flat memory if the loop has moved them. Takes about 0.1 µs per parameter.

        `p.data = ...`, `vector_to_parameters` or `.double().float()` move them, for example. A parameter that was
        frozen stays in `frozen`, without gradient.

        Raises:
            ConfigError: a parameter was replaced, added, removed, or has another dtype or device.
        """
        held = [parameter for values in self._holders for parameter in values()]
        if [*map(len, self._parts)] != self._counts or not all(map(is_, held, self._held)):
            self._check_structure()
        if [*map(Tensor.data_ptr, self._tensors)] == self._pointers:
            return
        for slots, flats in ((self.slots, self.params), (self.frozen_slots, self.frozen)):
            for slot in slots:
                if slot.tensor.data_ptr() != slot.view(flats).data_ptr():
                    move_in(slot, slot.tensor, flats, "parameter", _MOVED)
                    self._moves += 1

    def _check_structure(self) -> None:
        """Raise ConfigError if a parameter of this FlatModel was replaced, added or removed.

        Parameters that the module had when it was wrapped, but that belong to no slot (see `only`), are not compared.
        """
        own_ids = {id(slot.tensor) for slot in self._all_slots}
        all_ids = own_ids | set(map(id, self._held))
        named = [*self.module.named_parameters(), *self._extra]
        check_parameters([(name, p) for name, p in named if id(p) in own_ids or id(p) not in all_ids], self._all_slots)

    @property
    def unfrozen(self) -> str | None:
        """The name of a parameter that was frozen when the model was wrapped, and is trainable now; else None."""
        unfrozen = (slot for slot in self.frozen_slots if slot.tensor.requires_grad and self._trains(slot.tensor))
        return next((slot.name for slot in unfrozen), None)

    def relayout(self) -> None:
        """Make unfrozen parameters trainable: `params`, `grads`, `buckets` and `slots` become new objects.

        Gradients stay; those of an unfrozen parameter are weighted now. The old flat tensors must not be used any more.
        """
        unfrozen = [slot.tensor for slot in self.frozen_slots if slot.tensor.requires_grad]
        check_flattenable(self._named(), [])
        self._lay_out()
        for tensor in unfrozen if self.gradients._weights_batches else ():
            if tensor.grad is not None:
                tensor.grad = tensor.grad * self.gradients.weight
        if self._has_grads:
            for slot in self.slots:
                if slot.tensor.grad is not None:
                    slot.view(self.grads).copy_(slot.tensor.grad)
            self.gradients.release(self.gradients.present())

    def description(self) -> str:
        """Describe each tensor in a line: name, role, dtype, shape, group. Equal texts mean equal layouts."""
        roles = {slot.name: "frozen" for slot in self.frozen_slots}
        named = [(roles.get(slot.name, "trainable"), slot, slot.tensor) for slot in self._all_slots]
        named += [("buffer", slot, slot.tensor) for slot in self.flat_buffers.slots]
        return "\n".join(
            f"{slot.name}: {role} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} in group {slot.group}"
            for role, slot, tensor in named
        )

    def close(self) -> None:
        """Remove the hooks, and copy each tensor to separate memory. May be called twice."""
        self.gradients._watch((), None)
        for slot in (*self._all_slots, *self.flat_buffers.slots):  # torch.save would save a view's whole flat tensor
            slot.tensor.data = slot.tensor.detach().clone()
