"""Asynchronous DiLoCo: the servers' rules, lock-step as DiLoCo, staleness, periods by speed, whole reads."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from harness import loops
from harness.cases import each
from hpcdist.comm.virtual import Constant, Jitter, Network, Straggler, run_virtual
from strategies import problem, replicas

pytestmark = pytest.mark.computes

NAME = "async_diloco"
ALL = 1e9  # a grace period in which all workers push


def go(comm, options, optimizer="sgd", steps=12, after=lambda strategy: None):
    """Collective. A server's records, and the common parameters at the end."""
    module, records = problem.model(), []
    local = problem.OPTIMIZERS[optimizer](module.parameters())
    strategy = problem.make(comm, NAME, module, local, **options)
    strategy.records.write = records.append
    strategy.records.start()
    workers = strategy.roles.workers

    def backward(step):
        replicas.backward(module, workers.index(comm.rank), len(workers), step)

    loops.by_strategy(strategy, local, range(steps), backward, after=lambda step: after(strategy))
    params = strategy.consensus()[0][0]
    strategy.close()
    return records, params


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.sizes(3, 4)
def test_in_lock_step_it_is_diloco_and_else_it_is_not(ranks):
    outer = {"period": 3, "outer_lr": 0.6, "outer_momentum": 0.8}
    found = ranks(lambda comm: go(comm, {**outer, "grace_s": ALL})[1])
    apart = ranks(lambda comm: go(comm, outer)[1])
    hand = replicas.by_hand(len(found) - 1, "sgd", 12, **outer)
    for own, other in zip(found, apart, strict=True):
        torch.testing.assert_close(own, hand[-1, 0], rtol=0, atol=1e-12)
        assert (other - hand[-1, 0]).abs().max() > 1e-6


def served(options, ways, staleness=0):
    """θ, of one element, after each of these pushes, of two workers."""

    def body(comm):
        module = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(module.weight)
        strategy = problem.make(comm, NAME, module, **options)
        found = []
        if comm.rank == 0:
            server = strategy.server
            state = (server._params[0], server._momentum[0], server._sum[0])
            for number, way in enumerate(ways):
                ends = (number + 1) % server._every == 0
                server._step(*state, torch.tensor([way], dtype=torch.float64), staleness, ends)
                found.append(server._params[0].item())
        strategy.close()
        return found

    return run_virtual(body, 3)[0]


WAYS = [1.0, -2.0, 0.5, 3.0, 0.25, -1.0, 2.0, 0.0]


def test_each_momentum_acts_once_however_it_is_spread():
    """Over the pushes that follow the one at which it was made."""
    options = {"every": 4, "outer_lr": 0.5, "outer_momentum": 0.9}
    ways = [*WAYS, 0.0, 0.0, 0.0]  # two steps of the momentum, and the pushes over which the second acts
    plain = served(options, ways)
    for spread in (0.1, 0.25):
        other = served({**options, "spread": spread}, ways)
        assert other[-1] == pytest.approx(plain[-1], abs=1e-12)
        assert max(abs(a - b) for a, b in zip(plain, other, strict=True)) > 0.05


def test_the_rules_for_comparison():
    rate, beta = 0.5, 0.8

    def nesterov(gradients):
        x, m, found = 0.0, 0.0, []
        for gradient in gradients:
            m = beta * m + gradient
            x -= rate * (gradient + beta * m)
            found.append(x)
        return found

    options = {"outer_lr": rate, "outer_momentum": beta}
    root = math.sqrt(2)  # of two workers
    assert served({**options, "rule": "nesterov"}, WAYS) == pytest.approx(nesterov([w / root for w in WAYS]))
    stale = nesterov([w / root / 2 for w in WAYS])
    assert served({**options, "rule": "discounted"}, WAYS, staleness=3) == pytest.approx(stale)
    means = nesterov([(a + b) / 2 for a, b in zip(WAYS[::2], WAYS[1::2], strict=True)])
    found = served({**options, "rule": "buffered"}, WAYS)
    assert found[1::2] == pytest.approx(means) and found[::2] == pytest.approx([0.0, *means[:-1]])


# --- who waits for whom -----------------------------------------------------------------------------------------------
def test_the_staleness_of_equal_workers_is_one_less_than_their_number():
    def body(comm):
        return [list(record.staleness) for record in go(comm, {"period": 2}, steps=60)[0]]

    records = run_virtual(body, 5, compute=Jitter(0.1, 0.05), network=Network(1e-4, 1e9))
    found = [value for own in records for staleness in own for value in staleness]
    assert len(found) == 4 * 60 and sum(found) / len(found) == pytest.approx(3, abs=0.2)


def test_periods_follow_the_speed_of_the_workers():
    """Speeds 4 : 2 : 1: periods of 8, 4 and 2 steps, which take about as long."""

    def body(comm):
        seen = []

        def look(strategy):
            if not strategy.worker.done:
                seen.append((strategy.comm.now(), strategy.worker.steps))

        go(comm, {"period": 8, "dynamic": True}, steps=160 >> max(0, comm.rank - 1), after=look)
        return seen

    compute = Straggler(Straggler(Constant(0.1), 2, 2.0), 3, 4.0)
    found = run_virtual(body, 4, compute=compute, network=Network(1e-5, 1e10))
    assert [{steps for _, steps in own[2:]} for own in found[1:]] == [{8}, {4}, {2}]
    lengths = [[b - a for (a, _), (b, _) in pairwise(own[2:-1])] for own in found[1:]]
    assert all(one == pytest.approx(0.8, rel=0.1) for own in lengths for one in own)


