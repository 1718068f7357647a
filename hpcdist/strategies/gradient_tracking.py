"""Gradient tracking: each rank steps along an estimate of the mean gradient, which neighbours average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field, Named
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.decentralised.mixing import Mixing, conserving


@final
class GradientTracking(Strategy):
    """Train by gradient tracking, synchronously: yₜ = W yₜ₋₁ + gₜ − gₜ₋₁; xₜ₊₁ = W xₜ − η yₜ.

    In every step the sum of all y equals the sum of all gradients, so y approaches the mean gradient while x changes
    slowly, and ranks with different data agree on the optimum of all data; in `dpsgd` a rank is pulled to the optimum
    of its data. The local optimiser, which may have momentum, steps along y in place of the clipped gradient. With
    `order` = after ranks step first and then average, x ← W(x − ηy); on a complete graph this is synchronous SGD. The
    mean of all x follows the mean of the steps, to rounding.

    W must be doubly stochastic; it may be directed, and change between steps. With small batches y has the noise of two
    gradients, so that `dpsgd` is less noisy if all ranks have similar data. A rank that skips a gradient because it is
    not finite keeps its last gradient in y. On one rank only the optimiser runs.

    Bytes per rank and step: two parameter vectors to each neighbour, x and y, and two elements for each parameter to
    flag its gradient: a parameter without a gradient on any rank is not updated. Memory: y, the last gradient, and, on
    several nodes, two vectors per neighbour.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "gradient_tracking", topology="ring")

    Reference: Angelia Nedić, Alex Olshevsky, Wei Shi, "Achieving geometric convergence for distributed optimization
    over time-varying graphs", 2017 (DIGing); Shi Pu, Angelia Nedić, "Distributed stochastic gradient tracking methods",
    2018.
    """

    class Config(Strategy.Config):
        topology: Named = Field(Named(name="ring"), "graph of the neighbours, see `hpcdist topology`")
        order: Literal["before", "after"] = Field("before", "average before the local step, or after it")

    config: Config
    contract = Contract(averages="parameters", synchronizes="every step")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        topology = conserving(config.topology, comm, "gradient_tracking")
        super().__init__(config, comm, model, **kwargs)
        self._mixing = self.opened(Mixing(comm, topology, overlap=False))
        model.move_params(self._mixing.share(model.params))
        like = model.params if comm.size > 1 else []
        # After y's first tensor two flags per parameter are sent: this rank has a gradient; only some ranks have one.
        # `_sent` is y with these flags, `tracked` the views of y in it.
        flags = 2 * len(model.slots)
        sent = [x.new_zeros(len(x) + (0 if number else flags)) for number, x in enumerate(like)]
        self._sent = self._mixing.share(sent)
        tracked = [sent[: len(x)] for sent, x in zip(self._sent, like)]
        self._flags = self._sent[0][len(like[0]) :].view(2, -1) if like else torch.empty(2, 0)
        # y, and the gradient of the last step. Both are resharded alike, so that their sums stay equal.
        self._tracked = self.state.sharded("tracked", tensors=tracked, reshard="divide", resets=True)
        self._before = self.state.sharded("before", like, reshard="divide", resets=True)

    def advance(self, update: Update) -> Outcome:
        if self.comm.size == 1:
            return self.gradients.step_alone(update)
        params = self.model.params
        self.model.gradients.collect()
        if self.config.order == "before":
            used = self._mix(params, self.steps)
            return self.gradients.step_alone(lambda: self._step(update, used))
        used = self._mix((), max(self.steps - 1, 0))
        outcome = self.gradients.step_alone(lambda: self._step(update, used))
        self._mixing.mix(params, self.steps)
        return outcome

    def _mix(self, params: Sequence[Tensor], step: int) -> list[bool]:
        """Collective. Mix `params` and y with the neighbours of `step`; return for each parameter whether to update it.

        Updated is a parameter with a gradient on this rank or a neighbour. Other ranks may have one, too: once ranks
        are known to differ in a parameter, it is updated in every step, unless it is frozen.
        """
        present, differs = self._flags
        present.copy_(torch.tensor(self.model.gradients.present()))
        before = present > 0
        self._mixing.mix((*params, *self._sent), step)
        after = present > 0
        if self.model.gradients.mean_weight:
            differs.copy_((differs > 0) | (after & ~before))
        trainable = torch.tensor([slot.tensor.requires_grad for slot in self.model.slots]).to(after.device)
        return (after | ((differs > 0) & trainable)).tolist()

    def _step(self, update: Update, used: Sequence[bool]) -> None:
        """Update y, run the optimiser along y on the `used` parameters, and restore this rank's gradients."""
        originals = []
        for slot, is_used in zip(self.model.slots, used, strict=True):
            parameter, along, last = slot.tensor, slot.view(self._tracked), slot.view(self._before)
            gradient = parameter.grad
            originals.append((parameter, gradient))
            if gradient is None:
                along.sub_(last)
                last.zero_()
            else:
                for y, before, now in alongside(along.view(-1), last.view(-1), gradient.to_dense().reshape(-1)):
                    y.sub_(before).add_(now)
                    before.copy_(now)
            parameter.grad = along if is_used else None
        update()
        for parameter, gradient in originals:
            parameter.grad = gradient
