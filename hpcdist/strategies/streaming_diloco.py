"""DiLoCo that exchanges one fragment of the parameters at a time, while the next steps compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hpcdist import compress
from hpcdist.compress import CompressionConfig, Reduction
from hpcdist.errors import ConfigError
from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.common.state import Along, Entry, copy_all, first, flags, held_tensors, mean_of_ranks
from hpcdist.strategies.synchronous.exchanges import Exchanges
from hpcdist.strategies.synchronous.fragments import cut


@final
class StreamingDiLoCo(Strategy):
    """Run the local, inner optimiser; exchange each fragment of the parameters once in H = `period` steps, in turn.

    The parameters are cut into F fragments by layers, `fragment_layers` each: strided, so that a fragment has layers
    from all over the model, or sequential. Fragment f is sent at the end of step ⌊(f + 1)H/F⌋ of each period: ranks
    begin to average δᵢ = x − θᵢ, where x are the fragment's common parameters and θᵢ those of rank i. `delay` = τ steps
    later the mean is taken up: the outer optimiser, SGD with Nesterov momentum, moves x by it, and rank i goes on from
    αθᵢ + (1 − α)x, with α = `blend`; or, with `take_up` = shift, from x and what it has done since the fragment was
    sent. With one fragment and τ = 0, α = 0 this is `diloco`, and with τ = 1 and shift its `overlap`, to the bit.

    With `take_up` = delayed or eager the exchange of a fragment has the whole next period: the mean is taken up when
    the fragment is sent again. Delayed: x moves by the mean of the period before, and all ranks go on from it. Eager:
    each rank has x and a momentum of its own, and replaces its own part of that mean, δᵢ of the period before, by δᵢ of
    this one: it moves x by mean + (δᵢ − δᵢ before)/p.

    Unless eager, x and the outer momentum are bitwise equal on all ranks; replicas differ, and evaluations use their
    mean. Each rank keeps the state of its inner optimiser. Every rank has the same weight, also one that had no samples
    in some step. On one rank there is no outer step: the inner optimiser runs alone. Steps that a blend with α < 1
    discards are lost.

    Bytes per rank and step: 2n(p − 1)/(pH) for n bytes of parameters, as with `diloco`; but at most those of a fragment
    in one step. With `compression` = e3m0, (p − 1)(n/8 + 4F)/H: each rank sends its codes to every other one; and 8/H
    for each parameter, as with `diloco`. At meetings 1, 2, 4, 8... and each 64th an all-reduce of 16 bytes compares
    settings. Memory per rank: four parameter vectors (x, its momentum, the means, δᵢ; three with blend and delayed).

    Reference: Arthur Douillard et al., "Streaming DiLoCo with overlapping communication: towards a distributed free
    lunch", 2025. There δᵢ is the distance from the rank's own parameters of a period ago; here it is that from x, the
    same where τ = 0 and α = 0. Satyen Kale et al., "Eager updates for overlapped communication and computation in
    DiLoCo", 2025, for delayed and eager.
    """

    class Config(Strategy.Config):
        """Options of streaming_diloco."""

        period: int = Field(100, ge=1, description="H: steps in which each fragment is exchanged once")
        fragment_layers: int | None = Field(
            3, ge=1, description="layers in a fragment; none: all parameters are one fragment"
        )
        order: Literal["strided", "sequential"] = Field(
            "strided", description="with F fragments one has every F-th layer, or layers that follow each other"
        )
        delay: int = Field(
            1, ge=0, description="τ: steps from sending a fragment to taking up its mean, with blend and shift"
        )
        take_up: Literal["blend", "shift", "delayed", "eager"] = Field(
            "blend",
            description="blend the rank's parameters with the common ones; shift: add what it has done meanwhile; "
            "delayed: take up the mean a period later; eager: with this rank's own part of this period",
        )
        blend: float = Field(0.5, ge=0, le=1, description="α: weight of the rank's own parameters in a blend")
        outer_lr: float = Field(0.4, gt=0, description="learning rate of the outer optimiser")
        outer_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer optimiser")
        algorithm: str = Field("auto", description="all-reduce algorithm; auto chooses by size and ranks")
        compression: CompressionConfig = Field(
            CompressionConfig(), description="how differences are compressed; e3m0 sends four bits per element"
        )

        @model_validator(mode="after")
        def _takes_up_before_it_sends_again(self):
            if not self.lasts_a_period and self.delay >= self.period:
                raise ValueError(
                    f"strategy.delay must be less than strategy.period, {self.period}, as a fragment is taken up "
                    f"before it is sent again; got {self.delay}. Take a smaller delay, or a longer period."
                )
            if self.lasts_a_period and self.delay != 1:
                raise ValueError(
                    f"strategy.delay must not be given where strategy.take_up is {self.take_up}, by which a mean is "
                    f"taken up a period later; got {self.delay}. Leave it away, or take blend or shift."
                )
            if self.compression and compress.load(self.compression.name).along:
                raise ValueError(
                    "strategy.compression of streaming_diloco must remember nothing but what it has not sent; got "
                    f"{self.compression.name}. Take e3m0, qsgd or topk."
                )
            return self

        @property
        def lasts_a_period(self) -> bool:
            """Whether an exchange has a whole period."""
            return self.take_up in ("delayed", "eager")

        def meets(self, step: int) -> bool:
            return step % self.period == 0  # then the last fragment is sent, whatever their number

    contract = Contract(averages="parameters", meets="every period")
    config: Config

    def __init__(self, config: Config, comm, model, **given):
        super().__init__(config, comm, model, **given)
        self.alone = comm.size == 1
        self._used = torch.ones_like(self.gradients.used)  # by some rank, in the period of `_mean`
        self._sent: dict[int, int] = {}  # the step in which each fragment under way was sent
        self._values: dict[int, list[Tensor]] = {}  # of each: δᵢ and what is used; then means
        aside = config.delay > 0 or config.lasts_a_period
        self.exchanges = Exchanges(comm, self.records, config.algorithm, aside)
        channel = self.exchanges.channel
        self.fragments = [] if self.alone else cut(model, config.fragment_layers, config.order)
        if len(self.fragments) > config.period:
            raise ConfigError(
                f"strategy.period must be at least the number of fragments, {len(self.fragments)}; got "
                f"{config.period}. Take a longer period, or more strategy.fragment_layers."
            )
        self.common = [] if self.alone else [params.clone() for params in model.params]  # x
        self._momentum = [torch.zeros_like(x) for x in self.common]
        shared = None if config.compression else channel.memory.shared_like(self.common)
        # δᵢ, and then their mean, of fragments under way
        self._mean = [torch.empty_like(x) for x in self.common] if shared is None else shared
        keeps = self._shifts or config.take_up == "eager"
        self._gone = [torch.zeros_like(x) for x in self.common if keeps]  # δᵢ of fragments under way
        self._compressed = [
            Reduction(channel, config.compression, fragment.take(self.common), fragment.spans)
            for fragment in (self.fragments if config.compression else ())
        ]

    @property
    def _shifts(self) -> bool:
        """Whether ranks keep what they do while a fragment is under way."""
        return self.config.take_up == "shift" and self.config.delay > 0

    def sends(self, step: int) -> list[int]:
        """Return the fragments that are sent at the end of a step, which counts from 1."""
        period, count = self.config.period, len(self.fragments)
        place = (step - 1) % period + 1
        return [fragment for fragment in range(count) if (fragment + 1) * period // count == place]

    # --- steps ----------------------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        outcome = self.gradients.step_alone(update)
        step = self.steps + 1
        for number in self.sends(step):
            if self.config.lasts_a_period:
                self._take_up_late(number)
            else:
                self._difference(number)
            self._send(number, step)
        if not self.config.lasts_a_period:
            for number in sorted(n for n, sent in self._sent.items() if sent + self.config.delay <= step):
                self._take_up(number)
        return outcome

    def _difference(self, number: int) -> None:
        """Write a fragment's δᵢ where its mean will be."""
        fragment = self.fragments[number]
        for mean, x, own in fragment.views(self._mean, self.common, self.model.params):
            torch.sub(x, own, out=mean)
        if self._shifts:
            for gone, mean in fragment.views(self._gone, self._mean):
                gone.copy_(mean)

    def _send(self, number: int, step: int) -> None:
        """Begin to replace a fragment's δᵢ by their mean."""
        fragment = self.fragments[number]
        values, used = fragment.take(self._mean), self.gradients.take_used(fragment.numbers)
        self._sent[number], self._values[number] = step, [*values, used]
        compressed = self._compressed[number] if self._compressed else None

        def average() -> None:
            self.exchanges.mean(values, compressed, used)
            self.exchanges.mean([used])

        self.exchanges.begin(average)

    def _await(self, number: int | None = None) -> None:
        """Wait for a fragment, and those sent before; or for all. Put the means that have come in their places."""
        if number is not None and number not in self._values:
            return
        under_way = list(self._values)
        arrived = under_way if number is None else under_way[: under_way.index(number) + 1]
        self.exchanges.wait(len(under_way) - len(arrived))
        for one in arrived:
            *values, used = self._values.pop(one)
            self.fragments[one].put(values, self._mean)
            self._used[self.fragments[one].numbers] = used > 0

    def _take_up(self, number: int) -> None:
        """Move a fragment's common parameters by the mean, and this rank's towards them."""
        config, fragment = self.config, self.fragments[number]
        self._await(number)
        del self._sent[number]
        if self._shifts:
            for own, x, gone in fragment.views(self.model.params, self.common, self._gone):
                own.sub_(x).add_(gone)  # x − gone is where it was
        with self.model.leave_alone(self._used, self._momentum):
            for x, momentum, mean in fragment.views(self.common, self._momentum, self._mean):
                self._move(x, momentum, mean)
        for own, x in fragment.views(self.model.params, self.common):
            if self._shifts:
                own.add_(x)
            elif config.take_up == "shift" or not config.blend:
                own.copy_(x)
            elif config.blend < 1:
                own.mul_(config.blend).add_(x, alpha=1 - config.blend)

    def _take_up_late(self, number: int) -> None:
        """Move a fragment by the mean of the period before, go on from there, and write δᵢ of this one as to be sent.

        Before the first mean there is none: it counts as 0, and so does the rank's own part of it.
        """
        fragment, eager = self.fragments[number], self.config.take_up == "eager"
        self._await(number)
        gone = self._gone if eager else self._mean
        if self._sent.pop(number, None) is None:
            for mean, before in fragment.views(self._mean, gone):
                mean.zero_()
                before.zero_()
        views = fragment.views(self.model.params, self.common, self._momentum, self._mean, gone)
        used = self._used | self.gradients.used if eager else self._used
        with self.model.leave_alone(used, self._momentum):
            for own, x, momentum, mean, before in views:
                difference = x - own
                if eager:
                    mean.add_(difference - before, alpha=1 / self.comm.size)
                    before.copy_(difference)
                self._move(x, momentum, mean)
                own.copy_(x)
                mean.copy_(difference)

    def _move(self, x: Tensor, momentum: Tensor, gradient: Tensor) -> None:
        """Step as torch's SGD with Nesterov momentum; overwrites the gradient."""
        if self.config.outer_momentum:
            momentum.mul_(self.config.outer_momentum).add_(gradient)
            gradient.add_(momentum, alpha=self.config.outer_momentum)
        x.add_(gradient, alpha=-self.config.outer_lr)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def entries(self) -> list[Entry]:
        of_x = mean_of_ranks if self.config.take_up == "eager" else first
        entries = [
            *super().entries(),
            Entry("under_way", lambda: sorted(map(list, self._sent.items())), self._load_under_way),
            held_tensors("common", self.common, of_x, otherwise=self.model.params),
            held_tensors("momentum", self._momentum, of_x),
            flags("used", self.gradients.used),
            flags("moving", self._used),
            replace(held_tensors("mean", self._mean, first), save=lambda: self._mean if self._sent else []),
            # In another world all begin at the mean of the parameters, which is as far from x as ranks were on average.
            replace(held_tensors("gone", self._gone, mean_of_ranks), save=lambda: self._gone if self._sent else []),
        ]
        if self._compressed:
            entries += [
                Along("compressed.residual", self._residuals, self._load_residuals, mean_of_ranks),
                Entry("compressed.coders", self._coders, self._load_coders, optional=True),
            ]
        return entries

    def state(self) -> dict[str, Any]:
        self._await()
        return super().state()

    def _load_under_way(self, saved: Sequence[Sequence[int]]) -> None:
        self._await()
        self._sent = {} if self.alone else {number: sent for number, sent in saved}

    def _residuals(self) -> list[Tensor]:
        """Return what was not sent, along the parameters."""
        wide = [torch.float64 if x.dtype == torch.float64 else torch.float32 for x in self.common]
        whole = [torch.zeros(len(x), dtype=dtype) for x, dtype in zip(self.common, wide, strict=True)]
        for fragment, reduction in zip(self.fragments, self._compressed, strict=True):
            fragment.put([feedback.residual for feedback in reduction.feedbacks], whole)
        return whole

    def _load_residuals(self, saved: Sequence[Tensor]) -> None:
        for fragment, reduction in zip(self.fragments, self._compressed, strict=True):
            for feedback, residual in zip(reduction.feedbacks, fragment.take(saved) if saved else ()):
                feedback.set_residual(residual)

    def _coders(self) -> list[Any]:
        return [[r.calls, [feedback.compressor.state() for feedback in r.feedbacks]] for r in self._compressed]

    def _load_coders(self, saved: Sequence[Any]) -> None:
        for reduction, (calls, states) in zip(self._compressed, saved):
            reduction.calls = calls
            for feedback, state in zip(reduction.feedbacks, states, strict=True):
                feedback.compressor.load_state(state)

    def take_up(self) -> None:
        self._await()
        self._sent.clear()
        copy_all(self.common, self.model.params)
        self.exchanges.mean(self.common)

    def close(self) -> None:
        self.exchanges.close(self._compressed)
