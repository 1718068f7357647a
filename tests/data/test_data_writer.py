"""create: blocks of any length become one file, whole or not at all."""

from __future__ import annotations

import os
import stat

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdist.data import HDF5Dataset, Split, create
from hpcdist.data.format import TARGET_BYTES, preferred_chunk_samples
from hpcdist.errors import ConfigError, DataError

X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.arange(20) % 3
CLASSES = ["a", "b", "c"]


def write(path, x=X, y=Y, **options):
    return create(path, {"train": Split.of(x, y)}, **{"task": "classification", "classes": CLASSES, **options})


@settings(max_examples=50, deadline=None)
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
    path = create(
        tmp_path_factory.mktemp("blocks") / "a.h5",
        {"train": Split(n, blocks)},
        task="classification",
        classes=CLASSES,
        chunk_samples=chunk_samples,
        compression=compression,
    )
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


def test_a_failure_leaves_what_was_there(tmp_path):
    path = write(tmp_path / "a.h5")
    before = path.read_bytes()

    def blocks():
        yield X[:10], Y[:10]
        raise OSError("the source went away")

    for target in (path, tmp_path / "new.h5"):
        with pytest.raises(OSError, match="the source went away"):
            create(target, {"train": Split(20, blocks())}, task="classification", classes=CLASSES)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.h5"]


def test_replaces_and_leaves_nothing_else(tmp_path):
    path = write(tmp_path / "a.h5")
    write(path, X[:3], Y[:3])
    with HDF5Dataset(path) as dataset:
        assert len(dataset) == 3
    assert os.listdir(tmp_path) == ["a.h5"]


def test_permissions_are_the_users_own(tmp_path):
    """As for any new file; a private temporary file would lock out the group that shares the data."""
    (tmp_path / "plain").touch()
    wanted = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert stat.S_IMODE(write(tmp_path / "a.h5").stat().st_mode) == wanted


def test_regression_has_no_classes(tmp_path):
    path = write(tmp_path / "a.h5", X, X[:, :1], task="regression", classes=())
    with HDF5Dataset(path) as dataset:
        assert (dataset.task, dataset.classes, dataset.y_shape) == ("regression", (), (1,))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"task": "cooking"}, "task must be one of classification, regression; got 'cooking'."),
        ({"compression": "zip"}, "compression must be one of None, gzip, lzf; got 'zip'."),
        ({"chunk_samples": 0}, "chunk_samples must be at least 1; got 0."),
        ({"classes": []}, "classes must be named for classification and only there"),
        ({"task": "regression"}, "classes must be named for classification and only there"),
        ({"notes": {"task": "x"}}, "notes must not use the names format, .*; got task."),
    ],
)
def test_bad_arguments(tmp_path, options, match):
    with pytest.raises(ConfigError, match=match):
        write(tmp_path / "a.h5", **options)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("samples", "blocks", "match"),
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
def test_bad_blocks(tmp_path, samples, blocks, match):
    with pytest.raises(DataError, match=match):
        create(tmp_path / "a.h5", {"train": Split(samples, blocks)}, task="classification", classes=CLASSES)
    assert not os.listdir(tmp_path)
