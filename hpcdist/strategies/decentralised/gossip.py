"""Draw random peers, and choose the steps in which to mix with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.errors import ConfigError
from hpcdist.model.pieces import alongside
from hpcdist.strategies.common.state import Entry, dropped
from hpcdist.strategies.decentralised.base import Decentralised
from hpcdist.strategies.decentralised.half_precision import WireConfig


class MixingConfig(WireConfig):
    """Options of strategies that mix a rank's parameters with those of others drawn at random.

    Steps count from 1. With `order = "before"` the gradient is still that at the parameters of before the mixing, as
    in D-PSGD; the local optimiser then steps from the mixed ones.
    """

    interval: int = Field(1, ge=1, description="steps between mixings: step k mixes where interval divides k")
    order: Literal["after", "before"] = Field("after", description="mix after the local optimiser's step, or before it")
    draw_self: bool = Field(True, description="a rank may draw itself, as in the paper, and average with itself")

    def mixes(self, step: int, order: str) -> bool:
        """Tell whether to mix in that step, "before" or "after" the local optimiser's step."""
        return order == self.order and step % self.interval == 0


class Gossip(Decentralised):
    """Collective. Train with random peers, drawn by a generator of each rank's own, which checkpoints hold."""

    class Config(Decentralised.Config):
        """Options of random peers."""

        seed: int = Field(0, ge=0, description="of the draw of peers; each rank draws from (seed, rank)")

    contract = replace(Decentralised.contract, memory="read by others")

    def __init__(self, config: Config, comm, model, **given):
        super().__init__(config, comm, model, **given)
        self._peers = torch.Generator().manual_seed(config.seed * 1_000_003 + comm.rank)

    def draw(self, count: int = 1, *, oneself: bool = True) -> list[int]:
        """Draw `count` different ranks of those present, uniformly; all of them where there are fewer.

        Args:
            oneself: draw from all ranks, this one included.
        """
        left = [rank for rank in self.present if oneself or rank != self.comm.rank]
        return [
            left.pop(int(torch.randint(len(left), (), generator=self._peers))) for _ in range(min(count, len(left)))
        ]

    def average_in(self, total: Sequence[Tensor], count: int, weight: int) -> None:
        """Average the own parameters, which count `weight` times, with those of `count` others.

        Args:
            total: the others' sum, flat tensors like `model.params`, of any type and on any device.
        """
        with torch.no_grad():
            for own, others in zip(self.model.params, total, strict=True):
                for mine, theirs in alongside(own, others.to(own.device, non_blocking=True)):
                    if weight > 1:
                        mine.mul_(weight)
                    mine.add_(theirs).div_(weight + count)

    def check_count(self, name: str, count: int, *, oneself: bool) -> None:
        """Check that there are `count` ranks to draw; on one rank, which mixes with nobody, any count will do.

        Raises:
            ConfigError: `count`, the option of that name, is greater.
        """
        most = self.comm.size - (not oneself)
        if self.comm.size > 1 and count > most:
            raise ConfigError(
                f"strategy.{name} must be at most the number of ranks to draw from, {most}; got {count}. Draw fewer, "
                "or start more ranks."
            )

    def entries(self) -> list[Entry]:
        return [*super().entries(), Entry("peers", self._peers.get_state, self._load_peers, dropped())]

    def _load_peers(self, saved: Tensor | None) -> None:
        if saved is not None:  # else ranks must not draw alike: each keeps the generator it has
            self._peers.set_state(saved)
