"""What the checks share: nodes and their names, gathering through rank 0, calls that may hang, lines of text."""

from __future__ import annotations

import os
import platform
import time

from hpcdist.tools.doctor.base import (
    Nodes,
    allocated,
    attempt,
    counted,
    find_nodes,
    gather,
    host_name,
    introduced,
    introduction,
    listed,
    overload,
)

SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def test_every_rank_gets_every_ranks_value(ranks):
    def body(comm):
        return [gather(comm, {"rank": comm.rank, "text": "ä" * 1000 * comm.rank}) for _ in range(3)]

    wanted = [{"rank": r, "text": "ä" * 1000 * r} for r in range(ranks.size)]
    assert ranks(body) == [[wanted] * 3] * ranks.size


def test_nodes_know_their_ranks():
    nodes = Nodes(("a", "b"), (0, 1, 0, 1))
    assert nodes.ranks(1) == [1, 3] and nodes.leaders == [0, 1] and nodes.name(3) == "b" and str(nodes) == "a, b"


def test_a_call_that_fails_or_hangs_is_an_error_in_its_result():
    start = time.monotonic()
    assert attempt(0.1, "a sleep", lambda: time.sleep(20)) == {"error": "a sleep did not end within 0.1 s."}
    assert time.monotonic() - start < 10
    assert attempt(5, "a sum", lambda: 1 + 1) == 2
    assert attempt(5, "a division", lambda: 1 / 0) == {"error": "division by zero"}


def test_numbers_and_names_in_a_line():
    rows = [([], ""), ([3], "3"), ([0, 1, 2, 3, 7], "0-3, 7"), ([5, 1, 2, 5], "1-2, 5"), ([4, 6], "4, 6")]
    assert all(counted(numbers) == text for numbers, text in rows)
    assert listed(["a", "b"]) == "a, b"
    assert listed([f"n{i}" for i in range(20)], max_names=3) == "n0, n1, 18 more"
    assert listed([f"n{i}" for i in range(3)], max_names=3) == "n0, n1, n2"


# --- names of nodes ---------------------------------------------------------------------------------------------------
def test_nodes_are_named_by_their_hosts(ranks):
    def body(comm):
        return str(find_nodes(comm, "twin" if comm.rank < 2 else f"n{comm.rank}").names)

    names = "('twin',)" if ranks.real or ranks.size == 1 else str(("twin#0", "twin#1", "n2", "n3")[: ranks.size])
    assert set(ranks(body)) == {names}


def test_nodes_have_slurms_names_where_slurm_tells_every_rank():
    step = {**SRUN, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "slurms-own"}
    assert host_name(step) == "slurms-own"
    own = platform.node()
    mpirun = {f"OMPI_COMM_WORLD_{what}": "1" for what in ("RANK", "SIZE", "LOCAL_RANK")}
    mpirun = {**step, **mpirun, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert host_name(mpirun) == own.partition(".")[0] and host_name({}) == own


def test_without_slurm_no_nodes_are_expected(monkeypatch, tmp_path):
    assert allocated({}) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert allocated({"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[1-4]"}) == [], "nobody answers"


def test_ranks_that_introduce_themselves_are_sorted_by_node():
    said = {0: '["a", "x", 1.0]', 1: '["b", "y", 2.5]', 2: '["a", "x", 1.0]', 3: '["a", "z", 1.0]'}
    assert introduced(said) == (Nodes(("a#0", "b", "a#2"), (0, 1, 0, 2)), [1.0, 2.5, 1.0, 1.0])
    assert introduced({0: introduction({})}) == (Nodes((platform.node(),), (0,)), [overload()])


def test_a_node_whose_load_is_above_its_processors_is_busy(monkeypatch):
    for load, expected in ((0.0, 1.0), (4.4, 1.0), (6.0, 1.5)):
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert overload() == expected
