"""The loader's benchmark: every reader reads the same, and every row is whole."""

from __future__ import annotations

import pytest
import torch

import hpcdist as hd
from hpcdist.comm.alone import Alone
from hpcdist.data import EpochPlan
from hpcdist.errors import UnknownNameError
from hpcdist.tools.bench import loader as bench

pytestmark = pytest.mark.virtual
SMALL = {"plain": bench.Kind(40, (1, 4, 4)), "scaled": bench.Kind(40, (1, 4, 4), 1 / 255)}


@pytest.mark.sizes(1, 2)
def test_rows(ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "KINDS", SMALL)

    def body(comm):
        return bench.measure(hd.init(comm=comm), ["plain", "scaled"], batch_size=8, rounds=7, folder=tmp_path)

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


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("kind", SMALL)
def test_all_readers_give_the_same_batches(ranks, tmp_path, kind):
    def body(comm):
        hd.init(comm=comm)
        plan = EpochPlan(40, comm.size, 8)
        (tmp_path / str(comm.rank)).mkdir()
        readers = bench._readers(SMALL[kind], plan, comm.rank, tmp_path / str(comm.rank))
        expected = list(readers.pop(bench.REFERENCE)(3))
        for read in readers.values():
            for (x, y), (expected_x, expected_y) in zip(read(3), expected, strict=True):
                assert torch.equal(y, expected_y) and x.dtype == expected_x.dtype
                torch.testing.assert_close(x, expected_x)
        return sum(len(y) for _, y in expected)

    assert sum(ranks(body)) == 40


def test_an_unknown_kind_is_refused():
    with pytest.raises(UnknownNameError, match="kind must be one of cifar10, .*; got 'cats'."):
        bench.measure(Alone(), ["cats"])
