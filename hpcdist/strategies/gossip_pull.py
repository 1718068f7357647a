"""Pull gossip: after each local step, average with the parameters of a random rank, read one-sidedly."""

from __future__ import annotations

import torch
from pydantic import Field

from hpcdist.comm.snapshot import Publication
from hpcdist.strategies.base import Outcome, Strategy, Update


class GossipPull(Strategy):
    """Asynchronous gossip SGD, pull variant.

    Every step: run the local optimiser, publish the own parameters θᵢ, draw j uniformly over all ranks (oneself
    included), fetch θⱼ and set θᵢ ← (θᵢ + θⱼ)/2. Nobody waits for anybody. The mean of all θ is conserved in
    expectation only.

    Bytes per rank and step: one parameter vector fetched with probability (p − 1)/p.

    Reference: Peter H. Jin, Qiaochu Yuan, Forrest Iandola, Kurt Keutzer, "How to scale distributed deep learning?",
    2016, algorithm 3.
    """

    class Config(Strategy.Config):
        """Options of gossip_pull."""

        torn: bool = Field(False, description="read without checking that the fetched parameters are of one step")
        seed: int = Field(0, ge=0, description="of the draw of peers; each rank draws from (seed, rank)")

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        self._peers = torch.Generator().manual_seed(config.seed * 1_000_003 + comm.rank)
        self._fetched = [torch.empty_like(p, device="cpu") for p in model.params]
        self._published = Publication(comm, model.params, publishes=True)
        self._published.publish(model.params, self.steps)

    def advance(self, update: Update) -> Outcome:
        outcome = self.step_alone(update)
        self._published.publish(self.model.params, self.steps + 1)
        peer = int(torch.randint(self.comm.size, (), generator=self._peers))
        if peer != self.comm.rank:
            self._average_with(peer)
        return outcome

    def _average_with(self, peer: int) -> None:
        read = self._published.read_torn if self.config.torn else self._published.read
        read(self._fetched, peer)
        with torch.no_grad():
            for own, other in zip(self.model.params, self._fetched, strict=True):
                own.add_(other.to(own.device, non_blocking=True)).mul_(0.5)

    def state(self) -> dict:
        return {**super().state(), "peers": self._peers.get_state()}

    def adapted_state(self, states: list[dict]) -> dict:
        return {**states[0], "peers": None}  # ranks must not draw alike: each keeps the generator it has

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        if state["peers"] is not None:
            self._peers.set_state(state["peers"])
        self._published.publish(self.model.params, self.steps)
        self.comm.barrier()  # nobody may fetch what was published before

    def close(self) -> None:
        self._published.close()
