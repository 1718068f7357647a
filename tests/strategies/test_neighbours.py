"""What strategies without servers have in common: the mean, dtypes, messages that are all received, other worlds."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch

from harness.cases import each
from harness.worlds import params, resharded, saved
from hpcdist.comm.virtual import Constant, Exponential, Network, Straggler, run_virtual
from hpcdist.model.flat import FlatModel
from strategies import mixed, problem

pytestmark = pytest.mark.computes

FRESH = {"steps": 0, "peers": None, "shared": None, "x": None, "weight": 1.0}  # what a rank begins with
# Transfers that tear, and last longer than a step: many happen at once.
SLOW = {"network": Network(0.02, 800.0), "compute": Exponential(0.1)}


@each("case", [("gossip_sync", {}, {}), ("local_sgd", {"period": 3}, {}), ("adpsgd", {}, {}), ("adpsgd", {}, SLOW)])
@pytest.mark.sizes(3, 7)
def test_the_mean_follows_the_mean_of_the_local_updates(ranks, case):
    """Ranks without samples in the last step of an epoch included: those do not move, but take part."""
    name, options, simulation = case

    def body(comm):
        noting, moved = problem.noting(lr=0.1)
        run = problem.train(comm, name, options, optimizer=noting, samples=50)
        return run.params[0], run.consensus[0], moved

    found = ranks(body, **simulation)
    start = FlatModel(problem.model()).params[0]
    expected = start + sum(moved for *_, moved in found) / len(found)
    assert (expected - start).abs().max() > 0.1
    for own, consensus, _ in found:
        assert torch.allclose(consensus, expected, rtol=0, atol=1e-13)
        assert (own - expected).abs().max() > 1e-6, "replicas agree: nothing was local"


@each("name", ["dpsgd", "adpsgd", "sgp", "gossip_sync"])
@pytest.mark.sizes(3)
def test_parameters_of_several_dtypes(ranks, name):
    dtypes = torch.bfloat16, torch.float64

    def body(comm):
        module = torch.nn.ParameterList(torch.zeros(5 + i, dtype=dtype) for i, dtype in enumerate(dtypes))
        strategy = problem.make(comm, name, module)
        for own in strategy.model.params:
            own.fill_(comm.rank)
        strategy.state.load(FRESH)
        for _ in range(60):
            strategy.step(lambda: None)
        found = [own.tolist() for own in strategy.consensus()[0]]
        strategy.close()
        return found

    found = ranks(body)
    for consensus in found:
        assert [len(values) for values in consensus] == [5, 6]
        mean = pytest.approx((len(found) - 1) / 2, rel=2e-2)  # in bfloat16 each of 60 steps rounds
        assert all(value == mean for values in consensus for value in values)


@each("case", [("dpsgd", "ring"), ("dpsgd", "hierarchical"), ("sgp", "digraph"), ("sgp", "one_peer_exponential")])
@each("overlap", [True, False])
@pytest.mark.sizes(4)
def test_no_message_is_left_over(ranks, shared_tmp_path, case, overlap):
    name, graph = case

    def body(comm):
        chosen = mixed.option(graph, comm.size, shared_tmp_path)
        comm.barrier()
        strategy = mixed.linear(comm, name, topology=chosen, overlap=overlap)
        for _ in range(3):
            strategy.step(lambda: None)
        strategy.close()
        strategy.comm.barrier()
        left = strategy.comm.probe(block=False)
        strategy.comm.close()
        return left

    assert set(ranks(body, network=mixed.NODES)) == {None}


@each("overlap", [True, False])
@each("case", [("dpsgd", "ring"), ("dpsgd", "hierarchical"), ("sgp", "digraph"), ("sgp", "random_permutation")])
@pytest.mark.sizes(3, 4)
def test_a_state_is_taken_up_whatever_was_being_sent(ranks, shared_tmp_path, case, overlap):
    """x, w and the topology's step included; the exchange under way is of other parameters than those loaded."""
    name, graph = case

    def body(comm):
        chosen = mixed.option(graph, comm.size, shared_tmp_path)
        comm.barrier()
        return _ends_alike(comm, name, topology=chosen, overlap=overlap)

    assert all(ranks(body, network=mixed.NODES))


@pytest.mark.sizes(4)
def test_a_gossip_taken_up_draws_the_permutations_that_it_would_have_drawn(ranks):
    assert all(ranks(lambda comm: _ends_alike(comm, "gossip_sync", seed=2)))


def _ends_alike(comm, name: str, **options) -> bool:
    """Whether steps 5 to 9 end on the same bits when they are taken again from the state of before them."""
    strategy = mixed.linear(comm, name, **options)
    (params,) = strategy.model.params
    params.copy_(mixed.drawn(comm.rank))
    strategy.state.load(FRESH)

    def steps(count: int) -> torch.Tensor:
        for _ in range(count):
            strategy.step(lambda: params.add_(0.125 * (comm.rank + 1)))
        return params.clone()

    saved_params, state = steps(5), deepcopy(strategy.state.save())
    first = steps(4)
    params.copy_(saved_params)
    strategy.state.load(state)
    second = steps(4)
    strategy.close()
    return torch.equal(first, second)


