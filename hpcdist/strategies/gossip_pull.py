"""Average in each step with parameters read one-sidedly from random ranks: pull gossip."""

from __future__ import annotations

from functools import partial
from typing import Any, final

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.snapshot import Publication
from hpcdist.config.settings import Field
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Update
from hpcdist.strategies.common.state import copy_all
from hpcdist.strategies.decentralised.peers import Gossip, PeerSampler, SamplingConfig, average_in


@final
class GossipPull(Gossip):
    """Train by asynchronous gossip SGD, pull variant: in each step average with a random rank's parameters.

    Every step of rank i: run the local optimiser, publish the parameters θᵢ, sample a rank j uniformly over all ranks,
    i included, fetch θⱼ and set θᵢ ← (θᵢ + θⱼ)/2. No rank waits for another. The mean of all θ is conserved only in
    expectation. Failed ranks are not sampled; if rank j fails while it is read, rank i does not average, or averages
    with the last published parameters of rank j.

    With `pulls` = m, m different ranks are sampled, and θᵢ becomes the mean of θᵢ and the fetched parameters; θᵢ counts
    twice if rank i was sampled. With `interval` a rank fetches only in every `interval`-th step, but publishes in every
    step. With `order = "before"` it first fetches and averages, then runs the local optimiser and publishes; the
    gradient is computed at θᵢ before the average.

    Bytes per rank and step: m(p − 1)/p parameter vectors fetched on average, m without `include_self`; half with fp16
    or bf16; none in steps without a fetch. Memory: two parameter vectors, and one more where fetched parameters are
    copied: from another node, with m > 1, half precision or `order = "before"`.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "gossip_pull", pulls=2, interval=2)

    Reference: Peter H. Jin, Qiaochu Yuan, Forrest Iandola, Kurt Keutzer, "How to scale distributed deep learning?",
    2016, algorithm 3.
    """

    class Config(SamplingConfig, Gossip.Config):
        pulls: int = Field(1, "number of ranks whose parameters are fetched for one average", ge=1)
        torn: bool = Field(False, "do not check that all fetched parameters belong to one step")

    config: Config
    contract = Contract(averages="parameters", synchronizes="never", memory="read by others", deaths="others continue")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        self.sampler = PeerSampler(comm, self.peers, self.state, config, "pulls")
        self._mixes_published = config.order == "after" and not config.compression  # averages what was just published
        self._fetched = self.state.scratch(self.wire.empty())
        self._published = self.opened(Publication(comm, self._fetched, publishes=comm.size > 1))
        self.state.after_load(self.reset_from_model)
        self._publish(self.steps)
        comm.barrier()  # no rank may read before the first publication

    def local_step(self, update: Update) -> Outcome:
        outcome = super().local_step(update)
        self._publish(self.steps + 1)
        return outcome

    def _publish(self, clock: int) -> None:
        if self.comm.size > 1:
            self._published.publish(self.wire.pack(self.model.params), clock)

    def mix(self, due: bool) -> None:
        """Average with sampled ranks, with equal weights."""
        if not due:
            return
        peers = self.sampler.sample()
        weight = 1 + (self.comm.rank in peers)  # of the local parameters: they are a mean of this many
        published = self._mixes_published
        for peer in peers:
            if peer != self.comm.rank and self._average_with(peer, weight, published):
                weight, published = weight + 1, False

    def _average_with(self, peer: int, weight: int, published: bool) -> bool:
        """Average the local parameters, with weight `weight`, with a peer's; return False if the peer has failed.

        Args:
            published: the local parameters equal the last publication, from which they can be restored.
        """
        average = partial(average_in, self.model.params, count=1, weight=weight)
        if self.config.torn:
            return self.peers.survives(self._published.use_torn, average, self._fetched, peer)
        if published:  # averages in place, without a copy of the peer's parameters
            return self.peers.survives(self._published.use, average, self._fetched, peer, self._restore_published)
        if not self.peers.survives(self._published.read, self._fetched, peer):
            return False
        average(self._fetched)
        return True

    def _restore_published(self) -> None:
        """Set the local parameters to the last published ones."""
        copy_all(self.model.params, self._published.local())

    def reset_from_model(self) -> None:
        self._publish(self.steps)
        self.comm.barrier()  # no rank may fetch old parameters
