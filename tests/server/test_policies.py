"""Policies on scripted lists of arrivals, without ranks: which gradients make an update, and who goes on when."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.cases import each
from hpcdist.strategies.hardsync import HardsyncPolicy
from hpcdist.strategies.parameter_server import AsynchronousPolicy, ParameterServer
from hpcdist.strategies.server.channel import GRADIENT, NOBODY, ServerRequest
from hpcdist.strategies.server.gradients import Policy
from hpcdist.strategies.softsync import Softsync, SoftsyncPolicy
from hpcdist.strategies.ssp import SSPPolicy


def _gradient(worker: int, clocks: tuple[int, ...], **given: bool) -> ServerRequest:
    return ServerRequest(worker, GRADIENT, 1.0, clocks, **given)


@dataclass
class Script:
    """A server without parameters: one event after the other, with what the policy makes of it.

    Attributes:
        updates: the workers whose gradients each update was of, in the order in which they are added.
        went: the workers that went on, with the server's clock by then.
        refused: the reasons.
    """

    policy: Policy
    active: list[int]
    updates: list[list[int]] = field(default_factory=list)
    went: list[tuple[int, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    held: list[ServerRequest] = field(default_factory=list)
    summed: list[int] = field(default_factory=list)

    @property
    def clock(self) -> int:
        return len(self.updates)

    def arrive(self, worker: int, clock: int | None = None) -> Script:
        """A gradient of the parameters of that clock; default: of the newest ones."""
        clock = self.clock if clock is None else clock
        reason = self.policy.arrived(worker, self.clock - clock)
        if reason is not None:
            self.refused.append(reason)
            return self
        self.held.append(_gradient(worker, (clock,)))
        return self.settle()

    def settle(self) -> Script:
        due = self.policy.complete(self.held, len(self.summed), self.active)
        for gradient in sorted(self.held, key=lambda held: held.source) if due else self.held:
            if not gradient.added and (due or self.policy.may_go(gradient, self.active)):
                self.summed.append(gradient.source)
                gradient.added = True
            gradient.applied |= due
        if due and self.summed:
            self.updates.append(self.summed)
            self.summed = []
        going = [gradient for gradient in self.held if self.policy.may_go(gradient, self.active)]
        self.went += [(gradient.source, self.clock) for gradient in going]
        self.held = [gradient for gradient in self.held if gradient not in going]
        return self

    def ends(self, worker: int) -> Script:
        """A worker pauses, or is evicted."""
        self.active.remove(worker)
        return self.settle()


def test_hardsync_updates_with_one_of_each_and_all_go_on_together():
    script = Script(HardsyncPolicy(), [1, 2, 3])
    script.arrive(3).arrive(1)
    assert (script.updates, script.went) == ([], [])
    script.arrive(2)
    assert script.updates == [[1, 2, 3]], "in rank order, not in that of arrival"
    assert script.went == [(3, 1), (1, 1), (2, 1)]


def test_hardsync_goes_on_without_who_ends_and_refuses_what_comes_late():
    script = Script(HardsyncPolicy(), [1, 2, 3])
    script.arrive(1).arrive(2).ends(3)
    assert script.updates == [[1, 2]]
    script.arrive(1).arrive(2).arrive(3, clock=0)
    assert script.refused == ["dropped: a gradient of rank 3 missed 2 updates"]
    assert script.updates == [[1, 2], [1, 2]] and script.held == []


def test_hardsync_makes_no_update_of_nothing():
    assert not HardsyncPolicy().complete([], 0, [])


def test_the_asynchronous_server_updates_with_each_and_nobody_waits():
    script = Script(AsynchronousPolicy(ParameterServer.Config(), 3), [1, 2, 3])
    for worker in (2, 2, 1, 3, 2):
        script.arrive(worker)
    assert script.updates == [[2], [2], [1], [3], [2]]
    assert script.went == [(2, 1), (2, 2), (1, 3), (3, 4), (2, 5)]


QUOTAS = {
    1: ([[1], [1], [3], [2], [1], [2], [3]], []),
    2: ([[1, 1], [3, 2], [1, 2]], [3]),
    3: ([[1, 1, 3], [2, 1, 2]], [3]),
}


@each("quota", QUOTAS)
def test_softsync_updates_with_every_c_gradients_of_anybody(quota):
    script = Script(SoftsyncPolicy(Softsync.Config(splits=3), quota), [1, 2, 3])
    for worker in (1, 1, 3, 2, 1, 2, 3):
        script.arrive(worker)
    assert (script.updates, script.summed, script.held) == (*QUOTAS[quota], [])
    assert [worker for worker, _ in script.went] == [1, 1, 3, 2, 1, 2, 3], "each at once"
    assert [clock for _, clock in script.went] == [(i + 1) // quota for i in range(7)]


def test_softsync_counts_the_gradients_of_a_sum():
    policy = SoftsyncPolicy(Softsync.Config(), 4)
    assert not policy.complete([_gradient(1, (0, 0))], 1, [])
    assert policy.complete([_gradient(1, (0, 0))], 2, []) and policy.complete(
        [_gradient(1, (0, 0)), _gradient(2, (1, 0))], 0, []
    )
    assert not policy.complete([_gradient(1, (0, 0, 0, 0), added=True)], 3, []), "it counts nothing twice"


def test_softsync_refuses_what_is_too_stale_and_divides_the_rate_by_n():
    config = Softsync.Config(splits=4, max_staleness=2, modulation="average")
    script = Script(SoftsyncPolicy(config, 1), [1, 2])
    script.arrive(1).arrive(1).arrive(2, clock=0).arrive(1).arrive(2, clock=0)
    assert script.updates == [[1], [1], [2], [1]]
    assert script.refused == ["dropped: a gradient of rank 2 was 4 updates old, max_staleness is 2"]
    assert [script.policy.factor(staleness) for staleness in (0, 1, 7)] == [1 / 4] * 3


@each("bound", [0, 1, 3])
def test_ssp_holds_who_is_more_than_s_ahead_until_the_slowest_follows(bound):
    script = Script(SSPPolicy(bound, [1, 2]), [1, 2])
    for _ in range(bound):
        script.arrive(1)
    assert len(script.went) == bound == script.clock, "within the bound nobody waits"
    script.arrive(1)
    assert [gradient.source for gradient in script.held] == [1] and script.clock == bound
    assert script.policy.blocker(script.active) == 2
    script.arrive(2)
    assert script.updates[-1] == [1, 2] and script.held == [], "of all that has arrived, when somebody may read"


def test_ssp_divides_by_workers_and_goes_on_without_who_ends():
    script = Script(SSPPolicy(1, [1, 2, 3]), [1, 2, 3])
    assert script.policy.divides_by_workers
    script.arrive(1).arrive(1).arrive(2)
    assert [gradient.source for gradient in script.held] == [1]
    script.ends(3)
    assert script.held == [] and script.policy.blocker([]) == NOBODY


def test_ssp_takes_in_who_comes_back_where_the_slowest_is():
    policy = SSPPolicy(1, [1, 2, 3])
    for worker in (1, 1, 1, 2, 2, 3):
        policy.arrived(worker, 0)
    policy.returned(3, [1, 2, 3])
    assert policy.completed == [[1, 3], [2, 2], [3, 2]]
