"""The benchmark of pipelines: every side computes the same, and every row is whole."""

from __future__ import annotations

import pytest
import torch

from hpcdist.tools.bench import pipeline
from hpcdist.tools.bench.runner import peak_bytes

pytestmark = pytest.mark.computes


@pytest.mark.mpi(min_size=2)
@pytest.mark.time_limit(120)
def test_it_has_a_row_for_each_schedule_beside_torchs_and_one_rank(ranks, monkeypatch):
    """On as many stages as there are ranks for."""
    monkeypatch.setattr(pipeline, "WARM_UP", 1)
    monkeypatch.setattr(pipeline, "MEMORY_ROUNDS", 1)
    stages = max(number for number in pipeline.STAGES if number <= ranks.size)
    sizes = {"blocks": 8, "width": 8, "batch": 16, "micro_batches": 4}
    results = ranks(lambda comm: pipeline.measure(comm, [stages], rounds=1, **sizes))
    assert results.count(results[0]) == len(results), "all ranks have the same rows"
    rows, size = {row["name"]: row for row in results[0]}, len(results)
    assert list(rows) == ["alone", *(f"{stages}/{variant.name}" for variant in pipeline.VARIANTS)]
    alone = rows["alone"]
    assert (alone["stages"], alone["bubble"], alone["times_alone"], alone["speedup"]) == (1, 0, 1, None)
    for name, row in rows.items():
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-5), "all compute the same"
        assert row["ranks"] == size and row["micro_batches"] == 4
        assert row["samples_per_s"] == pytest.approx(16 / row["median_s"])
        assert row["ideal_s"] == pytest.approx(alone["median_s"] / row["stages"])
        assert row["peak_bytes"] is None or row["peak_bytes"] >= 0
        if name != "alone" and "torch" not in name:
            peer = rows[name.removesuffix(" recompute").replace("/", "/torch ")]
            assert row["speedup"] == pytest.approx(peer["median_s"] / row["median_s"])
    for name, parts in (("gpipe", 4), ("interleaved", 8)):
        limit = (stages - 1) / (parts + stages - 1)
        assert rows[f"{stages}/{name}"]["bubble_limit"] == pytest.approx(limit)


def test_memory_is_that_of_the_call_alone():
    """Also where others have freed as much before; None where the system does not tell."""
    size = 32 << 20
    torch.ones(size // 4)
    peak = peak_bytes(lambda: torch.ones(size // 4).sum())
    assert peak is None or (size <= peak + (1 << 20) and peak < 2 * size)
    nothing = peak_bytes(lambda: None)
    assert nothing is None or nothing < size // 4
