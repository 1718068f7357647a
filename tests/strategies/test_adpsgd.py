"""AD-PSGD: averaging in pairs that loses nothing, in any order of events, and for which nobody waits."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Constant, Exponential, Jitter, Network, run_virtual
from strategies import mixed

pytestmark = pytest.mark.computes

NAME = "adpsgd"
# Transfers that tear, and last longer than a step: many happen at once.
SLOW = {"network": Network(0.02, 800.0), "compute": Exponential(0.1)}


def _make(comm, **options):
    """A strategy whose ranks have parameters of their own."""
    strategy = mixed.linear(comm, NAME, **options)
    strategy.model.params[0].copy_(mixed.drawn(comm.rank))
    strategy.state.load({"steps": 0, "peers": None, "shared": None})
    return strategy


def _x(strategy):
    """A copy of this rank's x, which may be ahead of what its model holds."""
    return strategy.state.parameters().tensors[0].clone()


def _mix(comm, steps, update=lambda: None, **options):
    """The consensus at the start and at the end, this rank's x and the records."""
    strategy = _make(comm, **options)
    before = strategy.consensus()[0][0]
    strategy.records.start()
    records = []
    for _ in range(steps):
        comm.compute()
        records.append(strategy.step(update))
    params = strategy.model.params[0].clone()
    after = strategy.consensus()[0][0]
    assert torch.equal(params, strategy.model.params[0]), "evaluating changed the parameters"
    x = _x(strategy)
    strategy.close()
    return before, after, x, records


def conserving(ranks, mix, **simulation):
    found = ranks(mix, **simulation)
    mean = sum(mixed.drawn(rank) for rank in range(len(found))) / len(found)
    values = torch.stack([x for _, _, x, _ in found])
    assert (values.mean(dim=0) - mean).abs().max() < 1e-13
    for before, after, *_ in found:
        assert torch.allclose(before, mean, rtol=0, atol=1e-15)
        assert torch.allclose(after, mean, rtol=0, atol=1e-13)
    apart = torch.stack([mixed.drawn(rank) - mean for rank in range(len(found))]).norm()
    assert (values - mean).norm() < (1 if ranks.real else 0.2) * apart  # real ones may be done before others begin


@each("simulation", [SLOW, {"compute": Jitter(0.1, 0.5)}])
@pytest.mark.sizes(4)
def test_the_mean_is_conserved_to_rounding_and_ranks_agree_in_the_end(ranks, simulation):
    conserving(ranks, lambda comm: _mix(comm, 100), **simulation)


@pytest.mark.sizes(4)
def test_other_graphs_without_odd_cycles(ranks, tmp_path_factory):
    """One of them a path."""
    path = tmp_path_factory.mktemp("graphs") / "path"
    path.write_text("".join(f"{a} {a + 1}\n" for a in range(ranks.size - 1)))
    for topology in ("ring", {"name": "graph", "path": str(path)}):
        conserving(ranks, lambda comm, chosen=topology: _mix(comm, 100, topology=chosen))


@pytest.mark.mpi
@pytest.mark.sizes(3)
def test_the_mean_is_conserved_where_every_rank_is_on_a_node_of_its_own(ranks):
    def mix(comm):
        far = comm.apart("tcp")
        found = _mix(far, 60)
        far.close()
        return found

    conserving(ranks, mix)


def test_a_pair_averages_before_the_update_at_the_gradient_of_before():
    """Rank 0 is active: x0 = (4 + 8)/2 − 1. Rank 1 has added its change before: x1 = 8, then 6 by rank 0's doing."""

    def body(comm):
        strategy = mixed.linear(comm, NAME)
        (params,) = strategy.model.params
        params.fill_(4.0 if comm.rank == 0 else 9.0)
        strategy.state.load({"steps": 0, "peers": None, "shared": None})
        if comm.rank == 1:
            strategy.step(lambda: params.sub_(1.0))
        comm.barrier()
        if comm.rank == 0:
            strategy.step(lambda: params.sub_(1.0))
        comm.barrier()
        copy, x = params[0].item(), _x(strategy)[0].item()
        if comm.rank == 1:
            strategy.step(lambda: params.add_(0.5))
        end = params[0].item()
        strategy.close()
        return copy, x, end

    assert run_virtual(body, 2) == [(5.0, 5.0, 5.0), (8.0, 6.0, 6.5)]


def test_one_averages_at_a_time_and_the_others_go_on_without():
    """Two active ranks, one passive, and averaging that takes three steps of computing."""
    results = run_virtual(lambda comm: _mix(comm, 40), 3, network=Network(0.01, 512.0), compute=Constant(0.1))
    fetched = [[record.bytes_fetched for record in records] for *_, records in results]
    n_bytes = 8 * 8
    assert set(fetched[0]) == set(fetched[2]) == {0, n_bytes} and set(fetched[1]) == {0}
    for rank in (0, 2):
        for record in results[rank][3]:
            alone_s = 0.3 if record.bytes_fetched else 0.0
            assert record.communicating_s == pytest.approx(alone_s, abs=0.08) and record.waiting_s == 0
    assert all((r.bytes_sent >= n_bytes) == bool(r.bytes_fetched) for *_, records in results for r in records)
    for record in results[1][3]:
        assert record.communicating_s + record.waiting_s == pytest.approx(0, abs=1e-12), "a passive rank never waits"


# --- checkpoints and deaths -------------------------------------------------------------------------------------------
def test_a_run_taken_up_goes_on_to_the_bit():
    """With what others have averaged into a passive rank's x since it took its copy."""

    def body(comm):
        strategy = _make(comm, seed=4)
        (params,) = strategy.model.params

        def steps(count):
            for _ in range(count):
                comm.compute()
                strategy.step(lambda: params.mul_(0.875))
            comm.barrier()

        steps(6)
        saved, state = params.clone(), deepcopy(strategy.state.save())
        stale = comm.rank % 2 == 1 and not torch.equal(saved, state["shared"][0])
        steps(5)
        first = params.clone(), _x(strategy)
        params.copy_(saved)
        strategy.state.load(state)
        steps(5)
        second = params.clone(), _x(strategy)
        strategy.close()
        return stale, all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    found = run_virtual(body, 5, compute=Constant(0.1))
    assert all(same for _, same in found) and any(stale for stale, _ in found)


def test_the_living_go_on_and_a_passive_rank_frees_itself_from_a_dead_one():
    def body(comm):
        strategy = _make(comm)
        if comm.rank == 0:
            strategy._holder.compare_and_swap(0, 1, 1)  # dies while it averages with rank 1
        comm.barrier()
        strategy.comm.failures.alive = (1, 2, 3)
        values = []
        if comm.rank != 0:
            for _ in range(80):
                comm.compute()
                strategy.step(lambda: None)
            values = _x(strategy).tolist()
        comm.barrier()
        strategy.close()
        return values

    _, *found = run_virtual(body, 4, compute=Constant(0.1))
    mean = sum(mixed.drawn(rank) for rank in (1, 2, 3)) / 3
    for values in found:
        assert torch.tensor(values, dtype=torch.float64) == pytest.approx(mean, abs=1e-3)
