"""A server's store: one shard of the parameters, and the sum of the gradients that its next update is made of."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hpcdist.flat import FlatModel
from hpcdist.server.mailbox import SUM, Letter
from hpcdist.server.shards import Shard


class Store:
    """The update under way: gradients are added up as they are taken from their slots, then applied at once.

    Args:
        apart: the sum gets memory of its own, because the model's gradients are needed between updates.
    """

    def __init__(self, model: FlatModel, shard: Shard, *, apart: bool):
        self._model, self._shard = model, shard
        slices = list(model.named_slices())
        self._owned = torch.tensor([shard.overlaps(g, a, b) for _, g, a, b, _ in slices], dtype=torch.bool)
        self._outside = [outside for _, g, a, b, _ in slices for outside in shard.outside(g, a, b)]
        for flat in model.grads:
            flat.zero_()  # what lies outside the shard must be finite: it may reach the optimiser
        grads = shard.of(model.grads)
        self.sums = [torch.zeros_like(g) for g in grads] if apart else grads
        self._apart = apart
        self.forget()

    def forget(self) -> None:
        """Begins a new update."""
        self.clocks: list[int] = []  # of the gradients in the sum
        self.weights: list[float] = []  # of the letters in the sum
        self.used = torch.zeros(len(self._owned), dtype=torch.bool)

    def add(self, letter: Letter, factor: float = 1.0) -> None:
        """Adds a letter's weighted gradient to the sum; `factor` is how much less it counts for its staleness."""
        scale = factor if letter.kind == SUM else letter.weight * factor  # a sum's addends are weighted already
        for total, arrived in zip(self.sums, letter.tensors, strict=True):
            if not self.weights:
                total.copy_(arrived)
                if scale != 1.0:
                    total.mul_(scale)
            elif scale != 1.0:  # rounded as all-reduce rounds it, not fused
                total.add_(arrived.to(total.device) * scale)
            else:
                total.add_(arrived.to(total.device))
        self.clocks += letter.clocks
        self.weights.append(letter.weight)
        self.used |= letter.used

    def total_weight(self) -> float:
        """The sum of the weights; that of one whole step is exactly the number of its workers."""
        total = math.fsum(self.weights)
        return float(round(total)) if abs(total - round(total)) < 1e-9 * total else total

    def apply(self, update: Callable[[], None], divisor: float, rate: float = 1.0) -> None:
        """Runs the optimiser on sum / divisor, with its learning rate times `rate`, and begins a new update.

        The rate is modulated by taking only that part of the optimiser's step, which is the same for every optimiser
        whose step is proportional to its rate: all of torch's but LBFGS and Rprop.
        """
        if self._apart:
            for grad, total in zip(self._shard.of(self._model.grads), self.sums, strict=True):
                grad.copy_(total)
        if divisor != 1.0:
            for grad in self._shard.of(self._model.grads):
                grad.div_(divisor)
        self._model.release(self.used & self._owned)
        params = self._shard.of(self._model.params) if rate != 1.0 else []
        before = [p.clone() for p in params]
        # An optimiser changes whole parameters, also where a shard's border cuts one; the other side stays.
        outside = [self._model.params[group][start:stop] for group, start, stop in self._outside]
        saved = [view.clone() for view in outside]
        update()
        for view, values in zip(outside, saved, strict=True):
            view.copy_(values)
        for old, new in zip(before, params):
            torch.lerp(old, new, rate, out=new)
        self.forget()

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state(self) -> dict:
        """The update under way."""
        sums: list[Tensor] = [total.clone() for total in self.sums] if self.weights else []
        return {"sums": sums, "clocks": self.clocks, "weights": self.weights, "used": self.used.tolist()}

    def load_state(self, state: dict) -> None:
        """Takes up an update under way."""
        for total, saved in zip(self.sums, state["sums"]):
            total.copy_(saved)
        self.clocks, self.weights = list(state["clocks"]), list(state["weights"])
        self.used = torch.tensor(state["used"], dtype=torch.bool)
