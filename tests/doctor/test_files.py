"""The run's file system: what is found out about a real folder, that nothing stays there, and what is said."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from readings import changed

from harness.cases import each
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Nodes, Requirements, find_nodes
from hpcdist.tools.doctor.checks import files

NODES = Nodes(("n1", "n2", "n3"), (0, 1, 2))


def examined(comm, folder: Path):
    nodes = find_nodes(comm, "host")
    measured = files.measure(comm, nodes, Requirements(folder=folder))
    comm.barrier()
    return measured, list(files.judge(measured, nodes, Requirements(folder=folder)))


# --- real folders -----------------------------------------------------------------------------------------------------
def test_a_folder_is_examined_and_left_as_it_was(ranks, shared_tmp_path):
    (shared_tmp_path / "mine").write_text("mine")
    for measured, found in ranks(lambda comm: examined(comm, shared_tmp_path / "runs" / "7")):
        assert measured["folder"] == str(shared_tmp_path), "the nearest one that is there"
        assert found[-1].text.startswith(f"{shared_tmp_path} ({shared_tmp_path}/runs/7 does not exist: a run makes it ")
        assert all(row["refused"] and row["freed"] for row in measured["locks"]["nodes"].values())
        assert measured["locks"]["held"] and measured["locks"]["nodes"]
        assert measured["write"]["bytes"] == measured["read"]["bytes"] > 0
        assert {f.status for f in found} <= {OK, WARNING} and ", locks work, write " in found[-1].text
    assert [path.name for path in shared_tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_can_not_be_written_is_refused(ranks):
    for _, (finding,) in ranks(lambda comm: examined(comm, Path("/proc/1"))):
        assert finding.status == ERROR
        assert finding.text.startswith("folder must be one that can be written; got /proc/1 on host")


def test_another_ones_lock_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FREED_S", 0.05)
    path = tmp_path / "lock"
    with open(path, "w") as file:
        assert files._lock(file)
        assert files._refused(path) == {"refused": True} and files._freed(path) == {"freed": False}
    assert files._freed(path) == {"freed": True}


# --- what is said -----------------------------------------------------------------------------------------------------
def fine() -> dict:
    row = {"seen_s": 0.01, "free_bytes": 5 * 10**11}
    locks = {"held": True, "nodes": {name: {"refused": True, "freed": True} for name in NODES.names[1:]}}
    sample = {"bytes": 10**7, "seconds": 0.1}
    seen = {name: dict(row) for name in NODES.names}
    return {"folder": "/w", "nodes": seen, "locks": locks, "write": sample, "read": sample}


def judge(measured: dict, **environ: str):
    return list(files.judge(measured, NODES, Requirements(environ=environ)))


BLIND = {"seen_s": None}
LATE = {"seen_s": 0.1, "free_bytes": 10**12, "arrived": False}
ALONE = "folder must be on a file system that all nodes share; got /w, where n2, n3 see no file of n1"
REFUSES = {"error": os.strerror(errno.ENOSYS), "nodes": {}}
UNLOCKED = "HDF5 must be able to lock files; got Function not implemented in /w. Set HDF5_USE_FILE_LOCKING=FALSE"


@each(
    "case",
    [
        ({"nodes.n2": BLIND, "nodes.n3": BLIND}, ERROR, (), ALONE),
        ({"nodes.n2": BLIND}, ERROR, ("n2",), "n2 does not see the file of n1 in /w within 4 s: is it mounted there?"),
        ({"nodes.n2": {"error": "Read-only"}}, ERROR, ("n2",), "n2 can't use /w: Read-only"),
        ({"nodes.n2": LATE}, ERROR, ("n2",), "n1 does not see the file of n2 in /w within 4 s"),
        ({"nodes.n3.free_bytes": 10**9}, WARNING, (), "/w has 1 GB"),
        ({"nodes.n3.free_bytes": 10**7}, ERROR, (), "/w has 10 MB"),
        ({"locks": REFUSES}, WARNING, (), UNLOCKED),
        ({"locks.nodes.n3.refused": False}, WARNING, (), "locks must work between nodes; got one on n3, of a file in"),
        ({"locks.nodes.n3.freed": False}, WARNING, ("n3",), "a released lock of a file in /w stays refused"),
        ({"locks.nodes.n3": {"error": "No locks"}}, WARNING, ("n3",), "n3 can't lock files in /w: No locks. Set HDF5_"),
        ({"write": {"error": "Disk quota exceeded"}}, ERROR, (), "/w must allow to write a file; got Disk quota"),
    ],
)
def test_what_is_wrong_with_a_file_system(case):
    change, status, nodes, text = case
    found, *rest = judge(changed(fine(), change))
    assert (found.status, found.nodes) == (status, nodes) and found.text.startswith(text)
    assert [f.status for f in rest] == [OK] * (status == WARNING)


def test_a_good_file_system_and_one_whose_locks_nobody_needs():
    (found,) = judge(fine())
    text = "/w: 500 GB free, seen by all nodes within 10 ms, locks work, write 100 MB/s, read 100 MB/s"
    assert (found.status, found.text) == (OK, text)
    (found,) = judge(fine() | {"locks": REFUSES}, HDF5_USE_FILE_LOCKING="FALSE")
    assert found.status == OK and "locks" not in found.text
