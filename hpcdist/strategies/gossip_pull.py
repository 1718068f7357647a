"""Pull gossip: after each local step, average with the parameters of a random rank, read one-sidedly."""

from __future__ import annotations

from typing import final

import torch
from pydantic import Field

from hpcdist.comm.snapshot import Publication
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.families.gossip import Gossip
from hpcdist.strategies.families.wire import Wire, WireConfig


@final
class GossipPull(Gossip):
    """Asynchronous gossip SGD, pull variant.

    Every step: run the local optimiser, publish the own parameters θᵢ, draw j uniformly over all ranks (oneself
    included), fetch θⱼ and set θᵢ ← (θᵢ + θⱼ)/2. Nobody waits for anybody. The mean of all θ is conserved in
    expectation only. Ranks that have died are not drawn; whoever pulls from one that dies goes on without averaging,
    or with what it published last.

    Bytes per rank and step: one parameter vector fetched with probability (p − 1)/p; half with fp16 or bf16.

    Reference: Peter H. Jin, Qiaochu Yuan, Forrest Iandola, Kurt Keutzer, "How to scale distributed deep learning?",
    2016, algorithm 3.
    """

    class Config(Gossip.Config, WireConfig):
        """Options of gossip_pull."""

        torn: bool = Field(False, description="read without checking that the fetched parameters are of one step")

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        self._wire = Wire(config.compression, model.params)
        self._fetched = self._wire.like
        self._published = Publication(comm, self._wire.like, publishes=True)
        self._published.publish(self._wire.pack(model.params), self.steps)
        comm.barrier()  # nobody may wait for what was never published

    def advance(self, update: Update) -> Outcome:
        outcome = self.step_alone(update)
        self._published.publish(self._wire.pack(self.model.params), self.steps + 1)
        peer = self.draw()
        if peer != self.comm.rank:
            self._average_with(peer)
        return outcome

    def _average_with(self, peer: int) -> None:
        read = self._published.read_torn if self.config.torn else self._published.read
        if not self.survives(read, self._fetched, peer):
            return
        with torch.no_grad():
            for own, other in zip(self.model.params, self._fetched, strict=True):
                own.add_(other.to(own.device, non_blocking=True)).mul_(0.5)

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        self._published.publish(self._wire.pack(self.model.params), self.steps)
        self.comm.barrier()  # nobody may fetch what was published before

    def close(self) -> None:
        self._published.close()
