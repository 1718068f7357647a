"""D-PSGD: the recursion x ← Wx − ηg(x), an exchange that costs no time, differences that are compressed."""

from __future__ import annotations

import pytest
import torch

from harness import loops
from harness.cases import each
from harness.worlds import HeldRank
from hpcdist import compress, topology
from hpcdist.comm.virtual import Network, run_virtual
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
@pytest.mark.sizes(4, 7)
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
@pytest.mark.sizes(4)
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


# --- compressed differences: all that a message lacks comes later -----------------------------------------------------
OPTIONS = {"threshold": {"density": 0.2}, "topk": {"ratio": 0.2}, "dgc": {"ratio": 0.2, "momentum": 0.0}}
every = each("compressor", [name for name in compress.available() if name != "none" and compress.load(name).feeds_back])


def _options(compressor: str, **more) -> dict:
    rate = {} if compress.load(compressor).faithful else {"consensus_rate": 0.2}
    return {"compression": {"name": compressor, **OPTIONS.get(compressor, {}), **more}, **rate}


def _mix_compressed(comm, options: dict, steps: int):
    """Only averages; each rank's parameters at the start and at the end."""
    strategy = mixed.linear(comm, "dpsgd", **options)
    strategy.model.params[0].copy_(mixed.drawn(comm.rank))
    strategy.load_state({"steps": 0})  # neighbours are told
    start = strategy.model.params[0].clone()
    for _ in range(steps):
        mixed.step_without_samples(strategy)
    end = strategy.model.params[0].clone()
    strategy.close()
    return start, end


@every
@pytest.mark.sizes(4)
def test_the_mean_stays_and_the_ranks_come_together(ranks, compressor):
    found = ranks(lambda comm: _mix_compressed(comm, _options(compressor), 60))
    start, end = (torch.stack(rows) for rows in zip(*found, strict=True))
    torch.testing.assert_close(end.mean(dim=0), start.mean(dim=0), rtol=0, atol=1e-12)
    assert (end - end.mean(dim=0)).norm() < 0.3 * (start - start.mean(dim=0)).norm()


@pytest.mark.sizes(4)
def test_messages_that_say_all_make_it_the_uncompressed_strategy(ranks):
    def body(comm):
        whole = {"compression": {"name": "fp16", "warmup_steps": 1000}}
        return [problem.train(comm, "dpsgd", options).params[0] for options in (whole, {})]

    for compressed, plain in ranks(body):
        torch.testing.assert_close(compressed, plain, rtol=0, atol=1e-12)


@each("compressor", ["qsgd", "topk"])
@pytest.mark.sizes(4)
def test_it_learns(ranks, compressor):
    problem.learns(ranks, "dpsgd", _options(compressor), epochs=4)


@pytest.mark.sizes(4)
def test_bytes_are_those_of_the_messages(ranks):
    def body(comm):
        run = problem.train(comm, "dpsgd", {"compression": "bf16"}, epochs=1, tells=False)
        return [record.bytes_sent for record in run.records]

    n = sum(p.numel() for p in problem.model().parameters())
    for sent in ranks(body):
        assert set(sent[1:]) == {2 * 2 * n}  # two neighbours, two bytes each
        assert sent[0] == 2 * 2 * 2 * n  # the first exchange, and the one under way


@each("overlap", [True, False])
@each("compressor", ["topk", "qsgd", "powersgd"])
@pytest.mark.sizes(3)
def test_a_saved_state_goes_on_to_the_same_bits(ranks, compressor, overlap):
    def body(comm):
        options = _options(compressor) | {"overlap": overlap}

        def make():
            module = problem.model()
            local = torch.optim.SGD(module.parameters(), lr=0.05)
            return problem.make(comm, "dpsgd", module, **options), local

        def go(strategy, local, steps):
            module = strategy.model.module

            def backward(step):
                problem.loss(module, range(step, step + 8 + comm.rank)).backward()

            loops.by_strategy(strategy, local, steps, backward, pauses=False)
            return strategy.model.params[0].clone()

        strategy, local = make()
        go(strategy, local, range(5))
        params, state = HeldRank([[flat.clone() for flat in strategy.model.params], strategy.state()]).at()
        expected = go(strategy, local, range(5, 9))
        strategy.close()
        again, local = make()
        again.model.load_params(params)
        again.load_state(state)
        found = go(again, local, range(5, 9))
        again.close()
        return torch.equal(found, expected)

    assert all(ranks(body))
