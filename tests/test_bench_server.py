"""The benchmark of parameter servers: both sides do the same, and every row is whole."""

from __future__ import annotations

import pytest
import torch

from hpcdist.comm.external.torch_distributed import default_group
from hpcdist.errors import ConfigError
from hpcdist.tools.bench import runner, server


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(server, "PHASE_S", 0.01)
    monkeypatch.setattr(server, "MOST_STEPS", 5)
    monkeypatch.setattr(server, "IDLE_STEPS", 2)
    monkeypatch.setattr(server, "IDLE_STEP_S", 0.01)
    monkeypatch.setattr(server, "LATE_S", 0.02)


@pytest.mark.mpi(min_size=2)
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
@pytest.mark.parametrize("servers", [1, 2])
def test_both_sides_apply_the_same(ranks, servers):
    def body(comm):
        if comm.size <= servers:
            return None
        with default_group(comm):
            place = server._Place(comm, servers, 1001)
            ends = []
            for side in server.SIDES:
                place.model.params[0].zero_()
                runner.meet_asleep(comm)
                place.side(side, len(place.workers)).run(3)
                runner.meet_asleep(comm)
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
