"""The asynchronous server: staleness by definition, no gradient lost, and the trajectory that follows from them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hpcdist import strategies
from hpcdist.comm.virtual import Constant, Exponential, Jitter, Network, Straggler, run_virtual
from hpcdist.model.flat import FlatModel
from strategies import problem
from strategies.replay import asynchronous, logged

pytestmark = pytest.mark.computes

NAME = "parameter_server"
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["momentum", "adam"])


def _staleness(runs):
    return [s for run in runs for s in run.staleness]


def _mean(values):
    return sum(values) / len(values)


# --- staleness --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("workers", "compute"),
    [(1, Constant(0.1)), (2, Exponential(0.1)), (4, Constant(0.1)), (9, Exponential(0.1))],
    ids=str,
)
def test_the_mean_staleness_is_the_number_of_workers_minus_one(workers, compute):
    # Every update falls into every other worker's gradient under way; only the first and last gradients see fewer.
    samples = workers * 4 * 60
    runs = run_virtual(
        lambda comm: problem.train(comm, NAME, samples=240, batch=1, epochs=max(1, samples // 960)),
        workers + 1,
        compute=compute,
        network=Network(latency_s=1e-5, bandwidth_bytes_s=1e9),
    )
    assert _mean(_staleness(runs)) == pytest.approx(workers - 1, rel=0.12, abs=0.02)


def test_equal_workers_have_equal_staleness():
    runs = run_virtual(lambda comm: problem.train(comm, NAME, batch=1, epochs=1), 5, compute=Constant(0.1))
    counts = Counter(_staleness(runs))
    assert counts[3] > 0.95 * sum(counts.values())


def test_a_straggler_exceeds_any_bound():
    runs = run_virtual(
        lambda comm: problem.train(comm, NAME, batch=1, epochs=1), 5, compute=Straggler(Constant(0.1), 1, 10.0)
    )
    assert max(_staleness(runs)) > 2 * 4


@pytest.mark.parametrize("bound", [0, 2, 5])
def test_a_bound_of_staleness_drops_and_counts(bound):
    runs = run_virtual(
        lambda comm: problem.train(comm, NAME, {"max_staleness": bound}, batch=1, epochs=1),
        4,
        compute=Straggler(Constant(0.1), 1, 8.0),
    )
    dropped = [record for record in runs[0].records if record.dropped]
    assert max(_staleness(runs)) <= bound
    assert dropped and all(record.staleness == () for record in dropped)
    assert len(_staleness(runs)) + sum(record.dropped for record in dropped) == sum(len(r.records) for r in runs[1:])
    assert all(f"updates old, max_staleness is {bound}" in record.event for record in dropped)
    assert "a gradient of rank 1 was" in dropped[-1].event


@pytest.mark.parametrize("workers", [1, 6])
def test_overlap_costs_as_many_updates_of_staleness_as_there_are_workers(workers):
    """A gradient is of the parameters that came with the last reply but one: two rounds of all, less itself."""
    network = Network(latency_s=1e-5, bandwidth_bytes_s=1e9)
    runs = run_virtual(
        lambda comm: problem.train(comm, NAME, {"overlap": True}, batch=1, epochs=2),
        workers + 1,
        compute=Jitter(0.1, 0.2),
        network=network,
    )
    assert _mean(_staleness(runs)) == pytest.approx(2 * workers - 1, rel=0.1)
    assert len(_staleness(runs)) == sum(len(run.records) for run in runs[1:]) == 2 * problem.SAMPLES


def test_overlap_hides_the_network():
    network = Network(latency_s=1e-3, bandwidth_bytes_s=1e4)
    seconds = {}
    for overlap in (False, True):
        runs = run_virtual(
            lambda comm, overlap=overlap: problem.train(comm, NAME, {"overlap": overlap}, epochs=1),
            3,
            compute=Constant(0.1),
            network=network,
        )
        seconds[overlap] = max(run.seconds for run in runs)
    assert seconds[True] < 0.85 * seconds[False]  # pushing takes its time; only the reply travels meanwhile


# --- trajectories -----------------------------------------------------------------------------------------------------
@pytest.mark.sizes(2, 3, 4)
def test_no_gradient_is_lost(ranks):
    runs = ranks(lambda comm: problem.train(comm, NAME, epochs=2))
    server, workers = runs[0], runs[1:]
    pushed = sum(len(run.records) for run in workers)
    assert not server.is_worker and len(server.records) == pushed
    assert [record.clock for record in server.records] == list(range(1, pushed + 1))
    assert all(torch.equal(run.consensus[0], server.params[0]) for run in runs)


@OPTIMIZERS
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("servers", [1, 2, 3, "colocated"])
def test_the_trajectory_is_that_of_the_recorded_arrivals(optimizer, workers, servers):
    """Replaying who posted what, computed from which clocks, gives the servers' parameters to the bit."""
    cls = logged(strategies.load(NAME))
    serving = 0 if servers == "colocated" else servers
    workers += servers == "colocated"  # else it is alone
    runs = run_virtual(
        lambda comm: problem.train(comm, cls, {"servers": servers}, optimizer=optimizer, samples=50, epochs=1),
        serving + workers,
        compute=Exponential(0.1),
        network=Network(latency_s=0.03, bandwidth_bytes_s=1e6),  # shards get out of step
        seed=4,
    )
    ranks = [rank for rank, run in enumerate(runs) if run.is_worker]
    expected = asynchronous(cls.arrivals, ranks, optimizer=optimizer, samples=50)
    assert all(torch.equal(run.consensus[0], expected) for run in runs)
    if workers > 1:
        late = [i - a.clock for log in cls.arrivals.values() for i, a in enumerate(log)]
        assert any(late), "no gradient was stale: the test shows nothing"
        assert sorted(late) == sorted(_staleness(runs)), "staleness is recorded as something else"


