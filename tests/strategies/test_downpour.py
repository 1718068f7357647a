"""Downpour: pushes and fetches by their own schedules, Adagrad on the servers, and a warm start by one worker."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

from harness import loops
from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import Constant, Exponential, Jitter, Network, Straggler, run_virtual
from hpcdist.strategies.server.channel import FETCH, GRADIENT, PAUSE, PUSH
from strategies import problem

pytestmark = pytest.mark.computes

NAME = "downpour"
_train = partial(problem.virtual, name=NAME)


def _noting():
    """Downpour that notes which requests each server gets."""

    class Noting(strategies.load(NAME)):
        requests: list[tuple[int, int, int]] = []  # server, source, kind

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if self.replica.children:
                self._deal, self.server._deal = self.server._deal, self._note

        def _note(self, request):
            self.requests.append((self.comm.rank, request.source, request.kind))
            self._deal(request)

    return Noting


# --- the server's rule ------------------------------------------------------------------------------------------------
@pytest.mark.sizes(2, 4)
def test_the_kth_step_under_a_constant_gradient_is_the_rate_over_the_root_of_k(ranks):
    """For one worker and any number of servers."""
    rate, gradient = 0.3, torch.tensor([2.0, -0.01, 5e3, -7.0, 1.0], dtype=torch.float64)

    def body(comm):
        module = torch.nn.Linear(5, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(module.weight)
        return _steps(comm, module, [gradient] * 20, lr=1.0, rate=rate, servers=comm.size - 1)[0]

    params = torch.stack([torch.zeros(5).double(), *ranks(body)[-1]])
    steps = params[:-1] - params[1:]
    expected = rate / torch.arange(1, 21, dtype=torch.float64).sqrt()
    torch.testing.assert_close(steps, expected[:, None] * gradient.sign(), rtol=1e-7, atol=1e-9)


@each("rule", ["adagrad", "optimizer"])
@each("period", [{}, {"n_push": 3, "n_fetch": 5}])
def test_the_number_of_shards_does_not_change_the_trajectory_of_one_worker(rule, period):
    found = []
    for servers in (1, 2, 5):
        runs = _train({"servers": servers, "server_rule": rule, **period}, servers + 1, optimizer="adam", samples=50)
        assert all(torch.equal(run.consensus[0], runs[0].consensus[0]) for run in runs)
        found.append((runs[0].consensus[0], runs[-1].params[0]))
    assert all(torch.equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))


# --- half precision ---------------------------------------------------------------------------------------------------
def _masters(again, strategy):
    """What both have on this server, pair by pair; nothing where this rank doesn't serve."""
    return zip(again.server.master(), strategy.server.master(), strict=True) if strategy.replica.children else ()


HALF = each("dtype", [torch.float16, torch.bfloat16])


def _ones(features, dtype):
    module = torch.nn.Linear(features, 1, bias=False, dtype=dtype)
    torch.nn.init.ones_(module.weight)
    return module


def _steps(comm, module, gradients, lr=1e-3, **options):
    """The worker's parameters after each step on one of `gradients`, and the servers' state."""
    strategy = problem.make(comm, NAME, module, **options)
    local, found = torch.optim.SGD(module.parameters(), lr=lr), []

    def backward(gradient):
        module.weight.grad = gradient[None].to(module.weight.dtype)

    def look(gradient):
        found.append(module.weight.detach()[0].clone())

    loops.by_strategy(strategy, local, gradients, backward, after=look)
    consensus, state = strategy.consensus()[0][0], strategy.state.save()
    identity_weight = strategy.state.save()  # as another world goes on from
    again = problem.make(comm, NAME, module, **options)
    again.state.load(state)
    same = [torch.equal(a, b) for a, b in _masters(again, strategy)]
    for made in (again, strategy):
        made.close()
    return found, consensus, identity_weight, same


@HALF
@each("servers", [1, 2, "colocated"])
def test_a_model_in_half_precision_follows_adagrad_in_single_precision(dtype, servers):
    """Gradients of 0 in some elements, always or at first; what the server has is not rounded."""
    gradients = torch.randn(40, 6, generator=torch.Generator().manual_seed(2)) * torch.tensor([0, 1, 1, 1e-6, 200, 1])
    gradients[:20, 1] = 0

    def body(comm):
        others = servers == "colocated" and comm.rank > 0  # whose gradients leave the sums alone
        return _steps(comm, _ones(6, dtype), 0 * gradients if others else gradients, rate=0.01, servers=servers)

    found = run_virtual(body, 2 if servers == "colocated" else servers + 1, compute=Constant(0.1))
    params = torch.nn.Parameter(torch.ones(6))
    adagrad, expected = torch.optim.Adagrad([params], lr=0.01), []
    for gradient in gradients:
        params.grad = gradient.to(dtype).float()
        adagrad.step()
        expected.append(params.detach().to(dtype))
    steps = found[0 if servers == "colocated" else -1][0]
    assert all(step.isfinite().all() for step in steps)
    assert all(torch.equal(consensus, expected[-1]) for _, consensus, *_ in found)
    if servers != "colocated":  # there the two meet in other orders
        assert all(torch.equal(a, b) for a, b in zip(steps, expected, strict=True))
    assert all(all(same) for *_, same in found), "a checkpoint rounds"
    if servers == 1:
        assert torch.equal(found[0][2]["squares"][0], adagrad.state[params]["sum"])
        assert torch.equal(found[0][2]["params"][0], params.detach()), "on other ranks it goes on from rounded ones"


