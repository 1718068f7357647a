"""Add up the gradients of a server's next update, and apply their sum to its shard of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hpcdist.model.flat import FlatModel
from hpcdist.strategies.server.requests import SUM, ServerRequest
from hpcdist.strategies.server.shards import Shard


class Aggregate:
    """Add gradients as they are taken from their slots, then apply them at once.

    Args:
        apart: the sum gets memory of its own, because the model's gradients are needed between updates.

    Attributes:
        clocks: of the gradients in the sum.
        factors: how much less each of them counts for its staleness; the caller's to restore after `load_state`.
        weights: of the requests in the sum.
        values: the hyper-parameters of each worker whose request is in the sum.
        used: which parameters have a gradient in the sum.
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
        self.used = torch.zeros(len(slices), dtype=torch.bool)
        self.forget()

    def forget(self) -> None:
        """Begin a new update."""
        self.clocks: list[int] = []
        self.factors: list[float] = []
        self.weights: list[float] = []
        self.values: dict[int, list[float]] = {}
        self.used.zero_()

    def add(self, request: ServerRequest, factor: float = 1.0) -> None:
        """Add a request's weighted gradient to the sum; `factor` is how much less it counts for its staleness."""
        scale = factor if request.kind == SUM else request.weight * factor  # a sum's addends are weighted already
        for total, arrived in zip(self.sums, request.tensors, strict=True):
            if not self.weights:
                total.copy_(arrived)
                if scale != 1.0:
                    total.mul_(scale)
            elif scale != 1.0:  # rounded as all-reduce rounds it, not fused
                total.add_(arrived.to(total.device) * scale)
            else:
                total.add_(arrived.to(total.device))
        self.clocks += request.clocks
        self.factors += [factor] * len(request.clocks)
        self.weights.append(request.weight)
        self.values[request.source] = request.values.tolist()
        self.used |= request.used

    def total_weight(self) -> float:
        """Return the sum of the weights; that of one whole step is exactly the number of its workers."""
        total = math.fsum(self.weights)
        return float(round(total)) if abs(total - round(total)) < 1e-9 * total else total

    def mean_values(self) -> list[float]:
        """Return the mean of each hyper-parameter over the workers whose gradients are in the sum."""
        columns = zip(*self.values.values())
        return [column[0] if len(set(column)) == 1 else math.fsum(column) / len(column) for column in columns]

    def apply(
        self,
        update: Callable[[], None],
        divisor: float,
        rate: float = 1.0,
        clip: Callable[[], None] | None = None,
    ) -> None:
        """Run the optimiser on sum / divisor, clipped, with its learning rate times `rate`, and begin a new update.

        The rate is modulated by taking only that part of the optimiser's step, which is the same for every optimiser
        whose step is proportional to its rate: all of torch's but LBFGS and Rprop.
        """
        if self._apart:
            for grad, total in zip(self._shard.of(self._model.grads), self.sums, strict=True):
                grad.copy_(total)
        if divisor != 1.0:
            for grad in self._shard.of(self._model.grads):
                grad.div_(divisor)
        had = [parameter.grad is not None for parameter in self._model.parameters()] if self._apart else []
        self._model.release(self.used & self._owned)
        if clip is not None:
            clip()
        params = self._shard.of(self._model.params) if rate != 1.0 else []
        before = [p.clone() for p in params]
        # An optimiser changes whole parameters, also where a shard's border cuts one; the other side stays.
        outside = [self._model.params[group][start:stop] for group, start, stop in self._outside]
        saved = [view.clone() for view in outside]
        update()
        if self._apart:  # the worker's loop may look at its gradients
            self._model.release(had)
        for view, values in zip(outside, saved, strict=True):
            view.copy_(values)
        for old, new in zip(before, params):
            torch.lerp(old, new, rate, out=new)
        self.forget()

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state(self) -> dict:
        """Return the update under way."""
        sums: list[Tensor] = [total.clone() for total in self.sums] if self.weights else []
        begun = {"clocks": self.clocks, "weights": self.weights, "values": list(self.values.items())}
        return {"sums": sums, **begun, "used": self.used.tolist()}

    def load_state(self, state: dict) -> None:
        """Take up an update under way."""
        for total, saved in zip(self.sums, state["sums"]):
            total.copy_(saved)
        self.clocks, self.weights = list(state["clocks"]), list(state["weights"])
        self.values = dict(state.get("values", []))
        self.used = torch.tensor(state["used"], dtype=torch.bool)
