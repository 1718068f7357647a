"""Asynchronous parameter server: each gradient is applied as it arrives, on whatever the parameters are by then."""

from __future__ import annotations

from torch import Tensor

from hpcdist.server.mailbox import GRADIENT, PAUSE, Letter, Mailbox
from hpcdist.strategies.base import Outcome, Strategy, Update

SERVER = 0


class ParameterServer(Strategy):
    """Asynchronous SGD with one server, rank 0; all others are workers.

    Every step of a worker: put the gradient, with the clock of the parameters it was computed from, into the worker's
    slot on the server, and wait for the answer. The server applies gradients one by one in order of arrival with the
    optimiser that lives there (any of torch's, with its state), adds 1 to its clock, and answers by putting the new
    parameters and clock into the worker's memory. A gradient's staleness is the server's clock at application minus
    the gradient's; its mean is λ − 1 for λ workers. On one rank the optimiser runs locally.

    Bytes per worker and step: one gradient vector put by the worker, one parameter vector put by the server.

    Reference: Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
    systematic study", 2016 (n-softsync with n = λ); Jeffrey Dean et al., "Large scale distributed deep networks",
    2012 (Downpour SGD with n_fetch = n_push = 1).
    """

    class Config(Strategy.Config):
        """Options of parameter_server."""

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        self.clock = 0  # of the parameters that this rank has
        self._workers = self.worker_ranks(config, comm.size)
        self._pauses = dict.fromkeys(self._workers, 0)  # by worker, as the server saw them
        self._periods = 0  # periods of service that have ended
        if comm.size > 1:
            self._mailbox = Mailbox(comm, SERVER, self._workers, [*model.grads, model.collect()], model.params)

    @classmethod
    def worker_ranks(cls, config: Config, size: int) -> tuple[int, ...]:
        return tuple(range(1, size)) if size > 1 else (0,)

    # --- workers --------------------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        used, bad = self.model.collect(), self.nonfinite()
        if bad:
            return Outcome(self.clock, event=self.refuse_nonfinite({self.comm.rank: bad}))
        if self.comm.size == 1:
            self.model.release(used)
            update()
            self.clock += 1
            return Outcome(self.clock, staleness=(0,))
        self._mailbox.post([*self.model.grads, used], self.clock)
        self.clock = self._mailbox.wait()
        self.model.load_params(self._mailbox.answer)
        return Outcome(self.clock)

    def pause(self) -> None:
        if self.comm.size > 1:
            self._mailbox.post([], self.clock, PAUSE)

    # --- the server -----------------------------------------------------------------------------------------------
    def serve(self, update: Update) -> None:
        if self.comm.size == 1:
            return
        self._periods += 1
        while min(self._pauses.values()) < self._periods:
            letter = self._mailbox.next()
            if letter.kind == GRADIENT:
                self._apply(letter, update)
                self._mailbox.deal(letter, self.clock, self.model.params)
            else:
                self._pauses[letter.worker] += 1
                self._mailbox.deal(letter, self.clock)

    def _apply(self, letter: Letter, update: Update) -> None:
        *gradients, used = letter.tensors
        for own, arrived in zip(self.model.grads, gradients, strict=True):
            own.copy_(arrived)
        self.model.release(used)
        staleness = self.clock - letter.clock
        update()
        self.clock += 1
        self.steps += 1
        if self.on_record is not None:
            self.on_record(self.record(Outcome(self.clock, staleness=(staleness,))))

    # --- common ---------------------------------------------------------------------------------------------------
    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. The server's parameters; buffers, which only workers compute, averaged over the workers."""
        params = [p.clone() for p in self.model.params]
        for tensor in params:
            self.comm.broadcast(tensor, SERVER)
        return params, self._means(self.model.buffers, over=self._workers)

    def state(self) -> dict:
        return {**super().state(), "clock": self.clock}

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        self.clock = state["clock"]

    def close(self) -> None:
        if self.comm.size > 1:
            self._mailbox.close()
