"""Windows internode nodes while their owner computes: over TCP, between hosts; and the choice of the way."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from comm.jobs_here import ROOT, TCP, write
from harness.launch import find_mpirun, launch
from hpcdist.comm import cache
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.tools.bench.window import measure as bench

needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")

# Rank 0 computes without a call of MPI, in torch and in Python, until the others have used its memory ROUNDS times, or
# for 40 s. Files, which hosts share, say how far they are.
ROUNDS = 10
BUSY_OWNER = """
import json, sys, time
from pathlib import Path
import torch
import hpcdist as hd
comm = hd.init(deadline_s=60, internode=sys.argv[2])
for way in sys.argv[2:]:
    place = comm.apart(way) if len(set(comm.memory.nodes)) == 1 or way != sys.argv[2] else comm.split(0)
    window, words = place.window(100_000), place.window(1, torch.int64)
    folder, late = Path(sys.argv[1], way), False
    folder.mkdir(exist_ok=True)
    place.barrier()
    if comm.rank == 0:
        matrix, until = torch.full((200, 200), 1e-3), time.perf_counter() + 40
        for done, compute in (("half-*", lambda: matrix @ matrix), ("whole-*", lambda: sum(range(1000)))):
            (folder / f"computes-{done[:4]}").touch()
            while len(list(folder.glob(done))) < comm.size - 1 and not late:
                for _ in range(100):
                    compute()
                late = time.perf_counter() > until
    else:
        values, out, mine = torch.full((30_000,), float(comm.rank)), torch.empty(30_000), comm.rank * 30_000
        for part in ("half", "whole"):
            while not (folder / f"computes-{part[:4]}").exists():
                time.sleep(0.01)
            for _ in range(ROUNDS // 2):
                window.put(values, 0, mine)
                window.get(out, 0, mine)
                assert torch.equal(out, values)
                window.accumulate(values, 0, mine)
                words.fetch_add(1, 0)
                words.compare_and_swap(-1, 0, 0)
            (folder / f"{part}-{comm.rank}").touch()
    place.barrier()
    received = [int(l.split()[1]) for l in open("/proc/net/dev") if "eth0" in l]
    print(json.dumps({"rank": comm.rank, "nodes": comm.memory.nodes, "way": place.memory.internode, "late": late,
                      "received": sum(received), "count": int(words.local[0]) if comm.rank == 0 else None}), flush=True)
"""


def busy_owner(folder: Path, *ways: str) -> list:
    (folder / "files").mkdir()
    return [write(folder, BUSY_OWNER.replace("ROUNDS", str(ROUNDS))), folder / "files", *ways]


def check(job, size, *ways):
    assert job.returncode == 0, job.stderr
    found = [json.loads(line) for line in job.stdout.splitlines() if line[:1] == "{"]
    assert sorted((told["way"], told["rank"]) for told in found) == [(way, r) for way in ways for r in range(size)]
    assert not any(told["late"] for told in found), "the others waited for the owner, which computed"
    assert {told["count"] for told in found if told["rank"] == 0} == {ROUNDS * (size - 1)}
    return found


@needs_mpirun
def test_a_busy_owner_over_tcp(tmp_path):
    """Ranks of one machine that count as being on nodes of their own, and talk by TCP."""
    env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), **TCP}
    check(launch(2, busy_owner(tmp_path, "tcp", "rma"), env=env), 2, "rma", "tcp")


@needs_mpirun
def test_a_busy_owner_on_another_host(tmp_path, make_hosts):
    env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    found = check(make_hosts(3).launch(busy_owner(tmp_path, "tcp:eth0", "rma"), env=env), 3, "rma", "tcp")
    assert all(told["nodes"] == [0, 1, 2] for told in found)
    assert sum(told["received"] for told in found) > ROUNDS * 2 * 240_000, "through the network"


# --- the choice -------------------------------------------------------------------------------------------------------
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_the_way_is_measured_once_and_kept(ranks, shared_tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_tmp_path))

    def chosen(comm, wanted):
        """The way before and after the first window, and that of a part; when the file was written."""
        apart = comm.apart(wanted)
        before = apart.memory.internode
        window, part = apart.window(3), apart.split(0)
        found = before, apart.memory.internode, part.memory.internode
        for made in (part, window, apart):
            made.close()
        (kept,) = (shared_tmp_path / "hpcdist").iterdir()
        return found, kept.stat().st_mtime_ns, kept

    def change(comm, kept, text):
        comm.barrier()
        if comm.rank == 0:
            kept.write_text(text)
        comm.barrier()

    def body(comm):
        first, second, told = [chosen(comm, wanted) for wanted in ("auto", "auto", "tcp")]
        way, kept = first[0][1], first[2]
        measured = json.loads(kept.read_text())
        assert set(measured["seconds"]) == {"tcp", "rma"} and measured["way"] == way in ("tcp", "rma")
        assert first == second and first[0] == ("auto", way, way), "measured the first time only"
        assert told[0] == ("tcp",) * 3
        other = "tcp" if way == "rma" else "rma"
        change(comm, kept, json.dumps({"way": other}))
        assert chosen(comm, "auto")[0][1] == other, "the file decides"
        change(comm, kept, '{"way": "carrier pigeon"}')
        message = r"does not say how windows are read across nodes \(unknown way 'carrier pigeon'\)"
        with pytest.warns(UserWarning, match=message) if comm.rank == 0 else nullcontext():
            chosen(comm, "auto")
        comm.barrier()
        assert json.loads(kept.read_text())["way"] in ("tcp", "rma")
        apart = comm.apart("pigeon")
        with pytest.raises(UnknownNameError, match="internode must be one of auto, rma, tcp; got 'pigeon'"):
            apart.memory.choose()
        apart.close()

    ranks(body)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_the_self_test_takes_well_under_two_seconds_and_agrees(ranks):
    from hpcdist.comm.mpi.transports import SPAN_S, measure

    def body(comm):
        apart = comm.apart("tcp")
        before = apart.trace.traffic.copy()
        seconds = measure(apart)
        spent = apart.trace.traffic - before
        apart.close()
        return seconds, spent.bytes_fetched

    results = ranks(body)
    assert all(seconds == results[0][0] and fetched == 0 for seconds, fetched in results)
    assert set(results[0][0]) == {"tcp", "rma"} and all(0 < s < 30 for s in results[0][0].values())
    assert 2 * len(results[0][0]) * SPAN_S < 1, "on a machine with a core for each rank"


# --- the cache --------------------------------------------------------------------------------------------------------
def test_a_measurement_is_kept_by_what_it_depends_on(tmp_path):
    path = cache.cache_file("thing", "Open MPI", 2, folder=tmp_path / "new")
    assert path == cache.cache_file("thing", "Open MPI", 2, folder=tmp_path / "new")
    assert path != cache.cache_file("thing", "Open MPI", 3, folder=tmp_path / "new")
    assert re.fullmatch(r"thing-[0-9a-f]{16}\.json", path.name)
    cache.keep(path, "1")
    cache.keep(path, "2")
    assert path.read_text() == "2" and list(path.parent.iterdir()) == [path]


def test_a_measurement_that_can_not_be_kept_warns(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="a measurement can't be kept in .*thing.json"):
        cache.keep(tmp_path / "file" / "thing.json", "1")


# --- the benchmark ----------------------------------------------------------------------------------------------------
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3)
@pytest.mark.time_limit(60)
def test_the_benchmark_has_a_row_for_each_call_and_for_the_owners_step(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def body(comm):
        return bench(comm, sizes=(4000, 400_000), rounds=3)

    results = ranks(body)
    assert results.count(results[0]) == len(results), "all ranks have the same rows"
    rows = {(row["name"], row["bytes"]): row for row in results[0]}
    assert len(rows) == len(results[0])
    (way,) = {name.split("/")[1] for name, _ in rows if name.startswith("internode/")}
    for where in ("node", f"internode/{way}"):
        for n_bytes in (4000, 400_000):
            for call, sent in (("copy", 0), ("get", 0), ("put", n_bytes), ("accumulate", n_bytes)):
                assert rows[f"{where}/{call}", n_bytes]["bytes_sent"] == sent
        assert rows[f"{where}/snapshot read", 400_000]["bytes_sent"] == 0
        assert rows[f"{where}/pull + push", 400_000]["bytes_sent"] == 400_000
        assert rows[f"{where}/fetch_add", 8]["bytes_sent"] == rows[f"{where}/compare_and_swap", 8]["bytes_sent"] == 8
        assert rows[f"internode/{way}/get, owner computes", n_bytes]["ratio_to_copy"] is None
    steps = [row for row in results[0] if row["name"].startswith("owner's step/window ")]
    assert [row["name"].split()[-1] for row in steps] == ["missing", "idle", "read", "read"]
    assert [row["bytes"] for row in steps] == [0, 400_000, 4000, 400_000] and steps[0]["slowdown_percent"] == 0
    for row in results[0]:
        assert row["ranks"] == len(results) and row["median_s"] > 0
        assert (row["slowdown_percent"] is None) == (row["spare_cores"] is None) == (row not in steps)
        assert row not in steps or -0.1 <= row["spare_cores"] <= os.cpu_count() + 0.5


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_the_benchmark_refuses_bad_settings(ranks):
    def body(comm):
        for options, message in (
            ({"sizes": (10,)}, "sizes must be positive multiples of 4 bytes .* got 10"),
            ({"rounds": 0}, "rounds must be at least 1; got 0"),
        ):
            with pytest.raises(ConfigError, match=message):
                bench(comm, **options)
        if comm.size == 1:
            with pytest.raises(ConfigError, match="ranks of this measurement must be at least 2; got 1"):
                bench(comm)

    ranks(body)
