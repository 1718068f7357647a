"""Optimisers that evaluate their closure several times per step: L-BFGS equals itself on the joint batch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import hpcdist as hd
from harness import loops
from harness.cases import each
from hpcdist import checkpoint, strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError, NonFiniteError
from strategies import problem
from train import tiny

pytestmark = pytest.mark.computes

searches = pytest.mark.parametrize("search", [None, "strong_wolfe"])
STEPS = 4  # rounding differences grow with each


def _lbfgs(module, search):
    rate = 0.3 if search is None else 1.0
    return torch.optim.LBFGS(module.parameters(), lr=rate, max_iter=5, history_size=6, line_search_fn=search)


def _closure(optimizer, module, indices, seen=None):
    def closure():
        optimizer.zero_grad()
        loss = problem.loss(module, indices)
        loss.backward()
        if seen is not None:
            seen.append(loss.item())
        return loss

    return closure


def _train(comm, search, sizes, **options):
    """STEPS steps on the same batches, rank r with sizes[r] samples; parameters, losses, evaluations of each rank."""
    hd.init(comm=comm)
    module = problem.model()
    optimizer = hd.DistributedOptimizer(_lbfgs(module, search), module, **options)
    start = sum(sizes[: comm.rank])
    indices, losses, seen = range(start, start + sizes[comm.rank]), [], []
    for _ in range(STEPS):
        optimizer.strategy.model.gradients.start_batch(sizes[comm.rank] * len(sizes) / sum(sizes))
        if len(indices):
            losses.append(optimizer.step(_closure(optimizer, module, indices, seen)).item())
        else:
            optimizer.step(_closure(optimizer, module, range(4)))  # counts 0
    (evaluations,) = {state["func_evals"] for state in optimizer.state.values()}
    record = optimizer.record
    optimizer.strategy.close()
    return loops.vector(module), losses, evaluations, len(seen), record


def _plain(search, samples):
    module = problem.model()
    optimizer = _lbfgs(module, search)
    losses = [optimizer.step(_closure(optimizer, module, range(samples))).item() for _ in range(STEPS)]
    (evaluations,) = {state["func_evals"] for state in optimizer.state.values()}
    return loops.vector(module), losses, evaluations


@searches
@each("uneven", [False, True])
@pytest.mark.sizes(1, 3)
def test_it_equals_the_plain_one_on_the_joint_batch(ranks, search, uneven):
    """Also where batches differ in size, and where the last rank has none."""
    sizes = [24 + 8 * rank for rank in range(ranks.size - 1)] + [0] if uneven and ranks.size > 1 else [24] * ranks.size
    found = ranks(lambda comm: _train(comm, search, sizes))
    expected, expected_losses, expected_evaluations = _plain(search, sum(sizes))
    assert expected_losses[-1] < 0.5 * expected_losses[0] and expected_evaluations > 3 * STEPS
    for size, (params, losses, evaluations, seen, record) in zip(sizes, found, strict=True):
        assert torch.equal(params, found[0][0]), "replicas drifted apart"
        torch.testing.assert_close(params, expected, rtol=0, atol=1e-12)
        assert evaluations == expected_evaluations and seen == (evaluations if size else 0)
        assert losses == (pytest.approx(expected_losses, rel=1e-12) if size else [])
        assert (record.step, record.clock, record.staleness) == (STEPS, STEPS, (0,) if size else ())
        assert record.event is None and (record.bytes_sent > 0) == (ranks.size > 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
@searches
def test_overlap_changes_no_bit(ranks, search):
    def body(comm):
        ways, samples = ("off", "on", "auto"), [24] * comm.size
        return [_train(comm, search, samples, overlap=way, algorithm="ring")[0] for way in ways]

    assert all(torch.equal(apart, beside) and torch.equal(apart, auto) for apart, beside, auto in ranks(body))


@pytest.mark.sizes(2)
def test_a_nan_in_a_line_search_stops_all_ranks(ranks):
    def body(comm):
        hd.init(comm=comm)
        module = problem.model()
        optimizer = hd.DistributedOptimizer(_lbfgs(module, "strong_wolfe"), module)
        evaluations = []

        def closure():
            poisons = comm.rank == 1 and len(evaluations) == 1
            with problem.poisoned(module[0].weight) if poisons else nullcontext():
                return _closure(optimizer, module, range(24), evaluations)()

        with pytest.raises(NonFiniteError, match=r"gradients must be finite; got NaN .* step 1, rank 1: 0.weight"):
            optimizer.step(closure)
        return len(evaluations)

    assert ranks(body) == [2, 2]


@pytest.mark.virtual
@pytest.mark.sizes(2)
def test_what_does_not_suit_it_is_refused(ranks):
    refused = {
        f"strategy must be allreduce with LBFGS, whose .*; got {name}": {"strategy": name}
        for name in strategies.available()
        if name != "allreduce"
    } | {
        "clip_norm must be None with LBFGS, .*; got 1.0. Remove it": {"clip_norm": 1.0},
        "strategy.on_nonfinite must be stop or ignore with LBFGS, .*; got skip": {"on_nonfinite": "skip"},
        "strategy.compression must be none with LBFGS, .*; got fp16. Leave it": {"compression": "fp16"},
    }

    def body(comm):
        hd.init(comm=comm)
        module = problem.model()
        for message, options in refused.items():
            with pytest.raises(ConfigError, match=message):
                hd.DistributedOptimizer(_lbfgs(module, None), module, **options)
        optimizer = hd.DistributedOptimizer(_lbfgs(module, None), module)
        with pytest.raises(ConfigError, match="closure must be passed to each step of LBFGS, which .*; got none. Pass"):
            optimizer.step()
        optimizer.strategy.close()
        return True

    assert all(ranks(body))


def test_a_strategy_of_ones_own_may_support_closures(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("from hpcdist.strategies.allreduce import AllReduce\n\n\nclass Own(AllReduce):\n    pass\n")
    own, native = (
        run_virtual(lambda comm, name=name: _train(comm, None, [24, 24], strategy=name)[0], 2)
        for name in (f"{path}:Own", "allreduce")
    )
    assert torch.equal(own[0], native[0]) and torch.equal(own[1], native[1])


# --- in a job ---------------------------------------------------------------------------------------------------------
JOB = ("optimizer=LBFGS", "optimizer.max_iter=3", "optimizer.line_search_fn=strong_wolfe", "schedule=none")
JOB += ("clip_norm=none", "strategy.algorithm=ring")


def _run(comm, folder, *overrides, resume=None):
    summary, (params, *_) = tiny.run(comm, folder, *JOB, *overrides, resume=resume)
    return summary, params


@pytest.mark.sizes(2)
def test_a_job_learns_with_it_and_resumes_to_the_bit(ranks, shared_tmp_path):
    whole, halves = shared_tmp_path / "whole", shared_tmp_path / "halves"
    settings = (f"batch_size={96 // ranks.size}", "checkpoint.every_steps=3")  # of 4 steps in an epoch

    def body(comm):
        expected = _run(comm, whole, "epochs=3", *settings)
        _run(comm, halves, "epochs=1", *settings)
        path = checkpoint.latest(halves / "run" / "checkpoints")
        return expected, _run(comm, halves, "epochs=3", *settings, resume=path)

    found = ranks(body)
    for (summary, params), (resumed, its) in found:
        assert torch.equal(params, found[0][0][1]) and torch.equal(params, its)
        assert summary.sha256 == resumed.sha256 and summary.metrics["accuracy"] > 0.6


@each("setting", ["strategy=gossip_pull", "clip_norm=1.0", "amp=fp16"])
def test_a_job_says_what_does_not_suit_it(tmp_path, setting):
    overrides = (*(s for s in JOB if not s.startswith("strategy")), setting)
    with pytest.raises(ConfigError, match="must be (allreduce|None|stop or ignore) with LBFGS"):
        run_virtual(lambda comm: tiny.trainer(comm, tmp_path, *overrides), 2)
