"""Real Horovod sums as our own ring does, to rounding, and does what else it is asked."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch

from hpcdist import collectives
from hpcdist.comm.external import horovod as hvd
from hpcdist.comm.external.horovod import Horovod
from hpcdist.errors import CommunicationError, ConfigError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("horovod"), pytest.mark.time_limit(600)]
FLOATS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3}


def addend(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    wide = torch.randn(count, generator=generator, dtype=torch.float64)
    return wide.to(dtype) if dtype.is_floating_point else (100 * wide).to(dtype)


def replaced(reduce, tensor: torch.Tensor) -> torch.Tensor:
    reduce.all_reduce(tensor)
    return tensor


@pytest.fixture
def sums(ranks):
    """Runs `body(comm, make)` on all ranks; what it makes is closed."""

    def run(body):
        def on_rank(comm):
            made = []

            def make(over=comm, **options):
                made.append(Horovod(over, **options))
                return made[-1]

            result = body(comm, make)
            for reduce in made:
                reduce.close()
            return result

        return ranks(on_rank)

    return run


@pytest.mark.sizes(4)
def test_it_sums_as_the_ring_does_and_averages(sums):
    def body(comm, make):
        reduce, found = make(), []
        for dtype in (*FLOATS, torch.int32, torch.int64):
            for count in (0, 7, 300_001):
                own, other = addend(comm.rank, count, dtype), addend(comm.rank, count, dtype)
                reduce.all_reduce(own)
                collectives.load("ring")(comm)(other)
                torch.testing.assert_close(own, other, rtol=0, atol=FLOATS.get(dtype, 0) * 4 * comm.size)
                found.append(hashlib.sha256(own.numpy().tobytes()).hexdigest())
        mean = replaced(make(op="average"), torch.full((5,), float(comm.rank)))
        torch.testing.assert_close(mean, torch.full((5,), (comm.size - 1) / 2))
        return found

    found = sums(body)
    assert found.count(found[0]) == len(found), "bitwise the same on all ranks"


@pytest.mark.sizes(3)
def test_many_sums_are_under_way_at_the_same_time(sums):
    def body(comm, make):
        reduce = make()
        for _ in range(3):  # the same names again
            tensors = [torch.full((n,), float(comm.rank + n)) for n in range(1, 40)]
            works = [reduce.all_reduce(tensor, f"tensor {n}", async_op=True) for n, tensor in enumerate(tensors)]
            for work in reversed(works):
                work.wait()
            for n, tensor in enumerate(tensors, 1):
                assert tensor.eq(comm.size * n + comm.size * (comm.size - 1) / 2).all()
        return True

    assert all(sums(body))


@pytest.mark.sizes(4)
def test_in_half_precision_half_the_bytes_travel_and_sums_are_rounded(sums):
    def body(comm, make):
        tensor, exact = addend(comm.rank, 1000, torch.float32), addend(comm.rank, 1000, torch.float32)
        reduce, before = make(compression="fp16"), comm.trace.traffic.bytes_sent
        reduce.all_reduce(tensor)
        sent = comm.trace.traffic.bytes_sent - before
        collectives.load("ring")(comm)(exact)
        torch.testing.assert_close(tensor, exact, rtol=0, atol=0.01)
        assert tensor.dtype == torch.float32 and torch.equal(tensor, tensor.half().float())
        whole = torch.full((3,), 70_000 + comm.rank)
        reduce.all_reduce(whole)  # integers travel as they are
        assert whole[0] == sum(70_000 + rank for rank in range(comm.size))
        return sent

    found = sums(body)
    assert found == [2 * (len(found) - 1) * 2000 // len(found)] * len(found)


def pairwise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Adasum of two tensors: equation 3 of the paper."""
    dot = torch.dot(a, b)
    return (1 - dot / (2 * torch.dot(a, a))) * a + (1 - dot / (2 * torch.dot(b, b))) * b


