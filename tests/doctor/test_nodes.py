"""The names of the job's nodes: from Slurm, and from what ranks say."""

from __future__ import annotations

import platform

from hpcdist.tools.doctor import nodes
from hpcdist.tools.doctor.base import Nodes
from hpcdist.tools.doctor.nodes import find_nodes

SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def test_nodes_are_named_by_their_hosts(ranks):
    def body(comm):
        return str(find_nodes(comm, "twin" if comm.rank < 2 else f"n{comm.rank}").names)

    names = "('twin',)" if ranks.real or ranks.size == 1 else str(("twin#0", "twin#1", "n2", "n3")[: ranks.size])
    assert set(ranks(body)) == {names}


def test_nodes_have_slurms_names_where_slurm_tells_every_rank():
    step = {**SRUN, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "slurms-own"}
    assert nodes.host_name(step) == "slurms-own"
    own = platform.node()
    mpirun = {f"OMPI_COMM_WORLD_{what}": "1" for what in ("RANK", "SIZE", "LOCAL_RANK")}
    mpirun = {**step, **mpirun, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert nodes.host_name(mpirun) == own.partition(".")[0] and nodes.host_name({}) == own


def test_without_slurm_no_nodes_are_expected(monkeypatch, tmp_path):
    assert nodes.allocated({}) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nodes.allocated({"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[1-4]"}) == [], "nobody answers"


def test_ranks_that_introduce_themselves_are_sorted_by_node():
    said = {0: "a\nx", 1: "b\ny", 2: "a\nx", 3: "a\nz"}
    assert nodes.introduced_nodes(said) == Nodes(("a#0", "b", "a#2"), (0, 1, 0, 2))
    name, place = nodes.introduction({}).split("\n")
    assert name == platform.node() and place
