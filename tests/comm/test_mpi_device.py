"""Device memory given to MPI as it is: who may ask for it, who is told why not, and what it changes."""

from __future__ import annotations

import pytest
import torch

import hpcdist as hd
from comm.jobs_here import run
from harness.launch import find_mpirun
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError, MismatchError
from train import tiny

REFUSED = "gpu_aware_mpi must be false where MPI can't read the memory of a GPU; got true, and on rank 0 "
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def test_mpi_tells_whether_it_reads_device_memory_and_an_obstacle_is_said_in_words():
    from hpcdist.comm.mpi.library import device_obstacle, explain, supports_cuda, version

    for supported in (True, False, None):
        assert explain(0, supported) == "torch finds no CUDA device"
    assert explain(4, False) == f"{version()} was built or started without CUDA support"
    assert explain(4, True) == explain(1, None) == ""
    if version().startswith(("Open MPI", "MPICH")):
        assert isinstance(supports_cuda(), bool)
    assert (device_obstacle() == "") == (torch.cuda.is_available() and supports_cuda() is not False)


@needs_none
def test_it_is_refused_on_all_ranks_without_a_gpu(ranks):
    def body(comm):
        why = "there is no MPI: the ranks are virtual" if comm.mpi is None else "torch finds no CUDA device"
        with pytest.raises(ConfigError, match=f"{REFUSED}{why}. Leave it out: messages then go through pinned host"):
            hd.init(comm=comm, gpu_aware_mpi=True)
        assert comm.mpi is None or not comm.staging.device_aware
        return True

    assert all(ranks(body))


@pytest.mark.mpi()
def test_what_is_split_from_a_communicator_does_as_it_does(ranks):
    def body(comm):
        found = []
        for wanted in (True, False):
            comm.staging.device_aware = True
            if not wanted:
                hd.init(comm=comm, gpu_aware_mpi=False)
            part = comm.split(0)
            found.append(part.staging.device_aware)
            assert part.staging.direct(torch.zeros(1)), "host memory is MPI's anyway"
            part.close()
        hd.init(comm=comm)  # says nothing of it, so nothing changes
        return found, comm.staging.device_aware

    assert all(result == ([True, False], False) for result in ranks(body))


@pytest.mark.gpu
@pytest.mark.mpi()
def test_sums_of_device_memory(ranks):
    from hpcdist.comm.mpi.library import device_obstacle

    if device_obstacle():
        pytest.skip(device_obstacle())

    def body(comm):
        hd.init(comm=comm, gpu_aware_mpi=True)
        part, device = comm.split(0), torch.device("cuda", hd.local_rank() % torch.cuda.device_count())
        sent, received = torch.full((1000,), float(comm.rank), device=device), torch.empty(1000, device=device)
        part.sendrecv(sent, (comm.rank + 1) % comm.size, received, (comm.rank - 1) % comm.size)
        total = sent.square()  # still to be computed when MPI is called
        part.allreduce(total)
        part.broadcast(sent, comm.size - 1)
        part.close()
        hd.init(comm=comm, gpu_aware_mpi=False)
        return [tensor.unique().tolist() for tensor in (received, total, sent)]

    size = ranks.size
    for rank, found in enumerate(ranks(body)):
        assert found == [[(rank - 1) % size], [sum(r * r for r in range(size))], [size - 1]]


# --- in a job ---------------------------------------------------------------------------------------------------------
@needs_none
def test_a_job_may_ask_for_it(tmp_path):
    with pytest.raises(ConfigError, match=REFUSED):
        run_virtual(lambda comm: tiny.trainer(comm, tmp_path, "gpu_aware_mpi=true"), 2)
    with pytest.raises(ConfigError, match="gpu_aware_mpi must be true or false; got 'yes'"):
        tiny.trainer(None, tmp_path, "gpu_aware_mpi=yes")


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
def test_ranks_that_join_with_different_wishes_are_told(tmp_path):
    text = """
        import os, sys
        import hpcdist as hd
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
        hd.init(**({"gpu_aware_mpi": False} if rank == 0 else {}))
        """
    job = run(tmp_path, text, 2)
    assert job.returncode != 0
    assert "versions and settings must be the same on every rank; rank 1 differs from rank 0: gpu_aware" in job.stderr


@pytest.mark.sizes(2, 3)
def test_ranks_must_agree(ranks):
    def body(comm):
        with pytest.raises(
            MismatchError, match="gpu_aware_mpi must be the same on every rank; rank 1 .*gpu_aware_mpi: true against f"
        ):
            hd.init(comm=comm, gpu_aware_mpi=comm.rank == 0)
        return True

    assert all(ranks(body))