def test_periods_do_not_follow_the_speed_of_a_worker_that_has_died():
    """The fastest of three says so after its fourth period, as one that is killed would."""
    gone: list[int] = []

    def body(comm):
        seen = []

        def look(strategy):
            strategy.comm.failures.failed = lambda: tuple(gone)
            if not strategy.worker.done:
                seen.append(strategy.worker.steps)
                if comm.rank == 1 and len(seen) == 4:
                    gone.append(1)

        go(comm, {"period": 8, "dynamic": True}, steps=32 if comm.rank == 1 else 40, after=look)
        return seen

    found = run_virtual(body, 4, compute=Straggler(Constant(0.4), 1, 0.25), network=Network(1e-5, 1e10))
    assert found[2:] == [[2, 8, 8, 8, 8]] * 2


def test_within_the_grace_period_workers_begin_at_the_same_parameters():
    def body(comm, grace_s):
        read = []

        def look(strategy):
            if not strategy.worker.done:
                read.append((strategy.replica.clock, strategy.model.params[0].clone()))

        go(comm, {"period": 1, "grace_s": grace_s}, steps=6, after=look)
        return read

    compute = Straggler(Straggler(Constant(0.1), 2, 1.1), 3, 2.0)  # the second is 10 ms late, the third 100
    alike = run_virtual(lambda comm: body(comm, 0.05), 4, compute=compute)
    assert alike[1][0][0] == alike[2][0][0] == 2 and torch.equal(alike[1][0][1], alike[2][0][1])
    assert alike[3][0][0] > 2
    apart = run_virtual(lambda comm: body(comm, 0.0), 4, compute=compute)
    assert [apart[rank][0][0] for rank in (1, 2)] == [1, 2]


@each("servers", [1, 2, "colocated"])
@pytest.mark.sizes(4)
def test_no_read_is_torn(ranks, servers):
    """All elements of θ are the number of pushes, so a read of two versions would show both."""
    options = {"period": 1, "every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "servers": servers}

    def body(comm):
        module = torch.nn.Linear(300, 100, bias=False).double()
        torch.nn.init.zeros_(module.weight)
        strategy, local = problem.make(comm, NAME, module, **options), torch.optim.SGD(module.parameters())
        whole = []

        def backward(step):
            module.weight.grad = torch.zeros_like(module.weight)

        def look(step):
            parts = [part for shard in strategy.replica.shards.values() for part in shard.of(strategy.model.params)]
            whole.extend(bool((part == part[:1]).all()) for part in parts)

        params = strategy.model.params[0]
        loops.by_strategy(strategy, local, range(25), backward, update=lambda: params.add_(1.0), after=look)
        (params,), _ = strategy.consensus()
        strategy.close()
        return all(whole), params.unique().tolist()

    found = ranks(body, compute=Jitter(0.01, 0.5), network=Network(1e-4, 1e8))
    workers = {1: 3, 2: 2, "colocated": 4}[servers]
    assert all(whole and values == [25.0 * workers] for whole, values in found)


@pytest.mark.sizes(2)
def test_the_local_state_is_kept_or_made_anew(ranks):
    def steps_of(comm, kind):
        found = []

        def look(strategy):
            state = strategy.optimizer.state
            found.append(max((int(own["step"]) for own in state.values()), default=0))

        go(comm, {"period": 2, "inner_state": kind}, "adam", steps=6, after=look)
        return found

    identity_weight, reset = ranks(lambda comm: [steps_of(comm, kind) for kind in ("keep", "reset")])[1]
    assert identity_weight == [1, 2, 3, 4, 5, 6] and reset == [1, 0, 1, 0, 1, 0]


def save(folder, model, optimizer):
    hd.save(folder, optimizer=optimizer)


def look(folder, model, optimizer):
    with hd.consensus(model):
        pass


@each("take", [save, look])
def test_a_call_of_all_ranks_inside_an_epoch_lets_nobody_wait_for_a_server(take, tmp_path):
    """Colocated servers serve inside steps alone, and with periods by speed ranks push at different steps."""

    def body(comm):
        hd.init(comm=comm)
        model = problem.model()
        local, options = torch.optim.SGD(model.parameters(), lr=0.02), {"period": 3, "dynamic": True}
        optimizer = hd.DistributedOptimizer(local, model, strategy=NAME, servers="colocated", **options)
        samples, steps = TensorDataset(problem.X[:80], problem.Y[:80]), []
        for x, y in hd.shard(DataLoader(samples, batch_size=2), seed=1):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            steps.append(optimizer.record.step)
            if len(steps) in (4, 5, 7):
                take(tmp_path, model, optimizer)
        hd.finish(model)
        return steps

    assert run_virtual(body, 4, compute=Jitter(1.0, 0.3)) == [list(range(1, 11))] * 4
