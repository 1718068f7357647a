"""Means that are compressed both ways: exact sums of what is sent and left, equal bits, bytes, checkpoints."""

from __future__ import annotations

import pytest
import torch

from compress.vectors import spans_of
from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.compress import CompressionConfig, Span
from hpcdist.compress.coding.reduction import TwoWayMean
from hpcdist.errors import ConfigError

pytestmark = pytest.mark.computes
SHAPES = [(7, 5), (3,), (4, 6), (1,)]


def spans():
    own = spans_of(*SHAPES)
    return [own], own[-1].stop


def run(comm, name, steps=5, dtype=torch.float64, **options):
    """Collective. Per step what this rank gave, what all got, and what is left at both ends."""
    own, size = spans()
    like = [torch.zeros(size, dtype=dtype)]
    mean = TwoWayMean(comm.split(0), CompressionConfig.from_mapping({"name": name, **options}, "x"), like, own)
    generator = torch.Generator().manual_seed(comm.rank)
    found = []
    for _ in range(steps):
        given = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        got = given.clone()
        mean([got])
        found.append((given, got, mean.residuals[0].clone(), mean.mean_residuals[0].clone(), mean.ranges[0]))
    return found


@each("name", ["ef_signsgd", "onebit", "topk", "bins", "none"])
@pytest.mark.sizes(1, 4)
def test_what_is_given_is_received_or_left_at_one_end(ranks, name):
    """Σ means received = mean over ranks of (Σ given − left) − owed, piece by piece."""
    found = ranks(lambda comm: run(comm, name))
    for steps in range(1, 6):
        received = sum(step[1] for step in found[0][:steps])
        expected = torch.zeros_like(received)
        for of_rank in found:
            expected += sum(step[0] for step in of_rank[:steps]) - of_rank[steps - 1][2]
        expected /= len(found)
        for of_rank in found:
            *_, owed, (start, stop) = of_rank[steps - 1]
            expected[start:stop] -= owed
        torch.testing.assert_close(received, expected, rtol=0, atol=1e-12)


@each("name", ["ef_signsgd", "topk"])
@pytest.mark.sizes(3)
def test_all_ranks_receive_the_same_bits(ranks, name):
    found = ranks(lambda comm: run(comm, name))
    assert all(torch.equal(step[1], other[1]) for of_rank in found for step, other in zip(of_rank, found[0]))
    exact = sum(of_rank[0][0] for of_rank in found) / len(found)
    assert (found[0][0][1] - exact).abs().max() > 1e-3


@pytest.mark.sizes(1, 40)
def test_more_ranks_than_elements(ranks):
    found = ranks(lambda comm: run(comm, "ef_signsgd", steps=2))
    assert all(torch.equal(of_rank[1][1], found[0][1][1]) for of_rank in found)


@pytest.mark.sizes(4)
def test_it_sends_a_bit_for_each_element_both_ways(ranks):
    def body(comm):
        size = 8 * 1000 * comm.size
        mean = TwoWayMean(comm, CompressionConfig(name="ef_signsgd"), [torch.zeros(size)], [[Span(0, size, (size,))]])
        before = comm.trace.traffic.bytes_sent
        mean([torch.randn(size)])
        return comm.trace.traffic.bytes_sent - before

    assert ranks(body) == [2 * 3 * (1000 + 4)] * 4


@each("option", [{"warmup_steps": 3}, {"warmup_steps": 3, "warmup_ranks": 1}])
def test_a_warm_up_is_refused(option):
    with pytest.raises(ConfigError, match="compression.warmup_steps and warmup_ranks must be omitted where means are"):
        run_virtual(lambda comm: run(comm, "ef_signsgd", **option), 2)


@pytest.mark.sizes(2)
def test_half_precision_is_fed_back_in_single(ranks):
    found = ranks(lambda comm: run(comm, "ef_signsgd", dtype=torch.bfloat16))
    assert found[0][0][1].dtype == torch.bfloat16 and found[0][0][2].dtype == torch.float32
