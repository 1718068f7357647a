"""DiLoCo that exchanges one fragment of the parameters at a time, overlapped with the next steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor

from hpcdist import compress
from hpcdist.comm.communicator import Communicator
from hpcdist.compress import CompressionConfig, Reduction
from hpcdist.config.settings import Field, joint_rule
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.common.state import first, mean_of_ranks
from hpcdist.strategies.synchronous.fragments import Fragment, split_layers
from hpcdist.strategies.synchronous.periodic import Periodic, outer_step


@final
class StreamingDiLoCo(Periodic):
    """Run the local, inner optimiser; exchange each fragment of the parameters once in H = `period` steps, in turn.

    The parameters are split into F fragments of `fragment_layers` layers: strided, so that a fragment has layers from
    the whole model, or sequential. Fragment f is sent at the end of step ⌊(f + 1)H/F⌋ of each period: ranks start to
    average δᵢ = x − θᵢ, where x are the fragment's common parameters and θᵢ rank i's. `delay` = τ steps later the mean
    is merged: the outer optimiser, SGD with Nesterov momentum, updates x with it, and rank i continues from
    αθᵢ + (1 − α)x, with α = `blend`; or, with `merge` = shift, from x plus its local steps since the fragment was sent.
    With one fragment and τ = 0, α = 0 this is `diloco`, and with τ = 1 and shift its `overlap`, to the bit.

    With `merge` = delayed or eager a fragment's exchange lasts the whole next period: the mean is merged when the
    fragment is sent again. Delayed: x moves by the mean of the last period, and all ranks continue from x. Eager: each
    rank has a local x and momentum, and replaces its part of the old mean, the last period's δᵢ, by this period's δᵢ:
    x moves by mean + (δᵢ − last δᵢ)/p.

    Unless eager, x and the outer momentum are bitwise equal on all ranks; replicas differ, and evaluations use their
    mean. Each rank keeps the state of its inner optimiser. All ranks have the same weight, even without samples in some
    step. On one rank only the inner optimiser runs. A blend with α < 1 discards a part of the last steps.

    Bytes per rank and step: 2n(p − 1)/(pH) for n bytes of parameters, as with `diloco`, and at most one fragment's in
    one step. With `compression` = e3m0, (p − 1)(n/8 + 4F)/H: each rank sends its codes to every other rank; and 8/H for
    each parameter, as with `diloco`. Memory per rank: four parameter vectors (x, its momentum, the means, δᵢ; three
    with blend and delayed).

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "streaming_diloco", period=4, fragment_layers=None, delay=1)

    Reference: Arthur Douillard et al., "Streaming DiLoCo with overlapping communication: towards a distributed free
    lunch", 2025, where δᵢ is the change of the rank's local parameters in a period; here it is the distance from x, the
    same if τ = 0 and α = 0. Satyen Kale et al., "Eager updates for overlapped communication and computation in
    DiLoCo", 2025, for delayed and eager.
    """

    class Config(Periodic.Config):
        period: int = Field(100, "H: steps in which each fragment is exchanged once", ge=1)
        fragment_layers: int | None = Field(3, "layers in a fragment; none: all parameters are one fragment", ge=1)
        order: Literal["strided", "sequential"] = Field(
            "strided", "a fragment has every F-th layer, for F fragments, or consecutive layers"
        )
        delay: int = Field(1, "τ: steps from sending a fragment to merging its mean, with blend and shift", ge=0)
        merge: Literal["blend", "shift", "delayed", "eager"] = Field(
            "blend",
            "blend the rank's parameters with the common ones; shift: keep its own steps since then; "
            "delayed: apply the mean a period later; eager: the same, with this rank's part of this period",
        )
        blend: float = Field(0.5, "α: weight of the rank's own parameters in a blend", ge=0, le=1)
        outer_lr: float = Field(0.4, "learning rate of the outer optimiser", gt=0)
        outer_momentum: float = Field(0.9, "Nesterov momentum of the outer optimiser", ge=0, lt=1)
        compression: CompressionConfig = Field(
            CompressionConfig(), "how differences are compressed; e3m0 sends four bits per element"
        )

        @joint_rule
        def _merges_before_it_sends_again(self) -> None:
            if not self.lasts_a_period and self.delay >= self.period:
                raise ValueError(
                    f"strategy.delay must be less than strategy.period, {self.period}, as a fragment is merged "
                    f"before it is sent again; got {self.delay}. Take a smaller delay, or a longer period."
                )
            if self.lasts_a_period and self.delay != 1:
                raise ValueError(
                    f"strategy.delay must not be given where strategy.merge is {self.merge}, by which a mean is "
                    f"merged a period later; got {self.delay}. Leave it away, or take blend or shift."
                )
            if self.compression and compress.load(self.compression.name).elementwise:
                raise ValueError(
                    "strategy.compression of streaming_diloco must remember nothing but what it has not sent; got "
                    f"{self.compression.name}. Take e3m0, qsgd or topk."
                )

        @property
        def lasts_a_period(self) -> bool:
            """Whether an exchange lasts a whole period."""
            return self.merge in ("delayed", "eager")

        @property
        def steps_in_flight(self) -> float:
            return math.inf if self.lasts_a_period else self.delay

    config: Config

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        self.eager = config.merge == "eager"  # each rank has a local x and momentum
        self.of_ranks = "mean" if self.eager else "first"
        self.blend = None if self.eager or config.merge == "shift" else config.blend
        super().__init__(config, comm, model, **kwargs)
        self.momentum = self.state.sharded("momentum", self.common, reshard=self.of_ranks)

    def split_layers(self) -> list[Fragment]:
        config = self.config
        fragments = split_layers(self.model, config.fragment_layers, config.order)
        if len(fragments) > config.period:
            raise ConfigError(
                f"strategy.period must be at least the number of fragments, {len(fragments)}; got {config.period}. "
                "Take a longer period, or more strategy.fragment_layers."
            )
        return fragments

    def sends(self, step: int) -> list[int]:
        period, count = self.config.period, len(self.fragments)
        step_of_period = (step - 1) % period + 1
        return [fragment for fragment in range(count) if (fragment + 1) * period // count == step_of_period]

    def move(self, fragment: Fragment) -> None:
        for views in fragment.views(self.common, self.momentum, self.mean):
            outer_step(self.config, *views)

    def send(self, number: int, step: int) -> None:
        if self.config.lasts_a_period:
            self._move_late(number)
            self.start(number, step)
        else:
            super().send(number, step)

    def _move_late(self, number: int) -> None:
        """For delayed and eager: merge a fragment's mean of the last period, before this period's δᵢ = x − θᵢ is sent.

        1. Wait for the mean of all ranks' last δᵢ; in the first period it is zero. 2. Compute this period's δᵢ. 3. If
        eager, replace this rank's part of the mean: mean + (δᵢ − last δᵢ)/p. 4. Run the outer optimiser on x, which may
        overwrite `mean`. 5. Continue from x. The fragment's part of each buffer contains, before and after:

            model.params   θᵢ                     updated x
            common         x                      updated x
            mean           mean of the last δᵢ    this period's δᵢ, which `start` averages next
            sent (eager)   this rank's last δᵢ    this period's δᵢ
        """
        fragment = self.fragments[number]
        self.complete(number)
        last_local = self.sent if self.eager else self.mean  # this rank's last δᵢ; unused unless eager
        if self.in_flight.pop(number, None) is None:
            for mean, local in fragment.views(self.mean, last_local):
                mean.zero_()
                local.zero_()
        for local, x in fragment.views(self.model.params, self.common):
            torch.sub(x, local, out=local)  # δᵢ of this period, in the memory of the parameters
        if self.eager:
            for local, mean, last in fragment.views(self.model.params, self.mean, last_local):
                mean.add_(local - last, alpha=1 / self.comm.size)
                last.copy_(local)
        with self.model.skip_unused(self.used | self.gradients.used if self.eager else self.used, self.momentum):
            self.move(fragment)
        for local, x, mean in fragment.views(self.model.params, self.common, self.mean):
            mean.copy_(local)  # δᵢ
            local.copy_(x)

    def declare_compressed(self, of_fragments: Sequence[Reduction]) -> None:
        compressors = [[feedback.compressor for feedback in reduction.feedbacks] for reduction in of_fragments]
        for reduction in of_fragments:
            self.state.scratch([*reduction.working, *(feedback.residual for feedback in reduction.feedbacks)])

        def residuals() -> list[Tensor]:
            flats = [torch.zeros(len(x), dtype=torch.promote_types(x.dtype, torch.float32)) for x in self.common]
            for fragment, reduction in zip(self.fragments, of_fragments, strict=True):
                fragment.put([feedback.residual for feedback in reduction.feedbacks], flats)
            return flats

        def load_residuals(saved: Sequence[Tensor]) -> None:
            for fragment, reduction in zip(self.fragments, of_fragments, strict=True):
                for feedback, residual in zip(reduction.feedbacks, fragment.take(saved) if saved else ()):
                    feedback.set_residual(residual)

        def load_coders(saved: Sequence[Any]) -> None:
            for reduction, of_fragment, (calls, states) in zip(of_fragments, compressors, saved):
                reduction.calls = calls
                for compressor, state in zip(of_fragment, states, strict=True):
                    compressor.load_state_dict(state)

        self.state.custom(
            "compressed.residual", residuals, load_residuals, lambda: None, reshard=mean_of_ranks, optional=True,
            sharded=True,
        )  # fmt: skip
        self.state.custom(
            "compressed.coders",
            lambda: [[r.calls, [c.state_dict() for c in own]] for r, own in zip(of_fragments, compressors)],
            load_coders, lambda: None, reshard=first, optional=True,
        )  # fmt: skip
