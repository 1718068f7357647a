"""D-PSGD: the recursion x ← Wx − ηg(x), an exchange that costs no time, differences that are compressed."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist import compress, topology
from hpcdist.comm.virtual import run_virtual
from strategies import mixed, problem

pytestmark = pytest.mark.computes

NAME = "dpsgd"
SYMMETRIC = [name for name in topology.available() if topology.load(name).symmetric and name != "random_groups"]


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


@each("name", SYMMETRIC)
@pytest.mark.sizes(4, 7)
def test_it_is_the_recursion(ranks, shared_tmp_path, name):
    """In one process: all gradients at the rows of x, x ← Wx, then each row's optimiser steps along its gradient."""

    def recursion(matrix):
        def step(x, updates, number):
            return torch.stack([update(row) for update, row in zip(updates, matrix(number) @ x, strict=True)])

        return step, lambda x: x.mean(dim=0)

    mixed.is_recursion(ranks, shared_tmp_path, NAME, name, ranks.size == 4, recursion)


# --- the exchange -----------------------------------------------------------------------------------------------------


@each("case", [("ring", 2), ("complete", 4), ("hierarchical", 2)])
def test_bytes_are_a_parameter_vector_per_neighbour(case):
    name, messages = case
    options = {"topology": name, "overlap": False}
    runs = run_virtual(lambda comm: problem.train(comm, NAME, options, tells=False), 5)
    n_bytes = runs[0].params[0].nbytes
    sent = {(record.bytes_sent, record.messages_sent) for run in runs for record in run.records}
    expected = {(messages * n_bytes, messages)}
    assert sent == (expected | {(0, 0)} if name == "hierarchical" else expected), "alone on its node every other step"


# --- compressed differences: all that a message lacks comes later -----------------------------------------------------
OPTIONS = {"threshold": {"density": 0.2}, "topk": {"ratio": 0.2}, "dgc": {"ratio": 0.2, "momentum": 0.0}}
every = each("compressor", ["fp16", "onebit", "powersgd", "qsgd", "threshold", "topk"])


def _options(compressor: str, **more) -> dict:
    rate = {} if compress.load(compressor).faithful else {"consensus_rate": 0.2}
    return {"compression": {"name": compressor, **OPTIONS.get(compressor, {}), **more}, **rate}


def _mix_compressed(comm, options: dict, steps: int):
    """Only averages; each rank's parameters at the start and at the end."""
    strategy = mixed.linear(comm, "dpsgd", **options)
    strategy.model.params[0].copy_(mixed.drawn(comm.rank))
    strategy.state.load({"steps": 0})  # neighbours are told
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


@pytest.mark.sizes(4)
def test_bytes_are_those_of_the_messages(ranks):
    def body(comm):
        run = problem.train(comm, "dpsgd", {"compression": "bf16"}, epochs=1, tells=False)
        return [record.bytes_sent for record in run.records]

    n = sum(p.numel() for p in problem.model().parameters())
    for sent in ranks(body):
        assert set(sent[1:]) == {2 * 2 * n}  # two neighbours, two bytes each
        assert sent[0] == 2 * 2 * 2 * n  # the first exchange, and the one under way
