"""Send, beside local steps, the parameters to random ranks, one-sidedly, and average the messages: push gossip.

Each rank has a slot for every other one, which holds the sum of the messages that it has not taken yet (in float16
their mean, which the sender reads and writes), and a word that counts them; ranks that step change it by atomics only.
The sender marks the slot as being written, writes or adds, and counts one more. The receiver copies a slot and then
swaps the count that it saw before for 0: that fails if the sender has begun to write meanwhile, and the slot is then
left for the receiver's next step. So no message is lost, counted twice or read torn, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.decentralised.peers import (
    MixingConfig,
    Peers,
    PeerSampler,
    SamplingConfig,
    Wire,
    average_in,
    check_count,
)

_WRITING = -1  # in place of a count


@final
class GossipPush(Strategy):
    """Train by asynchronous gossip SGD, push variant.

    Every step of rank i: run the local optimiser, draw a rank j uniformly over all ranks, i included, put θᵢ (its
    parameters) into the memory of rank j, then set θᵢ ← (wθᵢ + Σ received)/(m + w) for the m messages that have arrived
    since the last step; w is 2 if j = i (the rank's message to itself has arrived), else 1. Every message counts: a
    second one from the same sender is added to the first, and m is greater by one. No rank waits for another; a rank
    that pauses still receives. The mean of all θ is conserved in expectation only. Dead ranks are not drawn; messages
    to a rank that dies are lost, and a message that a dying rank has not finished is never averaged.

    With `pushes` = n, n different ranks are drawn, and each gets θᵢ. With `interval` a rank pushes only in every
    `interval`-th step, but averages the messages that have arrived in every step, so that no message grows old. With
    `order = "before"` it first pushes and averages, then runs the local optimiser; the gradient is computed at θᵢ
    before the average.

    Bytes per rank and step that pushes: n(p − 1)/p parameter vectors put on average, n without `include_self`; half
    with fp16 or bf16; and two to four words for each. Memory per rank: p parameter vectors, p − 1 slots and a copy. A
    checkpoint includes messages that are not averaged yet; on another number of ranks they are dropped, because all
    ranks start from the mean.

    Reference: Peter H. Jin, Qiaochu Yuan, Forrest Iandola, Kurt Keutzer, "How to scale distributed deep learning?",
    2016, asynchronous push-gossiping SGD; for an interval Michael Blot, David Picard, Matthieu Cord, Nicolas Thome,
    "Gossip training for deep learning", 2016, where a rank pushes with a probability, 1/interval on average.
    """

    class Config(SamplingConfig, MixingConfig):
        """Options of gossip_push."""

        pushes: int = Field(1, ge=1, description="number of ranks that the parameters are sent to at each average")

    config: Config
    contract = Contract(averages="parameters", synchronizes="never", memory="read by others", deaths="others continue")

    def __init__(self, config: Config, comm, model, **kwargs):
        super().__init__(config, comm, model, **kwargs)
        self.peers = Peers(comm, self.records)
        self.sampler = PeerSampler(comm, self.peers, self.state, config.seed)
        check_count(comm, "pushes", config.pushes, include_self=config.include_self)
        self._wire = Wire(config.compression, model.params, self.state)
        self._taken = self.state.scratch(self._wire.empty())
        self._slots = [comm.window((comm.size - 1) * t.numel(), t.dtype) for t in self._taken]
        self._counts = comm.window(comm.size - 1, torch.int64)
        self.state.custom("held", self._copy_slots, self._fill_slots, lambda: self._fill_slots([]))
        self.state.before_load(comm.barrier)  # nobody still pushes what was before

    def advance(self, update: Update) -> Outcome:
        if self.config.order == "before":
            self._mix()
        outcome = self.gradients.step_alone(update)
        if self.config.order == "after":
            self._mix()
        return outcome

    def _mix(self) -> None:
        """Push where this step does, and average all messages that have arrived."""
        weight = 1
        if (self.steps + 1) % self.config.interval == 0:
            for peer in self.sampler.sample(self.config.pushes, include_self=self.config.include_self):
                if peer == self.comm.rank:
                    weight = 2
                else:
                    self.peers.survives(self._push, peer)
        self._average(weight)

    # --- the sender -----------------------------------------------------------------------------------------------
    def _push(self, peer: int) -> None:
        slot, count = (self.comm.rank - peer) % self.comm.size - 1, 0
        while (current := self._counts.compare_and_swap(count, _WRITING, peer, slot)) != count:
            count = current  # only the receiver changes it meanwhile, and only to 0: the third attempt succeeds
        for window, own, held in zip(self._slots, self._wire.pack(self.model.params), self._taken, strict=True):
            write, at = window.accumulate if count else window.put, slot * own.numel()
            if count and own.dtype is torch.float16:  # a sum may be beyond its range: such a slot holds the mean
                window.get(held, peer, at)
                average_in([held], [own], 1, count)
                write, own = window.put, held
            write(own, peer, at)
        self._counts.fetch_add(count + 1 - _WRITING, peer, slot)

    # --- the receiver ---------------------------------------------------------------------------------------------
    def _average(self, weight: int) -> None:
        """Average the own parameters, weighted `weight` times, with all messages that have arrived."""
        for slot, count in enumerate(self._arrived()):
            if count > 0 and self._take(slot, count):
                sums = [t.float() * count if t.dtype is torch.float16 else t for t in self._taken]
                average_in(self.model.params, sums, count, weight)
                weight += count  # a mean of that many from here on

    def _arrived(self) -> list[int]:
        """Count the messages in each slot; _WRITING where its sender is writing, or died while it was."""
        counts = torch.empty(self.comm.size - 1, dtype=torch.int64)
        self._counts.get(counts, self.comm.rank)
        return counts.tolist()

    def _take(self, slot: int, count: int) -> bool:
        """Copy a slot's sum of `count` messages and empty it; return False if its sender is writing meanwhile."""
        self._copy(slot)
        return self._counts.compare_and_swap(count, 0, self.comm.rank, slot) == count

    def _copy(self, slot: int) -> None:
        for window, out in zip(self._slots, self._taken, strict=True):
            window.get(out, self.comm.rank, slot * out.numel())

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def _copy_slots(self) -> list[tuple[int, int, list[Tensor]]]:
        """Copy the messages that have arrived: slot, their number, their sums."""
        held = []
        whole = len(self.comm.failures.alive) == self.comm.size  # else those who go on from here have other slots
        for slot, count in enumerate(self._arrived() if whole else ()):
            if count > 0:
                self._copy(slot)
                held.append((slot, count, [messages.clone() for messages in self._taken]))
        return held

    def _fill_slots(self, held: Sequence[tuple[int, int, Sequence[Tensor]]]) -> None:
        """Put these messages, and no others, into the slots."""
        counts = torch.zeros(self.comm.size - 1, dtype=torch.int64)
        for slot, count, sums in held:
            counts[slot] = count
            for window, messages in zip(self._slots, sums, strict=True):
                window.put(messages, self.comm.rank, slot * messages.numel())
        self._counts.put(counts, self.comm.rank)

    def reset_from_model(self) -> None:
        self.comm.barrier()
        self._fill_slots([])
        self.comm.barrier()  # nobody may push into slots that are yet to be filled

    def close(self) -> None:
        for window in (*self._slots, self._counts):
            window.close()
