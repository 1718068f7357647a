"""The benchmarks of training steps, checkpoints, compressors, pipelines and the loader: each side has whole rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import hpcdist as hd
from benchmarks import checkpoint, loader, pipeline
from benchmarks import compress as coding
from benchmarks import train as training
from benchmarks.runner import peak_bytes
from hpcdist import compress, strategies
from hpcdist.comm.single_rank import SingleRankCommunicator
from hpcdist.comm.virtual import run_virtual
from hpcdist.data import EpochPlan
from hpcdist.errors import UnknownNameError

pytestmark = pytest.mark.computes
MODEL = training.MODELS["mlp_100k"]
MORE = ("gossip", "compress")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(training, "MODELS", {"small": (8, 16, 4)})
    monkeypatch.setattr(training, "WARM_UP", 2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("bench", ["train", *(pytest.param(name, marks=pytest.mark.extended) for name in MORE)])
def test_it_has_a_row_for_each_side(ranks, bench):
    gossip = list(training.gossip_ways(ranks.size))
    ways = {"train": training.ALLREDUCE_WAYS, "gossip": gossip, "compress": training.COMPRESSED_WAYS}[bench]
    ours = bench == "train"
    measure = training.measure if ours else partial(training.compare, ways=ways)
    results = ranks(lambda comm: measure(comm, models=["small"], rounds=2, steps=2))
    assert results.count(results[0]) == len(results), "all ranks have the same rows"
    rows = {row["name"]: row for row in results[0]}
    sides = ways if ours else [training.ALONE, training.ALONE_ADAM, training.COPY, training.ALLREDUCE, *ways]
    with_horovod = [f"small/{training.HOROVOD.name}"] * (ours and "small/allreduce_horovod" in rows)
    assert list(rows) == [*(f"small/{side.name}" for side in sides), *with_horovod]
    for row in rows.values():
        assert row["ranks"] == len(results) and row["bytes"] == 4 * (9 * 16 + 17 * 4) and row["median_s"] > 0
    assert rows["small/alone"]["bytes_sent"] == 0
    assert rows["small/allreduce"]["bytes_sent"] > 0
    if not ours:
        assert rows["small/alone"]["overhead_s"] == 0
        assert rows["small/allreduce"]["speedup"] == 1
        assert rows["small/copy"]["overhead_copies"] is None
        each = rows["small/allreduce"]
        assert each["overhead_copies"] == pytest.approx(each["overhead_s"] / rows["small/copy"]["median_s"])


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


# --- pipelines --------------------------------------------------------------------------------------------------------
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
@pytest.mark.extended
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


# --- the loader -------------------------------------------------------------------------------------------------------
SMALL = {"plain": loader.Kind(40, (1, 4, 4)), "scaled": loader.Kind(40, (1, 4, 4), 1 / 255)}


@pytest.mark.virtual
@pytest.mark.sizes(2)
def test_rows_of_the_loader(ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(loader, "KINDS", SMALL)

    def body(comm):
        return loader.measure(hd.init(comm=comm), ["plain", "scaled"], batch_size=8, rounds=3, folder=tmp_path)

    results = ranks(body)
    assert results.count(results[0]) == len(results), "all ranks have the same rows"
    rows = results[0]
    readers = ("memory_map", "batch", "loader", "dataloader", "shard")
    assert [row["name"] for row in rows] == [f"loader/{kind}/{reader}" for kind in SMALL for reader in readers]
    for row in rows:
        assert row.keys() == {"name", "bytes", "ranks", "median_s", "bytes_sent", "ratio"}
        assert (row["bytes"], row["ranks"], row["bytes_sent"]) == (8 * 16, len(results), 0) and row["median_s"] > 0
    assert [row["ratio"] for row in (rows[0], rows[5])] == [1, 1] and all(row["ratio"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.virtual
@pytest.mark.sizes(3)
@pytest.mark.parametrize("kind", SMALL)
def test_all_readers_give_the_same_batches(ranks, tmp_path, kind):
    def body(comm):
        hd.init(comm=comm)
        plan = EpochPlan(40, comm.size, 8)
        (tmp_path / str(comm.rank)).mkdir()
        readers = loader._readers(SMALL[kind], plan, comm.rank, tmp_path / str(comm.rank))
        expected = list(readers.pop(loader.REFERENCE)(3))
        for read in readers.values():
            for (x, y), (expected_x, expected_y) in zip(read(3), expected, strict=True):
                assert torch.equal(y, expected_y) and x.dtype == expected_x.dtype
                torch.testing.assert_close(x, expected_x)
        return sum(len(y) for _, y in expected)

    assert sum(ranks(body)) == 40


# --- checkpoints ------------------------------------------------------------------------------------------------------
@pytest.mark.virtual
@pytest.mark.sizes(2)
def test_rows_of_checkpoints(ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "CALLS", (6, 8, 4))
    monkeypatch.setattr(checkpoint, "STEPS", (6, 4))
    results = ranks(lambda comm: checkpoint.measure(hd.init(comm=comm), rounds=2, folder=tmp_path))
    assert results.count(results[0]) == len(results), "all ranks have the same rows"
    calls, steps = ("torch.save", "hd.save", "torch.load", "hd.load"), ("", "_saving", "_saving_in_background")
    sides = [(name, 12 * (7 * 8 + 9 * 4)) for name in calls] + [(f"steps{end}", 12 * 7 * 4) for end in steps]
    expected = [(f"{strategy}/{name}", n_bytes) for strategy in checkpoint.STRATEGIES for name, n_bytes in sides]
    assert [(row["name"], row["bytes"]) for row in results[0]] == expected
    for row in results[0]:
        assert row["median_s"] > 0 and row["cpu_s"] > 0 and row["ranks"] == len(results)
        if row["name"].split("/")[1] in ("torch.save", "torch.load", "steps"):  # what the others are compared with
            assert (row["slowdown_percent"], row["cpu_multiple"]) == (0, 1)
    assert not list(tmp_path.iterdir())


def test_an_unknown_kind_of_data_is_refused():
    with pytest.raises(UnknownNameError, match="kind must be one of cifar10, .*; got 'cats'."):
        loader.measure(SingleRankCommunicator(), ["cats"])


@pytest.mark.extended
def test_values_stay_finite_with_every_strategy(monkeypatch):
    trained, make = [], training.perceptron
    monkeypatch.setattr(training, "MODELS", {"mlp_100k": MODEL})
    monkeypatch.setattr(training, "perceptron", lambda widths: (trained.append(make(widths)), trained[-1])[1])
    ways = [*training.gossip_ways(2), *training.COMPRESSED_WAYS]
    rows = run_virtual(lambda comm: training.time_steps(comm, "mlp_100k", ways, rounds=1, steps=training.PERIOD), 2)[0]
    assert len(rows) == len(ways) and len(trained) == 2 * len(ways)
    assert all(bool(own.isfinite().all()) for net in trained for own in net.parameters())
