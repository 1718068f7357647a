"""Asynchronous parameter server: each gradient is applied as it arrives, on whatever the parameters are by then."""

from __future__ import annotations

from typing import final

from hpcdist.strategies.families.gradients import Held, Stale


@final
class ParameterServer(Stale):
    """Asynchronous SGD with servers; all other ranks are workers.

    Every step of a worker: put the gradient, with the clock of the parameters it was computed from, into the worker's
    slot on the server, and wait for the answer. The server applies gradients one by one in order of arrival with the
    optimiser that lives there (any of torch's, with its state), adds 1 to its clock, and answers by putting the new
    parameters and clock into the worker's memory. A gradient's staleness is the server's clock at application minus
    the gradient's; its mean is λ − 1 for λ workers. On one rank the optimiser runs locally.

    With several servers each has a shard of the parameters, with a clock of its own. `overlap` is the communication
    of Rudra-adv*: the worker computes its next gradient while the last one travels; the mean staleness is 2λ − 1 then.

    Bytes per worker and step: one gradient vector put by the worker, one parameter vector put by the servers.

    Reference: Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
    systematic study", 2016 (n-softsync with n = λ); Jeffrey Dean et al., "Large scale distributed deep networks",
    2012 (Downpour SGD with n_fetch = n_push = 1).
    """

    class Config(Stale.Config):
        """Options of parameter_server."""

    def complete(self) -> bool:
        return any(not held.added for held in self.held)

    def may_go(self, held: Held) -> bool:
        return True

    def expected_staleness(self) -> float:
        return len(self.roles.workers)

    def weight(self) -> float:
        return 1.0  # each gradient is an update of its own
