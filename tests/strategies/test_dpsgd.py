"""D-PSGD: the recursion x ← Wx − ηg(x), its conserved mean, its contraction, and an exchange that costs no time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.cases import each
from hpcdist import topology
from hpcdist.comm.virtual import Constant, Network, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.tools.topology import spectral_gap
from strategies import mixed, problem

pytestmark = pytest.mark.computes

NAME = "dpsgd"
SYMMETRIC = [name for name in topology.available() if topology.load(name).symmetric and name != "random_groups"]
overlapping = each("overlap", [True, False])


def _mix(comm, steps, **options):
    """Averaging without learning: this rank's parameters at the start and after each step, and the consensus."""
    strategy = mixed.linear(comm, NAME, **options)
    (params,) = strategy.model.params
    params.copy_(mixed.drawn(comm.rank))
    values = [params.clone()]
    for _ in range(steps):
        strategy.step(lambda: None)
        values.append(params.clone())
    consensus = strategy.consensus()[0][0]
    assert torch.equal(params, values[-1]), "evaluating changed the parameters"
    strategy.close()
    return torch.stack(values), consensus


@overlapping
@each("name", SYMMETRIC)
@pytest.mark.sizes(2, 3, 4)
def test_it_is_the_recursion(ranks, shared_tmp_path, name, overlap):
    """In one process: all gradients at the rows of x, x ← Wx, then each row's optimiser steps along its gradient.

    With ranks that have no sample in the last step of an epoch.
    """

    def body(comm):
        chosen = mixed.option(name, comm.size, shared_tmp_path)
        comm.barrier()  # the file is whole
        options = {"topology": chosen, "overlap": overlap}
        run = problem.train(comm, NAME, options, samples=50)
        return run.params[0], run.consensus[0], mixed.made(comm, chosen) if comm.rank == 0 else None

    found = ranks(body, network=mixed.NODES)
    graph = found[0][2]

    def step(x, updates, number):
        return torch.stack([update(row) for update, row in zip(updates, mixed.matrix(graph, number) @ x, strict=True)])

    expected = mixed.simulate(len(found), step, samples=50)
    assert torch.allclose(torch.stack([params for params, *_ in found]), expected, rtol=0, atol=1e-12)
    for _, consensus, _ in found:
        assert torch.allclose(consensus, expected.mean(dim=0), rtol=0, atol=1e-12)


@pytest.mark.sizes(2, 3, 4)
def test_overlap_changes_no_bit(ranks):
    def body(comm):
        runs = [problem.train(comm, NAME, {"overlap": overlap}, samples=50) for overlap in (True, False)]
        return torch.equal(runs[0].params[0], runs[1].params[0])

    assert all(ranks(body, network=Network(1e-3, 1e6), compute=Constant(1e-3)))


@pytest.mark.sizes(2, 3, 4)
def test_from_a_common_start_the_first_mean_is_that_of_all_reduce(ranks):
    """Later the gradients are at different parameters, so even on the complete graph it is another algorithm."""

    def body(comm):
        options = {"topology": "complete"}
        few = {"optimizer": "sgd", "samples": 4 * comm.size, "epochs": 1}
        ours, theirs = problem.train(comm, NAME, options, **few), problem.train(comm, "allreduce", **few)
        later = problem.train(comm, NAME, options), problem.train(comm, "allreduce")
        return [(a.consensus[0] - b.consensus[0]).abs().max().item() for a, b in ((ours, theirs), later)]

    for first, later in ranks(body):
        assert first < 1e-14 and later > 1e-5


