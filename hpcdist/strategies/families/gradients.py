"""What all strategies share whose workers post gradients to a server that updates and answers with parameters."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

from pydantic import Field
from torch import Tensor

from hpcdist.errors import ConfigError
from hpcdist.server.mailbox import GRADIENT, NOBODY, SUM, Letter, Reply
from hpcdist.server.modulation import Rule, factor
from hpcdist.server.store import Store
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.families.served import Served


@dataclass
class Held:
    """A gradient whose worker has no answer yet."""

    letter: Letter
    since: float
    blocker: int = NOBODY  # whom it waits for
    added: bool = False  # to the sum; so is what has no gradient to add
    applied: bool = False  # an update, or a sum that was passed on, has taken all gradients up to this one


class Gradients(Served):
    """A worker's step: post the gradient with the clock of the parameters it was computed from; take the answer.

    A subclass says when the server makes an update of the gradients it has (`complete`), and which workers may go on
    with the parameters as they are (`may_go`). A gradient whose worker goes on before its update is added to a sum,
    in order of arrival; the others are added in rank order when the update is made.
    """

    class Config(Served.Config):
        """Options of all servers of gradients."""

    silences = True

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        self.held: list[Held] = []
        if self.children:
            self.store = Store(model, self.shard, apart=self.colocated)

    # --- what a subclass defines ----------------------------------------------------------------------------------
    @abc.abstractmethod
    def complete(self) -> bool:
        """Whether the server makes an update now."""

    @abc.abstractmethod
    def may_go(self, held: Held) -> bool:
        """Whether a worker may be answered now; False keeps it waiting."""

    def divisor(self) -> float:
        """What the sum of an update's weighted gradients is divided by."""
        return self.store.total_weight()

    def weight(self) -> float:
        """What this worker's gradient counts in an average, by its number of samples."""
        return self.model.weight

    def factor(self, staleness: int) -> float:
        """How much less a gradient counts for its staleness."""
        return 1.0

    def blocker(self, held: Held) -> int:
        """The rank that a held worker waits for."""
        return NOBODY

    def refused(self, letter: Letter) -> str | None:
        """Why a gradient is dropped instead of applied; None: it is applied."""
        return None

    # --- workers --------------------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        used, bad = self.model.collect(), self.nonfinite()
        event = self.refuse_nonfinite({self.comm.rank: bad}) if bad else None
        if self.alone:
            if not bad:
                self.model.release(used)
                update()
                self.clock += 1
            return Outcome(self.clock, staleness=() if bad else (0,), event=event)
        silent = self.silent()
        if bad or silent:
            answers = self.exchange(update, GRADIENT)  # weight 0: it arrives, and counts for nothing
        else:
            answers = self.exchange(update, **self.letter(used))
        self.take_answer(answers)
        waited = {a.blocker: a.held_s for a in answers if a.blocker != NOBODY}
        return Outcome(
            self.clock, staleness=self._take_applied(), event=event or silent, dropped=bool(silent and not bad),
            waited_for=waited,
        )  # fmt: skip

    def letter(self, used: Tensor) -> dict:
        """A letter with this worker's gradient; to be compressed, it is weighted before, as what it lacks must be."""
        weight = self.weight()
        if self.config.compression and weight != 1.0:
            for grad in self.model.grads:
                grad.mul_(weight)
        kind = SUM if self.config.compression else GRADIENT
        return {"kind": kind, "tensors": self.model.grads, "used": used, "weight": weight}

    def silent(self) -> str | None:
        """Why this worker's gradient is not sent, while compression warms up; None: it is."""
        config = self.config.compression
        if config.warmup_ranks is None or self.steps >= config.warmup_steps:
            return None
        if self.roles.workers.index(self.comm.rank) < config.warmup_ranks:
            return None
        return f"dropped: a gradient of the warm-up, in which only {config.warmup_ranks} workers' count"

    # --- the server -----------------------------------------------------------------------------------------------
    @property
    def _aggregates(self) -> bool:
        """Whether this rank passes sums on to its own parent, instead of making updates of them."""
        return self.comm.rank in self.roles.aggregators

    def receive(self, letter: Letter) -> None:
        reason = self.refused(letter) if letter.weight else None
        if reason is not None:
            self.reply(Reply(letter, self.clock, self.master()))
            self.tell(Outcome(self.clock, event=reason, dropped=len(letter.clocks)))
            return
        self.held.append(Held(letter, self.comm.now(), added=letter.weight == 0.0))
        self._settle()

    def child_paused(self) -> None:
        self._settle()

    def _settle(self) -> None:
        """Makes an update if one is due, and answers who may go on."""
        if self.complete():
            self._apply()
        replies, waiting = [], []
        for held in self.held:
            if self.may_go(held):
                self._add(held)
                held_s = self.comm.now() - held.since if held.blocker != NOBODY else 0.0
                replies.append(Reply(held.letter, self.clock, self.master(), held.blocker, held_s))
            else:
                if held.blocker == NOBODY:
                    held.blocker = self.blocker(held)
                waiting.append(held)
        self.held = waiting
        self.reply(*replies)

    def _add(self, held: Held) -> None:
        if not held.added:
            held.added = True
            # An aggregator leaves it to the server, which knows how stale a gradient is when it is applied.
            less = 1.0 if self._aggregates else self.factor(self._staleness(held.letter.clocks[0]))
            self.store.add(held.letter, less)

    def _apply(self) -> None:
        for held in sorted(self.held, key=lambda h: h.letter.source):
            self._add(held)
            held.applied = True
        if self._aggregates:
            self._pass_on()
        elif self.store.weights:
            self._make_update()

    def _make_update(self) -> None:
        staleness = [self._staleness(clock) for clock in self.store.clocks]
        # Weights of an average times one rate: gradients keep their proportions, and an optimiser that undoes a
        # constant factor of its gradients, as Adam does, is modulated all the same.
        rate = sum(map(self.factor, staleness)) / len(staleness)
        self.store.apply(self._update, self.divisor() * rate, rate)
        self.clock += 1
        self.applied += staleness
        if not self.colocated:
            self.steps += 1
            self.tell(Outcome(self.clock, staleness=self._take_applied()))

    def _pass_on(self) -> None:
        """An aggregator posts the sum of its children's gradients to its own parent, and has its answer to give."""
        store = self.store
        if store.weights:
            whole = {"tensors": store.sums, "used": store.used, "weight": math.fsum(store.weights)}
            self.mailbox.post(SUM, [store.clocks], **whole)
        else:
            self.mailbox.post(GRADIENT, [[]])  # it arrives, and counts for nothing
        self.take_answer(self.mailbox.wait())
        self.clock = self.model_clocks()[0]
        store.forget()

    def _staleness(self, clock: int) -> int:
        return self.clock - clock

    # --- checkpoints ----------------------------------------------------------------------------------------------
    @property
    def pending(self) -> int:
        """Gradients in the sum that no update has applied yet.

        A checkpoint includes them, but for a world of another size, which begins without; the run's end loses them.
        """
        return len(self.store.clocks) if self.children else 0

    def state(self) -> dict:
        return {**super().state(), **({"store": self.store.state()} if self.children else {})}

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        if self.children and "store" in state:
            self.store.load_state(state["store"])


