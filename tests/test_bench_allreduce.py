"""The benchmark of all-reduce: every side is measured, and rows are whole."""

from __future__ import annotations

import pytest

from harness.cases import each
from hpcdist.comm.alone import Alone
from hpcdist.comm.virtual import Network
from hpcdist.errors import ConfigError
from hpcdist.tools.bench.allreduce import measure_beside as measure

NETWORK = Network(1e-3, 1e9)  # slow, so that few calls fill the time for measuring


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


def test_rows_of_the_benchmark(ranks):
    def body(comm):
        others = {"other": lambda tensor: comm.allreduce(tensor)}
        return measure(comm, [4096, 65536], ["native", "ring", "direct"], rounds=3, others=others)

    results = ranks(body, network=NETWORK)
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
        elif ranks.size in (1, 2, 4):
            shares = {"native": 2, "ring": 2, "direct": 1}[name]
            assert row["bytes_sent"] == shares * n_bytes * (ranks.size - 1) // ranks.size
        if ranks.real:
            assert row["median_s"] > 0 and row["copies"] == row["median_s"] / rows["copy", n_bytes]["median_s"]


@pytest.mark.virtual
@pytest.mark.sizes(2, 5)
def test_virtual_times_of_the_benchmark_are_the_formulas(ranks):
    (row, copy) = ranks(lambda comm: measure(comm, [4000], ["native"], rounds=1), network=NETWORK)[0]
    steps = 2 * (ranks.size - 1)
    assert row["median_s"] == pytest.approx(steps * (1e-3 + 4000 / ranks.size * 1e-9))
    assert copy["median_s"] == 0.0 and row["copies"] is None


@pytest.mark.virtual
def test_the_benchmark_measures_auto(ranks, tmp_path):
    rows = ranks(lambda comm: measure(comm, [64], ["auto"], 1, cache_dir=tmp_path), network=NETWORK)[0]
    assert [row["name"] for row in rows] == ["auto", "copy"]


def test_nothing_to_measure_is_no_rows(ranks):
    assert ranks(lambda comm: measure(comm, [], ["ring"], rounds=1)) == [[]] * ranks.size


@each("n_bytes", [0, 2, 6, -4])
def test_sizes_that_are_no_float32_are_refused(n_bytes):
    with pytest.raises(ConfigError, match=f"sizes must be positive multiples of 4 bytes .*; got {n_bytes}"):
        measure(Alone(), [n_bytes], ["ring"], rounds=1)
