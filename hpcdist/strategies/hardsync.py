"""Hardsync: the server waits for one gradient of every worker, then updates, and all go on together."""

from __future__ import annotations

from typing import final

from pydantic import Field

from hpcdist.server.mailbox import Letter
from hpcdist.strategies.families.gradients import Gradients, Held


@final
class Hardsync(Gradients):
    """Synchronous SGD through servers: every update is of the mean of one gradient of each worker.

    Equals `allreduce`, and one process with the batches of all workers together; the sum is taken in rank order. No
    gradient is stale. A worker that is left out (`learner_deadline_s`, or dead) is not waited for: updates are of those
    that remain, weighted by their samples; what it posts later was computed from old parameters and is dropped, and it
    is part of the updates again. Workers that have no sample left in an epoch's last step take part with weight 0.

    Bytes per worker and step: one gradient vector put by the worker, one parameter vector put by the servers. With
    `servers = "colocated"` and p ranks each rank moves 2n(p − 1)/p, as a ring all-reduce does.

    Reference: Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
    systematic study", 2016, section 3.
    """

    class Config(Gradients.Config):
        """Options of hardsync."""

        fan_in: int | None = Field(
            None, ge=2, description="workers post to aggregators, each of at most so many children, in a tree; or none"
        )

    joins = True

    def complete(self) -> bool:
        return bool(self.held) and {held.letter.source for held in self.held} >= set(self.active())

    def may_go(self, held: Held) -> bool:
        return held.applied

    def refused(self, letter: Letter) -> str | None:
        behind = self.clock - min(letter.clocks)
        return f"dropped: a gradient of rank {letter.source} missed {behind} updates" if behind else None
