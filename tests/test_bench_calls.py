"""The benchmarks of messages (all-reduce, collective calls, torch.distributed's, servers): each side has whole rows."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import typer

from benchmarks import collectives, runner, server, torch_calls
from benchmarks.allreduce import measure_beside as measure
from comm.jobs_here import LIMIT_S, ROOT
from harness.cases import each
from harness.launch import find_mpirun, launch
from hpcdist.comm.single_rank import SingleRankCommunicator
from hpcdist.comm.virtual import Network
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.tools import cli
from hpcdist.torch_backend.default_group import default_group

NETWORK = Network(1e-3, 1e9)  # slow, so that few calls fill the time for measuring


# --- all-reduce -------------------------------------------------------------------------------------------------------
@pytest.mark.virtual
@pytest.mark.sizes(2)
@pytest.mark.parametrize("n_bytes, bandwidth_bytes_s, rounds", [(4, 1e9, 24), (4_000_000, 1e7, 3)])
def test_short_tensors_get_more_rounds(ranks, n_bytes, bandwidth_bytes_s, rounds):
    def body(comm):
        done = []
        others = {"other": lambda tensor: done.append(comm.barrier())}
        measure(comm, [n_bytes], ["native"], rounds=3, others=others)
        return len(done)

    # A barrier takes one latency of a microsecond: 20 calls a round, after two single ones.
    assert ranks(body, network=Network(1e-6, bandwidth_bytes_s))[0] == 2 + 20 * rounds


@pytest.mark.sizes(2, 3)
def test_rows_of_the_benchmark(ranks):
    def body(comm):
        others = {"other": lambda tensor: comm.allreduce(tensor)}
        return measure(comm, [4096, 65536], ["native", "ring", "direct"], rounds=3, others=others)

    results = ranks(body, network=NETWORK)
    assert ranks(lambda comm: measure(comm, [], ["ring"], rounds=1)) == [[]] * ranks.size, "nothing to measure"
    assert all(rows == results[0] for rows in results)
    rows = {(row["name"], row["bytes"]): row for row in results[0]}
    assert [key for key in rows] == [
        (name, n_bytes) for n_bytes in (4096, 65536) for name in ("native", "ring", "direct", "other", "copy")
    ]
    for (name, n_bytes), row in rows.items():
        assert set(row) == {"name", "bytes", "ranks", "median_s", "bytes_sent", "copies"}
        assert row["ranks"] == ranks.size
        if name == "other":
            assert row["bytes_sent"] is None
        elif name == "copy":
            assert row["bytes_sent"] == 0 and row["copies"] in (None, 1.0)
        elif ranks.size == 2:
            shares = {"native": 2, "ring": 2, "direct": 1}[name]
            assert row["bytes_sent"] == shares * n_bytes * (ranks.size - 1) // ranks.size
        if ranks.real:
            assert row["median_s"] > 0 and row["copies"] == row["median_s"] / rows["copy", n_bytes]["median_s"]


@pytest.mark.sizes(2)
@pytest.mark.virtual
def test_the_benchmark_measures_auto(ranks, tmp_path):
    rows = ranks(lambda comm: measure(comm, [64], ["auto"], 1, cache_dir=tmp_path), network=NETWORK)[0]
    assert [row["name"] for row in rows] == ["auto", "copy"]


# --- collective calls -------------------------------------------------------------------------------------------------
def environment(folder: Path, program: str) -> Path:
    """An environment whose mpiexec is a shell script."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "mpiexec").write_text(f"#!/bin/sh\n{program}\n")
    (folder / "bin" / "mpiexec").chmod(0o755)
    (folder / "bin" / "python").symlink_to(sys.executable)
    return folder


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
@pytest.mark.time_limit(120)
def test_every_side_has_a_row_for_each_call_and_size(ranks, shared_tmp_path):
    def body(comm):
        seconds = {call: {"4096": 1e-9, "65536": 1e-9} for call in collectives.CALLS}
        if comm.rank == 0:
            environment(shared_tmp_path / "its", f"echo '{str(seconds).replace(chr(39), chr(34))}'")
        return collectives.measure(
            comm, sizes=(4096, 65536), rounds=2, other=shared_tmp_path / "its", environment=os.environ
        )

    results = ranks(body)
    assert results.count(results[0]) == len(results), "all ranks have the same rows"
    found = {(row["call"], row["bytes"], row["name"]) for row in results[0]}
    names = (collectives.OURS, "mpi", "gloo", collectives.COPY, "its")
    assert found == {(call, size, name) for call in collectives.CALLS for size in (4096, 65536) for name in names}
    for row in results[0]:
        assert row["median_s"] > 0 and row["ranks"] == len(results) and row["copies"] > 0
        assert row["speedup"] == pytest.approx(1e-9 / row["median_s"]), "beside the fastest of the others"


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
@each("program", ["exit 3", "echo no", "none"])
def test_an_environment_that_does_not_work_is_refused_on_all_ranks(ranks, program, shared_tmp_path):
    def body(comm):
        place = shared_tmp_path / program / "its"
        if comm.rank == 0 and program != "none":
            environment(place, program)
        with pytest.raises(ConfigError, match=r"--with must be an environment whose bin has mpiexec.*; got .*its \("):
            collectives.measure(comm, ["broadcast"], sizes=(4096,), rounds=1, other=place, environment=os.environ)
        return True

    assert all(ranks(body))