@OPTIMIZERS
@pytest.mark.parametrize("samples", [problem.SAMPLES, 50])
def test_it_is_downpour_that_pushes_and_fetches_at_every_step(optimizer, samples):
    """To the bit in parameters, staleness and time, for the same order of arrival."""
    found = []
    for name, options in ((NAME, {}), ("downpour", {"server_rule": "optimizer"})):
        runs = run_virtual(
            lambda comm, name=name, options=options: problem.train(
                comm, name, options, optimizer=optimizer, samples=samples
            ),
            4,
            compute=Exponential(0.1),
            network=Network(latency_s=1e-3, bandwidth_bytes_s=1e8),
            seed=3,
        )
        found.append((runs[0].consensus[0], _staleness(runs), runs[0].seconds))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:] and max(found[0][1]) > 2


@OPTIMIZERS
@pytest.mark.sizes(2, 3, 4, 6)
def test_one_worker_equals_one_process_to_the_bit_whatever_the_number_of_servers(ranks, optimizer):
    """Borders of the shards cut through parameters; momentum has weight decay."""
    options = {"servers": ranks.size - 1}
    runs = ranks(lambda comm: problem.train(comm, NAME, options, optimizer=optimizer, samples=50))
    (expected,) = problem.serial(1, optimizer=optimizer, samples=50)
    assert all(torch.equal(run.consensus[0], expected) for run in runs)
    assert set(_staleness(runs)) == {0}


class Mixed(torch.nn.Module):
    """Parameters of three dtypes, one of them complex, one frozen, one that has no gradient in some steps."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape, dtype in [
            ("a", (3, 2), torch.float32), ("b", (5,), torch.float64), ("c", (2,), torch.complex64),
            ("d", (4,), torch.float32), ("e", (1,), torch.bfloat16), ("f", (2,), torch.float64),
        ]:  # fmt: skip
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            setattr(self, name, torch.nn.Parameter(value, requires_grad=name != "f"))

    def backward(self, step):
        total = sum((p * p.conj()).real.sum().double() * (step + 1) for p in (self.a, self.b, self.c, self.e))
        (total if step % 2 else total + self.d.double().sum()).backward()


@OPTIMIZERS
@pytest.mark.sizes(2, 3, 4, 10)
@pytest.mark.parametrize("name", [NAME, "hardsync", "downpour"])
def test_one_worker_of_any_model_equals_one_process_to_the_bit(ranks, optimizer, name):
    """Several dtypes, more servers than some of them have elements, parameters without a gradient."""
    rule = {"server_rule": "optimizer"} if name == "downpour" else {}

    def trained(strategy, module):
        local = problem.OPTIMIZERS[optimizer](module.parameters())
        for step in range(4 if strategy is None or strategy.is_worker else 0):
            local.zero_grad()
            module.backward(step)
            local.step() if strategy is None else strategy.step(local.step)
        if strategy is not None:
            strategy.pause() if strategy.is_worker else strategy.serve(local.step)

    def body(comm):
        module, channel, cls = Mixed(), comm.split(0), strategies.load(name)
        strategy = cls(cls.Config(servers=comm.size - 1, **rule), channel, FlatModel(module))
        trained(strategy, module)
        params = strategy.consensus()[0]
        strategy.close()
        channel.close()
        return params

    expected = FlatModel(Mixed())
    trained(None, expected.module)
    for params in ranks(body):
        assert all(torch.equal(a, b) for a, b in zip(params, expected.params, strict=True))


@pytest.mark.sizes(4)
@pytest.mark.parametrize(("servers", "overlap"), [(1, False), (1, True), (2, True)])
def test_it_learns_and_all_ranks_agree_in_the_end(ranks, servers, overlap):
    found = problem.learns(ranks, NAME, {"servers": servers, "overlap": overlap}, compute=Jitter(0.1, 0.2))
    posted = sum(len(run.records) for run in found if run.is_worker)
    assert sum(len(run.staleness) for run in found) == servers * posted


@pytest.mark.sizes(2, 3)
def test_a_nan_gradient_is_left_out_on_the_server_too(ranks):
    """One worker, so that the others' gradients are those of one process that leaves that step out."""
    options = {"servers": ranks.size - 1, "on_nonfinite": "skip"}
    runs = ranks(lambda comm: problem.train(comm, NAME, options, poison={(0, 3)}, epochs=1))
    (expected,) = problem.serial(1, leave_out={(0, 3)}, epochs=1)
    assert all(torch.equal(run.consensus[0], expected) for run in runs)
    assert [record.step for record in runs[-1].records if record.event] == [4]