@overlapping
@each("name", SYMMETRIC)
@pytest.mark.sizes(2, 4, 7)
def test_the_mean_is_conserved_to_rounding_and_the_distance_from_it_shrinks(ranks, shared_tmp_path, name, overlap):
    def body(comm):
        chosen = mixed.option(name, comm.size, shared_tmp_path)
        comm.barrier()
        values, consensus = _mix(comm, 30, topology=chosen, overlap=overlap)
        return values, consensus, mixed.made(comm, chosen) if comm.rank == 0 else None

    found = ranks(body, network=mixed.NODES)
    values = torch.stack([values for values, *_ in found])
    mean = values.mean(dim=0)
    assert (mean - mean[0]).abs().max() < 1e-14
    assert all(torch.allclose(consensus, mean[0], rtol=0, atol=1e-14) for _, consensus, _ in found)
    graph, product = found[0][2], torch.eye(len(found), dtype=torch.float64)
    for step in range(30):
        product = mixed.matrix(graph, step) @ product
    shrinks = torch.linalg.matrix_norm(product - 1 / len(found), 2)
    distances = (values - mean).norm(dim=(0, 2))
    assert distances[30] <= distances[0] * shrinks * (1 + 1e-9) + 1e-13
    if graph.static:  # else that holds but for a constant
        assert shrinks == pytest.approx((1 - spectral_gap(graph)) ** 30, abs=1e-13)


@each("name", ["ring", "torus", "bipartite"])
def test_the_slowest_mode_shrinks_by_one_minus_the_gap(name):
    size, steps = 12, 20
    graph = topology.load(name)(size)
    values, vectors = np.linalg.eigh(graph.matrix())
    second = int(np.argsort(np.abs(values))[-2])

    def body(comm):
        strategy = mixed.linear(comm, NAME, topology=name)
        strategy.model.params[0].fill_(vectors[comm.rank, second])
        for _ in range(steps):
            strategy.step(lambda: None)
        strategy.close()
        return strategy.model.params[0][0].item()

    found = np.array(run_virtual(body, size))
    assert np.allclose(found, values[second] ** steps * vectors[:, second], rtol=0, atol=1e-13)
    assert np.linalg.norm(found) == pytest.approx((1 - spectral_gap(graph)) ** steps, rel=1e-9)


@each("name", ["exponential", "one_peer_exponential", "random_permutation", "digraph"])
def test_weights_that_are_not_symmetric_are_refused(name, tmp_path):
    message = f"topology of dpsgd must be symmetric and doubly stochastic; got {name}. Take ring, .* strategy sgp"
    with pytest.raises(ConfigError, match=message):
        run_virtual(lambda comm: mixed.linear(comm, NAME, topology=mixed.option(name, 4, tmp_path)), 4)


# --- the exchange -----------------------------------------------------------------------------------------------------
@each("compute_s", [3.0, 1.0])
@overlapping
def test_a_step_takes_the_longer_of_computing_and_exchanging(compute_s, overlap):
    """Two messages to the neighbours on the ring, of two seconds together."""
    mixed.takes(NAME, overlap, compute_s, 2.0, Network(0.5, 2 * mixed.LINEAR_BYTES / (2.0 - 0.5)))


@each("case", [("ring", 2), ("complete", 4), ("hierarchical", 2)])
def test_bytes_are_a_parameter_vector_per_neighbour(case):
    name, messages = case
    options = {"topology": name, "overlap": False}
    runs = run_virtual(lambda comm: problem.train(comm, NAME, options, tells=False), 5)
    n_bytes = runs[0].params[0].nbytes
    sent = {(record.bytes_sent, record.messages_sent) for run in runs for record in run.records}
    expected = {(messages * n_bytes, messages)}
    assert sent == (expected | {(0, 0)} if name == "hierarchical" else expected), "alone on its node every other step"


@each("name", ["ring", "hierarchical"])
@pytest.mark.sizes(2, 4)
def test_a_state_is_taken_up_whatever_was_being_sent(ranks, name):
    """The exchange under way is of other parameters than those loaded."""

    def body(comm):
        values, _ = _mix(comm, 9, topology=name)
        strategy = mixed.linear(comm, NAME, topology=name)
        for _ in range(3):
            strategy.step(lambda: None)
        strategy.model.params[0].copy_(values[5])
        strategy.load_state({"steps": 5})
        for _ in range(4):
            strategy.step(lambda: None)
        again = strategy.model.params[0].clone()
        strategy.close()
        return torch.equal(again, values[9])

    assert all(ranks(body, network=mixed.NODES))
