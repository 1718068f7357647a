"""Tensors that the other ranks of a node have mapped: what is attached is then read and written where it lies."""

from __future__ import annotations

import resource

import pytest
import torch

from hpcdist.comm.mpi import node_memory
from hpcdist.comm.single_rank import SingleRankCommunicator
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import CommunicationError

pytestmark = pytest.mark.sizes(1, 3)


def shared_by(comm, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if not comm.memory.can_attach:
        pytest.skip("the kernel lets no process read another's memory")
    tensor = comm.memory.zeros(count, dtype)
    assert bool(comm.memory.mapped(tensor)) == (comm.size > 1)
    return tensor


@pytest.mark.mpi(min_size=1)
def test_others_read_and_write_shared_zeros_in_place(ranks):
    def body(comm):
        tensor = shared_by(comm, 6)
        assert tensor.tolist() == [0.0] * 6
        tensor.fill_(comm.rank)
        part = tensor[1:5]
        attached, after = comm.memory.attach(part), (comm.rank + 1) % comm.size
        before = comm.trace.traffic.copy()
        seen = attached.read(after, 0, 4)
        assert seen.tolist() == [after] * 4
        out = torch.empty(2)
        attached.get(out, after, 2)
        assert out.tolist() == [after] * 2
        comm.barrier()
        attached.put(torch.full((2,), 10.0 + after), after, 1)
        comm.barrier()
        expected = [comm.rank, comm.rank, 10 + comm.rank, 10 + comm.rank, comm.rank, comm.rank]
        assert tensor.tolist() == expected
        if comm.size > 1:  # a view, which shows what has come since
            assert seen.tolist() == [after, 10 + after, 10 + after, after]
            spent = comm.trace.traffic - before
            assert (spent.bytes_fetched, spent.bytes_sent) == (4 * 4 + 2 * 4, 2 * 4)
        for call in (lambda: attached.read(0, 3, 2), lambda: attached.get(out, 0, 3), lambda: attached.put(out, 0, -1)):
            with pytest.raises(CommunicationError, match=r"must lie within rank 0's 4 elements; got \["):
                call()
        comm.barrier()
        attached.close()

    ranks(body)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(3)
def test_only_tensors_in_shared_zeros_are_shared_and_these_outlive_the_communicator(ranks):
    def body(comm):
        first, second = shared_by(comm, 5), shared_by(comm, 3, torch.bfloat16)
        assert bool(comm.memory.mapped(first[4:])) and bool(comm.memory.mapped(second))
        assert not comm.memory.mapped(torch.zeros(5)) and not comm.memory.mapped(torch.zeros(0))
        another = comm.split(0)
        assert not another.memory.mapped(first)  # whose ranks may be others
        tensor = shared_by(another, 1000, torch.float64)
        another.close()
        tensor += comm.rank
        return tensor.sum().item()

    assert ranks(body) == [1000.0 * rank for rank in range(ranks.size)]


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(3)
def test_where_one_rank_can_not_map_the_memory_of_others_all_have_their_own(ranks, monkeypatch):
    def body(comm):
        mapped = node_memory._map

        def fails(comm, rank, *others):
            if comm.rank == 1:
                raise CommunicationError("not here")
            return mapped(comm, rank, *others)

        if not comm.memory.can_attach:
            return
        monkeypatch.setattr(node_memory, "_map", fails)
        tensor = comm.memory.zeros(4, torch.float32)
        assert tensor.tolist() == [0.0] * 4 and not comm.memory.mapped(tensor)
        with pytest.raises(CommunicationError, match="not here"):
            node_memory.SharedTensor(comm, 4, torch.float32)

    ranks(body)


@pytest.mark.skipif(not hasattr(node_memory.os, "memfd_create"), reason="the system has no files without a name")
def test_more_memory_than_the_system_has_is_refused_with_its_length():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # as where there is no memory left
    try:
        with pytest.raises(
            CommunicationError, match="1048577 bytes of shared memory must be available; got File too large"
        ):
            node_memory._create_memfd((1 << 20) + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_mpi_shared_zeros_are_a_tensor_like_any_other():
    def body(comm):
        tensor = comm.memory.zeros(3, torch.int64)
        return tensor.tolist(), tensor.dtype, bool(comm.memory.mapped(tensor))

    expected = ([0, 0, 0], torch.int64, False)
    assert body(SingleRankCommunicator()) == expected
    assert run_virtual(body, 2) == [expected] * 2
