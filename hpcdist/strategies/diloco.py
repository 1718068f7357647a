"""Take many local steps, then one step of an outer optimiser with the mean change over the ranks: DiLoCo."""

from __future__ import annotations

from typing import Any, final

from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.synchronous.fragments import Fragment
from hpcdist.strategies.synchronous.periodic import OverlapConfig, Periodic, outer_step


@final
class DiLoCo(Periodic):
    """Run the local, inner optimiser; every H = `period` steps update the common parameters by the outer optimiser.

    The outer optimiser is SGD with Nesterov momentum. Its gradient is the mean over the ranks of x − θᵢ, where x are
    the common parameters after the last outer step and θᵢ rank i's parameters now; all ranks continue from the new x.
    Each rank keeps the state of its inner optimiser, which is never reset; the paper uses AdamW. With outer_lr = 1 and
    outer_momentum = 0 this is `local_sgd`, to the bit. All ranks have the same weight, even without samples in some
    step. On one rank only the inner optimiser runs.

    Replicas are bitwise equal after each outer step, and differ between outer steps; evaluations use their mean. A run
    of fewer than H steps never communicates: evaluate, and end, at multiples of H.

    Bytes per rank and step: 2n(p − 1)/(pH) for n bytes of parameters, and 8/H for each parameter, as outer momentum
    does not move a parameter without a gradient on any rank since the last outer step. Memory per rank: two parameter
    vectors (x and its momentum), with `overlap` four.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "diloco", period=4, outer_lr=0.7)

    Reference: Arthur Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023,
    algorithm 1; Qinggang Zhou et al., "DaSGD: squeezing SGD parallelization performance in distributed training using
    delayed averaging", 2020, for `overlap`.
    """

    class Config(OverlapConfig):
        period: int = Field(500, "H: inner steps to one outer step", ge=1)
        outer_lr: float = Field(0.7, "learning rate of the outer optimiser", gt=0)
        outer_momentum: float = Field(0.9, "momentum of the outer optimiser", ge=0, lt=1)
        nesterov: bool = Field(True, "Nesterov's momentum in the outer step; false: heavy-ball")

    config: Config

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        self.momentum = self.state.sharded("outer", self.common if config.outer_momentum else [], reshard="first")

    def move(self, fragment: Fragment) -> None:
        for views in fragment.views(self.common, self.momentum or self.mean, self.mean):  # without momentum unused
            outer_step(self.config, *views, nesterov=self.config.nesterov)