@pytest.mark.sizes(4)
def test_adasum_is_that_of_its_authors(sums):
    found = sums(lambda comm, make: replaced(make(op="adasum"), addend(comm.rank, 500, torch.float64)))
    level = [addend(rank, 500, torch.float64) for rank in range(len(found))]
    while len(level) > 1:
        level = [pairwise(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    for result in found:
        torch.testing.assert_close(result, level[0], rtol=0, atol=1e-12)


@pytest.mark.sizes(3)
def test_adasum_needs_a_power_of_two(ranks):
    def body(comm):
        with pytest.raises(ConfigError, match=r"Adasum must run on 1, 2, 4, 8... ranks; got 3. Use op"):
            Horovod(comm, op="adasum")
        return True

    assert all(ranks(body))


@pytest.mark.sizes(2)
def test_what_it_can_not_sum_is_refused(sums):
    def body(comm, make):
        reduce = make()
        for dtype in (torch.uint8, torch.int8, torch.bfloat16, torch.complex64):
            with pytest.raises(ConfigError, match=f"dtype must be one of float16, .* summed by Horovod; got {dtype}"):
                reduce.all_reduce(torch.zeros(3, dtype=dtype))
        with pytest.raises(CommunicationError, match="tensor must be flat .* and contiguous"):
            reduce.all_reduce(torch.zeros(4, 2)[:, 0])
        return True

    assert all(sums(body))


# --- one Horovod in a process -----------------------------------------------------------------------------------------
@pytest.mark.sizes(3)
def test_it_starts_again_after_its_end(sums):
    for fusion_bytes in (1 << 20, None, 0):
        found = sums(lambda comm, make: replaced(make(fusion_bytes=fusion_bytes), torch.ones(2)).tolist())
        assert found == [[len(found)] * 2] * len(found)


@pytest.mark.sizes(2)
def test_two_objects_share_it_and_the_settings_must_be_the_same(sums):
    def body(comm, make):
        first, second = make(fusion_bytes=1 << 20), make(fusion_bytes=1 << 20, op="average")
        with pytest.raises(ConfigError, match="Horovod's settings must be the same for all objects in this process"):
            make(fusion_bytes=1 << 10)
        assert os.environ.get("HOROVOD_FUSION_THRESHOLD") is None, "its variables are ours only while it starts"
        return replaced(first, torch.ones(2)).tolist(), replaced(second, torch.ones(2)).tolist()

    found = sums(body)
    assert found == [([len(found)] * 2, [1, 1])] * len(found)


@pytest.mark.sizes(3, 4)
def test_groups_of_ranks_sum_on_their_own(sums):
    """The halves are a process set each; and all ranks go on summing together."""

    def body(comm, make):
        everyone, half = make(), comm.split(comm.rank % 2)
        own = make(half)
        results = [replaced(reduce, torch.full((3,), comm.rank + 1.0))[0].item() for reduce in (own, everyone, own)]
        with pytest.raises(ConfigError, match="Adasum must run on all ranks that Horovod runs on, .* of them"):
            make(half, op="adasum") if half.size != 3 else None
        own.close()
        half.close()
        return results

    found = sums(body)
    everyone = sum(range(1, len(found) + 1))
    for rank, results in enumerate(found):
        group = sum(r + 1 for r in range(rank % 2, len(found), 2))
        assert results == [group, everyone, group]


@pytest.mark.sizes(4)
def test_disjoint_groups_need_not_know_of_each_other(sums):
    def body(comm, make):
        own = comm.split(0 if comm.rank == 0 else 1)
        reduce = make(own)
        with pytest.raises(ConfigError, match="Horovod must run on all ranks that sum by it; it runs on .* Start with"):
            make()
        result = replaced(reduce, torch.full((3,), comm.rank + 1.0))[0].item()
        reduce.close()
        own.close()
        return result

    found = sums(body)
    assert found == [1.0] + [sum(range(2, len(found) + 1))] * (len(found) - 1)


@pytest.mark.sizes(3)
def test_bytes_are_counted_as_those_of_a_ring(sums):
    def body(comm, make):
        reduce, before = make(), comm.trace.traffic.copy()
        reduce.all_reduce(torch.ones(1200))
        spent = comm.trace.traffic - before
        assert spent.communicating_s > 0
        return spent.bytes_sent, spent.messages_sent

    found = sums(body)
    size = len(found)
    assert found == [(2 * (size - 1) * 4800 // size, 2 * (size - 1))] * size


@pytest.mark.sizes(2)
def test_it_knows_what_it_was_built_with(ranks):
    assert all({"MPI", "Gloo"} <= set(parts) for parts in ranks(lambda comm: hvd.built_with()))


@pytest.mark.sizes(2)
def test_without_threads_it_is_refused(ranks):
    def body(comm):
        comm.platform.concurrent = False
        with pytest.raises(CommunicationError, match="MPI must be started with MPI_THREAD_MULTIPLE for Horovod"):
            Horovod(comm)
        return True

    assert all(ranks(body))
