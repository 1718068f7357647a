"""NoLoCo: DiLoCo without an all-reduce: at the end of a period ranks average in random groups."""

from __future__ import annotations

from typing import Any, final

import torch

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field, Named
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.decentralised.mixing import Mixing
from hpcdist.topology import make_topology


@final
class NoLoCo(Strategy):
    """Run the local, inner optimiser; every H = `period` steps average within a random group of ranks.

    Each rank has local outer parameters xᵢ and momentum vᵢ. The groups are sampled from (seed, exchange), equally on
    all ranks; in each group vᵢ ← a·vᵢ + ν·mean(θⱼ − xⱼ) + γ·(mean(xⱼ) − xᵢ), xᵢ ← xᵢ + vᵢ, and rank i continues from
    θᵢ = xᵢ; a is `outer_momentum`, ν `outer_lr`, and γ is `pull`, which reduces the distance between ranks. The means
    over all ranks follow the rule of `diloco` with heavy-ball momentum, whatever the groups. With a single group all x
    are equal, to rounding, and the strategy is `diloco` with heavy-ball momentum.

    A slow rank delays its group, and all ranks at synchronizations 1, 2, 4, 8... and each 64th, where an all-reduce of
    16 bytes compares settings. Replicas always differ, unless there is a single group; evaluations use their mean. Each
    rank keeps the state of its inner optimiser. On one rank only the inner optimiser runs.

    Bytes per rank and exchange: two parameter vectors to each other rank of the group, and 4 for each parameter, as
    momentum does not move a parameter without a gradient in the group. Memory per rank: three parameter vectors (x, v,
    and x as sent), and two for each other rank of the group.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "noloco", period=2, group=2)

    Reference: Jari Kolehmainen, Nikolay Blagoev, John Donaghy, Oğuzhan Ersoy, Christopher Nies, "NoLoCo: no-all-reduce
    low communication training method for large models", 2025; signs and defaults as in its published code.
    """

    class Config(Strategy.Config):
        period: int = Field(50, "H: inner steps to one exchange", ge=1)
        group: int = Field(2, "ranks in a group; must divide the number of ranks", ge=2)
        outer_lr: float = Field(0.7, "ν: weight of a group's mean change in an outer step", gt=0)
        outer_momentum: float = Field(0.5, "a: momentum of the outer step", ge=0, lt=1)
        pull: float = Field(0.7, "γ: weight of the distance to the mean of the group's x", ge=0, le=2)
        seed: int = Field(0, "seed of the groups", ge=0)

        def synchronizes(self, step: int) -> bool:
            return step % self.period == 0

    config: Config
    contract = Contract(averages="parameters", synchronizes="every period")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        groups = make_topology(
            Named(name="random_groups", group=config.group if comm.size > 1 else 1, seed=config.seed), comm
        )
        super().__init__(config, comm, model, **kwargs)
        self._mixing = self.opened(Mixing(comm, groups, overlap=False))
        templates = model.params if comm.size > 1 else []
        self.outer = self.state.sharded("outer", templates, start="parameters", reshard="mean", resets=True)  # x
        self._momentum = self.state.sharded("momentum", templates, reshard="mean")  # v
        self._means = self.state.scratch([torch.empty_like(x) for x in templates])
        self.state.flags("used", self.gradients.used)

    def advance(self, update: Update) -> Outcome:
        outcome = self.gradients.step_alone(update)
        if self.outer and self.config.synchronizes(self.steps + 1):
            self._synchronize()
        return outcome

    def _synchronize(self) -> None:
        """Collective in each group. Take an outer step, and continue from x."""
        config, params = self.config, self.model.params
        for local, x, mean in zip(params, self.outer, self._means, strict=True):
            local.sub_(x)  # θ − x, which is mixed in the memory of θ
            mean.copy_(x)
        used = self.gradients.take_used()
        self._mixing.mix((*params, *self._means, used), (self.steps + 1) // config.period)
        with self.model.skip_unused(used > 0, self._momentum):
            for flats in zip(params, self.outer, self._momentum, self._means, strict=True):
                for move, x, v, mean in alongside(*flats):
                    v.mul_(config.outer_momentum).add_(move, alpha=config.outer_lr)
                    v.add_(mean.sub_(x), alpha=config.pull)
                    move.copy_(x.add_(v))  # θ = x