# --- calls of torch.distributed ---------------------------------------------------------------------------------------
@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
@pytest.mark.extended
def test_every_side_has_a_row_for_each_of_torchs_calls(tmp_path):
    path = tmp_path / "rows.json"
    words = ["-m", "hpcdist", "bench", "torch", "--sizes", "4096", "--rounds", "1", "--json", str(path)]
    job = launch(2, words, env={"PYTHONPATH": str(ROOT)}, timeout_s=LIMIT_S, preloaded=("torch._dynamo",))
    assert job.returncode == 0, job.stderr
    rows = json.loads(path.read_text())
    expected = {(call, name) for call in torch_calls.CALLS for name in ("hpcdist", "gloo", "communicator")}
    expected -= {("send", "communicator")}
    expected |= {(step, name) for step in ("ddp", "fsdp2") for name in ("hpcdist", "gloo", "alone")}
    assert {(row["call"], row["name"]) for row in rows} == expected and len(rows) == len(expected)
    for row in rows:
        assert row["median_s"] > 0 and row["ranks"] == 2 and row["speedup"] > 0
        assert (row["over_below"] is None) == (row["call"] == "send")
        assert row["bytes"] == (24_096_040 if row["call"] in ("ddp", "fsdp2") else 4096)


@each(
    "case",
    [
        ("collectives --call gossip", UnknownNameError, "--call must be one of .*; got 'gossip'"),
        ("collectives --sizes 6", ConfigError, "sizes must be positive multiples of 4 bytes"),
        ("collectives --sizes 4", ConfigError, "ranks of this measurement must be at least 2; got 1"),
        ("torch --call gossip", UnknownNameError, "--call must be one of .*; got 'gossip'"),
        ("torch --sizes 4", ConfigError, "ranks of this measurement must be at least 2; got 1"),
    ],
)
def test_what_can_not_be_measured_is_refused(case):
    words, error, message = case
    with pytest.raises(error, match=message):
        typer.main.get_command(cli.app).main(["bench", *words.split()], standalone_mode=False)
    for n_bytes in (0, 2, 6, -4):
        with pytest.raises(ConfigError, match=f"sizes must be positive multiples of 4 bytes .*; got {n_bytes}"):
            measure(SingleRankCommunicator(), [n_bytes], ["ring"], rounds=1)


