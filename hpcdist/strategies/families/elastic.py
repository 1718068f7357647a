"""What elastic averaging is with and without momentum: workers tied to a centre on the servers by springs."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.server.mailbox import FETCH, Letter, Reply
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.families.served import Served


class Elastic(Served):
    """Every `period` steps a worker posts its x; server and worker move by e = a(x − c), both from the old values.

    The server answers with e and adds it to the centre c; the worker subtracts it: what one gains the other loses. The
    worker's gradient is that of its old x.

    Compressed, a letter says how x differs from x', which the server has of it, and e = C(a(x' − c)) is what the
    answer's message stands for. All of x, x' and c move by just that: c + Σx is conserved as without compression, and
    what C leaves out pulls again next time.
    """

    class Config(Served.Config):
        """Options of elastic averaging."""

        period: int = Field(4, ge=1, description="steps of a worker between two exchanges with the centre")
        beta: float = Field(0.9, ge=0, lt=2, description="p * a for p workers: how strongly these hang on the centre")

    letters, answers = "values", "moves"

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
                for own, pull in zip(self.model.params, self.mailbox.answer, strict=True):
                    own.sub_(pull.to(own.device))
                for known, pull in zip(self.mailbox.letters.whole, self.mailbox.answer):  # none if not compressed
                    known.sub_(pull)
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
        pulls = [self._pull(x.to(c.device), c).to(c.dtype) for x, c in zip(letter.tensors, self._centre, strict=True)]
        self.reply(Reply(letter, self.clock, pulls))
        told = self.mailbox.answers.told(letter.source, pulls)
        for centre, known, pull in zip(self._centre, letter.tensors, told, strict=True):
            centre.add_(pull.to(centre.device))
            if self.config.compression:  # else it lies in the worker's slot, which is the worker's again
                known.sub_(pull)
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