# --- schedules --------------------------------------------------------------------------------------------------------
@each("servers", [1, 2])
def test_it_pushes_and_fetches_when_it_should(servers):
    """31 steps: 10 pushes and 6 fetches, of which steps 15 and 30 are both; whole gradients, whole parameters."""
    noting, workers, steps = _noting(), 2, 31
    options = {"n_push": 3, "n_fetch": 5, "servers": servers}
    settings = {"batch": 2, "samples": 2 * workers * steps, "epochs": 1, "tells": False}
    runs = _train(options, servers + workers, name=noting, compute=Jitter(0.1, 0.2), **settings)
    counts = Counter(noting.requests)
    for worker in range(servers, servers + workers):
        for server in range(servers):
            kinds = {kind: counts[server, worker, kind] for kind in (PUSH, FETCH, GRADIENT, PAUSE)}
            assert kinds == {PUSH: 8, FETCH: 4, GRADIENT: 2, PAUSE: 1}
    n_bytes, word, names = sum(flat.nbytes for flat in problem.FlatModel(problem.model()).params), 8, 4
    for run in runs[servers:]:
        pushes = 10 * n_bytes + servers * names  # which parameters have a gradient is told once, as it stays the same
        requests = 14 * servers * 6 * word  # kind, weight, number of clocks, clock; ticket drawn and raised
        assert sum(record.bytes_sent for record in run.records) == pushes + requests
    assert [len(run.staleness) for run in runs[:servers]] == [10 * workers] * servers


@pytest.mark.sizes(3)
@each("servers", [1, "colocated"])
def test_the_last_push_before_a_pause_is_not_lost(ranks, servers):
    """Nobody waits for the answer to a push; the pause that follows must."""
    options = {"n_push": 1, "n_fetch": 1000, "servers": servers}
    slow = Network(latency_s=1.0, bandwidth_bytes_s=1e9)
    runs = ranks(lambda comm: problem.train(comm, NAME, options, samples=40, epochs=3), network=slow)
    workers = [run for run in runs if run.is_worker]
    shards = len(runs) if servers == "colocated" else 1
    steps = 3 * (40 // (4 * len(workers)) * len(workers) + -(-(40 % (4 * len(workers))) // 4))
    assert sum(len(run.staleness) for run in runs) == shards * steps


def test_gradients_in_the_sum_at_the_end_of_an_epoch_stay_for_the_next():
    """5 steps an epoch, a push every 3: after 2 epochs 3 pushes, and one gradient left."""
    runs = _train({"n_push": 3}, 2, samples=20, epochs=2)
    assert len(runs[0].staleness) == 3


def test_between_fetches_a_worker_is_on_its_own():
    runs = _train({"n_fetch": 1000, "n_push": 2}, 4, compute=Jitter(0.1, 0.2))
    steps = problem.SAMPLES // 12
    for worker, run in enumerate(runs[1:]):
        others = {(w, step) for w in range(3) if w != worker for step in range(steps)}
        assert torch.equal(run.params[0], problem.serial(3, leave_out=others)[0])
    assert not torch.equal(runs[0].consensus[0], runs[1].params[0])


def test_staleness_counts_from_the_last_fetch():
    """One worker, a fetch every 4 steps: the pushes in between are 0, 1, 2 and 3 updates after it."""
    runs = _train({"n_fetch": 4}, 2, samples=80, epochs=1)
    assert runs[0].staleness == [0, 1, 2, 3] * 5


@pytest.mark.sizes(3)
def test_a_fetch_brings_a_colocated_worker_its_own_shard_too(ranks):
    """What its server has, in place of what the local steps have made of it."""

    def body(comm):
        module = torch.nn.Linear(7, 3)
        strategy = problem.make(comm, NAME, module, servers="colocated")
        local, own = torch.optim.SGD(module.parameters(), lr=0.3), strategy.replica.shard.of(strategy.model.params)
        found = []
        for _ in range(3):
            module(torch.full((2, 7), comm.rank + 1.0)).square().sum().backward()
            strategy.step(local.step)
            local.zero_grad()
            master = strategy.server.master()
            found.append([(part.clone(), new.clone()) for part, new in zip(own, master, strict=True)])
        strategy.pause()
        strategy.close()
        return found

    for found in ranks(body):
        assert all(torch.equal(part, new) for parts in found for part, new in parts)


# --- warm start -------------------------------------------------------------------------------------------------------
@each("case", [(2, Exponential(0.1)), ("colocated", Straggler(Constant(0.1), 2, 5.0))])
def test_the_first_pushes_are_the_first_workers_alone(case):
    (servers, compute) = case
    noting, warm = _noting(), 9
    runs = _train({"warm_start": warm, "servers": servers}, 5, name=noting, compute=compute, epochs=1)
    leader = 0 if servers == "colocated" else servers
    for server in range(5 if servers == "colocated" else servers):
        kinds = [(source, kind) for at, source, kind in noting.requests if at == server]
        first = next(i for i, (source, kind) in enumerate(kinds) if source != leader and kind == GRADIENT)
        before = [source for source, kind in kinds[:first] if kind == GRADIENT]
        assert before == [leader] * len(before) and len(before) >= warm
    for rank, run in enumerate(runs):
        if run.is_worker:
            dropped = [(record.step, record.dropped, record.event) for record in run.records if record.dropped]
            text = "dropped: the gradient of before the warm start"
            assert dropped == ([] if rank == leader else [(1, 1, text)])


@each("servers", [2, "colocated"])
def test_a_leader_that_ends_its_epoch_before_the_warm_start_is_over_holds_nobody_up(servers):
    runs = _train({"warm_start": 10_000, "servers": servers}, 4, compute=Jitter(0.1, 0.2), samples=50, epochs=3)
    workers = [run for run in runs if run.is_worker]
    assert sum(record.dropped for run in workers for record in run.records) == len(workers) - 1
