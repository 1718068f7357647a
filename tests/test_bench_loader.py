"""The loader's benchmark: every reader reads the same, and every row is whole."""

from __future__ import annotations

import pytest
import torch

from hpcdist.bench import loader as bench
from hpcdist.data import EpochPlan
from hpcdist.errors import UnknownNameError

SMALL = {"plain": bench.Kind(40, (1, 4, 4)), "scaled": bench.Kind(40, (1, 4, 4), 1 / 255)}


def test_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "KINDS", SMALL)
    rows = bench.measure(["plain", "scaled"], batch_size=8, rounds=7, folder=tmp_path)
    readers = ("memory_map", "batch", "loader", "dataloader")
    assert [row["name"] for row in rows] == [f"loader/{kind}/{reader}" for kind in SMALL for reader in readers]
    for row in rows:
        assert row.keys() == {"name", "bytes", "ranks", "median_s", "bytes_sent", "ratio"}
        assert (row["bytes"], row["ranks"], row["bytes_sent"]) == (8 * 16, 1, 0) and row["median_s"] > 0
    assert [row["ratio"] for row in (rows[0], rows[4])] == [1, 1] and all(row["ratio"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", SMALL)
def test_all_readers_give_the_same_batches(tmp_path, kind):
    plan = EpochPlan(40, 1, 8)
    readers = bench._readers(SMALL[kind], plan, tmp_path)
    expected = list(readers.pop(bench.REFERENCE)(3))
    for read in readers.values():
        for (x, y), (expected_x, expected_y) in zip(read(3), expected, strict=True):
            assert torch.equal(y, expected_y) and x.dtype == expected_x.dtype
            torch.testing.assert_close(x, expected_x)


def test_an_unknown_kind_is_refused():
    with pytest.raises(UnknownNameError, match="kind must be one of cifar10, .*; got 'cats'."):
        bench.measure(["cats"])
