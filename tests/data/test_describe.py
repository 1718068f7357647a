"""describe: what a file holds, in plain values."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from hdf5_layouts import MAPPED, READ, N, contiguous, sample_data, write_layout

from hpcdist.data import Split, create, describe
from hpcdist.errors import DataError


def test_classification(tmp_path):
    x = np.arange(3000 * 4, dtype=np.uint16).view(np.int16).reshape(3000, 4)
    y = np.arange(3000) % 2
    path = create(
        tmp_path / "a.h5",
        {"test": Split.of(x[:2], y[:2]), "train": Split.of(x, y)},
        task="classification",
        classes=["even", "odd", "neither"],
        source="made here",
        scale=0.5,
        notes={"seed": 3, "means": np.arange(2.0), "names": ["a", "b"]},
        chunk_samples=100,
    )
    found = describe(path)
    assert json.loads(json.dumps(found)) == found
    train = found["splits"].pop("train")
    assert found.pop("splits")["test"]["samples"] == 2
    assert found == {
        "path": str(path),
        "bytes": path.stat().st_size,
        "format_version": 1,
        "task": "classification",
        "source": "made here",
        "classes": ["even", "odd", "neither"],
        "notes": {"seed": 3, "means": [0.0, 1.0], "names": ["a", "b"]},
    }
    assert (train["samples"], train["mapped"]) == (3000, True)
    assert train["counts"] == {"even": 1500, "odd": 1500, "neither": 0}
    stored = {"dtype": "int16", "shape": [4], "loaded_dtype": "float32", "chunk_samples": 100, "chunk_bytes": 800}
    assert train["x"].items() >= {**stored, "compression": None, "min": 0.0, "max": 5999.5}.items()
    assert train["x"]["mean"] == pytest.approx(x.mean() / 2, rel=1e-3)
    assert train["y"].items() >= {"dtype": "int64", "shape": [], "min": 0.0, "max": 1.0, "mean": 0.5}.items()


def test_regression_with_compression(tmp_path):
    x = np.arange(40.0).reshape(20, 2)
    path = create(tmp_path / "a.h5", {"train": Split.of(x, x[:, :1])}, task="regression", compression="gzip")
    train = describe(path)["splits"]["train"]
    assert not train["mapped"] and "counts" not in train
    assert train["x"]["compression"] == train["y"]["compression"] == "gzip"
    assert (train["x"]["min"], train["x"]["max"], train["x"]["mean"]) == (0.0, 39.0, 19.5)


@pytest.mark.parametrize("how", [*MAPPED, *READ], ids=lambda how: how.__name__)
def test_every_layout(tmp_path, how):
    x, y = sample_data()
    found = describe(write_layout(tmp_path / "a.h5", how, x, y))
    assert json.loads(json.dumps(found)) == found
    train = found["splits"]["train"]
    assert train["samples"] == sum(train["counts"].values()) == N
    assert train["x"]["mean"] == pytest.approx(x.mean())


def test_a_dataset_at_the_top_is_no_split(tmp_path):
    path = write_layout(tmp_path / "a.h5", contiguous, *sample_data())
    with h5py.File(path, "r+") as file:
        file["table"] = np.arange(3)
    assert list(describe(path)["splits"]) == ["train"]


def test_damaged_labels(tmp_path):
    """Compressed y that can't be decompressed; opening the file does not notice."""
    x = np.zeros((50, 1))
    path = create(tmp_path / "a.h5", {"train": Split.of(x, x)}, task="regression", compression="gzip")
    with h5py.File(path) as file:
        chunk = file["train/y"].id.get_chunk_info(0)
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(b"\xff" * chunk.size)
    with pytest.raises(DataError, match="a.h5 is corrupt .*Import it again."):
        describe(path)
