"""Train in periods: local steps, and at each period's end one common move of all ranks."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.compress import CompressionConfig, Reduction, spans
from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.common.state import Along, Entry, copy_all, first, flags, held_tensors, mean_of_ranks, reduction
from hpcdist.strategies.synchronous.exchanges import Exchanges


class Periodic(Strategy):
    """Step alone for a period; then move the common parameters x, of which all ranks have a copy, and start there.

    Ranks communicate their distances from x, δᵢ = x − θᵢ, and nothing else; every rank counts alike, also one that had
    no samples in some step. With `compression` they send δᵢ and their residuals as the compressor encodes them; the
    rank goes back to x all the same, and the error follows at a later exchange. A subclass says how x moves by the mean
    δ; all ranks make the same move, to the bit. On one rank the optimiser runs alone, and there is no x.

    With `overlap` the exchange that begins at the end of step k runs while step k + 1 computes its gradient, and is
    taken up after that step's update, θᵢ ← x + (θᵢ − θᵢ at step k): each rank keeps what it has done meanwhile. Where
    MPI lets a rank have no second thread, the numbers are the same and the time is not saved.
    """

    class Config(Strategy.Config):
        """Options of strategies that communicate once in a period."""

        period: int = Field(10, ge=1, description="H: steps between two exchanges of all ranks")
        overlap: bool = Field(
            False, description="exchange while the next step computes, and use the result after that step"
        )
        algorithm: str = Field("auto", description="all-reduce algorithm; auto chooses by size and ranks")
        compression: CompressionConfig = Field(
            CompressionConfig(), description="how differences are compressed; its warmup_steps count exchanges"
        )

        def meets(self, step: int) -> bool:
            return step % self.period == 0

    config: Config
    contract = Contract(averages="parameters", meets="every period")

    def __init__(self, config: Config, comm, model, **given):
        super().__init__(config, comm, model, **given)
        self.alone = comm.size == 1
        self.exchanges = Exchanges(comm, self.records, config.algorithm, aside=config.overlap)
        channel = self.exchanges.channel
        self._compressed: Reduction | None = None
        if config.compression and not self.alone:
            self._compressed = Reduction(
                channel, config.compression, model.params, spans(model), over_senders=self.over_senders
            )
        self.common = [] if self.alone else [params.clone() for params in model.params]  # x
        shared = channel.memory.shared_like(self.common) if self._compressed is None else None
        self._mean = [torch.empty_like(x) for x in self.common] if shared is None else shared
        self._gone: list[Tensor] = []  # δᵢ of the exchange under way; empty where there is none
        self._used = torch.ones_like(self.gradients.used)  # by some rank, in the period of `_mean`

    @property
    def over_senders(self) -> bool:
        """Whether an element's mean is over the ranks that have sent it, where that is compressed."""
        return False

    # --- what a subclass defines ----------------------------------------------------------------------------------
    @abc.abstractmethod
    def move(self, mean: Sequence[Tensor]) -> None:
        """Move the parameters in `common` by the mean δ, the same on all ranks.

        Args:
            mean: flat tensors like `model.params`; the method may overwrite them.
        """

    def momentum(self) -> Sequence[Tensor]:
        """Return the momentum with which x moves, along the parameters; none where it moves without."""
        return ()

    def exchanges_at(self, step: int) -> bool:
        """Tell whether all ranks exchange at the end of a step; counts from 1."""
        return self.config.meets(step)

    def inner_step(self, update: Update) -> Outcome:
        """Take a step of the period: of this rank alone, unless a subclass knows better."""
        return self.gradients.step_alone(update)

    # --- steps ----------------------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        outcome = self.inner_step(update)
        if not self.alone:
            if self._gone:
                self._take_up()
            if self.exchanges_at(self.steps + 1):
                self._exchange()
        return outcome

    def _exchange(self) -> None:
        for mean, x, own in zip(self._mean, self.common, self.model.params, strict=True):
            torch.sub(x, own, out=mean)
        used = self.gradients.take_used()
        if not self.config.overlap:
            self._average(used)
            self._move()
            self.model.load_params(self.common)
            return
        self._gone = [mean.clone() for mean in self._mean]
        self.exchanges.begin(lambda: self._average(used))

    def _average(self, used: Tensor) -> None:
        """Collective. Average δᵢ over the ranks, of which this one has used these parameters."""
        self.exchanges.mean(self._mean, self._compressed, used)
        if self.momentum():
            self.exchanges.mean([used])
            self._used.copy_(used > 0)

    def _move(self) -> None:
        with self.model.leave_alone(self._used, self.momentum()):
            self.move(self._mean)

    def _take_up(self) -> None:
        """Move `common` by the exchange under way; add this rank's own change since that began."""
        self.exchanges.wait()
        for own, x, gone in zip(self.model.params, self.common, self._gone, strict=True):
            own.sub_(x).add_(gone)  # x − gone is where it was
        self._move()
        for own, x in zip(self.model.params, self.common, strict=True):
            own.add_(x)
        self._gone = []

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def entries(self) -> list[Entry]:
        return [
            *super().entries(),
            held_tensors("common", self.common, first, otherwise=self.model.params),
            # In another world all begin at the mean of the parameters, which is as far from x as ranks were on average.
            Along("gone", lambda: self._gone, self._load_gone, mean_of_ranks),
            Along("mean", lambda: self._mean if self._gone else [], lambda saved: copy_all(self._mean, saved)),
            flags("used", self.gradients.used),
            flags("moving", self._used),
            *reduction("compressed", self._compressed),
        ]

    def state(self) -> dict:
        self.exchanges.wait()
        return super().state()

    def _load_gone(self, saved: Sequence[Tensor]) -> None:
        self._gone = [gone.to(x.device, copy=True) for gone, x in zip(saved, self.common)]

    def take_up(self) -> None:
        self.exchanges.wait()
        self._gone = []
        copy_all(self.common, self.model.params)
        self.exchanges.mean(self.common)

    def close(self) -> None:
        self.exchanges.close([] if self._compressed is None else [self._compressed])
