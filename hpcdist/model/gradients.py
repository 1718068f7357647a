"""The gradients of a model's parameters in backward passes and steps, in flat memory or where autograd stores them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hpcdist.errors import ConfigError
from hpcdist.model.buckets import Bucket, make_buckets
from hpcdist.model.flat_buffers import FlatBuffers
from hpcdist.model.slots import Slot, fits

_NO_PASS = -1
Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Keep torch.compile from compiling a function and its calls; torch.compiler.disable takes seconds to import."""
    target: Any = function
    target._torchdynamo_disable = True  # read when a function that calls it is compiled
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # from torch 2.7 on
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(target.__code__, frames._FrameExecStrategy(skip, skip))
    return function


class Gradients:
    """The gradients of the trainable parameters of a `FlatModel` (its docstring lists the calls of a step).

    A hook on each parameter copies a gradient that autograd stored elsewhere into its flat slice. A rank without others
    has no hooks, which take longer than all else here, unless gradients are flat or a batch has another weight than 1.

    A backward pass has the weight of its batch. Gradients of a batch of weight 0 are dropped, NaN included; a parameter
    with only such gradients counts as one without gradient. If `configure` says so, the gradients of other batches are
    multiplied by the weight as they arrive, before autograd adds them to earlier ones.

    A bucket is announced when all its gradients have arrived, on autograd's thread, with the stream that the last one
    was written on. It waits for incomplete buckets before it, because collectives need the same order on every rank.
    The lock is for several devices' threads. A position is an index in `FlatModel.slots`; a pass is a backward pass.

    Attributes:
        buckets: in the order in which a backward pass from the last to the first parameter completes them.
        on_bucket: called with each bucket that is announced.
        on_begin: called at the first gradient of each pass.
        on_end: called at the end of each pass, on the thread of `backward()`, which raises its errors. With reentrant
            checkpointing inner passes end too, and it is called more than once.
        weight: of the latest batch; 1 if no loop announces batches.
        weights: of the passes since the last step; empty if there was none.
        batch: number of batches so far; ranks compare it.
        batches_used: number of batches that a step has used.
        ends_epoch: the latest batch is the last of an epoch, so that an accumulation may be incomplete.
        changed_by_loop: a code for the loop's changes of gradients so far, with a `fingerprint`, see `configure`.

    Args:
        caps: maximum bytes of a bucket, and of the first bucket of each group.
        refresh: raises ConfigError if a parameter has another dtype, shape or device than its slot.
        buffers: restored after a batch of weight 0.
        watched: False: `watch` adds the hooks, once it is known where gradients are stored.
    """

    def __init__(self, caps: tuple[int, int], refresh: Callable[[], None], buffers: FlatBuffers, watched: bool):
        self._caps, self._refresh, self._buffers, self._watched = caps, refresh, buffers, watched
        self._lock = threading.Lock()
        self._hooks: list[RemovableHandle] = []
        self.on_bucket: Callable[[Bucket], None] | None = None
        self.on_begin: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        # batches
        self.weight, self._counts = 1.0, True  # the batch was announced with a weight other than 0
        self.batch = self.batches_used = self._used_last = 0
        self.ends_epoch = self._more_follow = False
        self._weighted_by_loop = False  # hooks stay; else they exist only while the weight needs them
        self._weight_hooks: list[RemovableHandle] = []
        self._collected = False  # a step has used this batch's gradients
        # passes
        self.weights: list[float] = []
        self._accumulated: set[int] = set()  # positions of gradients that these passes have added to
        self._current = _NO_PASS  # autograd's number of the current pass
        self._joined = False
        # changes
        self.changed_by_loop = 0
        self._after_step: list[int] = []  # versions of the gradients
        self._after_pass: list[object] = []  # versions, and fingerprints if any
        self._weights_batches = self._alone = False  # see `configure`
        self._equal_weight: float | None = None
        self._fingerprint: Callable[[Tensor], object] | None = None

    def configure(
        self, *, weights_batches: bool = False, equal_weight: float | None = None,
        fingerprint: Callable[[Tensor], object] | None = None, alone: bool = False,
    ) -> None:  # fmt: skip
        """Set how gradients are weighted and their changes detected, before the first batch.

        Args:
            weights_batches: gradients are multiplied by the batch's weight.
            equal_weight: weight of each batch that counts, instead of weights by samples.
            fingerprint: (flat gradients) -> value that shows changes through `p.grad.data`, which torch does not count;
                called at the end of a pass and at the step. None: such changes are not detected.
            alone: there are no other ranks. Passes are not counted then, without hooks.
        """
        self._alone = alone
        self._weights_batches, self._equal_weight, self._fingerprint = weights_batches, equal_weight, fingerprint
        self._announce_batch(1.0, False)

    def _watch(self, slots: Sequence[Slot], flats: Sequence[Tensor] | None) -> None:
        """Track the gradients of the parameters in these slots, and no others; `flats` as in `keep_gradients`."""
        for hook in (*self._hooks, *self._weight_hooks):
            hook.remove()
        self._slots, self._tensors = slots, [slot.tensor for slot in slots]
        self._flat, self._flats = flats is not None, tuple(flats or ())
        self._views = [slot.view(self._flats) for slot in slots if self._flat]
        self._pointers = [view.data_ptr() for view in self._views]
        self.buckets = make_buckets(slots, self._flats, *self._caps)
        bucket_of = {name: bucket.index for bucket in self.buckets for name in bucket.params}
        self._bucket_of = [bucket_of[slot.name] for slot in slots if self._flat]
        self.announce(early=False)
        self._blank: set[int] = set()  # positions of gradients from batches of weight 0 only
        self._first: set[int] = set()  # ids of parameters whose first gradient came from a batch of weight 0
        self._hidden: list[int] = []  # gradients removed for the optimiser's step
        self._released = 0  # number of gradients set by the last `release`
        self._hooks, self._weight_hooks = [], []
        if self._watched:
            self.watch()
        self._set_weight(self.weight)

    def watch(self) -> None:
        """Add the hooks that are needed; those added and removed would still cost time in each pass."""
        self._watched = True
        if not self._hooks and (self._flat or not self._alone or self._weight_hooks):
            made = map(self._make_hook, range(len(self._tensors)))
            self._hooks = [*map(Tensor.register_post_accumulate_grad_hook, self._tensors, made)]

    # --- batches --------------------------------------------------------------------------------------------------
    def start_batch(self, weight: float | None = 1.0, *, ends_epoch: bool = False) -> None:
        """Start a batch, before its forward pass. Loops that never call this have batches of weight 1.

        Args:
            weight: this rank's samples in the step divided by the workers' mean number. With weight 0 gradients are
                dropped, and buffers are restored. None: the loop has ended; later passes belong to no batch.
            ends_epoch: it is the last batch of an epoch, so that an accumulation may be incomplete.
        """
        self.batch += weight is not None
        self._announce_batch(1.0 if weight is None else weight, ends_epoch)
        if not self._needs_hooks and not self._weighted_by_loop:
            for hook in self._weight_hooks:
                hook.remove()
            self._weight_hooks = []

    def set_batch_weight(self, n: float, share: Callable[[float], float] = float) -> None:
        """Change the weight of the current batch, before its forward pass: for each batch of the loop, or never.

        `share`, perhaps collective, computes the weight from n, or from 0 for a batch that was announced with weight 0.
        """
        weight = share(n if self._counts else 0.0)
        if self._counts:
            if weight == 0.0:
                self._buffers._save()
            self._weighted_by_loop = True
            self._set_weight(weight)

    def _announce_batch(self, weight: float, ends_epoch: bool) -> None:
        """Set the weight of the next passes; restore buffers after a batch of weight 0, or save them before one."""
        self._buffers.restore()
        if weight == 0.0:
            self._buffers._save()
        self.ends_epoch, self._counts, self._collected = ends_epoch, weight != 0.0, False
        self._set_weight(weight if self._equal_weight is None or not self._counts else self._equal_weight)

    def _set_weight(self, weight: float) -> None:
        """Set the weight of the current batch; add the hooks that apply it, which `start_batch` removes."""
        self.weight = weight
        if self._needs_hooks and not self._weight_hooks:
            self._weight_hooks = [self._make_weight_hook(tensor) for tensor in self._tensors]
            self.watch()

    @property
    def _needs_hooks(self) -> bool:
        return self.weight == 0.0 or (self._weights_batches and self.weight != 1.0)

    def _make_weight_hook(self, parameter: Tensor) -> RemovableHandle:
        """Register a hook that stays while the parameter is frozen, as a critic's in steps of its generator."""
        trained = parameter.requires_grad
        try:
            return parameter.requires_grad_().register_hook(partial(self._apply_weight, parameter))
        finally:
            parameter.requires_grad_(trained)

    @uncompiled
    def _apply_weight(self, parameter: Tensor, grad: Tensor) -> Tensor | None:
        """Hook before a gradient is accumulated: return it times the weight; None leaves it unchanged.

        Results of torch.autograd.grad stay: the loop may compute a loss from them (a penalty, an inner step).
        """
        try:
            node = torch.autograd.graph.get_gradient_edge(parameter).node if self._needs_hooks else None
            if node is None or not torch._C._will_engine_execute_node(node):
                return None
        except RuntimeError:  # a leaf in torch.autograd.grad
            return None
        (self._first.add if parameter.grad is None else self._first.discard)(id(parameter))
        return grad * self.weight if self.weight else torch.zeros_like(grad)  # zero times infinity is not zero

    @property
    def mean_weight(self) -> float:
        """The mean weight of the passes since the last step; before the first pass: the weight of the batch."""
        return sum(self.weights) / len(self.weights) if self.weights else self.weight

    @property
    def skipped(self) -> int:
        """The number of earlier batches that no step has used."""
        return self.batch - self.batches_used - (self.batch > self._used_last)  # a step may still use the current one

    # --- backward passes ------------------------------------------------------------------------------------------
    def _make_hook(self, position: int) -> Callable[[Tensor], None]:
        """Return the hook that runs when autograd has accumulated a parameter's gradient."""

        @uncompiled
        def hook(parameter: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if task != self._current:  # the first gradient of a pass
                self._start(task)
            grad = parameter.grad
            if not self._flat:
                if grad is None or grad.requires_grad or grad.layout is not torch.strided:
                    parameter.grad = self._dense(position, grad)
            elif grad is not self._views[position] or grad.data_ptr() != self._pointers[position]:
                self._move_in(position, self._dense(position, grad))
            if self.weight == 0.0:
                if id(parameter) in self._first:
                    self._blank.add(position)
            elif self._blank:
                self._blank.discard(position)
            self._accumulated.add(position)
            hooks: Any = parameter._post_accumulate_grad_hooks
            # A hook of the loop after this one may change the gradient: `collect` announces its bucket.
            if self._armed and not self._more_follow and next(reversed(hooks.values())) is hook:
                self._arrive(position)

        return hook

    def _start(self, task: int) -> None:
        """Start the pass with autograd's number `task`, at its first gradient."""
        with self._lock:
            if task != self._current:
                self._current = task
                if not self._joined:
                    self.weights.append(self.weight)
                    torch.autograd.Variable._execution_engine.queue_callback(self._end)
                    if self.on_begin is not None:
                        self.on_begin()

    @uncompiled
    def _end(self) -> None:
        """End a pass: autograd calls this at the end of `backward()`."""
        self._current = _NO_PASS
        if not self.weights:  # a step was taken inside the pass, by a hook on its last parameter
            return
        if self.on_end is not None:
            self.on_end()
        self._after_pass = self._versions() if self._flat else []

    @contextmanager
    def joined(self) -> Iterator[Callable[[bool], None]]:
        """Treat what is added to gradients inside the context as one pass, such as the micro-batches of a pipeline.

        Changes before its end do not count as changes by the loop. Yields a function that sets whether more gradients
        will be added to the current ones: buckets are announced after a call with False, for the last micro-batch.
        """

        def set_more_follow(more_follow: bool) -> None:
            self._more_follow = more_follow

        self._joined = self._more_follow = True
        self.weights.append(self.weight)
        try:
            yield set_more_follow
        finally:
            self._joined = self._more_follow = False
        self._end()

    def _move_in(self, position: int, grad: Tensor) -> None:
        """Copy a gradient into its flat slice, and set the slice as the parameter's gradient."""
        slot = self._slots[position]
        if not fits(slot, grad, self._flats):
            self._refresh()  # raises the error about the parameter
        view = self._view(position)
        view.copy_(grad)
        slot.tensor.grad = view

    def _dense(self, position: int, grad: Tensor | None) -> Tensor:
        """Return a gradient as a dense tensor; raise ConfigError if there is none, or if it has a graph."""
        if grad is None or grad.requires_grad:
            with_graph = "one with a graph; use torch.autograd.grad(..., create_graph=True) for inner gradients"
            removed = "none; register a hook that takes it, such as an optimiser's step, after DistributedOptimizer"
            got = removed if grad is None else with_graph
            name = self._slots[position].name
            raise ConfigError(f"the gradient of {name!r} must be a plain tensor after backward(); got {got}.")
        return grad if grad.layout is torch.strided else grad.to_dense()

    def _view(self, position: int) -> Tensor:
        """Return the view of a flat gradient; create it again if `p.grad.data = ...` moved it, as `.float()` does."""
        if self._views[position].data_ptr() != self._pointers[position]:
            self._views[position] = self._slots[position].view(self._flats)
        return self._views[position]

    # --- buckets --------------------------------------------------------------------------------------------------
    def announce(self, *, early: bool = True, passes: int = 1) -> None:
        """Start announcing the buckets of the next step: each when it is complete, if `early`, or all in `collect`.

        Args:
            passes: number of backward passes of the step; the last one completes buckets.
        """
        self._armed, self._passes = early, passes
        self._arrived = [0] * len(self._bucket_of)  # gradients of each parameter
        self._missing = [len(bucket.params) for bucket in self.buckets]  # gradients that each bucket waits for
        self._announced = 0  # buckets [0, announced) have been announced

    def _arrive(self, position: int) -> None:
        """Count the gradient of the parameter at `position`, and announce the buckets that it completes."""
        with self._lock:
            if self._bucket_of[position] < self._announced:
                raise ConfigError(
                    f"the backward pass before a step must be one, or accumulation must be set; got a gradient of "
                    f"{self._slots[position].name!r} after its bucket was announced, so it would be lost. Set the "
                    "number of backward passes per step, or turn overlap off."
                )
            self._arrived[position] += 1
            if self._arrived[position] == self._passes:
                self._missing[self._bucket_of[position]] -= 1
                self._announce_complete()

    def _announce_complete(self) -> None:
        while self._announced < len(self.buckets) and not self._missing[self._announced]:
            bucket = self.buckets[self._announced]
            self._announced += 1
            if self.on_bucket is not None:
                self.on_bucket(bucket)

    # --- changes by the loop --------------------------------------------------------------------------------------
    def changed(self) -> bool:
        """Return whether the loop has changed or replaced gradients since the last pass; update `changed_by_loop`."""
        if not self.weights or not self._flat:
            return False
        replaced, n_grads, versions = False, 0, self._versions()
        for tensor, view, pointer in zip(self._tensors, self._views, self._pointers):
            grad = tensor.grad
            n_grads += grad is not None
            replaced = replaced or (grad is not None and (grad is not view or grad.data_ptr() != pointer))
        changed = replaced or versions != self._after_pass
        if self._fingerprint is not None:
            self.changed_by_loop += (self._change(versions) if changed else 0) + (n_grads < self._released)
        return changed

    def _change(self, now: list[object]) -> int:
        """Return a code for the loop's change, to compare between ranks if gradients are already the mean of all ranks.

        0: none. 1: gradients still differ by rank, as inside a pass. Else 2048 + the exponent of the mean magnitude:
        different factors on ranks change it in most cases, rounding hardly ever.
        """
        if self.on_end is None or self._current != _NO_PASS:
            return 1
        values, before = now[len(self._flats) :], self._after_pass[len(self._flats) :]
        return 0 if values == before else 2048 + math.frexp(np.abs(np.frombuffer(b"".join(values))).mean())[1]  # type: ignore[arg-type]

    def _versions(self) -> list[object]:
        """Return torch's version counter of each flat gradient, then its fingerprint if there is a function for it."""
        values = [] if self._fingerprint is None else map(self._fingerprint, self._flats)
        return [*(flat._version for flat in self._flats), *values]  # versions count changes of views too

    # --- a step ---------------------------------------------------------------------------------------------------
    def present(self) -> list[bool]:
        """Return for each trainable parameter whether it has a gradient."""
        return [tensor.grad is not None for tensor in self._tensors]

    def collect(self, *, last: bool = False) -> Tensor:
        """Fill the flat gradients: zeros where there are none, all times the batch's weight unless hooks did that.

        If only batches of weight 0 contributed, `p.grad` is None until `done`. With `last` all remaining buckets are
        announced, and further gradients are refused until `announce` is called again.

        Returns a bool tensor on the CPU: for each trainable parameter, whether it has a gradient. Raises ConfigError if
        a gradient was replaced after its bucket was announced, so that other ranks got the old one.
        """
        any_counts = self.mean_weight > 0.0
        # Gradients of earlier passes, or of the last step, may be the mean of all ranks: they remain.
        keeps = any_counts or (self._weights_batches and (bool(self.weights) or self._unchanged_since_step()))
        if not keeps or self._blank:
            self._hide(keeps)
        for tensor in () if self._hooks else self._tensors:
            if tensor.grad is not None and tensor.grad.layout is not torch.strided:
                tensor.grad = tensor.grad.to_dense()
        used = torch.tensor(self.present(), dtype=torch.bool)
        for position, (tensor, view, pointer) in enumerate(zip(self._tensors, self._views, self._pointers)):
            grad = tensor.grad
            if grad is view and grad.data_ptr() == pointer:
                continue
            if self._bucket_of[position] < self._announced:  # it has been sent already
                self._require_in_place(position, any_counts)
            elif grad is None:
                self._view(position).zero_()
            else:
                self._move_in(position, self._dense(position, grad))
                if self.weights and position not in self._accumulated and self._needs_hooks:
                    self._view(position).mul_(self.weight)  # the loop assigned it, next to a backward pass
        if not (self.weights or self._collected) and self._weights_batches and self._needs_hooks:
            if self.batch > self._used_last + 1 and (self._hidden or used.any()):
                raise ConfigError(
                    "gradients must be computed by backward() where a step has several batches of different weights; "
                    f"got assigned ones of {self.batch - self._used_last} batches. Call backward(), or step each time."
                )
            for grad in (self._flats or [t.grad for t in self._tensors if t.grad is not None]) if self.weight else ():
                grad.mul_(self.weight)  # the loop assigned all, without a backward pass
        self._collected = True
        if last:
            with self._lock:
                self._armed, self._missing = True, [0] * len(self.buckets)
                self._announce_complete()
        return used

    def _unchanged_since_step(self) -> bool:
        """Return whether the gradients are still those of the last step, in place."""
        parts = zip(self._tensors, self._views, self._pointers)
        in_place = all(t.grad is None or (t.grad is view and view.data_ptr() == pointer) for t, view, pointer in parts)
        return in_place and self._after_step == [flat._version for flat in self._flats]

    def _hide(self, stays: bool) -> None:
        """Remove gradients that come only from batches of weight 0, or all unless `stays`; `done` sets them to zero."""
        for position, tensor in enumerate(self._tensors):
            if tensor.grad is not None and (not stays or position in self._blank):
                tensor.grad = None
                self._hidden.append(position)
        self._blank.clear()

    def _require_in_place(self, position: int, counts: bool) -> None:
        """Raise ConfigError if a gradient was replaced or removed after it had been announced."""
        slot = self._slots[position]
        arrived = counts and position not in self._hidden and self._arrived[position]
        if slot.tensor.grad is not None or arrived:
            raise ConfigError(
                f"the gradient of {slot.name!r} must be changed in place once its bucket is announced; got "
                f"{'None' if slot.tensor.grad is None else 'another tensor'}. Use p.grad.mul_(), not p.grad = ..., or "
                "turn overlap off."
            )

    def release(self, used: Tensor | Sequence[bool]) -> None:
        """Set the gradient of each parameter: the view of its flat gradient if `used`, else None.

        `used` is the result of `collect()` or'ed over the ranks: optimisers skip parameters as with one joint batch.
        """
        flags = torch.as_tensor(used).tolist()
        if len(flags) != len(self._slots):
            raise ConfigError(f"used must be {len(self._slots)} flags, one per trainable parameter; got {len(flags)}.")
        for position, (tensor, flag) in enumerate(zip(self._tensors, flags, strict=True)):
            tensor.grad = self._view(position) if flag else None
        self._released = sum(flags)

    def done(self) -> None:
        """End the step: gradients that were removed for it become zeros that the loop can read."""
        for position in self._hidden:
            tensor = self._tensors[position]
            if tensor.grad is None:
                tensor.grad = self._view(position).zero_() if self._flat else torch.zeros_like(tensor)
        self._hidden.clear()
        self.weights.clear()
        self._accumulated.clear()
        self._current = _NO_PASS  # later gradients belong to the next step, also those of the same pass
        self.batches_used += self.batch > self._used_last
        self._used_last = self.batch
        self._after_step = [flat._version for flat in self._flats]