# --- seconds ----------------------------------------------------------------------------------------------------------
@each("case", [("dpsgd", 2 * mixed.LINEAR_BYTES), ("sgp", mixed.LINEAR_BYTES)])
@each("compute_s", [3.0, 1.0])
@each("overlap", [True, False])
def test_with_overlap_a_step_takes_the_longer_of_computing_and_exchanging(case, compute_s, overlap):
    """Messages of two seconds together, on 4 ranks; without overlap a step takes both."""
    name, n_bytes = case

    def body(comm):
        strategy, times = mixed.linear(comm, name, overlap=overlap), []
        for _ in range(6):
            times.append(comm.now())
            comm.compute()
            strategy.step(lambda: None)
        strategy.close()
        return times

    expected_s = max(compute_s, 2.0) if overlap else compute_s + 2.0
    for times in run_virtual(body, 4, network=Network(0.5, n_bytes / 1.5), compute=Constant(compute_s)):
        assert np.diff(times)[1:].tolist() == [pytest.approx(expected_s)] * 4


@each("case", [("adpsgd", 0), ("adpsgd", 1), ("strom", 2), ("gossip_pull", 2), ("gossip_push", 2)])
def test_nobody_waits_for_a_straggler(case):
    """Neither for an active rank of a pair nor for a passive one."""
    name, slow = case

    def body(comm):
        strategy = problem.make(comm, name, problem.model())
        took_s = problem.seconds(strategy, 20)
        comm.barrier()
        held = sum(count for _, count, _ in strategy.state.save().get("held", []))
        strategy.consensus()
        strategy.close()
        return took_s, held

    found = run_virtual(body, 4, network=Network(1e-5, 1e9), compute=Straggler(Constant(0.1), slow, 8.0))
    assert found[slow][0] > 16
    assert all(took_s < 2.1 for rank, (took_s, _) in enumerate(found) if rank != slow)
    held = sum(held for rank, (_, held) in enumerate(found) if rank != slow)
    assert (held > 0) == (name == "gossip_push"), "ranks that have ended receive what the slow one pushes"


@each("name", ["sgp", "adpsgd"])
def test_on_another_number_of_ranks_it_goes_on_from_the_mean_of_x(tmp_path, name):
    """With sgp that is another one than the mean of what the models hold."""

    def body(comm):
        options = {"topology": mixed.option("digraph", comm.size, tmp_path)} if name == "sgp" else {}
        strategy = mixed.linear(comm, name, **options)
        strategy.model.params[0].copy_(mixed.drawn(comm.rank))
        strategy.state.load(FRESH)
        strategy.step(lambda: None)
        comm.barrier()
        return strategy, strategy.model.params[0].clone(), saved(strategy), strategy.consensus()[0][0]

    found = run_virtual(body, 4, compute=Constant(0.1))
    strategy, states = found[0][0], [state for _, _, state, _ in found]
    state = resharded(strategy, states)
    mean = torch.cat([tensor.view(-1) for tensor in params(state).values()])
    assert torch.allclose(mean, found[0][3], rtol=0, atol=1e-15)
    assert name != "sgp" or (mean - sum(z for _, z, *_ in found) / 4).abs().max() > 1e-3
    assert state["strategy"] == {"steps": 1}


# --- parameters that travel in half precision -------------------------------------------------------------------------
NAMES = ["gossip_pull", "gossip_push", "gossip_sync", "sgp"]


def _moved(comm, name, compression) -> int:
    run = problem.train(comm, name, {"compression": compression}, epochs=1, dtype=torch.float32)
    moved = [record.bytes_sent + record.bytes_fetched for record in run.records]
    if name == "gossip_pull":  # a read that was overtaken is made, and counts, once more
        fetching = [n_bytes for n_bytes in moved if n_bytes]
        return len(fetching) * min(fetching)
    return sum(moved)


@each("name", NAMES)
@each("compression", ["fp16", "bf16"])
@pytest.mark.sizes(4)
def test_it_sends_half_and_learns(ranks, name, compression):
    if compression == "fp16":
        problem.learns(ranks, name, {"compression": compression}, epochs=1, below=0.95)

    def body(comm):
        return _moved(comm, name, compression), _moved(comm, name, "none")

    for half, whole in ranks(body):
        # Beside the 296 bytes of the parameters are versions and counts. A slot can't hold every sum of float16: there
        # gossip_push reads the messages that wait, on real ranks as many as the machine makes wait.
        reads = (name, compression) == ("gossip_push", "fp16")
        most = 0.6 if not reads else 1.0 if ranks.real else 0.7
        assert 0.5 * whole <= half < most * whole


@each("case", [("gossip_sync", None), ("sgp", "ring"), ("sgp", "digraph")])
@each("compression", ["fp16", "bf16"])
@pytest.mark.sizes(4)
def test_the_mean_is_conserved_although_all_is_rounded(ranks, shared_tmp_path, case, compression):
    name, graph = case

    def body(comm):
        chosen = {"topology": mixed.option(graph, comm.size, shared_tmp_path)} if graph else {}
        comm.barrier()
        strategy = mixed.linear(comm, name, compression=compression, **chosen)
        strategy.model.params[0].copy_(mixed.drawn(comm.rank))
        strategy.state.load(FRESH)
        before = mixed.drawn(comm.rank)
        for _ in range(20):
            mixed.step_without_samples(strategy)
        (mean,), _ = strategy.consensus()
        own = strategy.model.params[0].clone()
        strategy.close()
        return before, mean, own

    found = ranks(body)
    wanted = torch.stack([before for before, _, _ in found]).mean(dim=0)
    for _, mean, own in found:
        torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(own, wanted, rtol=0, atol=0.5)
