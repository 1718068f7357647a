"""Take local steps, and average the parameters of all ranks every few steps: local SGD."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from hpcdist import collectives
from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field, joint_rule
from hpcdist.model.flat import FlatModel
from hpcdist.model.optimizer_state import Moments, required
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.synchronous.fragments import Fragment
from hpcdist.strategies.synchronous.periodic import OverlapConfig, Periodic


@final
class LocalSGD(Periodic):
    """Run the local optimiser; every H = `period` steps replace the parameters by their mean over all ranks.

    All ranks have the same weight in the mean, even without samples in some step. H = 1 with SGD, heavy-ball or
    Nesterov momentum is synchronous SGD; with Adam it is not, because the mean of Adam's updates is not the update of
    the mean gradient. Usual choices of H are 10 to 20. Replicas are bitwise equal after each average, and differ
    between averages; evaluations use their mean.

    Post-local SGD: H = 1 in the first `warmup_steps`, then larger. Hierarchical: the ranks of each node average every
    `node_period` steps, all ranks every `period`. With `average_optimizer_state` the optimiser's momentum (and Adam's
    mean squares, but not its step count) is averaged with the parameters; otherwise each rank keeps its local state.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "local_sgd", period=16)

    Bytes per rank and step: 2n(p − 1)/(pH) for n bytes of parameters; averaging SGD's momentum doubles these bytes, and
    Adam's state triples them. Memory per rank: one parameter vector, with `overlap` three.

    Reference: Sebastian U. Stich, "Local SGD converges fast and communicates little", 2019; Jian Zhang, Christopher
    De Sa, Ioannis Mitliagkas, Christopher Ré, "Parallel SGD: when does averaging help?", 2016; Tao Lin, Sebastian U.
    Stich, Kumar Kshitij Patel, Martin Jaggi, "Don't use large mini-batches, use local SGD", 2018, for post-local and
    hierarchical local SGD; Qinggang Zhou et al., "DaSGD: squeezing SGD parallelization performance in distributed
    training using delayed averaging", 2020, for `overlap`.
    """

    class Config(OverlapConfig):
        warmup_steps: int = Field(0, "number of first steps that all end with an average", ge=0)
        node_period: int | None = Field(
            None, "steps between averages inside each node, fewer than period; none: no such averages", ge=1
        )
        average_optimizer_state: bool = Field(False, "also average the optimiser's moments")

        @joint_rule
        def _goes_together(self) -> None:
            if self.node_period is not None and self.node_period >= self.period:
                raise ValueError(
                    f"strategy.node_period must be less than strategy.period, {self.period}; got {self.node_period}. "
                    "Average inside nodes more often than across, or leave node_period out."
                )
            # A mean merged one step late, v + (mean − v one step ago), may yield a negative mean square.
            if self.overlap and self.average_optimizer_state:
                raise ValueError(
                    "strategy.average_optimizer_state must be false where strategy.overlap is true, which takes a mean "
                    "up a step late; got true. Leave one of them out."
                )

        def synchronizes(self, step: int) -> bool:
            since_warmup = step - self.warmup_steps
            return since_warmup <= 0 or since_warmup % self.period == 0

    config: Config

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        self._node_mean: collectives.AllReduce | None = None  # this rank's node
        if config.node_period is not None:
            node = self.opened(comm.split(comm.nodes[comm.rank]))
            self.records.channels.append(node)
            self._node_mean = self.opened(collectives.load(config.algorithm)(node))
        self._moments = Moments(comm, model)
        self.state.after_load(self._moments.reset)

    def advance(self, update: Update) -> Outcome:
        """Take the step of `Periodic`, which averages the parameters at the end of a period.

        The optimizer's state is averaged at the same steps; both are averaged within a node every `node_period` steps.
        """
        outcome = super().advance(update)
        step, node_period = self.steps + 1, self.config.node_period
        if self.alone:
            return outcome
        if self.config.synchronizes(step):
            self._average_state(self.calls.algorithm(self.config.algorithm))
        elif self._node_mean and node_period and (step - self.config.warmup_steps) % node_period == 0:
            for flat in self.model.params:
                self._node_mean.mean(flat)
            self._average_state(self._node_mean)
        return outcome

    def move(self, fragment: Fragment) -> None:
        for x, mean in fragment.views(self.common, self.mean):
            x.sub_(mean)

    def _average_state(self, reduce: collectives.AllReduce) -> None:
        """Collective. Average the optimiser's state over the ranks of `reduce`, if `average_optimizer_state` is set."""
        if self.config.average_optimizer_state:
            optimizer = required(self.optimizer, "strategy.average_optimizer_state is true")

            def average(flats: list[Tensor]) -> None:
                for flat in flats:
                    reduce.mean(flat)

            self._moments.average(optimizer, average)
