"""Gradients of pipelines: the unsplit model's, by every schedule, with every number of ranks and micro-batches."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from harness.pipelines import assert_close, make_pipeline, merged, outcome, piped, same, samples, whole

COURSES = [
    ("gpipe", 1),
    ("gpipe", 2),
    ("one_f_one_b", 1),
    ("interleaved", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero_bubble", 1),
]
loss_of = nn.functional.mse_loss


def make(dtype=torch.float64):
    """Layers with and without parameters, of different widths."""
    widths = [5, 8, 8, 6, 7, 4]
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b, dtype=dtype), nn.Tanh())]
    return nn.Sequential(*layers, nn.LayerNorm(4, dtype=dtype), nn.Linear(4, 3, dtype=dtype))


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("schedule, chunks", COURSES)
def test_they_are_those_of_the_unsplit_model(ranks, schedule, chunks):
    """Batches of 7 samples: micro-batches that differ in length, and fewer of them than ranks, recomputed or not."""
    x, y = samples(7, 5, 3)

    def body(comm):
        return [
            piped(comm, make, loss_of, x, y, micro_batches=n, schedule=schedule, chunks=chunks, recompute=recompute)
            for n, recompute in ((1, False), (5, False), (5, True))
        ]

    expected = whole(make, loss_of, x, y)
    for outcomes in zip(*ranks(body), strict=True):
        assert_close(merged(outcomes), expected, 1e-12)


@pytest.mark.computes
@pytest.mark.sizes(2, 4)
def test_every_schedule_ends_on_the_same_bits_also_in_single_precision(ranks):
    """Micro-batches are added in the same order, so that it does not matter which schedule was chosen."""
    x, y = samples(7, 5, 3, torch.float32)

    def body(comm):
        found = []
        for schedule, chunks in COURSES:
            if chunks == 1:
                options = {"schedule": schedule, "micro_batches": 3}
                found.append(piped(comm, lambda: make(torch.float32), loss_of, x, y, **options))
        return found

    results = ranks(body)
    for first, *others in results:
        for other in others:
            assert other.loss == first.loss
            assert all(same(grad, other.grads[name]) for name, grad in first.grads.items())
    assert_close(merged([found[0] for found in results]), whole(lambda: make(torch.float32), loss_of, x, y), 1e-6)


@pytest.mark.computes
@pytest.mark.sizes(1, 3)
def test_they_add_up_until_they_are_set_to_zero_and_batches_may_differ_in_length(ranks):
    """Several batches make one update. The last one of an epoch is smaller, down to one sample; then all come again."""
    x, y = samples(8, 5, 3)
    lengths = [8, 3, 1, 8, 3]

    def body(comm):
        pipeline, found = make_pipeline(comm, make, loss_of, schedule="zero_bubble"), []
        for length in lengths:
            pipeline.zero_grad()
            found.append(outcome(pipeline.forward_backward(x[:length], y[:length]), pipeline))
        return [*found, outcome(pipeline.forward_backward(x[4:], y[4:]), pipeline)]

    *found, both = (merged(outcomes) for outcomes in zip(*ranks(body), strict=True))
    for length, once in zip(lengths, found, strict=True):
        assert_close(once, expected := whole(make, loss_of, x[:length], y[:length]), 1e-12)
    second = whole(make, loss_of, x[4:], y[4:])
    total = {name: grad + second.grads[name] for name, grad in expected.grads.items()}
    assert_close(both, second._replace(grads=total), 1e-12)


@pytest.mark.computes
@pytest.mark.sizes(1, 3)
def test_outputs_are_those_of_the_unsplit_model(ranks):
    """Where the last stage is; and outside of training nothing is kept."""
    x, _ = samples(7, 5, 3)

    def body(comm):
        pipeline = make_pipeline(comm, make, loss_of, micro_batches=3, schedule="interleaved", chunks=2).eval()
        with torch.no_grad():
            return pipeline(x), pipeline.is_last

    torch.manual_seed(5)
    expected = make().eval()(x)
    for rank, (output, is_last) in enumerate(ranks(body)):
        assert is_last == (rank == ranks.size - 1)
        if is_last:
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
            assert not output.requires_grad
        else:
            assert output is None


@pytest.mark.computes
@pytest.mark.sizes(2)
def test_messages_may_go_on_while_ranks_compute(ranks):
    """Where stages are on several nodes, and the library moves messages only while it is called."""
    x, y = samples(4, 5, 3)

    def body(comm):
        pipeline, entered = make_pipeline(comm, make, loss_of), []
        inner = pipeline.grid.inner
        compute = inner.compute

        @contextmanager
        def overlapping():
            entered.append("in")
            yield
            entered.append("out")

        inner.overlapping = overlapping
        inner.compute = lambda *share: entered.append("compute") or compute(*share)
        pipeline.forward_backward(x, y)
        return entered

    for entered in ranks(body):
        assert (entered[0], entered[-1]) == ("in", "out") and entered.count("compute") == 8
