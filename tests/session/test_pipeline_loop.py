"""A loop of one's own on a model in stages: it trains as one process does."""

from __future__ import annotations

import pytest
import torch
from staged import SAMPLES, batches, difference, make, mse, pipeline, sgd, values, whole
from torch import nn

import hpcdist as hd
from harness.cases import each
from strategies import problem

pytestmark = pytest.mark.computes
OPTIONS = problem.PERIODS
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-6}


def trained(comm, stages, *, strategy="allreduce", epochs=2, samples=SAMPLES, dtype=torch.float64, **options):
    """Collective. The README's loop; what this rank has at the end, and its losses."""
    of_pipeline = ("schedule", "chunks", "micro_batches", "routing", "seed")
    settings = {key: options.pop(key) for key in of_pipeline if key in options}
    model = pipeline(comm, stages, lambda: make(dtype), **settings)
    options = OPTIONS.get(strategy, {}) | problem.fitting(strategy, comm.size // stages) | options
    optimizer = problem.local(strategy, model.parameters(), lr=0.05, momentum=0.5)
    hd.DistributedOptimizer(optimizer, model, strategy=strategy, **options)
    losses = []
    for _ in range(epochs):
        for x, y in hd.shard(batches(model.grid.replicas, samples, dtype)):
            losses.append(model.step(x, y).item())
    hd.finish(model)
    return values(model), losses


def alone(*, epochs=2, samples=SAMPLES, dtype=torch.float64, clip_norm=None):
    model = make(dtype)
    optimizer, losses = sgd(model.parameters()), []
    for _ in range(epochs):
        for x, y in batches(1, samples, dtype):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            losses.append(loss.item())
    return values(model), losses


@each("stages", [1, 2, 4])
@each("dtype", DTYPES)
@pytest.mark.sizes(4)
def test_stages_and_replicas_train_as_one_process(ranks, stages, dtype):
    tolerance = DTYPES[dtype]
    found = ranks(lambda comm: trained(comm, stages, dtype=dtype, overlap="on"))
    expected, losses = alone(dtype=dtype)
    assert difference(whole([part for part, _ in found]), expected) <= tolerance
    mean = [sum(of_step) / 4 for of_step in zip(*(own for _, own in found))]
    assert mean == pytest.approx(losses, abs=tolerance)


@pytest.mark.sizes(4)
@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("zero_bubble", 1)])
def test_averaging_beside_the_last_micro_batch_changes_no_bit(ranks, schedule, chunks):
    options = {"schedule": schedule, "chunks": chunks, "micro_batches": 4, "bucket_bytes": 256}
    on, off = (ranks(lambda comm, o=overlap: trained(comm, 2, overlap=o, **options)) for overlap in ("on", "off"))
    for (own, losses), (expected, others) in zip(on, off, strict=True):
        assert losses == others and all(torch.equal(own[name], expected[name]) for name in expected)


@pytest.mark.mpi(min_size=4)
@pytest.mark.sizes(4)
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_gradients_leave_while_the_last_micro_batch_is_on_its_way_back(ranks, schedule):
    def body(comm):
        model = pipeline(comm, 2, schedule=schedule, micro_batches=4)
        optimizer = hd.DistributedOptimizer(sgd(model.parameters()), model, overlap="on", bucket_bytes=256)
        strategy, passes_ended = optimizer.strategy, []
        start = strategy._averaging.start

        def note(bucket):
            passes_ended.append(strategy._passes)
            start(bucket)

        strategy.model.gradients.on_bucket = note
        x, y = next(iter(hd.shard(batches(2))))
        model.step(x, y)
        hd.finish(model)
        return 0 in passes_ended

    assert all(ranks(body))