# --- servers ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def _short(monkeypatch):
    monkeypatch.setattr(server, "PHASE_S", 0.01)
    monkeypatch.setattr(server, "MOST_STEPS", 5)
    monkeypatch.setattr(server, "IDLE_STEPS", 2)
    monkeypatch.setattr(server, "IDLE_STEP_S", 0.01)
    monkeypatch.setattr(server, "LATE_S", 0.02)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(3, 4)
@pytest.mark.usefixtures("_short")
@pytest.mark.time_limit(120)
def test_it_has_a_row_for_each_side_and_number_of_workers(ranks):
    sizes = (10, 1000)
    results = ranks(lambda comm: server.measure(comm, sizes, rounds=2))
    assert results.count(results[0]) == len(results), "all ranks have the same rows"
    rows = {(row["name"], row["servers"], row["workers"], row["bytes"]): row for row in results[0]}
    assert len(rows) == len(results[0])
    size = len(results)
    most = max(n for n in (1, 2, 4) if n < size)
    places = [(s, w) for s in (1, 2) for w in (1, 2, 4) if s + w <= size]
    updates = {(side, s, w, 4 * n) for side in ("ours", "gloo") for s, w in places for n in sizes}
    extra = {(f"{side} {what}", 1, most, 40) for side in ("ours", "gloo") for what in ("idle", "waiting")}
    assert set(rows) == updates | extra
    for (name, servers, workers, n_bytes), row in rows.items():
        assert row["ranks"] == size and row["median_s"] > 0 and row["cpu_percent"] > 0
        assert row["updates_per_s"] == pytest.approx(1 / row["median_s"])
        assert row["per_worker"] == pytest.approx(row["updates_per_s"] / workers)
        assert row["bytes_per_s"] == pytest.approx(2 * n_bytes * row["updates_per_s"])
        if name == "ours":  # beside gradient and parameters a few words
            assert 2 * n_bytes < row["bytes_sent"] <= 2 * n_bytes + 100 * servers
            gloo_s = rows["gloo", servers, workers, n_bytes]["median_s"]
            assert row["speedup"] == pytest.approx(gloo_s / row["median_s"])
        else:
            assert row["bytes_sent"] is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(3, 4)
@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("servers", [1, 2])
def test_both_sides_apply_the_same(ranks, servers):
    def body(comm):
        if comm.size <= servers:
            return None
        with default_group(comm, "gloo"):
            place = server._Place(comm, servers, 1001)
            ends = []
            for side in server.SIDES:
                place.model.params[0].zero_()
                runner.barrier_asleep(comm)
                place.side(side, len(place.workers)).run(3)
                runner.barrier_asleep(comm)
                ends.append(place.model.params[0].clone())
            place.close()
        return ends, place.shards

    for rank, found in enumerate(ranks(body)):
        if found is not None:
            (ours, gloo), shards = found
            if rank < servers:  # workers may have been replied to in another order
                (ours,), (gloo,) = shards[rank].of([ours]), shards[rank].of([gloo])
                updates = 3 * (ranks.size - servers)
                torch.testing.assert_close(ours, torch.full_like(ours, -1e-6 * updates))
                assert torch.equal(ours, gloo)
            assert ours.max() < 0 and gloo.max() < 0


@pytest.mark.mpi
def test_it_refuses_bad_settings(ranks):
    def body(comm):
        for sizes, rounds, message in (
            ((1,), 1, "sizes must be at least 2 parameters; got 1"),
            ((10,), 0, "rounds must be at least 1; got 0"),
        ):
            with pytest.raises(ConfigError, match=message):
                server.measure(comm, sizes, rounds=rounds)
        if comm.size == 1:
            with pytest.raises(ConfigError, match="ranks of this measurement must be at least 2; got 1"):
                server.measure(comm)
        else:
            with pytest.raises(ConfigError, match="sizes must fit into the memory that is free; got 10{15} parameters"):
                server.measure(comm, (10, 10**15))

    ranks(body)
