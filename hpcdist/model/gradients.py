"""Watch the gradients of a model's parameters through backward passes and steps, and keep them in flat memory."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpcdist.errors import ConfigError
from hpcdist.model.buckets import Announcer, Bucket, make_buckets
from hpcdist.model.passes import Passes
from hpcdist.model.slots import Slot


class Gradients:
    """Keep the gradients of the trainable parameters in flat memory; `FlatModel` says how to use them.

    A hook on each parameter copies a gradient that autograd has made elsewhere into its flat slice; or, where they are
    not flat, leaves it there. Gradients that only batches of weight 0 have made count as none.

    Attributes:
        flats: one tensor per group of parameters, of the same shapes; zero at first. Empty where they are not flat.
        buckets: ranges of them, in the order in which the backward pass completes them.
        announcer: notes what has arrived, and announces buckets.

    Args:
        slots: of the trainable parameters.
        params: their flat memory.
        passes: the backward passes whose gradients these are.
        caps: bytes of a bucket, and of the first one of each group.
        refresh: raises ConfigError where a parameter is of another dtype, shape or device than its slot.
        flat: False leaves gradients where autograd makes them: there are no `flats`, no buckets, nothing to announce.
        flats: memory for them, of zeros; new if None.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        params: Sequence[Tensor],
        passes: Passes,
        caps: tuple[int, int],
        refresh: Callable[[], None],
        *,
        flat: bool = True,
        flats: Sequence[Tensor] | None = None,
    ):
        self._slots, self._passes, self._refresh, self.flat = slots, passes, refresh, flat
        self.flats = tuple(map(torch.zeros_like, params) if flats is None else flats) if flat else ()
        self.buckets = make_buckets(slots, self.flats, *caps)
        self.announcer = Announcer(self.buckets, tuple(slot.name for slot in slots if flat))
        self._views = [slot.view(self.flats[slot.group]) for slot in slots if flat]
        self._pointers = [view.data_ptr() for view in self._views]
        self._blank = [False] * len(slots)  # gradients that only batches of weight 0 have made
        self._hidden: list[int] = []  # those of them that the optimiser must not see
        self._hooks = [
            slot.tensor.register_post_accumulate_grad_hook(self._make_hook(position))
            for position, slot in enumerate(slots)
        ]

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # --- backward passes ------------------------------------------------------------------------------------------
    def _make_hook(self, position: int) -> Callable[[Tensor], None]:
        views, pointers, announcer, passes = self._views, self._pointers, self.announcer, self._passes
        blank, flat = self._blank, self.flat

        def hook(parameter: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if task != passes.current:
                passes.begin(task)
            grad = parameter.grad
            if not flat:
                if grad is None or grad.requires_grad or grad.layout is not torch.strided:
                    parameter.grad = self._plain(position, grad)
            elif grad is not views[position] or grad.data_ptr() != pointers[position]:
                self._take(position, grad)
            if passes.weight != 0.0:
                blank[position] = False
            elif passes.is_first(parameter):
                blank[position] = True
            if announcer.armed and not passes.more_follow:
                announcer.arrive(position)

        return hook

    def _take(self, position: int, grad: Tensor | None) -> None:
        """Copy a gradient that lies elsewhere into its flat slice, and make the slice the parameter's gradient."""
        slot, grad = self._slots[position], self._plain(position, grad)
        if grad.dtype != slot.dtype or grad.shape != slot.shape:
            self._refresh()  # says so of the parameter
        view = self._view(position)
        view.copy_(grad)
        slot.tensor.grad = view

    def _plain(self, position: int, grad: Tensor | None) -> Tensor:
        """Return a gradient as a dense tensor; raise ConfigError where there is none, or it has a graph."""
        if grad is None or grad.requires_grad:
            flaw = "one with a graph; use torch.autograd.grad(..., create_graph=True) for inner gradients"
            taken = "none; let no other hook take it away (optimiser steps during the backward pass do)"
            got = taken if grad is None else flaw
            name = self._slots[position].name
            raise ConfigError(f"the gradient of {name!r} must be a plain tensor after backward(); got {got}.")
        return grad if grad.layout is torch.strided else grad.to_dense()

    def _view(self, position: int) -> Tensor:
        """Return the view of a flat gradient; a new one where `p.grad.data = ...` has moved it, as `.float()` does."""
        if self._views[position].data_ptr() != self._pointers[position]:
            slot = self._slots[position]
            self._views[position] = slot.view(self.flats[slot.group])
        return self._views[position]

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Return each trainable parameter, and the view that is its gradient; none where they are not flat."""
        return [(slot.tensor, view) for slot, view in zip(self._slots, self._views)]

    def some_replaced(self) -> bool:
        """Tell whether a gradient lies elsewhere than in its slice, as after `p.grad = ...`."""
        return any(map(self._replaced, range(len(self._views))))

    def _replaced(self, position: int) -> bool:
        grad = self._slots[position].tensor.grad
        return grad is not None and (grad is not self._views[position] or grad.data_ptr() != self._pointers[position])

    # --- a step ---------------------------------------------------------------------------------------------------
    def collect(self) -> Tensor:
        """Make every element of `flats` valid; see `FlatModel.collect`."""
        self._hide()
        used = [True] * len(self._slots)
        counts = self._passes.contributes
        for position, (slot, view) in enumerate(zip(self._slots, self._views, strict=True)):
            grad = slot.tensor.grad
            if grad is view and grad.data_ptr() == self._pointers[position]:
                continue
            used[position] = grad is not None
            if self.announcer.announced(position):
                self._require_in_place(position, counts)
            elif grad is None:
                self._view(position).zero_()
            else:
                self._take(position, grad)
        self._weigh_by_hand()
        return torch.tensor(used, dtype=torch.bool)

    def settle(self) -> None:
        """Leave to the optimiser the gradients that count; see `FlatModel.settle`."""
        if self.flat:
            self.release(self.collect())
            return
        self._hide()
        self._weigh_by_hand()
        self._blank[:] = [False] * len(self._blank)

    def _hide(self) -> None:
        """Take gradients that count for nothing away from their parameters."""
        # What earlier passes, or the last step, have left may be the mean of all.
        passes = self._passes
        used_before = passes.used and not self.some_replaced()
        stays = passes.contributes or (passes.weighs and (bool(passes) or used_before))
        if stays and not any(self._blank):
            return
        for position, slot in enumerate(self._slots):
            if slot.tensor.grad is not None and (not stays or self._blank[position]):
                slot.tensor.grad = None
                self._hidden.append(position)

    def _tensors(self) -> Sequence[Tensor]:
        """Return the tensors that all gradients are in."""
        return self.flats if self.flat else [s.tensor.grad for s in self._slots if s.tensor.grad is not None]

    def _require_in_place(self, position: int, counts: bool) -> None:
        """Raise ConfigError where a gradient was replaced, or taken away, after it has been announced."""
        slot = self._slots[position]
        arrived = counts and not self._blank[position] and self.announcer.arrived[position]
        if slot.tensor.grad is not None or arrived:
            raise ConfigError(
                f"the gradient of {slot.name!r} must be changed in place once its bucket is announced; got "
                f"{'None' if slot.tensor.grad is None else 'another tensor'}. Use p.grad.mul_(), not p.grad = ..., or "
                "turn overlap off."
            )

    def _weigh_by_hand(self) -> None:
        """Weigh gradients that the loop has put there itself, so that no tensor's hook has."""
        passes = self._passes
        if not passes.weighed and passes.weighs and passes.weight not in (0.0, 1.0):
            passes.weighed = True
            for tensor in self._tensors():
                tensor.mul_(passes.weight)

    def release(self, used: Tensor | Sequence[bool]) -> None:
        """Give the view to each parameter with a True in `used`, and no gradient (None) to the others."""
        flags = torch.as_tensor(used).tolist()
        if len(flags) != len(self._slots):
            raise ConfigError(f"used must be {len(self._slots)} flags, one per trainable parameter; got {len(flags)}.")
        for position, (slot, flag) in enumerate(zip(self._slots, flags, strict=True)):
            slot.tensor.grad = self._view(position) if flag else None
        self._blank[:] = [False] * len(self._blank)

    def reveal(self) -> None:
        """Give back gradients that a batch of weight 0 has hidden from the optimiser, as zeros to be read."""
        hidden, self._hidden = self._hidden, []
        for position in hidden:
            slot = self._slots[position]
            if slot.tensor.grad is None:
                slot.tensor.grad = self._view(position).zero_() if self.flat else torch.zeros_like(slot.tensor)

    def unscale(self, factor: float) -> None:
        """Multiply the gradients, which counts as no change of them."""
        for slot in self._slots:
            if slot.tensor.grad is not None:
                slot.tensor.grad.mul_(factor)
        self._passes.note()

    def nonfinite(self, bucket: Bucket | None = None) -> list[str]:
        """Name the parameters whose gradient holds NaN or infinity; see `FlatModel.nonfinite`."""
        if all(cmath.isfinite(t.sum().item()) for t in (self._tensors() if bucket is None else (bucket.grads,))):
            return []
        within = None if bucket is None else set(bucket.params)
        suspects = (s for s in self._slots if (within is None or s.name in within) and s.tensor.grad is not None)
        return [slot.name for slot in suspects if not torch.isfinite(slot.tensor.grad).all()]
