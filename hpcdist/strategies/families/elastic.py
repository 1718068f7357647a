"""What elastic averaging is with and without momentum: workers tied to a centre on the servers by springs."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.server.mailbox import FETCH, Letter
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.families.served import Served


class Elastic(Served):
    """Every `period` steps a worker posts its x; server and worker move by e = a(x − c), both from the old values.

    The server answers with the old centre c and adds e to it; the worker subtracts e. Both compute e alike, to the
    bit, so that what one gains the other loses. The worker's gradient is that of its old x.
    """

    class Config(Served.Config):
        """Options of elastic averaging."""

        period: int = Field(4, ge=1, description="steps of a worker between two exchanges with the centre")
        beta: float = Field(0.9, ge=0, lt=2, description="p * a for p workers: how strongly these hang on the centre")

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        self.strength = config.beta / len(self.roles.workers)  # a
        self._centre = [part.clone() for part in self.shard.of(model.params)] if self.children else []

    def master(self) -> list[Tensor]:
        return self._centre

    # --- workers --------------------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        used, bad = self.model.collect(), self.nonfinite()
        event = self.refuse_nonfinite({self.comm.rank: bad}) if bad else None
        if not self.alone and self.steps % self.config.period == 0:
            self.exchange(update, FETCH, tensors=self.model.params)
            with torch.no_grad():
                for own, centre in zip(self.model.params, self.mailbox.answer, strict=True):
                    own.sub_(self._pull(own, centre.to(own.device)))
        if not bad:
            self.model.release(used)
            self.local_step(update)
        return Outcome(self.steps + 1, staleness=() if bad else (0,), event=event)

    def local_step(self, update: Update) -> None:
        """The worker's own step on its gradient."""
        update()

    def _pull(self, x: Tensor, centre: Tensor) -> Tensor:
        """e: how far the spring between x and the centre moves both."""
        return (x - centre).mul_(self.strength)

    # --- servers --------------------------------------------------------------------------------------------------
    def receive(self, letter: Letter) -> None:
        pulls = [self._pull(x.to(c.device), c) for x, c in zip(letter.tensors, self._centre, strict=True)]
        self.reply(letter, self.clock, self._centre)
        for centre, pull in zip(self._centre, pulls, strict=True):
            centre.add_(pull)
        self.clock += 1
        if not self.colocated:
            self.steps += 1
            self.tell(Outcome(self.clock))

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state(self) -> dict:
        return {**super().state(), "centre": self._centre}

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        # Of a world of another size there is none: all begin at the centre, which the parameters are then.
        if self.children:
            for centre, saved in zip(self._centre, state.get("centre") or self.shard.of(self.model.params)):
                centre.copy_(saved)

    def saved_master(self, params: list[Tensor], state: dict) -> list[Tensor]:
        return state["centre"] or params
