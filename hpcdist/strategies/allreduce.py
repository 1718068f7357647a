"""Synchronous data parallelism: gradients are averaged over all ranks, then every rank makes the same update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hpcdist.collectives.background import Trial
from hpcdist.comm.communicator import Traffic
from hpcdist.compress import CompressionConfig, Reduction, spans
from hpcdist.flat import Bucket
from hpcdist.records import StepRecord
from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.families.averaging import Averaging, OutsideAveraging, OwnAveraging
from hpcdist.strategies.families.provider import ProviderConfig


class AllReduce(Strategy):
    """Average the gradients of all ranks, weighted by their sample counts, then update everywhere.

    Equals one process with the batches of all ranks together. Replicas stay bitwise equal. With `overlap`, buckets
    of gradients are reduced on a thread while the backward pass computes the rest; that costs interpreter time and
    a core, so `auto` measures the first steps both ways.

    With another `provider` the same is done by Horovod (`hpcdist horovod build`), or by torch.distributed, which have
    NCCL for GPUs, also on one rank. Adasum is another mathematics: orthogonal gradients are added, parallel ones
    averaged, so that the learning rate need not grow with the ranks.

    With `compression` each rank sends what the compressor makes of its gradient, and of what it has not sent before;
    all ranks apply the mean of what was sent, so that replicas stay bitwise equal there too.

    Bytes per rank and step: 2n(p − 1)/p for n bytes of gradients (ring, direct), or those of `hpcdist compressors`;
    and 4 that say whether all gradients were there and finite, as they are as a rule.

    Reference: Priya Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017; for the
    buckets, Shen Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020; for
    Adasum, Saeed Maleki et al., "Scaling distributed training with adaptive summation", 2020.
    """

    class Config(Strategy.Config):
        """Options of allreduce."""

        algorithm: str = Field("auto", description="all-reduce algorithm; auto chooses by size and ranks")
        overlap: Literal["auto", "on", "off"] = Field(
            "auto", description="reduce buckets while the backward pass runs; auto tries both"
        )
        accumulation: int = Field(1, ge=1, description="backward passes per step, whose gradients add up")
        compression: CompressionConfig = Field(CompressionConfig(), description="how gradients are compressed")
        provider: ProviderConfig = Field(ProviderConfig(), description="the library that sums gradients")

        @model_validator(mode="after")
        def _provided_as_it_is(self):
            other = self.provider.name
            if self.provider and self.algorithm != "auto":
                raise ValueError(
                    f"strategy.algorithm must be auto with strategy.provider = {other!r}, which has its own; got "
                    f"{self.algorithm}. Leave it out."
                )
            if self.provider and self.compression:
                raise ValueError(
                    f"strategy.compression must be none with strategy.provider = {other!r}, which sums gradients as "
                    f"they are; got {self.compression.name}. Leave it out; Horovod has strategy.provider.compression."
                )
            return self

        @model_validator(mode="after")
        def _compressed_at_once(self):
            if self.compression and self.overlap == "on":
                raise ValueError(
                    "strategy.overlap must be off or auto with strategy.compression, which sees all gradients before "
                    "any is sent; got on. Leave it out."
                )
            return self

    reduces_in_backward = True

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        self.updates = 0
        self._channel = comm.split(0)  # the thread's own
        self._averaging: Averaging = (
            OutsideAveraging(self._channel, config.provider, model)
            if config.provider
            else OwnAveraging(self._channel, config.algorithm)
        )
        self._alone = comm.size == 1 and not config.provider
        self._compressed: Reduction | None = None
        if config.compression and comm.size > 1:
            self._compressed = Reduction(self._channel, config.compression, model.grads, spans(model))
        self._used = (torch.ones(len(model.names), dtype=torch.bool),) * 2  # in the last step: here, and on any rank
        self._bad: list[str] = []
        overlaps = self._averaging.beside and self._compressed is None
        self._trial = Trial(comm) if config.overlap == "auto" and overlaps else None
        model.on_bucket_ready(self._bucket_ready)
        self._arm(overlapped=config.overlap == "on" and overlaps)

    def _arm(self, overlapped: bool) -> None:
        """Chooses how the next step is reduced."""
        self._overlapped = overlapped
        self.model.begin(announce=overlapped, passes=self.config.accumulation)

    def _bucket_ready(self, bucket: Bucket) -> None:
        self._averaging.begin(bucket, partial(self._prepare, self.model.weight))

    def _prepare(self, weight: float, bucket: Bucket) -> None:
        """Makes the bucket this rank's part of the mean, weighted by samples; notes what is not finite before."""
        if self.config.on_nonfinite != "ignore":
            self._bad += self.model.nonfinite(bucket)
        if weight != 1.0:
            bucket.grads.mul_(weight)

    def advance(self, update: Update) -> Outcome:
        bad = self._merge()
        event = self.refuse_nonfinite(bad) if bad else None
        if not bad:
            update()
            self.updates += 1
        return Outcome(self.updates, staleness=() if bad else (0,), event=event)

    def minimise(
        self, solve: Callable[[Callable[[], Tensor]], Any], closure: Callable[[], Any] | None
    ) -> tuple[StepRecord, Any]:
        """Collective. One step of an optimiser that evaluates the loss as often as it likes, such as L-BFGS.

        After each evaluation gradients and loss are their means over the ranks, so that line searches decide alike
        everywhere, as in one process with the joint batch. A gradient that is not finite ends the run (or is looked
        away from): the step can't be left out once it is half made. Messages: at each evaluation those of a step.

        Args:
            solve: the optimiser's own step, which is given the closure to evaluate.
            closure: zeroes the gradients, runs this rank's backward pass and returns its loss; None on a rank without
                samples, which takes part with weight 0.

        Returns:
            The step's record, and what `solve` returned; losses are float64 scalars, shape ().

        Reference: Dong Liu, Jorge Nocedal, "On the limited memory BFGS method for large scale optimization", 1989.
        """

        def evaluate() -> Tensor:
            loss = self._nothing() if closure is None else torch.as_tensor(closure(), dtype=torch.float64).item()
            bad = self._merge()
            if bad:
                self.refuse_nonfinite(bad)
            return self._mean(loss)

        result = solve(evaluate)
        self.updates += 1
        self.steps += 1
        return self.record(Outcome(self.updates, staleness=() if closure is None else (0,))), result

    def _mean(self, loss: float) -> Tensor:
        """Collective. The loss averaged as gradients are, the same to the bit on all ranks."""
        losses = torch.zeros(self.comm.size, dtype=torch.float64)  # one place each: a sum of zeros and one is exact
        losses[self.comm.rank] = self.model.weight * loss
        self.comm.allreduce(losses)
        return torch.tensor(sum(losses.tolist()) / self.comm.size, dtype=torch.float64)

    def _merge(self) -> dict[int, list[str]]:
        """Collective. Gives all ranks the mean gradients; where some were not finite tells which, by rank, instead."""
        if self._compressed is not None:
            used, bad = self._average_compressed()
        else:
            used, bad = self._agree(self._average_beside() if self._overlapped else self._average_now())
        if not bad:
            self.model.release(used)
        if self._trial is not None and not self._trial.decided:
            self._trial.step()
        self._arm(self._trial.way if self._trial is not None else self._overlapped)
        return bad

    def _average_now(self) -> torch.Tensor:
        used = self.model.collect()
        if self._alone:
            self._bad = self.nonfinite()
        else:
            self._averaging.now(self.model.buckets, partial(self._prepare, self.model.weight))
        return used

    def _average_compressed(self) -> tuple[torch.Tensor, dict[int, list[str]]]:
        used, self._bad = self.model.collect(), self.nonfinite()
        used, bad = self._agree(used)  # before: what is not finite must not get into what is left to be sent
        if not bad:
            for flat in self.model.grads:
                flat.mul_(self.model.weight)
            ranks = self._compressed(self.model.grads)
            for flat in self.model.grads:
                flat.div_(ranks)
        return used, bad

    def _average_beside(self) -> torch.Tensor:
        used = self.model.flush()
        start = self.comm.now()
        self._averaging.wait()
        self.comm.traffic.waiting_s += self.comm.now() - start
        return used

    def _agree(self, used: torch.Tensor) -> tuple[torch.Tensor, dict[int, list[str]]]:
        """Which parameters had a gradient on any rank, and which were not finite, by rank."""
        bad, self._bad = self._bad, []
        if self.comm.size == 1:
            return used, {0: bad} if bad else {}
        news = torch.tensor([bool(bad) or not torch.equal(used, self._used[0])], dtype=torch.int32)
        self.comm.allreduce(news)
        if int(news) == 0:  # on every rank as in the last step
            return self._used[1], {}
        word = torch.cat([used.to(torch.int32), torch.tensor([len(bad)], dtype=torch.int32)])
        self.comm.allreduce(word)
        self._used = used, word[:-1] > 0
        if int(word[-1]) == 0:
            return self._used[1], {}
        names = [text.decode() for text in self.comm.exchange("\n".join(bad).encode())]
        return self._used[1], {rank: text.split("\n") for rank, text in enumerate(names) if text}

    def _nothing(self) -> float:
        """This rank's part of an average for which it has no samples; returns their loss."""
        self.model.release([False] * len(self.model.names))
        self.model.weight = 0.0
        return 0.0

    def join(self, update: Update) -> StepRecord:
        self.model.weight = 0.0
        return self.step_without_samples(update)

    def traffic(self) -> Traffic:
        return self.comm.traffic + self._channel.traffic

    def state(self) -> dict:
        held = {} if self._compressed is None else {"compressed": self._compressed.state()}
        return {**super().state(), "updates": self.updates, **held}

    def adapted_state(self, states: list[dict]) -> dict:
        compressed = [state["compressed"] for state in states if "compressed" in state]
        return {**states[0], **({"compressed": Reduction.adapted(compressed)} if compressed else {})}

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        self.updates = state["updates"]
        if self._compressed is not None and "compressed" in state:
            self._compressed.load_state(state["compressed"])

    def close(self) -> None:
        if self._compressed is not None:
            self._compressed.close()
        self._averaging.close()
        self._channel.close()
