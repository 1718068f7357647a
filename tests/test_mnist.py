"""The jobs on images of 28 by 28 pixels, with small data sets in MNIST's format: nothing is downloaded."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.data import HDF5Dataset, fetch
from hpcdist.errors import DataError
from hpcdist.records import load_run
from hpcdist.train import load_job
from hpcdist.train.runs import train

JOB = Path(__file__).parents[1] / "jobs" / "mnist.py"
SPLITS = {"train": 96, "t10k": 20}


def _idx(name: str) -> dict[str, bytes]:
    """The files of a data set whose classes are bars at ten places, as deep as its name is long."""
    files = {}
    for split, count in SPLITS.items():
        labels = np.arange(count) % 10
        images = np.zeros((count, 28, 28), np.uint8)
        for image, label in zip(images, labels):
            image[: len(name), 2 * label + 2 : 2 * label + 5] = 255
        files[f"{split}-images-idx3-ubyte"] = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28) + images.tobytes()
        files[f"{split}-labels-idx1-ubyte"] = struct.pack(">4BI", 0, 0, 8, 1, count) + labels.astype(np.uint8).tobytes()
    return files


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Data sets that no place has but the folders that `write` fills."""
    monkeypatch.chdir(tmp_path)
    for name in ("mnist", "fashion-mnist"):
        sums = {file: hashlib.sha256(content).hexdigest() for file, content in _idx(name).items()}
        release = replace(fetch.RELEASES[name], sha256=sums, mirrors=(), package=None, installed=None)
        monkeypatch.setitem(fetch.RELEASES, name, release)


def write(name: str) -> None:
    folder = Path("data", name)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in _idx(name).items():
        (folder / file).write_bytes(content)


def test_the_job_learns_from_what_is_there_and_writes_down_what_it_was():
    write("fashion-mnist")
    settings = ["batch_size=16", "epochs=6", "optimizer.lr=0.003"]
    body = lambda comm: train(comm, JOB, overrides=settings, output=Path("run"))[1]  # noqa: E731
    summary, other = run_virtual(body, 2, compute=Constant(0.01))
    assert summary == other and summary.samples == 6 * 96
    assert summary.metrics["accuracy"] > 0.5
    found = load_run("run").settings["data"]
    assert found["source"] == "IDX files fashion-mnist" and found["path"] == "data/mnist-or-fashion-mnist.h5"


def test_a_files_name_says_which_data_set_it_has():
    data = load_job(JOB).data
    write("fashion-mnist")
    with pytest.raises(DataError, match="^MNIST's four files must come from one of these places; none has them"):
        data(Path("data/mnist.h5"))
    write("mnist")
    for name, other in (("mnist", "IDX files mnist"), ("fashion-mnist", "IDX files fashion-mnist")):
        data(path := Path("data", f"{name}.h5"))
        with HDF5Dataset(path, "train") as train_set, HDF5Dataset(path, "test") as test_set:
            assert (train_set.source, len(train_set), len(test_set)) == (other, 96, 20)
    data(path := Path("data/either.h5"))
    with HDF5Dataset(path, "train") as train_set:
        assert train_set.source == "IDX files mnist", "the first of both"


def test_the_small_job_learns_from_fashion_mnist():
    write("fashion-mnist")
    settings = ["batch_size=16", "epochs=6"]
    body = lambda comm: train(comm, JOB.with_name("fashion.py"), overrides=settings, output=Path("run"))[1]  # noqa: E731
    summary, _ = run_virtual(body, 2, compute=Constant(0.01))
    assert summary.samples == 6 * 96 and summary.metrics["accuracy"] > 0.5
    assert load_run("run").settings["data"]["source"] == "IDX files fashion-mnist"


def test_where_neither_can_be_had_it_says_so_of_both():
    match = "^MNIST's four files must come .*\nFashion-MNIST's four files must come from one of these places; none"
    with pytest.raises(DataError, match=match):
        load_job(JOB).data(Path("data/images.h5"))
