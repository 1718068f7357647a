"""Synchronous gossip: after each local step, average with one other rank, along a random permutation shared by all."""

from __future__ import annotations

from typing import final

import torch
from pydantic import Field

from hpcdist.records import StepRecord
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.families.decentralised import Decentralised
from hpcdist.strategies.families.wire import Wire, WireConfig


@final
class GossipSync(Decentralised):
    """Synchronous gossip SGD.

    Every step, on all ranks together: run the local optimiser, draw one permutation π of the ranks, the same
    everywhere and without communication, send θᵢ to π(i) and set θᵢ ← (θᵢ + θⱼ)/2 with j = π⁻¹(i). The mean of all θ
    changes by the mean of the local updates and by nothing else, to rounding; in expectation over π the squared
    distance to the mean is halved. Whoever receives from a rank that has died leaves the average out until all ranks
    heal, and draw permutations of the living.

    Bytes per rank and step: one parameter vector sent, half with fp16 or bf16, unless π(i) = i, which happens with
    probability 1/p.

    Reference: Peter H. Jin, Qiaochu Yuan, Forrest Iandola, Kurt Keutzer, "How to scale distributed deep learning?",
    2016, synchronous gossiping SGD.
    """

    class Config(WireConfig):
        """Options of gossip_sync."""

        seed: int = Field(0, ge=0, description="of the permutations; all ranks draw from (seed, step)")

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        self._wire = Wire(config.compression, model.params)
        self._received = [torch.empty_like(t) for t in self._wire.pack(model.params)]

    def advance(self, update: Update) -> Outcome:
        outcome = self.step_alone(update)
        self._average()
        return outcome

    def _average(self) -> None:
        """Collective. One exchange along this step's permutation, which all know alike: not all know who has died."""
        ranks, rank = self.comm.living, self.comm.rank
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.steps)
        order = torch.randperm(len(ranks), generator=generator).tolist()
        place = ranks.index(rank)
        dest, source = ranks[order[place]], ranks[order.index(place)]
        if dest == rank:
            return
        sent = self._wire.pack(self.model.params)
        if not self.exchange(sent, dest, self._received, source):
            return
        with torch.no_grad():
            for own, told, other in zip(self.model.params, sent, self._received, strict=True):
                if told is own:
                    own.add_(other).mul_(0.5)
                else:  # what rounding took from it stays here
                    own.sub_(told, alpha=0.5).add_(other, alpha=0.5)

    def join(self, update: Update) -> StepRecord:
        return self.step_without_samples(update)
