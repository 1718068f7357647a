"""The benchmarks of training steps and of compressors: every side is measured, and rows are whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from hpcdist import compress, strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.tools.bench import compress as coding
from hpcdist.tools.bench import train as training

pytestmark = pytest.mark.computes
MODEL = training.MODELS["mlp_100k"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(training, "MODELS", {"small": (8, 16, 4)})
    monkeypatch.setattr(training, "WARM_UP", 2)


@pytest.mark.mpi
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("bench", ["train", "gossip", "compress"])
def test_it_has_a_row_for_each_side(ranks, bench):
    gossip = list(training.gossip_ways(ranks.size))
    ways = {"train": training.ALLREDUCE_WAYS, "gossip": gossip, "compress": training.COMPRESSED_WAYS}[bench]
    ours = bench == "train"
    measure = training.measure if ours else partial(training.compare, ways=ways)
    results = ranks(lambda comm: measure(comm, models=["small"], rounds=2, steps=2))
    assert results.count(results[0]) == len(results), "all ranks have the same rows"
    rows = {row["name"]: row for row in results[0]}
    sides = ways if ours else [training.ALONE, training.COPY, training.ALLREDUCE, *ways]
    with_horovod = [f"small/{training.HOROVOD.name}"] * (ours and "small/allreduce_horovod" in rows)
    assert list(rows) == [*(f"small/{side.name}" for side in sides), *with_horovod]
    for row in rows.values():
        assert row["ranks"] == len(results) and row["bytes"] == 4 * (9 * 16 + 17 * 4) and row["median_s"] > 0
    assert rows["small/alone"]["bytes_sent"] == 0
    if len(results) > 1:
        assert rows["small/allreduce"]["bytes_sent"] > 0
    if not ours:
        assert rows["small/alone"]["overhead_s"] == 0
        assert rows["small/allreduce"]["speedup"] == 1
        assert rows["small/copy"]["overhead_copies"] is None
        each = rows["small/allreduce"]
        assert each["overhead_copies"] == pytest.approx(each["overhead_s"] / rows["small/copy"]["median_s"])


def test_values_stay_finite_with_every_strategy(monkeypatch):
    trained, make = [], training.perceptron
    monkeypatch.setattr(training, "MODELS", {"mlp_100k": MODEL})
    monkeypatch.setattr(training, "perceptron", lambda widths: (trained.append(make(widths)), trained[-1])[1])
    ways = [*training.gossip_ways(2), *training.COMPRESSED_WAYS]
    rows = run_virtual(lambda comm: training.time_steps(comm, "mlp_100k", ways, rounds=1, steps=training.PERIOD), 2)[0]
    assert len(rows) == len(ways) and len(trained) == 2 * len(ways)
    assert all(bool(own.isfinite().all()) for net in trained for own in net.parameters())


def test_what_is_slow_takes_fewer_steps_in_fewer_rounds_and_whole_periods(monkeypatch):
    monkeypatch.setattr(training, "SPAN_S", 1e-9)  # every step takes longer
    periodic = training.Way("local_sgd", "local_sgd", {"period": 4})
    taken = {}

    def of_way(comm, name, *given):
        side = make(comm, name, *given)

        def run(steps):
            taken.setdefault((name, comm.rank), []).append(steps)
            return side.run(steps)

        return replace(side, run=run)

    make = training._side
    monkeypatch.setattr(training, "_side", of_way)
    run_virtual(lambda comm: training.time_steps(comm, "small", [training.ALONE, periodic], rounds=5, steps=4), 2)
    assert taken["small/alone", 0] == [1, 1, 1] + [1] * training.FEW
    assert taken["small/local_sgd", 0] == [1, 1, 1] + [4] * training.FEW


def test_every_decentralised_strategy_and_compressor_is_measured():
    served = {name for name in strategies.available() if "servers" in strategies.load(name).Config.model_fields}
    measured = {way.strategy for way in training.gossip_ways(1)}
    assert measured == set(strategies.available()) - served - {training.ALLREDUCE.strategy}
    assert {config["name"] for config in coding.CONFIGS.values()} == set(compress.available()) - {"none"}


def test_coding_has_a_row_for_each_compressor_beside_a_copy():
    rows = coding.measure_coding(elements=10_007, rounds=2)
    assert [row["name"] for row in rows] == ["copy", *coding.CONFIGS]
    for row in rows:
        assert row["bytes"] == 40_028 and row["bytes_per_s"] > 0
        assert row["ratio"] == row["bytes"] / row["message_bytes"]
    assert {row["name"]: row for row in rows}["bf16"]["ratio"] == 2
