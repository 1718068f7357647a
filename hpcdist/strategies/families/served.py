"""What all strategies with parameter servers share: roles, shards, mailboxes, periods of service."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hpcdist.compress import CompressionConfig, spans
from hpcdist.errors import ConfigError, RankFailedError
from hpcdist.records import StepRecord
from hpcdist.server.coding import Coding
from hpcdist.server.mailbox import GRADIENT, PAUSE, Answer, Letter, Mailbox, Reply
from hpcdist.server.roles import Roles, Servers, assign
from hpcdist.server.shards import Shard, cut
from hpcdist.server.silence import CHECK_S, Silence
from hpcdist.strategies.base import Outcome, Strategy, Update


class Served(Strategy):
    """Workers post letters to servers, which deal with them in order of arrival and answer with parameters.

    Each server holds one shard, and treats its part of every letter as if there were no other server; they are not
    synchronised with each other. A server that is a worker too (`servers = "colocated"`) serves while it is inside a
    step: there the shard's parameters are those that lie in its model, which nobody computes with meanwhile.

    With `compression` workers send what the compressor makes of their gradients and of what they have not sent before,
    and servers, unless `compress_answers` is off, what it makes of all that a worker's parameters differ by from their
    own. So workers compute with parameters that are somewhat older here and there; records don't count that as
    staleness. Any compressor will do for answers whose error is smaller than what it codes; `threshold` needs a
    density, or a `tau` that suits updates as well as gradients. Memory: two parameter vectors more per worker, and on
    each server its shard once per worker. An aggregator codes its sums as a worker its gradients.

    A period of service (an epoch, or the steps until a checkpoint) ends when every worker has paused. A letter of a
    worker that has begun its next period already waits until this rank begins it too.
    """

    class Config(Strategy.Config):
        """Options that all strategies with servers have."""

        servers: Servers = Field(
            1, description="how many ranks only serve, each a shard of the parameters; colocated: every worker serves"
        )
        learner_deadline_s: float | None = Field(
            None, gt=0, description="a worker that posts nothing for so long is left out until it does; none: wait"
        )
        compression: CompressionConfig = Field(CompressionConfig(), description="how letters to servers are compressed")
        compress_answers: bool = Field(True, description="compress what servers send in the same way")

        @model_validator(mode="after")
        def _shards_wait_for_their_owners(self):
            if self.servers == "colocated" and self.learner_deadline_s is not None:
                raise ValueError(
                    "strategy.learner_deadline_s must be none where strategy.servers is 'colocated', where all wait "
                    f"for every rank's shard; got {self.learner_deadline_s}. Give ranks of their own to the servers."
                )
            return self

        def roles(self, size: int) -> Roles:
            """Who does what among `size` ranks."""
            return assign(size, self.servers, getattr(self, "fan_in", None))

    joins = False  # whether a worker without samples takes part in a step all the same
    letters, answers = "gradients", "values"  # what they carry, see `Coding`
    silences = False  # whether a worker's gradient may be left out while compression warms up

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        self.roles = config.roles(comm.size)
        self.clock = 0  # updates of this rank's shard; on a rank that only works, of the parameters it has
        self.applied: list[int] = []  # staleness of gradients applied on this rank since its last record
        self.everything = Shard(tuple((0, flat.numel()) for flat in model.params))
        shards = cut(model.params, max(1, len(self.roles.servers)))
        self.shards = dict(zip(self.roles.servers, shards)) | dict.fromkeys(self.roles.aggregators, self.everything)
        self.shard = self.shards.get(comm.rank)  # None: this rank doesn't serve
        self.children = self.roles.children(comm.rank)
        self.parents = self.roles.parents.get(comm.rank, ())
        self.colocated = comm.rank in self.roles.workers and bool(self.children)
        self._clocks = [0] * len(self.parents)  # of the parameters that have come from each parent
        self._pauses = dict.fromkeys(self.children, 0)  # periods that each child has ended
        self.period = 1
        self.left_out = Silence(self.children, config.learner_deadline_s)
        self._early: list[Letter] = []  # of children that have begun the next period
        self._update: Update = _none_yet
        if comm.size > 1:
            letters = max(1, len(self.roles.workers)) if self.roles.aggregators else 1
            codings = self._codings()
            self.mailbox = Mailbox(comm, self.roles, self.shards, model.params, len(model.names), letters, *codings)

    @classmethod
    def worker_ranks(cls, config: Config, size: int) -> tuple[int, ...]:
        return config.roles(size).workers

    def _codings(self) -> tuple[Coding | None, Coding | None]:
        """Of letters and of answers."""
        config = self.config.compression
        if config.warmup_ranks is not None and not self.silences:
            raise ConfigError(
                "strategy.compression.warmup_ranks must be none with downpour, easgd and eamsgd, whose workers take "
                f"steps of their own; got {config.warmup_ranks}. Leave it out: what is sent first is uncompressed then."
            )
        if not config:
            return None, None
        places = spans(self.model)
        letters = Coding(config, self.letters, places)
        answers = Coding(config, self.answers, places) if self.config.compress_answers else None
        for coding in filter(None, (letters, answers)):
            coding.check()
        return letters, answers

    @property
    def needed(self) -> tuple[int, ...]:
        return (*self.roles.servers, *self.roles.aggregators)

    @property
    def alone(self) -> bool:
        return self.comm.size == 1

    # --- what a subclass defines ----------------------------------------------------------------------------------
    @abc.abstractmethod
    def receive(self, letter: Letter) -> None:
        """A server deals with a letter; it may answer this one, or earlier ones, or none yet."""

    def child_paused(self) -> None:
        """A server deals with what a child's pause has changed for others."""

    def child_returned(self, child: int) -> None:
        """A worker that was left out has posted again."""

    def master(self) -> list[Tensor]:
        """The parameters of this server's shard, one flat tensor per group."""
        return self.shard.of(self.model.params)

    # --- workers --------------------------------------------------------------------------------------------------
    def exchange(self, update: Update, kind: int, **letter) -> list[Answer]:
        """Posts a letter to all parents and waits for their answers, serving meanwhile where this rank serves too."""
        self.post(update, kind, **letter)
        return self.await_answers()

    def post(self, update: Update, kind: int, clocks: Sequence[int] | None = None, **letter) -> None:
        """Posts a letter. The last one must have been answered.

        Args:
            clocks: of the parameters that the letter was computed from, shard by shard: those in the model.
        """
        self._update = update
        clocks = self.model_clocks() if clocks is None else clocks
        self.mailbox.post(kind, [[clock] for clock in clocks], **letter)

    def await_answers(self) -> list[Answer]:
        """Blocks until the last letter has been answered.

        Raises:
            RankFailedError: a server has died.
        """
        if self.colocated:
            while not self.mailbox.answered():
                self.mailbox.wait_event()
                self._serve_waiting()
        if not self.comm.tolerant:
            return self.mailbox.wait()
        until = self.comm.now() + self.comm.deadline_s
        while not self.mailbox.wait_for(min(CHECK_S, until - self.comm.now())):
            for parent in set(self.parents) & set(self.comm.failed()):
                raise RankFailedError(
                    f"server rank {parent} has died, and its part of the parameters and of the optimiser's state with "
                    "it. Resume from the last checkpoint."
                )
            if self.comm.now() > until:
                break
        return self.mailbox.wait()

    def take_answer(self, answers: Sequence[Answer]) -> None:
        """Copies the parameters that came with the answers into the model; a shard that lies there already stays."""
        others = [self.shards[parent] for parent in self.parents if parent != self.comm.rank]
        arrived = self.mailbox.answer
        for shard in [self.everything] if len(others) == len(self.parents) else others:
            for own, new in zip(shard.of(self.model.params), shard.of(arrived), strict=True):
                own.copy_(new)
        self._clocks = [answer.clock for answer in answers]
        if not self.children:
            self.clock = self._clocks[0]

    def model_clocks(self) -> list[int]:
        """The clock of the parameters in this worker's model, shard by shard."""
        own = self.comm.rank
        return [self.clock if parent == own else clock for parent, clock in zip(self.parents, self._clocks)]

    def join(self, update: Update) -> StepRecord | None:
        if self.alone or not self.joins:
            self._update = update
            return None
        self.model.release([False] * len(self.model.names))
        self.take_answer(self.exchange(update, GRADIENT))
        self.steps += 1
        return self.record(Outcome(self.clock, staleness=self._take_applied()))

    def pause(self) -> None:
        if self.alone:
            return
        self.exchange(self._update, PAUSE)
        if self.colocated:
            self._serve_period()
            if self.applied:
                self.tell(Outcome(self.clock, staleness=self._take_applied()))

    def _take_applied(self) -> tuple[int, ...]:
        applied, self.applied = tuple(self.applied), []
        return applied

    # --- servers --------------------------------------------------------------------------------------------------
    def serve(self, update: Update) -> None:
        if not self.alone:
            self._update = update
            self._serve_period()
            if self.parents:  # an aggregator is a child too
                self.exchange(update, PAUSE)

    def active(self) -> list[int]:
        """The children that still take steps in this period: they have neither paused, nor been left out."""
        return [child for child in self._unpaused() if child not in self.left_out]

    def _unpaused(self) -> list[int]:
        """The living children that have not paused in this period."""
        dead = self.comm.failed()
        return [child for child, pauses in self._pauses.items() if pauses < self.period and child not in dead]

    def _serve_period(self) -> None:
        watches = self.comm.tolerant or self.config.learner_deadline_s is not None
        self.left_out.listen(self._unpaused(), self.comm.now())
        while self._unpaused():
            letter = self.mailbox.next(self._patience_s() if watches else None)
            if letter is not None:
                self._deal(letter)
            if watches:
                self._leave_out()
        self.period += 1
        early, self._early = self._early, []
        for letter in early:
            self._deal(letter)

    def _patience_s(self) -> float | None:
        return self.left_out.patience_s(self.active(), self.comm.now(), self.comm.tolerant)

    def _leave_out(self) -> None:
        """Goes on without workers that have died or been silent for too long."""
        stepping = [c for c, pauses in self._pauses.items() if pauses < self.period and c not in self.left_out]
        found = self.left_out.look(stepping, self.comm.failed(), self.comm.now())
        for child, reason in found.items():
            self.tell(Outcome(self.clock, event=f"goes on without rank {child}: {reason}"))
        if found:
            self.child_paused()

    def tell(self, outcome: Outcome) -> None:
        """A server's record."""
        if self.on_record is not None:
            self.on_record(self.record(outcome))

    def _serve_waiting(self) -> None:
        while (letter := self.mailbox.poll()) is not None:
            self._deal(letter)

    def reply(self, *replies: Reply) -> None:
        """Answers letters; from now on their workers are expected to post the next ones."""
        self.mailbox.reply(*replies)
        for reply in replies:
            self.left_out.answered(reply.letter.source, self.comm.now())

    def _deal(self, letter: Letter) -> None:
        if self.left_out.posted(letter.source):
            self.tell(Outcome(self.clock, event=f"rank {letter.source} is back"))
            self.child_returned(letter.source)
        if self._pauses[letter.source] >= self.period:
            self._early.append(letter)
        elif letter.kind == PAUSE:
            self._pauses[letter.source] += 1
            self.reply(Reply(letter, self.clock))
            self.child_paused()
        else:
            self.receive(letter)

    # --- common ---------------------------------------------------------------------------------------------------
    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. The servers' parameters; buffers, which only workers compute, averaged over the workers."""
        params = [flat.clone() for flat in self.model.params]
        for server in self.roles.servers:
            if server == self.comm.rank:
                for part, own in zip(self.shard.of(params), self.master(), strict=True):
                    part.copy_(own)
            for part in self.shards[server].of(params):
                if part.numel():
                    self.comm.broadcast(part, server)
        workers = [rank for rank in self.roles.workers if rank in self.comm.living]
        return params, self._means(self.model.buffers, over=workers)

    def state(self) -> dict:
        flows = {} if self.alone else {"mailbox": self.mailbox.state()}
        return {**super().state(), "clock": self.clock, "clocks": self._clocks, **flows}

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        self.clock, self._clocks = state["clock"], list(state["clocks"])
        if not self.alone:
            self.mailbox.load_state(state.get("mailbox", {}), self.model.params)

    def adapted_state(self, states: list[dict]) -> dict:
        """The largest clock of a shard for all; and for each worker the mean of what was not sent."""
        clock = max(state["clock"] for state in states)
        adapted = {"steps": states[0]["steps"], "clock": clock, "clocks": [clock] * len(self.parents)}
        workers = len(self.config.roles(len(states)).workers)
        mailbox = {} if self.alone else self.mailbox.adapted([state.get("mailbox", {}) for state in states], workers)
        return {**adapted, "mailbox": mailbox}

    def adapted_params(self, params: list[list[Tensor]], states: list[dict]) -> list[Tensor]:
        """The servers' shards, put together."""
        return self.put_together([self.saved_master(p, s) for p, s in zip(params, states, strict=True)])

    def saved_master(self, params: list[Tensor], state: dict) -> list[Tensor]:
        """The parameters of a saved rank's shard, or whole ones in which they lie where the shard is."""
        return params

    def put_together(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Whole flat tensors from the shards of a saved world: from each server its part, or whole tensors."""
        servers = self.config.roles(len(parts)).servers or (0,)
        whole = [torch.empty_like(flat) for flat in self.model.params]
        for server, shard in zip(servers, cut(self.model.params, len(servers)), strict=True):
            for into, part, (start, stop) in zip(shard.of(whole), parts[server], shard.ranges, strict=True):
                into.copy_(part if part.numel() == into.numel() else part[start:stop])
        return whole

    def adapted_optimizer(self, states: list[dict]) -> dict:
        """The servers' optimisers together; of a parameter that a shard's border cuts, the first one's."""
        servers = self.config.roles(len(states)).servers or (0,)
        together: dict = {}
        for server in reversed(servers):
            together |= states[server]["state"]
        return {**states[servers[0]], "state": together}

    def close(self) -> None:
        if not self.alone:
            self.mailbox.close()


def _none_yet() -> None:
    """Stands for the local optimiser until the first step hands it over."""
