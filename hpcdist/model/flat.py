"""A model's parameters, gradients and buffers in flat memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from hpcdist.comm.pieces import some_values, sums
from hpcdist.errors import ConfigError
from hpcdist.model.buckets import check_caps
from hpcdist.model.flat_buffers import FlatBuffers
from hpcdist.model.gradients import Gradients
from hpcdist.model.slots import (
    bind,
    check_flattenable,
    check_memory,
    check_parameters,
    flatten,
    getter,
    unwrapped,
)

_MOVED = " (by module.to(), .half(), p.data = ... or the like). Move or convert the module first, wrap it after."


@contextmanager
def set_aside(parts: Sequence[Tensor], *, adds: bool = False) -> Iterator[None]:
    """Have zeros in these tensors inside the context, and afterwards what was there; or, if it `adds`, both together.

    A parameter of which no rank has a gradient is left alone, as torch's optimisers leave one whose gradient is None.
    So what earlier steps have left must not move it, and waits for its next gradient: momentum of an outer step
    (`FlatModel.leave_alone`), and what compression has not sent (`compress.only_used`).
    """
    before = [part.clone() for part in parts]
    for part in parts:
        part.zero_()
    try:
        yield
    finally:  # also where a rank has died, and the others go on
        for part, value in zip(parts, before, strict=True):
            part.add_(value) if adds else part.copy_(value)


class FlatModel:
    """A module whose tensors lie in flat memory: a change there changes the module, and the other way round.

    Tensors are grouped by (dtype, device), in order of first appearance. Within a group they lie in the order of
    `module.parameters()` (or `.buffers()`), row-major and without padding; a tied parameter lies there once. Parameter
    objects, shapes and values stay, so that an optimiser may be made before or after wrapping. Strides become
    contiguous (a channels_last parameter is row-major afterwards), and a parameter may start at any element. Training
    has the same bits as with the plain module, unless one of torch's kernels looks at strides or alignment: MKL's
    matrix-vector product does, which changes the last bits for batches of one sample.

    Gradients: `p.grad` is a view of `grads`. After `zero_grad(set_to_none=True)` autograd makes a new tensor, which a
    hook copies into the flat gradient: one read and one write for each element. `set_to_none=False` zeroes the view and
    adds to it: two reads and two writes. Both accumulate over several backward passes. Sparse gradients
    (`nn.Embedding(sparse=True)`) become dense, so use a dense optimiser. At a step call `refresh()`,
    `gradients.collect()`, communicate `grads`, then `gradients.release(used)`, the optimiser's step and
    `gradients.done()`. If only the optimiser reads gradients, they need not be flat: call `keep_gradients(None)` once,
    and at a step `gradients.collect()` before the optimiser's step and `done()` after it.

    Autograd does not notice writes to flat memory between a forward pass and its backward pass.

    Attributes:
        params: flat trainable parameters, one 1-D tensor per group; complex ones as (real, imaginary) pairs.
        grads: the flat gradients, like `params`; zero at first. Empty where gradients are left to autograd.
        frozen: flat parameters with requires_grad=False, integer ones included.
        slots: of each trainable parameter its name, itself (`tensor`), and its place in `params`, in the order of
            `module.parameters()`; `slot.view(flats)` is its part of tensors like `params`.
        frozen_slots: of the frozen ones likewise, in `frozen`.
        gradients: the trainable parameters' gradients, their buckets, and the backward passes since the last step.
        flat_buffers: the buffers, with what a batch of weight 0 has changed in them.
        is_swapped: the module has other values for the moment, see `swapped`.

    Args:
        module: initialised, dense, on its device, in its dtype: move it first, wrap it after.
        bucket_bytes, first_bucket_bytes: the largest bucket, and the largest first bucket of each group.
        extra: parameters beside the module's, such as a loss function's, with names for messages.
        only: the parameters to train; None for all. Other trainable parameters stay where they are.
        buffers: kinds of buffers, see FlatBuffers.
        rest: False leaves frozen parameters and buffers to another FlatModel of the same module.

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
    ):
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module must be a torch.nn.Module; got {type(module).__name__}. Pass the model itself.")
        check_caps(bucket_bytes, first_bucket_bytes)
        self.module, self._extra = module, tuple(extra)
        self._only, self._rest = None if only is None else set(map(id, only)), rest
        self.is_swapped = False
        self._moves = 0  # parameters that had to be moved back from other memory so far
        check_flattenable(self._named(), module.named_buffers())
        self.flat_buffers = FlatBuffers(module, buffers) if rest else FlatBuffers(nn.Module())
        self.gradients = Gradients((bucket_bytes, first_bucket_bytes), self.refresh, self.flat_buffers)
        self._has_grads = True
        self._lay_out()

    def _lay_out(self) -> None:
        """Move parameters into flat memory, the trainable and the frozen ones apart."""
        named = self._named()
        self.slots, self.params = flatten((name, p) for name, p in named if p.requires_grad)
        self.frozen_slots, self.frozen = flatten((name, p) for name, p in named if not p.requires_grad)
        by_name = {slot.name: slot for slot in self.slots + self.frozen_slots}
        self._all_slots = [by_name[name] for name, _ in named]  # in the module's order
        modules = list(self.module.modules())
        held = [(getter(m._parameters), m._parameters) for m in modules]  # to notice changes quickly
        self._places = [(get, key, p) for get, own in held for key, p in own.items() if p is not None]
        self._counts = [(m._parameters, m._modules, len(m._parameters), len(m._modules)) for m in modules]
        self.keep_gradients([flat.new_zeros(len(flat)) for flat in self.params] if self._has_grads else None)

    def keep_gradients(self, flats: Sequence[Tensor] | None) -> None:
        """Keep gradients in `flats`, zeros like `params`. Call it before the first batch.

        None leaves them where autograd makes them: nothing is copied, and there is no flat memory.
        """
        self._has_grads, self.grads = flats is not None, tuple(flats or ())
        self.gradients.watch(self.slots, flats)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """Return this view's parameters, in the module's order."""
        named = [*unwrapped(self.module, self.module.named_parameters()), *self._extra]
        return [(name, p) for name, p in named if (self._trains(p) if p.requires_grad else self._rest)]

    def _trains(self, parameter: Tensor) -> bool:
        """Tell whether the parameter is to be trained."""
        return self._only is None or id(parameter) in self._only

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers as the module has them now, non-persistent and integer ones (num_batches_tracked) included.

        Raises:
            ConfigError: a buffer is new, gone, of another shape, dtype or device, or no longer tied.
        """
        return self.flat_buffers.sync()

    def admit(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train these parameters too, as soon as they are not frozen.

        Raises:
            ConfigError: one is not in this view.
        """
        parameters = list(parameters)
        own = {id(slot.tensor): slot.name for slot in self._all_slots}
        if any(id(parameter) not in own for parameter in parameters):
            raise ConfigError(
                "add_param_group must get parameters that the model had, frozen or trained, when it was wrapped; got "
                "others. Give the optimiser all of them before it becomes a DistributedOptimizer."
            )
        self._only = None if self._only is None else self._only | set(map(id, parameters))

    def move_params(self, flats: Sequence[Tensor]) -> None:
        """Move the trainable parameters into `flats`, like `params`, in their place."""
        for flat, own in zip(flats, self.params, strict=True):
            flat.copy_(own)
        self.params = tuple(flats)
        bind(self.slots, self.params)

    # --- values ---------------------------------------------------------------------------------------------------
    @contextmanager
    def swapped(
        self, params: Sequence[Tensor] | None = None, buffers: Sequence[Tensor] | None = None
    ) -> Iterator[None]:
        """Give the module other values inside the context, and its own again afterwards, to the bit.

        The given tensors (like `params` and `buffers`, on the same device) become the module's memory. Nothing is
        copied, and the original memory, which other ranks may be reading, is never written. Changes inside the context
        go to the given tensors. None keeps the module's own values.
        """
        own_params, own_buffers = self.params, self.buffers
        new_params = own_params if params is None else tuple(params)
        new_buffers = own_buffers if buffers is None else tuple(buffers)
        check_memory("params", new_params, own_params, self.slots)
        check_memory("buffers", new_buffers, own_buffers, self.flat_buffers.slots)
        try:
            self.is_swapped = True
            self.params = new_params
            bind(self.slots, new_params)
            self.flat_buffers.bind(new_buffers)
            yield
        finally:
            self.is_swapped = False
            self.params = own_params
            bind(self.slots, own_params)
            self.flat_buffers.bind(own_buffers)

    @contextmanager
    def leave_alone(
        self, used: Iterable[bool], momentum: Sequence[Tensor], ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[None]:
        """Have zeros in the momentum of parameters without a True in `used`; put it back afterwards.

        Args:
            momentum: tensors like `params`, or none.
            ranges: the elements of `params` that the tensors have; None: all.
        """
        spans = ranges or [(0, flat.numel()) for flat in self.params]
        parts = []
        unused = (slot for slot, is_used in zip(self.slots, used, strict=True) if not is_used)
        for slot in unused if momentum else ():
            first, last = spans[slot.group]
            parts.append(momentum[slot.group][max(slot.start - first, 0) : max(min(slot.stop, last) - first, 0)])
        with set_aside(parts):
            yield

    def mark(self) -> None:
        """Remember the parameters' values for `touched`."""
        self._marked = sums(self.params)

    def touched(self) -> bool:
        """Tell whether the parameters have changed since `mark`."""
        return self._marked != sums(self.params)

    def changes(self) -> list[int | bytes]:
        """Return values that differ after changes of parameters: torch's counts, memory addresses, some of the values.

        torch does not count writes into `p.data` (`p.data.clamp_()`), which are noticed if they change one of up to 256
        values of each of `params`.
        """
        counts: list[int | bytes] = [self._moves]
        for slot in self.slots:
            counts += slot.tensor._version, slot.tensor.data_ptr()
        return [*counts, *map(some_values, self.params)]

    # --- changes of the module ------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Move parameters back that were given other memory, with their new values. Costs less than 1 µs a parameter.

        They move by `p.data = ...`, `vector_to_parameters` or `.double().float()`, for example. A parameter that was
        frozen stays where it is, and has no gradient.

        Raises:
            ConfigError: a parameter was replaced, added, removed, or given another dtype or device.
        """
        for get, key, held in self._places:
            if get(key) is not held:
                self._check_structure()
                break
        for parameters, modules, n_parameters, n_modules in self._counts:
            if len(parameters) != n_parameters or len(modules) != n_modules:
                self._check_structure()
                break
        for slots, flats in ((self.slots, self.params), (self.frozen_slots, self.frozen)):
            for slot in slots:
                tensor = slot.tensor
                if tensor.data_ptr() != slot.pointer or tensor.dtype != slot.dtype:
                    slot.move_in(tensor, flats, "parameter", _MOVED)
                    self._moves += 1

    def _check_structure(self) -> None:
        """Raise ConfigError if a parameter of this view was replaced, added or removed."""
        own = {id(slot.tensor) for slot in self._all_slots}
        known = own | {id(tensor) for _, _, tensor in self._places}
        named = [*self.module.named_parameters(), *self._extra]
        check_parameters([(name, p) for name, p in named if id(p) in own or id(p) not in known], self._all_slots)

    @property
    def unfrozen(self) -> str | None:
        """The name of a parameter that was frozen when the model was wrapped, and is to be trained now."""
        thawed = (slot for slot in self.frozen_slots if slot.tensor.requires_grad and self._trains(slot.tensor))
        return next((slot.name for slot in thawed), None)

    def lay_out_again(self) -> None:
        """Make unfrozen parameters trainable: `params`, `grads`, `buckets` and `slots` become new objects.

        Gradients stay; those of an unfrozen parameter are weighed as the others were. Nobody may go on using the old
        memory.
        """
        unfrozen = [slot.tensor for slot in self.frozen_slots if slot.tensor.requires_grad]
        check_flattenable(self._named(), [])
        self._lay_out()
        for tensor in unfrozen if self.gradients.weighs else ():
            if tensor.grad is not None:
                tensor.grad = tensor.grad * self.gradients.weight
        if self._has_grads:
            for slot in self.slots:
                if slot.tensor.grad is not None:
                    slot.view(self.grads).copy_(slot.tensor.grad)
            self.gradients.release(self.gradients.present())

    def description(self) -> str:
        """Describe each tensor in a line: name, role, dtype, shape, group. Equal texts mean the same layout."""
        roles = {slot.name: "frozen" for slot in self.frozen_slots}
        named = [(roles.get(slot.name, "trainable"), slot) for slot in self._all_slots]
        return "\n".join(
            f"{slot.name}: {role} {str(slot.dtype).removeprefix('torch.')} {list(slot.shape)} in group {slot.group}"
            for role, slot in [*named, *(("buffer", slot) for slot in self.flat_buffers.slots)]
        )

    def close(self) -> None:
        """Remove the hooks. The module goes on alone, each tensor in memory of its own. May be called twice."""
        self.gradients.watch((), None)
        for slot in (*self._all_slots, *self.flat_buffers.slots):  # of a view torch saves all that it is a view of
            slot.tensor.data = slot.tensor.detach().clone()
