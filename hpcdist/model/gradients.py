"""The gradients of a model's parameters in backward passes and steps, in flat memory or where autograd puts them."""

from __future__ import annotations

import cmath
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpcdist.errors import ConfigError
from hpcdist.model.buckets import Announcer, Bucket, make_buckets
from hpcdist.model.passes import NO_PASS, Passes, uncompiled
from hpcdist.model.slots import Slot
from hpcdist.records.digest import tensor_bytes


class Gradients(Passes):
    """The gradients of the trainable parameters of a `FlatModel`, which says what to call in a step.

    A hook on each parameter copies a gradient that autograd has made elsewhere into its flat slice. Gradients that only
    batches of weight 0 have made count as none.

    Attributes:
        flats: one tensor for each group of parameters, of the same shape, zero at first; none if they are not flat.
        announcer: of ranges of `flats`, its buckets.
        looks_at: what of flat gradients tells of changes through `p.grad.data`, which torch does not count: a function
            of one tensor, called at the end of a pass and at the step. None: they go unnoticed. Set it before the first
            batch.
        changed_by_loop: tells how the loop has changed gradients in the steps so far, where it is looked at them.

    Args:
        caps: bytes of a bucket, and of the first bucket of each group.
        refresh: raises ConfigError if a parameter has another dtype, shape or device than its slot.
    """

    def __init__(self, caps: tuple[int, int], refresh: Callable[[], None]):
        super().__init__()
        self._caps, self._refresh = caps, refresh
        self._flat = True
        self.announcer = Announcer((), ())
        self.looks_at: Callable[[Tensor], object] | None = None
        self.changed_by_loop = 0
        self._after_step: list[int] = []  # versions of the gradients
        self._after_pass: list[object] = []  # versions, and perhaps values
        self._hooks: list[RemovableHandle] = []

    def watch(self, slots: Sequence[Slot], params: Sequence[Tensor]) -> None:
        """Take the gradients of the parameters in these slots of `params` from now on, and of no others."""
        for hook in self._hooks:
            hook.remove()
        self._count([cast(nn.Parameter, slot.tensor) for slot in slots])
        self._slots = slots
        self._lay_out(tuple(map(torch.zeros_like, params)) if self._flat else ())
        self._blank = [False] * len(slots)  # gradients that only batches of weight 0 have made
        self._hidden: list[int] = []  # those of them that the optimiser must not see
        self._released = 0  # how many gradients `release` has given last
        self._hooks = [
            slot.tensor.register_post_accumulate_grad_hook(self._make_hook(position))
            for position, slot in enumerate(slots)
        ]

    def close(self) -> None:
        """Leave the parameters' gradients alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self.end_batches()
        self.on_end = self.announcer.callback = None

    # --- memory ---------------------------------------------------------------------------------------------------
    def leave(self) -> None:
        """Leave gradients where autograd makes them: nothing is copied, and there is no flat memory."""
        self._flat = False
        self._lay_out(())

    def move(self, flats: Sequence[Tensor]) -> None:
        """Keep gradients in `flats`, zeros like `params`. Call it before the first batch."""
        self._flat = True
        self._lay_out(tuple(flats))

    def _lay_out(self, flats: tuple[Tensor, ...]) -> None:
        self.flats = flats
        self._views = [slot.view(flats) for slot in self._slots if self._flat]
        self._pointers = [view.data_ptr() for view in self._views]
        names = tuple(slot.name for slot in self._slots if self._flat)
        self.announcer = Announcer(make_buckets(self._slots, flats, *self._caps), names, self.announcer.callback)

    # --- backward passes ------------------------------------------------------------------------------------------
    def _make_hook(self, position: int) -> Callable[[Tensor], None]:
        @uncompiled
        def hook(parameter: Tensor) -> None:
            task, announcer = torch._C._current_graph_task_id(), self.announcer
            if task != self._current:
                self._begin(task)
            grad = parameter.grad
            if grad is None or grad.requires_grad or grad.layout is not torch.strided:
                grad = parameter.grad = self._plain(position, grad)
            if self._flat and (grad is not self._views[position] or grad.data_ptr() != self._pointers[position]):
                self._move_in(position, grad)
            if self.weight != 0.0:
                self._blank[position] = False
            elif id(parameter) in self._first:
                self._blank[position] = True
            if announcer.armed and not self.more_follow:
                announcer.arrive(position)

        return hook

    def _move_in(self, position: int, grad: Tensor) -> None:
        """Copy a gradient from elsewhere into its flat slice, and make the slice the parameter's gradient."""
        slot = self._slots[position]
        if grad.dtype != slot.dtype or grad.shape != slot.shape:
            self._refresh()  # raises the error about the parameter
        view = self._view(position)
        view.copy_(grad)
        slot.tensor.grad = view

    def _plain(self, position: int, grad: Tensor | None) -> Tensor:
        """Return a gradient as a dense tensor; raise ConfigError if there is none, or if it has a graph."""
        if grad is None or grad.requires_grad:
            flaw = "one with a graph; use torch.autograd.grad(..., create_graph=True) for inner gradients"
            taken = "none; register a hook that takes it, such as an optimiser's step, after DistributedOptimizer"
            got = taken if grad is None else flaw
            name = self._slots[position].name
            raise ConfigError(f"the gradient of {name!r} must be a plain tensor after backward(); got {got}.")
        return grad if grad.layout is torch.strided else grad.to_dense()

    def _view(self, position: int) -> Tensor:
        """Return the view of a flat gradient, made anew if `p.grad.data = ...` has moved it, as `.float()` does."""
        if self._views[position].data_ptr() != self._pointers[position]:
            slot = self._slots[position]
            self._views[position] = slot.view(self.flats)
        return self._views[position]

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Return each trainable parameter with the view that is its gradient; none if they are not flat."""
        return [(slot.tensor, view) for slot, view in zip(self._slots, self._views)]

    def changed(self) -> bool:
        """Tell whether the loop has changed gradients since the last backward pass, and note how in `changed_by_loop`.

        It may have changed them in place, put others in their places, or set to None what `release` has given.
        """
        if not self.weights or not self._flat:
            return False
        replaced, left, now = False, 0, self._versions()
        for slot, view, pointer in zip(self._slots, self._views, self._pointers):
            grad = slot.tensor.grad
            left += grad is not None
            replaced = replaced or (grad is not None and (grad is not view or grad.data_ptr() != pointer))
        changed = replaced or now != self._after_pass
        if self.looks_at is not None:
            self.changed_by_loop += (self._change(now) if changed else 0) + (left < self._released)
        return changed

    def _change(self, now: list[object]) -> int:
        """Return what tells changes of gradients apart, if they are the ranks' mean by now.

        0 where values are as before; 1 where each rank has gradients of its own, as inside a pass. Else by the power of
        two that gradients have on average: ranks' own factors change it sooner or later, rounding hardly ever.
        """
        if self.on_end is None or self._current != NO_PASS:
            return 1
        values, before = now[len(self.flats) :], self._after_pass[len(self.flats) :]
        return 0 if values == before else 2048 + math.frexp(np.abs(np.frombuffer(b"".join(values))).mean())[1]  # type: ignore[arg-type]

    def _versions(self) -> list[object]:
        values = [] if self.looks_at is None else map(self.looks_at, self.flats)
        return [*(flat._version for flat in self.flats), *values]  # changes of views count too

    def _note(self) -> None:
        self._after_pass = self._versions() if self._flat else []

    def present(self) -> list[bool]:
        """Tell of each trainable parameter whether it has a gradient."""
        return [slot.tensor.grad is not None for slot in self._slots]

    # --- a step ---------------------------------------------------------------------------------------------------
    def collect(self) -> Tensor:
        """Make every element of `flats` valid: zeros for a parameter without a gradient.

        Gradients of batches of weight 0 are removed from their parameters.

        Returns:
            bool tensor on the CPU, one for each trainable parameter: True if it has a gradient.

        Raises:
            ConfigError: a gradient was replaced after its bucket was announced, so that other ranks got the old one.
        """
        counts = self.contributes
        # Gradients of earlier passes, or of the last step, may be the mean of all ranks.
        stays = counts or (self.weighs and (bool(self.weights) or self._are_of_last_step()))
        if not stays or any(self._blank):
            self._hide(stays)
        used = self.present()
        for position, (slot, view, pointer) in enumerate(zip(self._slots, self._views, self._pointers)):
            grad = slot.tensor.grad
            if grad is view and grad.data_ptr() == pointer:
                continue
            if self.announcer.announced(position):
                self._require_in_place(position, counts)
            elif grad is None:
                self._view(position).zero_()
            else:
                self._move_in(position, self._plain(position, grad))
        if not self._weighed and self.weighs and self.weight not in (0.0, 1.0):
            self._weigh_by_hand()
        return torch.tensor(used, dtype=torch.bool)

    def flush(self) -> Tensor:
        """Collect, announce all remaining buckets, and return the flags of parameters with a gradient.

        Further gradients are refused until the next `begin()`.
        """
        used = self.collect()
        self.announcer.flush()
        return used

    def _are_of_last_step(self) -> bool:
        """Tell whether the gradients are still those of the last step, in place."""
        held = zip(self._slots, self._views, self._pointers)
        places = ((slot.tensor.grad, view, pointer) for slot, view, pointer in held)
        in_place = all(grad is None or (grad is view and grad.data_ptr() == at) for grad, view, at in places)
        return in_place and self._after_step == [flat._version for flat in self.flats]

    def _hide(self, stays: bool) -> None:
        """Remove gradients that only batches of weight 0 have made from their parameters, or all unless it `stays`."""
        for position, slot in enumerate(self._slots):
            if slot.tensor.grad is not None and (not stays or self._blank[position]):
                slot.tensor.grad = None
                self._hidden.append(position)
        self._blank[:] = [False] * len(self._blank)

    def checksum(self, bucket: Bucket | None = None) -> int:
        """Return a checksum of the gradients' bits, of `bucket` or of all; 0 if all are zero or None."""
        tensors = self._tensors() if bucket is None else (bucket.grads,)
        return functools.reduce(_checksum, tensors, 0)

    def _tensors(self) -> Sequence[Tensor]:
        """Return the tensors that hold all gradients."""
        return self.flats if self._flat else [s.tensor.grad for s in self._slots if s.tensor.grad is not None]

    def _require_in_place(self, position: int, counts: bool) -> None:
        """Raise ConfigError if a gradient was replaced or removed after it had been announced."""
        slot = self._slots[position]
        arrived = counts and position not in self._hidden and self.announcer.arrived[position]
        if slot.tensor.grad is not None or arrived:
            raise ConfigError(
                f"the gradient of {slot.name!r} must be changed in place once its bucket is announced; got "
                f"{'None' if slot.tensor.grad is None else 'another tensor'}. Use p.grad.mul_(), not p.grad = ..., or "
                "turn overlap off."
            )

    def _weigh_by_hand(self) -> None:
        """Weigh gradients that the loop has assigned itself, so that no hook has weighed them."""
        self._weighed = True
        for tensor in self._tensors():
            tensor.mul_(self.weight)

    def release(self, used: Tensor | Sequence[bool]) -> None:
        """Give its view as gradient to each parameter with a True in `used`, and None to the others.

        `used`, in the order of the parameters, is the result of `collect()` or'ed over the ranks. Then an optimiser
        skips the same parameters as in a plain run on the ranks' joint batch.
        """
        flags = torch.as_tensor(used).tolist()
        if len(flags) != len(self._slots):
            raise ConfigError(f"used must be {len(self._slots)} flags, one per trainable parameter; got {len(flags)}.")
        for position, (slot, flag) in enumerate(zip(self._slots, flags, strict=True)):
            slot.tensor.grad = self._view(position) if flag else None
        self._released = sum(flags)

    def done(self) -> None:
        """End the step: gradients that were removed, those of batches of weight 0, are zeros that the loop can read."""
        for position in self._hidden:
            slot = self._slots[position]
            if slot.tensor.grad is None:
                slot.tensor.grad = self._view(position).zero_() if self._flat else torch.zeros_like(slot.tensor)
        self._hidden.clear()
        self.weights.clear()
        self._current = NO_PASS  # the next step gets later gradients, also those of the same pass
        self.batches_used += self.batch > self._used_last
        self._used_last = self.batch
        self._after_step = [flat._version for flat in self.flats]

    def unscale(self, factor: float) -> None:
        """Multiply the gradients; this does not count as a change by the loop."""
        for slot in self._slots:
            if slot.tensor.grad is not None:
                slot.tensor.grad.mul_(factor)
        self._note()

    def nonfinite(self, bucket: Bucket | None = None) -> list[str]:
        """Name the parameters whose gradient holds NaN or infinity.

        Reads the gradients once (those of `bucket`, or all), as NaN and infinity survive in a sum. Only if the sum is
        not finite (it may also overflow) is each gradient looked at. Waits for the device.
        """
        sums = [tensor.sum() for tensor in (self._tensors() if bucket is None else [bucket.grads])]
        if len(sums) > 1 and not sums[0].is_cpu and len({each.device for each in sums}) == 1:
            sums = list(torch.stack(sums).cpu())  # one wait for the device
        if all(cmath.isfinite(each.item()) for each in sums):
            return []
        within = None if bucket is None else set(bucket.params)
        suspects = [(s.name, s.tensor.grad) for s in self._slots if within is None or s.name in within]
        return [name for name, grad in suspects if grad is not None and not torch.isfinite(grad).all()]


_PIECES = 256  # of a tensor, whose bits are summed apart, so that their order counts


def _checksum(before: int, tensor: Tensor) -> int:
    """Continue a checksum by a tensor's bits; reads it twice where it lies, and copies no more than some sums."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    if not len(flat) or not torch.linalg.vector_norm(flat, torch.inf).item():
        return before
    share = 8 // flat.element_size()  # sums of 64-bit words are fast, and need a place where such a word may begin
    flat = flat.clone() if flat.storage_offset() % share else flat
    length = len(flat) // (share * _PIECES)
    last = length * share * _PIECES
    sums = flat[:last].view(torch.int64).view(_PIECES, length).sum(1)
    data = sums.cpu().numpy().tobytes() + tensor_bytes(flat[last:]).tobytes()
    return zlib.crc32(data, before)