class Stale(Gradients):
    """Servers of gradients that may be stale: how much these count, and whether they are dropped."""

    class Config(Gradients.Config):
        """Options of servers of gradients that may be stale."""

        overlap: bool = Field(
            False, description="compute the next gradient while the last one travels: n more updates of staleness"
        )
        modulation: Rule = Field("none", description="how the learning rate falls with staleness")
        decay: float = Field(0.1, ge=0, description="k of the exponential modulation exp(-k * staleness)")
        max_staleness: int | None = Field(None, ge=0, description="drop, and count, gradients that are staler; or none")

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        if config.overlap and self.colocated:
            raise ConfigError(
                "strategy.overlap must be false where strategy.servers is 'colocated', whose shards change only inside "
                "a step; got true. Leave it out, or give ranks of their own to the servers."
            )
        self._under_way = False  # a gradient whose answer this worker has not taken yet

    def advance(self, update: Update) -> Outcome:
        if self.alone or not self.config.overlap:
            return super().advance(update)
        clocks, used, bad = self.model_clocks(), self.model.collect(), self.nonfinite()
        event = self.refuse_nonfinite({self.comm.rank: bad}) if bad else None
        self._take_what_came()
        silent = self.silent()
        if not bad and not silent:
            self.post(update, clocks=clocks, **self.letter(used))
            self._under_way = True
        return Outcome(self.clock, event=event or silent, dropped=bool(silent and not bad))

    def _take_what_came(self) -> None:
        if self._under_way:
            self.take_answer(self.await_answers())
            self._under_way = False

    def pause(self) -> None:
        self._take_what_came()
        super().pause()

    def factor(self, staleness: int) -> float:
        return factor(self.config.modulation, staleness, expected=self.expected_staleness(), decay=self.config.decay)

    @abc.abstractmethod
    def expected_staleness(self) -> float:
        """n: the mean staleness, about, that the protocol leads to."""

    def refused(self, letter: Letter) -> str | None:
        most = self.config.max_staleness
        found = self._staleness(min(letter.clocks))
        if most is None or found <= most:
            return None
        return f"dropped: a gradient of rank {letter.source} was {found} updates old, max_staleness is {most}"
