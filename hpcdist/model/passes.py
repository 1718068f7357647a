"""The backward passes since the last step, and the weights of their batches."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

NO_PASS = -1
Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Let torch.compile call a function, and look neither inside nor at what it calls.

    As torch.compiler.disable does, which takes seconds to import.
    """
    own: Any = function
    own._torchdynamo_disable = True  # read where a function that calls it is compiled
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # from torch 2.7 on
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(own.__code__, frames._FrameExecStrategy(skip, skip))
    return function


class Passes(abc.ABC):
    """The backward passes that give a model's parameters their gradients.

    A pass has the weight of its batch. Gradients of a batch of weight 0 leave no trace, not even NaN. With `weighs`
    those of other batches are multiplied by the weight as they arrive, before autograd adds them to earlier ones.

    Attributes:
        weighs: gradients are multiplied by the weight. Set it before the first batch.
        weight: of the latest batch; 1 if no loop announces batches.
        counts: the latest batch was announced with a weight other than 0.
        batch: the number of batches so far, by which ranks see that they are at the same one.
        batches_used: the number of batches that a step has followed.
        ends_epoch: the latest batch is the last of an epoch, so that an accumulation may be incomplete.
        more_follow: more gradients will be added to those that arrive now, see `joined`.
        on_begin: is called at the first gradient of each pass.
        on_end: is called at the end of each pass, on the thread of `backward()`, which raises its errors. With
            reentrant checkpointing inner passes end too, and it is called more than once.
        weighed_by_loop: the loop says what its batches weigh.
        weights: of the passes since the last step; none where there was no pass.
    """

    def __init__(self) -> None:
        self.weighs = False
        self.weight = 1.0
        self.counts = True
        self._even: float | None = None  # the weight of each batch that counts; None: by its samples
        self.batch = 0
        self.batches_used = self._used_last = 0
        self.ends_epoch = self.more_follow = False
        self.on_begin: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.weights: list[float] = []
        self._weigh_hooks: list[RemovableHandle] = []
        self.weighed_by_loop = False  # hooks stay: else there are some only while the weight needs them
        self._parameters: Sequence[nn.Parameter] = ()
        self._first: set[int] = set()  # ids of those that had no gradient before a batch of weight 0 gave them one
        self._lock = threading.Lock()
        self._weighed = False  # some gradient of this batch has been weighed, perhaps one of torch.autograd.grad
        self._current = NO_PASS  # autograd's number of the current pass
        self._joined = False

    def _count(self, parameters: Sequence[nn.Parameter]) -> None:
        """Count the passes of these parameters from now on."""
        self._remove_weigh_hooks()
        self._parameters = parameters
        self.weigh(self.weight)

    # --- batches --------------------------------------------------------------------------------------------------
    def begin_batch(self, weight: float = 1.0, *, ends_epoch: bool = False) -> None:
        """Begin a batch, to which all passes belong until the next one; see `FlatModel.begin_batch`."""
        self.batch += 1
        self.ends_epoch = ends_epoch
        self._announce(weight)

    def end_batches(self) -> None:
        """End the last batch of a loop: later passes weigh 1 and belong to no new batch."""
        self.ends_epoch = False
        self._announce(1.0)

    def weigh_alike(self, weight: float) -> None:
        """Give each batch that counts this weight, whatever the number of its samples."""
        self._even = weight
        self._announce(1.0)

    def _announce(self, weight: float) -> None:
        self.counts, self._weighed = weight != 0.0, False
        self.weigh(weight if self._even is None or not self.counts else self._even)

    def weigh(self, weight: float, *, by_loop: bool = False) -> None:
        """Weigh further passes so, until the next batch. A loop that does so does it for each batch: hooks stay."""
        self.weight = weight
        self._weighed = self._weighed and bool(self.weights)  # gradients that are there already stay as they are
        self.weighed_by_loop = self.weighed_by_loop or by_loop
        if self._needs_hooks and not self._weigh_hooks:
            self._weigh_hooks = [self._hook(parameter) for parameter in self._parameters]
        elif not self._needs_hooks and not self.weighed_by_loop:
            self._remove_weigh_hooks()

    @property
    def _needs_hooks(self) -> bool:
        return self.weight == 0.0 or (self.weighs and self.weight != 1.0)

    def _remove_weigh_hooks(self) -> None:
        for hook in self._weigh_hooks:
            hook.remove()
        self._weigh_hooks = []

    def _hook(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register a hook, which stays while the parameter is frozen, as a critic is in its generator's steps."""
        trained = parameter.requires_grad
        try:
            return parameter.requires_grad_().register_hook(partial(self._weigh, parameter))
        finally:
            parameter.requires_grad_(trained)

    @uncompiled
    def _weigh(self, parameter: nn.Parameter, grad: Tensor) -> Tensor | None:
        if not self._needs_hooks:
            return None
        self._weighed = True
        (self._first.add if parameter.grad is None else self._first.discard)(id(parameter))
        return grad * self.weight if self.weight else torch.zeros_like(grad)  # zero times infinity is not zero

    # --- passes ---------------------------------------------------------------------------------------------------
    @property
    def contributes(self) -> bool:
        """Whether some batch of the gradients has a weight other than 0."""
        return any(self.weights) if self.weights else self.weight > 0.0

    @property
    def mean_weight(self) -> float:
        """The mean weight of the passes since the last step."""
        return sum(self.weights) / len(self.weights) if self.weights else self.weight

    @property
    def left_out(self) -> int:
        """The number of earlier batches that no step has followed."""
        return self.batch - self.batches_used - (self.batch > self._used_last)

    def _begin(self, task: int) -> None:
        """Begin the pass with autograd's number `task`, at its first gradient."""
        with self._lock:  # gradients of several devices arrive on several threads
            if task != self._current:
                self._current = task
                if not self._joined:
                    self.weights.append(self.weight)
                    torch.autograd.Variable._execution_engine.queue_callback(self._end)
                    if self.on_begin is not None:
                        self.on_begin()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Count everything that is added to the gradients inside the context as one pass, which ends with it.

        The micro-batches of a pipeline are one pass. Gradients are announced only while the caller sets `more_follow`
        to False, for the last of them. Changes before the end do not count as changes by the loop.
        """
        self._joined = self.more_follow = True
        self.weights.append(self.weight)
        try:
            yield
        finally:
            self._joined = self.more_follow = False
        self._end()

    @uncompiled
    def _end(self) -> None:
        self._current = NO_PASS
        if not self.weights:  # a step was taken inside the pass, in a hook on the last of its parameters
            return
        if self.on_end is not None:
            self.on_end()
        self._note()

    @abc.abstractmethod
    def _note(self) -> None:
        """Remember the gradients: later changes are changes by the loop."""
