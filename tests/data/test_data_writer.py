"""create: blocks of any length become one file, whole or not at all."""

from __future__ import annotations

import json
import os
import stat

import h5py
import numpy as np
import pytest
from hdf5_layouts import MAPPED, READ, contiguous, sample_data, write_layout
from hdf5_layouts import N as SAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import each
from hpcdist.data import HDF5Dataset, Split, create, describe
from hpcdist.data.format import TARGET_BYTES, preferred_chunk_samples
from hpcdist.errors import ConfigError, DataError, OutputError

X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.arange(20) % 3
CLASSES = ["a", "b", "c"]


def write(path, x=X, y=Y, **options):
    return create(path, {"train": Split.of(x, y)}, **{"task": "classification", "classes": CLASSES, **options})


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any),
    chunk_samples=st.none() | st.integers(1, 40),
    compression=st.sampled_from([None, "gzip", "lzf"]),
)
def test_blocks_of_any_length(tmp_path_factory, lengths, chunk_samples, compression):
    n = sum(lengths)
    x, y = np.random.default_rng(0).normal(size=(n, 3, 2)), np.arange(n) % 3
    ends = np.cumsum(lengths)[:-1]
    blocks = zip(np.split(x, ends), np.split(y, ends))
    options = {"task": "classification", "classes": CLASSES, "chunk_samples": chunk_samples, "compression": compression}
    path = create(tmp_path_factory.mktemp("blocks") / "a.h5", {"train": Split(n, blocks)}, **options)
    with HDF5Dataset(path) as dataset:
        assert len(dataset) == n and dataset.mapped == (compression is None)
        read_x, read_y = dataset.batch(np.arange(n))
        np.testing.assert_array_equal(read_x, x)
        np.testing.assert_array_equal(read_y, y)


def test_streams(tmp_path):
    """Each block is asked for after the one before it is stored."""
    stored = []

    def blocks():
        for i in range(20):
            stored.append(i)
            yield X[i : i + 1], Y[i : i + 1]

    create(tmp_path / "a.h5", {"train": Split(20, blocks())}, task="classification", classes=CLASSES)
    assert stored == list(range(20))


def test_splits_and_notes(tmp_path):
    many = [f"class {i} with a long name" for i in range(5000)]  # more than an attribute of old HDF5 can hold
    notes = {"text": "résumé", "number": 1.5, "array": np.arange(20_000.0), "names": ["é", "b"], "whole": 3}
    splits = {"train": Split.of(X, Y), "test": Split.of(X[:5], Y[:5]), "extra": Split.of(X[:1], Y[:1])}
    path = create(
        tmp_path / "deep/er/a.h5", splits, task="classification", classes=many, source="made here", notes=notes
    )
    for name, split in splits.items():
        with HDF5Dataset(path, name) as dataset:
            assert len(dataset) == split.samples and dataset.classes == tuple(many) and dataset.source == "made here"
            assert dataset.notes.pop("array").tolist() == notes["array"].tolist()
            assert dataset.notes == {name: value for name, value in notes.items() if name != "array"}


def test_chunks_have_a_sensible_size_and_whole_samples(tmp_path):
    for samples, length in ((100_000, 7), (3_000, 784), (500, 3072), (5, 300_000), (2, 1_000_000), (3, 1)):
        chunk = preferred_chunk_samples(length, samples)
        assert chunk == samples or length > TARGET_BYTES or TARGET_BYTES // 2 <= chunk * length <= TARGET_BYTES
        assert 1 <= chunk <= samples
        path = write(tmp_path / "a.h5", np.zeros((samples, length), np.uint8), np.zeros(samples, np.int64))
        with h5py.File(path) as file:
            assert file["train/x"].chunks == (chunk, length)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = write(tmp_path / "a.h5")
    before = path.read_bytes()

    def blocks():
        yield X[:10], Y[:10]
        raise OSError("the source went away")

    for target in (path, tmp_path / "new.h5"):
        with pytest.raises(OSError, match="the source went away"):
            create(target, {"train": Split(20, blocks())}, task="classification", classes=CLASSES)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.h5"]
    write(path, X[:3], Y[:3])
    with HDF5Dataset(path) as dataset:
        assert len(dataset) == 3
    assert os.listdir(tmp_path) == ["a.h5"]


