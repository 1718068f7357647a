"""The language model of jobs/transformer.py: its text, the model, and that it learns."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.data import HDF5Dataset
from hpcdist.records import read_records
from hpcdist.train import load_job
from hpcdist.train.runs import train

JOB = Path(__file__).parents[2] / "jobs" / "transformer.py"
TINY = {"width": 32, "blocks": 2, "heads": 2}
job = load_job(JOB)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "reference.h5"
    job.data(path)
    return path


def bits_of_frequencies(file: Path) -> float:
    """Bits per byte of the test's text for who knows how often each byte occurs in the training text, and no more."""
    with HDF5Dataset(file, "train") as train, HDF5Dataset(file, "test") as test:
        read, asked = (split.batch(range(len(split)))[1].flatten().long() for split in (train, test))
    counts = torch.bincount(read, minlength=256) + 1.0
    return -(counts / counts.sum()).log2()[asked].mean().item()


# --- the text ---------------------------------------------------------------------------------------------------------
def test_the_target_of_a_byte_is_the_one_that_follows_and_the_file_is_the_same_again(file, tmp_path):
    with HDF5Dataset(file, "train") as train, HDF5Dataset(file, "test") as test:
        for split in (train, test):
            x, y = split.batch(range(len(split)))
            assert x.dtype == y.dtype == torch.uint8 and x.shape == y.shape == (len(split), 64)
            assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
        assert len(train) > 5000 and len(test) == pytest.approx(len(train) / 9, rel=0.01)
        assert train.source.startswith("Language reference of Python 3.")
        job.data(tmp_path / "again.h5")
        with HDF5Dataset(tmp_path / "again.h5", "test") as again:
            assert again.checksum == test.checksum


def test_the_text_to_test_on_is_none_to_train_on(file):
    with HDF5Dataset(file, "train") as train, HDF5Dataset(file, "test") as test:
        known = bytes(train.batch(range(len(train)))[0].flatten().tolist())
        found = sum(bytes(chunk.tolist()) in known for chunk in test.batch(range(len(test)))[0])
    assert found / len(test) < 0.02, "a few lines of grammar are in several chapters"


# --- the model --------------------------------------------------------------------------------------------------------
def test_it_sees_nothing_of_what_follows():
    model = job.model(**TINY).eval()
    x = torch.randint(256, (2, 64), dtype=torch.uint8)
    changed = x.clone()
    changed[:, 40] += 1
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40], after[:, 40]) and not torch.equal(before[:, 63], after[:, 63])


def test_it_begins_knowing_nothing():
    torch.manual_seed(0)
    x, y = torch.randint(256, (2, 16, 64), dtype=torch.uint8)
    outputs = job.model()(x)
    assert job.loss(outputs, y).item() == pytest.approx(math.log(256), rel=0.02)
    bits = job.metrics["bits_per_byte"].per_sample(outputs, y)
    assert bits.mean().item() == pytest.approx(job.loss(outputs, y).item() / math.log(2))
    assert job.metrics["accuracy"].per_sample(outputs, outputs.argmax(dim=2)).tolist() == [1.0] * 16


def test_the_head_may_have_the_embeddings_weight_and_dropout_is_an_option():
    apart, tied = job.model(**TINY), job.model(**TINY, tied=True)
    assert tied[-1].weight is tied[0].byte.weight and apart[-1].weight is not apart[0].byte.weight
    sizes = [sum(param.numel() for param in model.parameters()) for model in (apart, tied)]
    assert sizes[0] - sizes[1] == 256 * TINY["width"]
    x = torch.randint(256, (2, 64), dtype=torch.uint8)
    model = job.model(**TINY, dropout=0.5)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


# --- training ---------------------------------------------------------------------------------------------------------
def test_it_learns_more_than_how_often_each_byte_occurs(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [f"data.path='{file}'", *(f"model.{name}={value}" for name, value in TINY.items())]
    settings += ["budget.samples=3000", "optimizer.lr=0.01"]
    body = lambda comm: train(comm, JOB, overrides=settings, output=Path("run"))[1]  # noqa: E731
    summary, other = run_virtual(body, 2, compute=Constant(0.01))
    assert summary == other and summary.samples >= 3000
    assert summary.metrics["bits_per_byte"] < bits_of_frequencies(file) - 0.7
    assert summary.metrics["accuracy"] > 0.25, "spaces alone are fewer"


# --- in stages --------------------------------------------------------------------------------------------------------
SMALL = ("model.width=16", "model.blocks=2", "model.heads=2", "optimizer.lr=0.01")


def losses(comm, folder: Path, *settings: str) -> list[float]:
    """Collective. The loss of each step of a run: the mean over its replicas."""
    overrides = [f"data.path='{folder.parent / 'python-reference.h5'}'", *SMALL, *settings]
    train(comm, JOB, overrides=overrides, output=folder)
    comm.barrier()
    of_ranks = [[record.loss for record in records] for records in read_records(folder).values()]
    trained = [found for found in of_ranks if None not in found]
    return [sum(of_step) / len(of_step) for of_step in zip(*trained)]


def alone(folder: Path, *settings: str) -> list[float]:
    """The same of one process."""
    folder.mkdir()
    return run_virtual(lambda comm: losses(comm, folder / "run", *settings), 1)[0]


@pytest.mark.computes
@pytest.mark.sizes(4)
def test_the_losses_are_those_of_one_process_with_all_replicas_batches(ranks, shared_tmp_path, tmp_path):
    settings = ("model.tied=true", "budget.steps=6", "clip_norm=1.0")  # a weight of the first stage and of the last
    staged = ("parallel.stages=2", "batch_size=8")
    found = ranks(lambda comm: losses(comm, shared_tmp_path / "run", *staged, *settings))
    expected = alone(tmp_path / "alone", *settings, "batch_size=16")
    assert len(expected) == 6 and expected[-1] < expected[0] - 0.5
    assert all(own == pytest.approx(expected, rel=1e-5) for own in found)
