"""Average in each step with one other rank, by a random permutation or matching: synchronous gossip."""

from __future__ import annotations

from typing import Any, Literal, final

import torch

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field, joint_rule
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.decentralised.peers import Gossip


@final
class GossipSync(Gossip):
    """Train by synchronous gossip SGD: in each step average with one random rank.

    Every step, synchronously on all ranks: run the local optimiser, sample a permutation π of the ranks (from the same
    seed on all ranks, without communication), send the parameters θᵢ to rank π(i), and set θᵢ ← (θᵢ + θⱼ)/2 with
    j = π⁻¹(i). Averaging conserves the mean of all θ, to rounding; in expectation over π it halves the squared distance
    to the mean. If a rank fails, the rank that would receive from it does not average; at the next synchronization the
    surviving ranks form a new group, and permute among themselves.

    With `pairing = "matching"` the ranks are paired at random, and both ranks of a pair get their mean, bitwise equal
    unless parameters are sent in half precision. With an odd number of ranks one rank, a different one each time, does
    not average. The mean of all θ is conserved, too.

    With `interval` ranks average only in every `interval`-th step. With `order = "before"` they average first, then run
    the local optimiser; the gradient is computed at θᵢ before the average.

    Bytes per rank and step with an average: one parameter vector sent, half with fp16 or bf16; none if π(i) = i, which
    has probability 1/p. Without `include_self` permutations with π(i) = i are sampled again.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "gossip_sync", pairing="matching")

    Reference: Peter H. Jin, Qiaochu Yuan, Forrest Iandola, Kurt Keutzer, "How to scale distributed deep learning?",
    2016, synchronous gossiping SGD. Matchings: Stephen Boyd, Arpita Ghosh, Balaji Prabhakar, Devavrat Shah,
    "Randomized gossip algorithms", 2006, synchronous model.
    """

    class Config(Gossip.Config):
        seed: int = Field(0, "seed of the permutations, sampled from (seed, step)", ge=0)
        pairing: Literal["permutation", "matching"] = Field(
            "permutation", "receive along a random permutation, or average in random disjoint pairs"
        )

        @joint_rule
        def _pairs_are_of_two(self) -> None:
            if self.pairing == "matching" and not self.include_self:
                raise ValueError(
                    "strategy.include_self must be true with strategy.pairing 'matching', whose pairs are of two ranks "
                    "in any case; got false. Leave it out."
                )

        def synchronizes(self, step: int) -> bool:
            return step % self.interval == 0

    config: Config
    contract = Contract(averages="parameters", synchronizes="every step", deaths="others continue")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        self._received = self.state.scratch([torch.empty_like(t) for t in self.wire.pack(model.params)])

    def mix(self, due: bool) -> None:
        """Collective. Average with this step's random partner."""
        if not due:
            return
        ranks, rank = self.comm.failures.alive, self.comm.rank
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.steps)
        order = _random_order(len(ranks), generator, self.config)  # the same on all ranks
        index = ranks.index(rank)
        dest, source = ranks[order[index]], ranks[order.index(index)]
        if dest == rank:
            return
        sent = self.wire.pack(self.model.params)
        if not self.peers.exchange(sent, dest, self._received, source):
            return
        with torch.no_grad():
            for flat, rounded, received in zip(self.model.params, sent, self._received, strict=True):
                for local, sent_part, remote in alongside(flat, rounded, received):
                    if rounded is flat:
                        local.mul_(0.5).add_(remote, alpha=0.5)  # a sum may be beyond the range of float16
                    else:  # the rounding error of the message stays here
                        local.sub_(sent_part, alpha=0.5).add_(remote, alpha=0.5)


def _random_order(count: int, generator: torch.Generator, config: GossipSync.Config) -> list[int]:
    """Sample the destination of each of `count` ranks: a permutation; for a matching, one that swaps random pairs."""
    order = torch.randperm(count, generator=generator).tolist()
    if config.pairing == "matching":
        swapped = list(range(count))
        for a, b in zip(order[::2], order[1::2]):
            swapped[a], swapped[b] = b, a
        return swapped
    while not config.include_self and count > 1 and any(i == to for i, to in enumerate(order)):
        order = torch.randperm(count, generator=generator).tolist()  # e times on average
    return order