def test_a_file_below_a_file_is_refused(tmp_path):
    (tmp_path / "plain").touch()
    with pytest.raises(OutputError, match="plain/data.h5 must be written; got 'File exists'. Write elsewhere."):
        create(tmp_path / "plain" / "data.h5", {"train": Split.of(np.zeros((4, 2)), np.zeros(4))}, task="regression")


def test_permissions_are_the_users_own(tmp_path):
    """As for any new file; a private temporary file would lock out the group that shares the data."""
    (tmp_path / "plain").touch()
    wanted = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert stat.S_IMODE(write(tmp_path / "a.h5").stat().st_mode) == wanted


@each(
    "case",
    [
        ({"task": "cooking"}, "task must be one of classification, regression; got 'cooking'."),
        ({"compression": "zip"}, "compression must be one of None, gzip, lzf; got 'zip'."),
        ({"chunk_samples": 0}, "chunk_samples must be at least 1; got 0."),
        ({"classes": []}, "classes must be named for classification and only there"),
        ({"task": "regression"}, "classes must be named for classification and only there"),
        ({"notes": {"task": "x"}}, "notes must not use the names format, .*; got task."),
    ],
)
def test_bad_arguments(tmp_path, case):
    options, match = case
    with pytest.raises(ConfigError, match=match):
        write(tmp_path / "a.h5", **options)
    assert not os.listdir(tmp_path)


@each(
    "case",
    [
        (20, [], "/train must have at least 1 sample; got none."),
        (20, [(X[:9], Y[:9])], "/train must have the 20 samples that were announced; got 9."),
        (20, [(X, Y), (X, Y)], "/train must have the 20 samples that were announced; got 40."),
        (20, [(X, Y[:9])], "/train must have as many y as x; got 9 and 20."),
        (20, [(X[:9], Y[:9]), (X[9:, :1], Y[9:])], r"/train/x must have samples of shape \(2,\) and dtype float32"),
        (20, [(X[:9], Y[:9]), (X[9:], Y[9:].astype("i4"))], "/train/y must have samples .* int64 .*; got .* int32."),
        (20, [(X, Y + 1)], r"/train/y must be labels, one integer in 0\.\.2 .*; got int64 of shape .*, 1 to 3."),
        (20, [(X, Y - 1)], "/train/y must be labels"),
        (20, [(X, Y.astype(float))], "/train/y must be labels"),
        (20, [(X, Y[:, None])], "/train/y must be labels"),
        (20, [(X.astype("U3"), Y)], "/train/x must be of uint8, .*; got <U3"),
        (20, [(X, Y > 1)], "/train/y must be of uint8, .*; got bool"),
        (20, [(X[:, :0], Y)], r"/train/x must be of .* with at least 1 of each; got float32 of shape \(20, 0\)"),
        (0, [(X[:0], Y[:0])], r"/train/x must be of .* got float32 of shape \(0, 2\)"),
    ],
)
def test_bad_blocks(tmp_path, case):
    samples, blocks, match = case
    with pytest.raises(DataError, match=match):
        create(tmp_path / "a.h5", {"train": Split(samples, blocks)}, task="classification", classes=CLASSES)
    assert not os.listdir(tmp_path)


# --- describe: what a file holds, in plain values ---------------------------------------------------------------------
def test_a_description_of_classification(tmp_path):
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


def test_a_description_of_regression_with_compression(tmp_path):
    x = np.arange(40.0).reshape(20, 2)
    path = create(tmp_path / "a.h5", {"train": Split.of(x, x[:, :1])}, task="regression", compression="gzip")
    train = describe(path)["splits"]["train"]
    assert not train["mapped"] and "counts" not in train
    assert train["x"]["compression"] == train["y"]["compression"] == "gzip"
    assert (train["x"]["min"], train["x"]["max"], train["x"]["mean"]) == (0.0, 39.0, 19.5)


@each("how", [*MAPPED, *READ])
def test_every_layout_is_described(tmp_path, how):
    x, y = sample_data()
    found = describe(write_layout(tmp_path / "a.h5", how, x, y))
    assert json.loads(json.dumps(found)) == found
    train = found["splits"]["train"]
    assert train["samples"] == sum(train["counts"].values()) == SAMPLES
    assert train["x"]["mean"] == pytest.approx(x.mean())


def test_a_dataset_at_the_top_is_no_split(tmp_path):
    path = write_layout(tmp_path / "a.h5", contiguous, *sample_data())
    with h5py.File(path, "r+") as file:
        file["table"] = np.arange(3)
    assert list(describe(path)["splits"]) == ["train"]
