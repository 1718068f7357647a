"""torch.distributed after `init`: libraries that ask it find the ranks."""

from __future__ import annotations

import os

import pytest

import hpcdist as hd
from comm.jobs_here import run
from harness.launch import find_mpirun
from hpcdist.comm.virtual import run_virtual
from hpcdist.session.world import _advice

KNOWN = """
import os
import psutil, torch, torch.distributed as dist
import hpcdist as hd

comm = hd.init(deadline_s=60)
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (comm.rank, 2, "gloo")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
assert [os.environ[name] for name in names] == [str(comm.rank), "2", str(comm.rank), "2"]
assert int(os.environ["MASTER_PORT"]) and os.environ["MASTER_ADDR"] == "127.0.0.1"
listening = [own.laddr.ip for own in psutil.Process().net_connections("inet") if own.status == "LISTEN"
             and own.laddr.port == int(os.environ["MASTER_PORT"])]
assert listening == ["127.0.0.1"] * (comm.rank == 0), "torch's store asks nobody for a secret"
group, found = dist.new_group([0, 1]), torch.ones(2)
dist.all_reduce(found, group=group)
assert hd.init() is comm and found.tolist() == [2, 2]
assert hd.device_mesh(1).size() == 1 and dist.get_world_size() == 1
"""
OWN = """
import os
import torch.distributed as dist
import hpcdist as hd

rank, folder = int(os.environ["OMPI_COMM_WORLD_RANK"]), os.environ["HOME"]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=1 - rank, world_size=2)
own = dist.group.WORLD
hd.init()
assert dist.group.WORLD is own and "RANK" not in os.environ
dist.destroy_process_group()
"""
APART = """
import os
import torch.distributed as dist
import hpcdist as hd
from hpcdist.comm.external import torch_distributed

torch_distributed.here = lambda: os.environ["OMPI_COMM_WORLD_RANK"]  # as on two hosts, of which none has an address
torch_distributed.addresses = lambda chosen="": []
comm = hd.init()
comm.barrier()
assert not dist.is_initialized() and "RANK" not in os.environ
"""


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
@pytest.mark.parametrize("script", [KNOWN, OWN], ids=["known", "own"])
def test_ranks_are_known_unless_the_script_says_otherwise_and_end_without_a_word(tmp_path, script):
    job = run(tmp_path, script, 2)
    assert job.returncode == 0 and not job.stderr, job.stderr


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
def test_ranks_that_reach_each_other_by_mpi_only_train_and_are_warned(tmp_path):
    job = run(tmp_path, APART, 2)
    assert job.returncode == 0, job.stderr
    assert "To torch.distributed, and libraries that ask it, each rank is alone: rank 0 must be reached" in job.stderr
    assert job.stderr.count("each rank is alone") == 1


def test_virtual_ranks_start_nothing():
    def body(comm):
        import torch.distributed as dist

        hd.init(comm=comm)
        return dist.is_initialized() or "MASTER_ADDR" in os.environ

    assert run_virtual(body, 2) == [False, False]


def test_an_error_of_webdataset_is_explained():
    """Its `single_node_only`, the default, which saw one rank before the ranks were made known."""
    error = ValueError("you need to add an explicit nodesplitter to your input pipeline for multi-node training")
    assert "nodesplitter=webdataset.split_by_node, with which each rank reads shards of its own" in _advice(error)
    assert _advice(ValueError("another one")) == ""
