"""Put the parameters into random ranks' memory in each step, and average received messages: push gossip.

A rank has a slot for every other rank, with the sum of the messages that it has not received yet (in float16 their
mean), and their count, which changes by atomic operations only. The sender marks the slot as being written, writes or
adds, and increments the count. The receiver copies a slot, then swaps the count that it has read for 0. The swap fails
if the sender has started to write since then; the slot then remains for the receiver's next step. So no message is
lost, counted twice or torn, and no rank waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.decentralised.peers import Gossip, PeerSampler, SamplingConfig, average_in

_WRITING = -1  # the count of a slot that is being written


@final
class GossipPush(Gossip):
    """Train by asynchronous gossip SGD, push variant: in each step send the parameters to a random rank.

    Every step of rank i: run the local optimiser, sample a rank j uniformly over all ranks, i included, put the
    parameters θᵢ into the memory of rank j, then set θᵢ ← (wθᵢ + Σ received)/(m + w) for the m messages received since
    the last step; w is 2 if j = i (the rank's message to itself), else 1. Several messages of one sender are added, and
    all count in m. No rank waits for another; a rank that pauses still receives. The mean of all θ is conserved only in
    expectation. Failed ranks are not sampled; messages to a rank that fails are lost, and a message that a failing rank
    has not completed is never averaged.

    With `pushes` = n, n different ranks are sampled, and each gets θᵢ. With `interval` a rank pushes only in every
    `interval`-th step, but averages received messages in every step, so that they are not delayed. With
    `order = "before"` it first pushes and averages, then runs the local optimiser; the gradient is computed at θᵢ
    before the average.

    Bytes per rank and step with a push: n(p − 1)/p parameter vectors put on average, n without `include_self`; half
    with fp16 or bf16; and two to four int64 for each. Memory per rank: p parameter vectors, p − 1 slots and a copy. A
    checkpoint includes messages that are not averaged yet; on another number of ranks they are dropped, because all
    ranks start from the mean.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "gossip_push", pushes=1, interval=2)

    Reference: Peter H. Jin, Qiaochu Yuan, Forrest Iandola, Kurt Keutzer, "How to scale distributed deep learning?",
    2016, asynchronous push-gossiping SGD; for an interval Michael Blot, David Picard, Matthieu Cord, Nicolas Thome,
    "Gossip training for deep learning", 2016, where a rank pushes with a probability, 1/interval on average.
    """

    class Config(SamplingConfig, Gossip.Config):
        pushes: int = Field(1, "number of ranks that the parameters are sent to at each average", ge=1)

    config: Config
    contract = Contract(averages="parameters", synchronizes="never", memory="read by others", deaths="others continue")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        self.sampler = PeerSampler(comm, self.peers, self.state, config, "pushes")
        # In windows each other rank has a slot for the sum of its messages, and their number or _WRITING.
        self._taken = self.state.scratch(self.wire.empty())
        self._slots = [self.opened(comm.window((comm.size - 1) * t.numel(), t.dtype)) for t in self._taken]
        self._counts = self.opened(comm.window(comm.size - 1, torch.int64))
        self.state.custom("held", self._copy_slots, self._fill_slots, lambda: self._fill_slots([]))
        self.state.before_load(comm.barrier)  # no rank still pushes old parameters

    def mix(self, due: bool) -> None:
        """Push if it is due in this step, and average all received messages."""
        weight = 1
        if due:
            for peer in self.sampler.sample():
                if peer == self.comm.rank:
                    weight = 2
                else:
                    self.peers.survives(self._push, peer)
        self._average(weight)

    # --- the sender -----------------------------------------------------------------------------------------------
    def _push(self, peer: int) -> None:
        """Add the parameters to this rank's slot in the peer's memory, and 1 to its count."""
        slot, count = (self.comm.rank - peer) % self.comm.size - 1, 0
        while (current := self._counts.compare_and_swap(count, _WRITING, peer, slot)) != count:
            count = current  # only the receiver changes it, and only to 0: the third attempt succeeds
        for window, values, merged in zip(self._slots, self.wire.pack(self.model.params), self._taken, strict=True):
            write, offset = window.accumulate if count else window.put, slot * values.numel()
            if count and values.dtype is torch.float16:  # a sum may be beyond its range: the slot holds the mean
                window.get(merged, peer, offset)
                average_in([merged], [values], 1, count)
                write, values = window.put, merged
            write(values, peer, offset)
        self._counts.fetch_add(count + 1 - _WRITING, peer, slot)  # from _WRITING to count + 1

    # --- the receiver ---------------------------------------------------------------------------------------------
    def _average(self, weight: int) -> None:
        """Average the local parameters, with weight `weight`, with all received messages."""
        for slot, count in enumerate(self._arrived()):
            if count > 0 and self._take(slot, count):
                average_in(self.model.params, [_sum(held, count) for held in self._taken], count, weight)
                weight += count  # the local parameters are now a mean of this many

    def _arrived(self) -> list[int]:
        """Return the number of messages in each slot; _WRITING if its sender is writing, or failed while writing."""
        counts = torch.empty(self.comm.size - 1, dtype=torch.int64)
        self._counts.get(counts, self.comm.rank)
        return counts.tolist()

    def _take(self, slot: int, count: int) -> bool:
        """Copy a slot's sum of `count` messages and empty the slot; return False if its sender is writing."""
        self._copy(slot)
        return self._counts.compare_and_swap(count, 0, self.comm.rank, slot) == count

    def _copy(self, slot: int) -> None:
        for window, out in zip(self._slots, self._taken, strict=True):
            window.get(out, self.comm.rank, slot * out.numel())

    def _copy_slots(self) -> list[tuple[int, int, list[Tensor]]]:
        """Return a copy of the received messages: slot, number and sums."""
        messages_of_slots = []
        # After a failure the surviving ranks will have other slots on resuming: save none.
        all_alive = len(self.comm.failures.alive) == self.comm.size
        for slot, count in enumerate(self._arrived() if all_alive else ()):
            if count > 0:
                self._copy(slot)
                messages_of_slots.append((slot, count, [messages.clone() for messages in self._taken]))
        return messages_of_slots

    def _fill_slots(self, messages_of_slots: Sequence[tuple[int, int, Sequence[Tensor]]]) -> None:
        """Replace the contents of all slots by these messages."""
        counts = torch.zeros(self.comm.size - 1, dtype=torch.int64)
        for slot, count, sums in messages_of_slots:
            counts[slot] = count
            for window, own, held in zip(self._slots, self._taken, sums, strict=True):
                if held.dtype is not own.dtype:  # saved with another strategy.compression
                    held = _sum(held, count).to(torch.float32) / (count if own.dtype is torch.float16 else 1)
                window.put(held.to(own.dtype), self.comm.rank, slot * held.numel())
        self._counts.put(counts, self.comm.rank)

    def reset_from_model(self) -> None:
        self.comm.barrier()
        self._fill_slots([])
        self.comm.barrier()  # no rank may push before the slots are filled


def _sum(held: Tensor, count: int) -> Tensor:
    """Return the sum of `count` messages from what a slot holds: their mean in float16, else the sum."""
    return held.float() * count if held.dtype is torch.float16 else held
