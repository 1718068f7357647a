"""Windows between nodes: the choice of the way, its cache, and the benchmark. network/test_busy_owner.py has more."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext

import pytest

from benchmarks.window import measure as bench
from hpcdist.comm import cache
from hpcdist.errors import ConfigError, UnknownNameError


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
        assert apart.trace.traffic.bytes_fetched == 0, "what is measured is not counted"
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
        assert all(0 < seconds < 30 for seconds in measured["seconds"].values())
        assert first == second and first[0] == ("auto", way, way), "measured the first time only"
        assert told[0] == ("tcp",) * 3
        other = "tcp" if way == "rma" else "rma"
        change(comm, kept, json.dumps({"way": other}))
        assert chosen(comm, "auto")[0][1] == other, "the file decides"
        change(comm, kept, '{"way": "carrier pigeon"}')
        message = r"is not a measurement of windows across nodes \(unknown transport 'carrier pigeon'\)"
        with pytest.warns(UserWarning, match=message) if comm.rank == 0 else nullcontext():
            chosen(comm, "auto")
        comm.barrier()
        assert json.loads(kept.read_text())["way"] in ("tcp", "rma")
        apart = comm.apart("pigeon")
        with pytest.raises(UnknownNameError, match="internode must be one of auto, rma, tcp; got 'pigeon'"):
            apart.memory.choose()
        apart.close()

    ranks(body)


# --- the cache --------------------------------------------------------------------------------------------------------
def test_a_measurement_is_kept_by_what_it_depends_on(tmp_path):
    path = cache.cache_file("thing", "Open MPI", 2, folder=tmp_path / "new")
    assert path == cache.cache_file("thing", "Open MPI", 2, folder=tmp_path / "new")
    assert path != cache.cache_file("thing", "Open MPI", 3, folder=tmp_path / "new")
    assert re.fullmatch(r"thing-[0-9a-f]{16}\.json", path.name)
    cache.write_cached(path, "1")
    cache.write_cached(path, "2")
    assert path.read_text() == "2" and list(path.parent.iterdir()) == [path]


def test_a_measurement_that_can_not_be_kept_warns(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="a measurement can't be cached in .*thing.json"):
        cache.write_cached(tmp_path / "file" / "thing.json", "1")


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
    refused = [
        ({"sizes": (10,)}, "sizes must be positive multiples of 4 bytes .* got 10"),
        ({"rounds": 0}, "rounds must be at least 1; got 0"),
        ({}, "ranks of this measurement must be at least 2; got 1"),
    ]

    def body(comm):
        for options, message in refused[: 4 - comm.size]:
            with pytest.raises(ConfigError, match=message):
                bench(comm, **options)

    ranks(body)
