"""Downpour SGD: workers run on with local steps, fetch and push seldom; the server's Adagrad makes up for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import torch
from pydantic import Field, model_validator

from hpcdist.server.mailbox import FETCH, GRADIENT, PUSH, Answer, Letter, Reply
from hpcdist.server.store import Store
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.families.served import Served


@final
class Downpour(Served):
    """Every worker steps locally; it pushes the sum of its gradients every `n_push` steps, fetches every `n_fetch`.

    A worker's step: add the gradient to the sum, take the local optimiser's step; every `n_push` steps put the sum
    into its slot on the servers and go on; every `n_fetch` steps replace the parameters by the servers'. Each server
    applies what arrives to its shard, one push at a time, with Adagrad: the rate of an element is γ/√Σg² over all its
    pushes so far; shards are not synchronised with each other. With `server_rule = "optimizer"` it is the job's own
    optimiser instead; then `n_push = n_fetch = 1` is `parameter_server`, to the bit for the same order of arrival.

    `warm_start` pushes are the first worker's alone: each other one drops its first gradient and starts from what that
    has reached. An epoch's end or a checkpoint ends the warm start early, since all ranks meet there. Gradients in a
    worker's sum at the end of an epoch stay for the next one.

    The staleness in the records is that of pushes: the server's clock at application minus that of the parameters
    last fetched before the push. Bytes per worker: one gradient vector per push, one parameter vector per fetch.

    Reference: Jeffrey Dean et al., "Large scale distributed deep networks", 2012, section 4.1; the worker's loop is
    algorithm 7.1 of its appendix. Adagrad: John Duchi, Elad Hazan, Yoram Singer, 2011.
    """

    class Config(Served.Config):
        """Options of downpour."""

        n_fetch: int = Field(1, ge=1, description="steps of a worker between two fetches of parameters")
        n_push: int = Field(1, ge=1, description="steps of a worker between two pushes of gradients")
        server_rule: Literal["adagrad", "optimizer"] = Field(
            "adagrad", description="what applies a push on the server: Adagrad, or the job's own optimiser"
        )
        rate: float = Field(0.05, gt=0, description="γ of the server's Adagrad")
        warm_start: int = Field(0, ge=0, description="pushes of the first worker before the others begin")

        @model_validator(mode="after")
        def _shards_have_a_rule_of_their_own(self):
            if self.servers == "colocated" and self.server_rule == "optimizer":
                raise ValueError(
                    "must be 'adagrad' where strategy.servers is 'colocated': the job's own optimiser takes the "
                    "worker's local steps there; got server_rule 'optimizer'."
                )
            return self

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        if self.children and config.server_rule == "adagrad":
            self._params = [torch.nn.Parameter(part.clone()) for part in self.shard.of(model.params)]
            self._adagrad = torch.optim.Adagrad(self._params, lr=config.rate)
        elif self.children:
            self._store = Store(model, self.shard, apart=False)
        self._sum = [torch.zeros_like(grad) for grad in model.grads] if self.is_worker and not self.alone else []
        self._used = torch.zeros(len(model.names), dtype=torch.bool)
        self._leader = self.roles.workers[0]
        self._waiting: list[Letter] = []  # for the end of the warm start

    def master(self) -> list[torch.Tensor]:
        if self.config.server_rule == "adagrad":
            return [param.detach() for param in self._params]
        return super().master()

    # --- workers --------------------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        if not self.alone and self.steps == 0 and self.config.warm_start and self.comm.rank != self._leader:
            return self._begin_late(update)
        used, bad = self.model.collect(), self.nonfinite()
        event = self.refuse_nonfinite({self.comm.rank: bad}) if bad else None
        if not bad:
            for total, grad in zip(self._sum, self.model.grads):
                total.add_(grad)
            self._used |= used
        fetches = not self.alone and (self.steps + 1) % self.config.n_fetch == 0
        if not self.alone and (self.steps + 1) % self.config.n_push == 0:
            self._push(update, GRADIENT if fetches else PUSH)
        elif fetches:
            self.await_answers()
            self.post(update, FETCH)
        if not bad:
            self.model.release(used)
            update()
        if fetches:
            self.take_answer(self.await_answers())
        if self.alone:
            self.clock += 1
            return Outcome(self.clock, staleness=() if bad else (0,), event=event)
        return Outcome(self.clock, staleness=self._take_applied(), event=event)

    def take_answer(self, answers: Sequence[Answer]) -> None:
        super().take_answer(answers)
        if self.comm.rank in self.parents:  # a colocated server's master copy lies beside its worker's model
            for own, new in zip(self.shard.of(self.model.params), self.master(), strict=True):
                own.copy_(new)

    def _begin_late(self, update: Update) -> Outcome:
        self.take_answer(self.exchange(update, FETCH))
        return Outcome(self.clock, event="dropped: the gradient of before the warm start", dropped=1)

    def _push(self, update: Update, kind: int) -> None:
        self.await_answers()
        self.post(update, kind, tensors=self._sum, used=self._used, weight=1.0)
        for total in self._sum:
            total.zero_()
        self._used.zero_()

    def pause(self) -> None:
        if not self.alone:
            self.await_answers()  # to a push, whose slot the pause takes
        super().pause()

    # --- servers --------------------------------------------------------------------------------------------------
    def receive(self, letter: Letter) -> None:
        if letter.source != self._leader and not self._warm():
            self._waiting.append(letter)
            return
        self._deal_with(letter)
        self.child_paused()

    def child_paused(self) -> None:
        if self._warm():
            waiting, self._waiting = self._waiting, []
            for letter in waiting:
                self._deal_with(letter)

    def _warm(self) -> bool:
        return self.clock >= self.config.warm_start or self._leader not in self.active()

    def _deal_with(self, letter: Letter) -> None:
        if letter.kind != FETCH:
            self._apply(letter)
        self.reply(Reply(letter, self.clock, () if letter.kind == PUSH else self.master()))

    def _apply(self, letter: Letter) -> None:
        if self.config.server_rule == "adagrad":
            for param, arrived in zip(self._params, letter.tensors, strict=True):
                param.grad = arrived.to(param.device, param.dtype)
            self._adagrad.step()
        else:
            self._store.add(letter)
            self._store.apply(self._update, 1.0)
        self.applied.append(self.clock - letter.clocks[0])
        self.clock += 1
        if not self.colocated:
            self.steps += 1
            self.tell(Outcome(self.clock, staleness=self._take_applied()))

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state(self) -> dict:
        own = {"sum": self._sum, "used": self._used.tolist()}
        if self.children and self.config.server_rule == "adagrad":
            own |= {"params": self.master(), "squares": self._squares()}
        return super().state() | own

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        for total, saved in zip(self._sum, state.get("sum", [])):
            total.copy_(saved)
        self._used = torch.tensor(state.get("used", [False] * len(self._used)), dtype=torch.bool)
        if self.children and self.config.server_rule == "adagrad":
            # From a world of another size whole tensors come, and from one rank, which has no server, no Σg².
            params, squares = state.get("params"), state.get("squares", self._squares())
            if params is None:
                params = self.shard.of(self.model.params)
                squares = self.shard.of(squares) if "squares" in state else squares
            for own, saved in zip([*self.master(), *self._squares()], [*params, *squares], strict=True):
                own.copy_(saved)

    def _squares(self) -> list[torch.Tensor]:
        """Σg² of this server's shard, in the optimiser's own memory."""
        return [self._adagrad.state[param]["sum"] for param in self._params]

    def saved_master(self, params: list[torch.Tensor], state: dict) -> list[torch.Tensor]:
        return state.get("params", params)

    def adapted_state(self, states: list[dict]) -> dict:
        """Σg² of all shards, put together; what workers had not pushed yet is dropped."""
        adapted = super().adapted_state(states)
        if self.config.server_rule == "adagrad" and any("squares" in state for state in states):
            adapted["squares"] = self.put_together([state.get("squares", self.model.params) for state in states])
        return adapted
