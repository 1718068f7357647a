"""Push gossip: after each local step, send the parameters to a random rank, one-sidedly, and average what has come.

Each rank has a slot for every other one, which holds the sum of the messages that it has not taken yet, and a word
that counts them; ranks that step change the word by atomics only. The sender marks the slot as being written, writes
or adds, and counts one more. The receiver copies a slot and then swaps the count that it saw before for 0: that fails
if the sender has begun to write meanwhile, and the slot is then left for the receiver's next step. So no message is
lost, counted twice or read torn, and nobody waits.
"""

from __future__ import annotations

from typing import final

import torch

from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.families.gossip import Gossip
from hpcdist.strategies.families.wire import Wire, WireConfig

_WRITING = -1  # in place of a count


@final
class GossipPush(Gossip):
    """Asynchronous gossip SGD, push variant.

    Every step: run the local optimiser, draw j uniformly over all ranks (oneself included), put the own parameters θᵢ
    into rank j's memory, then set θᵢ ← (wθᵢ + Σ received)/(m + w) for the m messages that have arrived since the last
    time, where w = 2 if j = i (what one sends oneself has arrived at once) and else 1. Every message counts: a second
    one from the same sender is added to the first, and m is greater by one. Nobody waits for anybody; whoever pauses
    still receives. The mean of all θ is conserved in expectation only. Ranks that have died are not drawn; what is
    pushed to one that dies is lost, and what it had not pushed whole is never averaged.

    Bytes per rank and step: one parameter vector put with probability (p − 1)/p, half with fp16 or bf16, and two to
    four words. Memory per rank: p parameter vectors, p − 1 slots and a copy. A checkpoint includes what has
    arrived and is not yet averaged; taken up on another number of ranks that is lost, for all start from the mean.

    Reference: Peter H. Jin, Qiaochu Yuan, Forrest Iandola, Kurt Keutzer, "How to scale distributed deep learning?",
    2016, asynchronous push-gossiping SGD.
    """

    class Config(Gossip.Config, WireConfig):
        """Options of gossip_push."""

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        self._wire = Wire(config.compression, model.params)
        self._slots = [comm.window((comm.size - 1) * t.numel(), t.dtype) for t in self._wire.like]
        self._counts = comm.window(comm.size - 1, torch.int64)
        self._taken = self._wire.like

    def advance(self, update: Update) -> Outcome:
        outcome = self.step_alone(update)
        peer = self.draw()
        if peer != self.comm.rank:
            self.survives(self._push, peer)
        self._average(weight=2 if peer == self.comm.rank else 1)
        return outcome

    # --- the sender -----------------------------------------------------------------------------------------------
    def _push(self, peer: int) -> None:
        slot, count = (self.comm.rank - peer) % self.comm.size - 1, 0
        while (found := self._counts.compare_and_swap(count, _WRITING, peer, slot)) != count:
            count = found  # only the receiver changes it meanwhile, and only to 0: the third attempt succeeds
        for window, own in zip(self._slots, self._wire.pack(self.model.params), strict=True):
            write = window.accumulate if count else window.put
            write(own, peer, slot * own.numel())
        self._counts.fetch_add(count + 1 - _WRITING, peer, slot)

    # --- the receiver ---------------------------------------------------------------------------------------------
    def _average(self, weight: int) -> None:
        """Averages the own parameters, which count `weight` times, with all messages that have arrived."""
        for slot, count in enumerate(self._arrived()):
            if count > 0 and self._take(slot, count):
                with torch.no_grad():
                    for own, messages in zip(self.model.params, self._taken, strict=True):
                        own.mul_(weight).add_(messages.to(own.device, non_blocking=True)).div_(weight + count)
                weight += count  # a mean of that many from here on

    def _arrived(self) -> list[int]:
        """How many messages each slot holds; _WRITING where its sender is writing, or died while it was."""
        counts = torch.empty(self.comm.size - 1, dtype=torch.int64)
        self._counts.get(counts, self.comm.rank)
        return counts.tolist()

    def _take(self, slot: int, count: int) -> bool:
        """Copies a slot's sum of `count` messages and empties it; False if its sender has begun to write meanwhile."""
        self._copy(slot)
        return self._counts.compare_and_swap(count, 0, self.comm.rank, slot) == count

    def _copy(self, slot: int) -> None:
        for window, out in zip(self._slots, self._taken, strict=True):
            window.get(out, self.comm.rank, slot * out.numel())

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state(self) -> dict:
        held = []
        whole = len(self.comm.living) == self.comm.size  # else those who go on from here have other slots
        for slot, count in enumerate(self._arrived() if whole else ()):
            if count > 0:
                self._copy(slot)
                held.append((slot, count, [messages.clone() for messages in self._taken]))
        return {**super().state(), "held": held}

    def adapted_state(self, states: list[dict]) -> dict:
        return {**super().adapted_state(states), "held": []}  # slots were those of the saved world's senders

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        self.comm.barrier()  # nobody still pushes what was before
        counts = torch.zeros(self.comm.size - 1, dtype=torch.int64)
        for slot, count, sums in state["held"]:
            counts[slot] = count
            for window, messages in zip(self._slots, sums, strict=True):
                window.put(messages, self.comm.rank, slot * messages.numel())
        self._counts.put(counts, self.comm.rank)
        self.comm.barrier()  # nobody may push into slots that are yet to be filled

    def close(self) -> None:
        for window in (*self._slots, self._counts):
            window.close()
