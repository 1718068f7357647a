"""What gossips share whose ranks draw their peers each by itself."""

from __future__ import annotations

import torch
from pydantic import Field

from hpcdist.strategies.base import Strategy
from hpcdist.strategies.families.decentralised import Decentralised


class Gossip(Decentralised):
    """Collective. Every rank draws other ranks by a generator of its own, which is part of its state."""

    class Config(Strategy.Config):
        """Options of random peers."""

        seed: int = Field(0, ge=0, description="of the draw of peers; each rank draws from (seed, rank)")

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        self._peers = torch.Generator().manual_seed(config.seed * 1_000_003 + comm.rank)

    def draw(self) -> int:
        """One of the ranks that are present, oneself included, each as likely as any other."""
        return self.present[int(torch.randint(len(self.present), (), generator=self._peers))]

    def state(self) -> dict:
        return {**super().state(), "peers": self._peers.get_state()}

    def adapted_state(self, states: list[dict]) -> dict:
        return {**states[0], "peers": None}  # ranks must not draw alike: each keeps the generator it has

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        if state["peers"] is not None:
            self._peers.set_state(state["peers"])
