"""Count the backward passes since the last step: their batches' weights, their ends, changes of gradients since."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_NONE = -1


class Passes:
    """The backward passes that give a model's parameters their gradients.

    Each counts the weight of its batch. The gradients of a batch of weight 0 leave no trace, whatever they are. If
    `weighs` is set, those of any other batch are multiplied by its weight as they arrive, before they are added to
    what earlier passes have left.

    Attributes:
        weighs: gradients are multiplied by the weight.
        weight: of the batch that began last; 1 where no loop says when batches begin.
        batch: how many batches have begun, for ranks to see that they are at the same one.
        batches_used: how many of them a step has followed.
        ends_epoch: that batch is the last one of an epoch, after which gradients may be fewer than is said.
        more_follow: to the gradients that arrive now others are added in the same pass, see `joined`.
    """

    def __init__(self) -> None:
        self.weighs = self._looks_closely = False
        self.weight = 1.0
        self.batch = 0
        self.batches_used = self._used_last = 0
        self.ends_epoch = self.more_follow = False
        self._on_end: Callable[[], None] | None = None
        self._weights: list[float] = []  # of the passes since the last step
        self._hooks: list[RemovableHandle] = []  # where the weight calls for them
        self._parameters: Sequence[nn.Parameter] = ()
        self._grads: Sequence[Tensor] = ()
        self._first: set[int] = set()  # parameters, by id, that had no gradient before that of a batch of weight 0
        self._lock = threading.Lock()
        self._used: list[int] = []  # versions of the gradients when the last step had used them
        self._seen: list[str] = []  # the gradients' versions, and perhaps sums, at the end of the last pass
        self.weighed = False  # gradients of this batch have been: torch.autograd.grad's, too
        self.current = _NONE  # autograd's number of the pass whose gradients arrive
        self._joined = False

    def watch(self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
        """Count passes of these parameters from here on, whose gradients are views of the flat `grads`, if any."""
        weight = self.weight
        self._set_weight(1.0)  # takes hooks away
        self._parameters, self._grads = parameters, grads
        self._set_weight(weight)

    def configure(self, *, weighs: bool, looks_closely: bool) -> None:
        """Set how gradients are weighed and watched, before the first batch.

        Args:
            weighs: gradients are multiplied by their batch's weight.
            looks_closely: gradients that were changed by way of `p.grad.data`, which torch does not count, are seen as
                changed too. Costs a look at all gradients at a pass's end, and another at the step.
        """
        self.weighs, self._looks_closely = weighs, looks_closely

    def on_end(self, callback: Callable[[], None] | None) -> None:
        """Set a callback for the end of each pass, on the thread that called `backward()`, before that returns.

        An error that it raises comes out of `backward()`. With reentrant checkpointing inner passes end too: then it is
        called more than once.
        """
        self._on_end = callback

    # --- batches --------------------------------------------------------------------------------------------------
    def begin_batch(self, weight: float = 1.0, *, ends_epoch: bool = False) -> None:
        """Begin a batch: the passes that follow are of it, until the next one begins; see `FlatModel.begin_batch`."""
        self.batch += 1
        self.ends_epoch = ends_epoch
        self._set_weight(weight)

    def end_batches(self) -> None:
        """End the last batch of a loop: passes that follow weigh 1, and count as of no new batch."""
        self.ends_epoch = False
        self._set_weight(1.0)

    def _set_weight(self, weight: float) -> None:
        self.weight, self.weighed = weight, False
        if (weight == 0.0 or (self.weighs and weight != 1.0)) == bool(self._hooks):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = [] if self._hooks else [self._hook(parameter) for parameter in self._parameters]

    def _hook(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register a hook that stays where the parameter is frozen meanwhile, as a critic in its generator's steps."""
        trained = parameter.requires_grad
        try:
            return parameter.requires_grad_().register_hook(partial(self._weigh, parameter))
        finally:
            parameter.requires_grad_(trained)

    def _weigh(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        self.weighed = True
        (self._first.add if parameter.grad is None else self._first.discard)(id(parameter))
        return grad * self.weight if self.weight else torch.zeros_like(grad)  # zero times infinity is not zero

    def is_first(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter had no gradient before the one that a batch of weight 0 has just given it."""
        return id(parameter) in self._first

    # --- passes ---------------------------------------------------------------------------------------------------
    def __bool__(self) -> bool:
        """Tell whether there has been a pass since the last step."""
        return bool(self._weights)

    @property
    def contributes(self) -> bool:
        """Tell whether the gradients are of a batch whose weight is not 0."""
        return any(self._weights) if self._weights else self.weight > 0.0

    @property
    def mean_weight(self) -> float:
        """Return the mean weight of the passes that the gradients are of."""
        return sum(self._weights) / len(self._weights) if self._weights else self.weight

    @property
    def left_out(self) -> int:
        """Count the batches before this one that no step has followed."""
        return self.batch - self.batches_used - (self.batch > self._used_last)

    def begin(self, task: int) -> None:
        """Begin the pass that autograd calls `task`, whose first gradient has arrived."""
        with self._lock:  # gradients of several devices arrive on several threads
            if task != self.current:
                self.current = task
                if not self._joined:
                    self._weights.append(self.weight)
                    torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Count all that is added to the gradients inside the context as one pass, which ends with it.

        So are the micro-batches of a batch one pass, whoever computes their gradients, and changes that are made to
        them before the end count as none. None is announced as ready, unless the caller sets `more_follow` to False
        while the last ones arrive.
        """
        self._joined = self.more_follow = True
        self._weights.append(self.weight)
        try:
            yield
        finally:
            self._joined = self.more_follow = False
        self._end()

    def _end(self) -> None:
        self.current = _NONE
        if self._on_end is not None:
            self._on_end()
        self.note()

    def note(self) -> None:
        """Note that gradients are as they should be: whoever changes them from here on is the loop."""
        self._seen = self._versions()

    @property
    def used(self) -> bool:
        """Tell whether the gradients are, in place, those that the last step has used."""
        return not self._weights and self._used == [flat._version for flat in self._grads]

    def changed_since(self) -> bool:
        """Tell whether a gradient has been changed in place since the last pass ended, or `note` was called."""
        return bool(self._weights) and self._seen != self._versions()

    def _versions(self) -> list[str]:
        sums = [flat.sum().item() for flat in self._grads] if self._looks_closely else []
        return [str(value) for value in (*(flat._version for flat in self._grads), *sums)]  # views' changes count, too

    def done(self) -> None:
        """Note that the gradients have been used: passes from here on are the next step's."""
        self._weights.clear()
        self.batches_used += self.batch > self._used_last
        self._used_last = self.batch
        self._used = [flat._version for flat in self._grads]
