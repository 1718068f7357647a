"""SlowMo: local steps or gossip, and once in a period an averaging step with slow momentum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transfer import WIDE
from hpcdist.config.settings import Field, Named, joint_rule
from hpcdist.model.flat import FlatModel
from hpcdist.model.optimizer_state import Moments, required
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.decentralised.mixing import rates
from hpcdist.strategies.dpsgd import DPSGD
from hpcdist.strategies.sgp import SGP
from hpcdist.strategies.sparta import SPARTA
from hpcdist.strategies.synchronous.fragments import Fragment
from hpcdist.strategies.synchronous.periodic import OverlapConfig, Periodic

BASES: dict[str, type[Strategy]] = {"dpsgd": DPSGD, "sgp": SGP, "sparta": SPARTA}


@final
class SlowMo(Periodic):
    """Run a base strategy; every H = `period` steps average all ranks, and apply momentum to the period's change.

    The base is `local`, independent local steps, or `dpsgd`, `sgp` or `sparta`, whose ranks also average in every step,
    with their neighbours or a part of the parameters. At the end of a period u ← βu + δ/η and x ← x − αηu, with β =
    `slow_momentum` and α = `slow_lr`; δ is the common parameters x minus the exact mean over all ranks, and η the
    current learning rate of each parameter. All ranks continue from x, bitwise equal; between slow steps they differ,
    and evaluations use their mean.

    u is in units of gradients, so that the slow step falls with the learning rate immediately, unlike the outer
    momentum of `diloco`. For a learning rate of 0 the last positive one is used. With constant η and the base `local`,
    SlowMo is `diloco` with nesterov = false, outer_lr = α, outer_momentum = β, and blockwise model-update filtering
    (BMUF) in its classical form, with block learning rate α and block momentum β; BMUF in its Nesterov form is `diloco`
    with Nesterov. With β = 0, α = 1 it is `local_sgd`.

    On one rank only the optimiser runs. Bytes per rank and step: 2n(p − 1)/(pH) for n bytes of parameters, plus the
    base's; and 8/H for each parameter, as with `diloco`. Memory per rank: two parameter vectors (x and u), plus the
    base's.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "slowmo", period=4, slow_momentum=0.5)

    Reference: Jianyu Wang, Vinayak Tantia, Nicolas Ballas, Michael Rabbat, "SlowMo: improving communication-efficient
    distributed SGD with slow momentum", 2020; Kai Chen, Qiang Huo, "Scalable training of deep learning machines by
    incremental block training with intra-block parallel optimization and blockwise model-update filtering", 2016.
    """

    class Config(OverlapConfig):
        period: int = Field(48, "H: steps to one slow step", ge=1)
        base: Named = Field(
            Named(name="local"), "base strategy in a period: local, dpsgd, sgp or sparta, with its options"
        )
        slow_lr: float = Field(1.0, "α: learning rate of the slow step, in units of the optimiser's", gt=0)
        slow_momentum: float = Field(0.5, "β: momentum of the slow step", ge=0, lt=1)
        inner_state: Literal["keep", "reset", "average"] = Field(
            "keep", "keep, reset or average the local optimiser's momentum and mean squares at a slow step"
        )

        @joint_rule
        def _has_a_base(self) -> None:
            if self.base.name not in ("local", *BASES):
                raise ValueError(
                    f"strategy.base must be one of local, {', '.join(BASES)}; got {self.base.name}. Take one of them."
                )
            if self.base.name == "local" and self.base.options:
                raise ValueError(
                    f"strategy.base must have no options with local; got {next(iter(self.base.options))}. Leave it out."
                )
            if self.base.name != "local":
                options = self.base_options()
                if self.overlap or getattr(options, "compression", None):
                    raise ValueError(
                        "strategy.overlap must be false, and strategy.base without compression, with "
                        f"{self.base.name}, whose ranks exchange in every step; got one. Leave it out, or take local."
                    )
                if (delay := getattr(options, "delay", 0)) >= self.period:
                    raise ValueError(
                        f"strategy.base.delay must be less than strategy.period, {self.period}, for a slow step drops "
                        f"what is under way; got {delay}. Take a smaller delay, or a longer period."
                    )

        def base_options(self) -> Strategy.Config:
            """Return the options of a base other than local."""
            return BASES[self.base.name].Config.from_mapping(self.base.options, "strategy.base")

        def synchronizes(self, step: int) -> bool:
            return self.base.name != "local" or step % self.period == 0

        def narrow(self, contract: Contract, size: int) -> Contract:
            if self.base.name == "local":
                return contract
            base_contract = self.base_options().narrow(BASES[self.base.name].contract, size)
            return replace(
                contract, synchronizes=base_contract.synchronizes, parameters=base_contract.parameters,
                sends=base_contract.sends, consensus=base_contract.consensus,
            )  # fmt: skip

    config: Config

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        slow = [torch.zeros_like(x, dtype=WIDE.get(x.dtype)) for x in self.common]  # u
        self.momentum = self.state.sharded("slow", tensors=slow, reshard="first")
        self.rates = self.state.by_parameter("rates", self, optional=True)  # last positive learning rates
        self._moments = Moments(comm, model)
        self._base: Strategy | None = None
        if config.base.name != "local" and not self.alone:
            channel = self.opened(comm.split(0))
            self._base = self.opened(BASES[config.base.name](config.base_options(), channel, model))
            self.records.channels += self._base.records.channels
            self._base.gradients = self.gradients  # clips and skips by this strategy's options
            self.state.include("base", self._base.state)
            self.state.parameters = self._base.state.parameters
        self.state.before_load(self.pause)  # messages in flight have old parameters
        self.state.after_load(self._moments.reset)

    @property
    def _at_end(self) -> bool:
        """Whether the current step is the last of a period."""
        return bool(self.sends(self.steps + 1))

    def inner_step(self, update: Update) -> Outcome:
        if not self.alone:
            for slot, rate in zip(self.model.slots, rates(self.model, self.optimizer), strict=True):
                self.rates[slot.name] = rate or self.rates.get(slot.name, 0.0)
        if self._base is None:
            return super().inner_step(update)
        self._base.steps = self.steps
        outcome = self._base.advance(update)
        if self._at_end:
            self._base.pause()  # messages in flight have parameters from before the slow step
        return outcome

    def advance(self, update: Update) -> Outcome:
        outcome = super().advance(update)
        if self._at_end and not self.alone:
            if self._base is not None:
                self._base.reset_from_model()
            self._treat_inner_state()
        return outcome

    def sends(self, step: int) -> list[int]:
        return [] if step % self.config.period else [0]

    def move(self, fragment: Fragment) -> None:
        alpha, beta = self.config.slow_lr, self.config.slow_momentum
        for slot in self.model.slots:
            if rate := self.rates[slot.name]:  # else the parameter has never changed
                slow = slot.view(self.momentum).mul_(beta).add_(slot.view(self.mean), alpha=1 / rate)
                slot.view(self.common).add_(slow, alpha=-alpha * rate)

    def _treat_inner_state(self) -> None:
        """Keep, reset or average the local optimiser's state, by `inner_state`. Collective if it averages."""
        if self.config.inner_state == "keep":
            return
        optimizer = required(self.optimizer, "strategy.inner_state is not keep")
        if self.config.inner_state == "reset":
            optimizer.state.clear()
        else:
            self._moments.average(optimizer, self.average)

    def pause(self) -> None:
        if self._base is not None:
            self._base.pause()

    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        return super().consensus() if self._base is None else self._base.consensus()

    def reset_from_model(self) -> None:
        super().reset_from_model()
        if self._base is not None:
            self._base.reset_from_model()
