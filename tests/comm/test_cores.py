"""Each rank of a node has cores of its own where nobody has bound it, and is left as it is everywhere else."""

from __future__ import annotations

import json
import os

import pytest
import torch

from comm.jobs_here import run
from harness.cases import each
from harness.launch import find_mpirun
from hpcdist.comm.mpi import world

WHOLE = set(range(os.cpu_count() or 1))
ONE_BOUND = """
    import os
    import torch
    import hpcdist as hd
    from hpcdist.comm.mpi.world import _set_up_node

    mask = os.sched_getaffinity(0)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    torch.set_num_threads(len(mask))  # as many as torch counts by itself
    comm = hd.init(torch_distributed=False, bind=rank == 0)

    def settled(mask):
        os.sched_setaffinity(0, mask)
        _set_up_node(comm.memory.node_mpi(), True)
        return comm.gather([sorted(os.sched_getaffinity(0)), torch.get_num_threads()])

    found = [comm.gather([sorted(os.sched_getaffinity(0)), torch.get_num_threads()])]
    found.append(settled({0} if rank else mask))
    torch.cuda.device_count = lambda: rank
    found.append(settled(mask))
    torch.cuda.device_count = lambda: 0
    found.append(settled(mask))
    if rank == 0:
        print(found)  # each rank's processors, and torch's threads, after each attempt to bind them
"""


@pytest.mark.skipif(
    find_mpirun() is None or not 2 <= len(WHOLE) <= 8 or os.sched_getaffinity(0) != WHOLE,
    reason="needs mpirun, and a whole machine of 2 to 8 processors",
)
def test_only_ranks_that_nobody_has_bound_and_that_see_no_gpu_get_equal_shares_of_the_cores(tmp_path):
    done, threads = run(tmp_path, ONE_BOUND, 2), len(WHOLE)
    assert done.returncode == 0, done.stderr
    found = [[(set(own), threads) for own, threads in ranks] for ranks in json.loads(done.stdout)]
    unwanted, one_bound, with_gpu, ((first, own), (second, others)) = found
    assert unwanted == with_gpu == [(WHOLE, threads)] * 2
    assert one_bound == [(WHOLE, threads), ({0}, threads)]
    assert first and second and len(first) == len(second) and not first & second
    assert own == others == len(world.whole_cores(first)) < threads


@pytest.fixture
def machine(monkeypatch):
    """Two sockets of two cores of two processors, which Linux numbers by turns; a process that may use all of them."""
    layout = [[0, 4], [2, 6], [1, 5], [3, 7]]
    monkeypatch.setattr(world, "whole_cores", lambda mask: layout)
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: set(range(8)))
    monkeypatch.setattr(os, "sysconf", lambda name: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)


def test_shares_are_whole_cores_side_by_side(machine):
    assert [world.find_share(rank, 2)[0] for rank in range(2)] == [{0, 4, 2, 6}, {1, 5, 3, 7}]
    assert [world.find_share(rank, 3)[0] for rank in range(3)] == [{0, 4}, {2, 6}, {1, 5}]
    assert world.find_share(0, 1) == world.find_share(4, 5) == (set(), 0), "one rank; more than cores"


def test_threads_that_torch_has_by_default_are_those_of_the_share(machine, monkeypatch):
    for threads, found in ((8, 2), (4, 2), (1, 1), (2, 2), (3, 3)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert world.find_share(0, 2) == ({0, 4, 2, 6}, found)
    for threads in (5, 6, 16):  # somebody has set so many
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert world.find_share(0, 2) == (set(), 0)


@each(
    "change",
    [
        (os, "sched_getaffinity", lambda who: set(range(7))),
        (torch.cuda, "device_count", lambda: 1),
        (torch.xpu, "is_available", lambda: True),
    ],
)
def test_a_part_of_a_machine_and_a_gpu_are_left_alone(machine, monkeypatch, change):
    with monkeypatch.context() as changed:
        changed.setattr(*change)
        assert world.find_share(0, 2) == (set(), 0)


def test_processors_of_a_core_stay_together_and_cores_of_a_socket_side_by_side(tmp_path):
    for processor in range(8):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{processor % 4},{processor % 4 + 4}\n")
        (folder / "physical_package_id").write_text(f"{processor % 2}\n")
    assert world.whole_cores(range(8), tmp_path) == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert world.whole_cores(range(3), tmp_path / "none") == [[0], [1], [2]], "where Linux does not say"
