"""A job whose data are torch Datasets: batches, random numbers, what is refused, and whole runs."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from harness.cases import each
from harness.launch import launch
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.data import HDF5Dataset
from hpcdist.data.loader import Loader
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import load_summary
from hpcdist.train.datasets import JobDataset
from hpcdist.train.job import load_job, open_split
from hpcdist.train.runs import train
from train import tiny


class Pairs(Dataset):
    """Samples that only `__getitem__` tells."""

    def __init__(self, samples, length=None):
        self.samples, self.length = samples, len(samples) if length is None else length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        return self.samples[number]


class Drawn(Pairs):
    """Samples with numbers of each generator."""

    def __getitem__(self, number):
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()]), number


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(1.0, 0)])


def padded(samples):
    tokens, labels = zip(*samples, strict=True)
    return pad_sequence(list(tokens), batch_first=True), torch.tensor(labels)


def of_job(data):
    job = dataclasses.replace(tiny.job, data=data)
    return tuple(open_split(job, JobConfig(), split) for split in ("train", "test"))


def images(count: int) -> list[tuple[torch.Tensor, int]]:
    return [(torch.full((1, 2, 2), number, dtype=torch.uint8), number % 2) for number in range(count)]


def drawn(workers: int, *, batch_size: int = 4, processes: int = 0, seed: int = 3, epoch: int = 1, start: int = 0):
    """Return what each sample of an epoch has drawn."""
    found = {}
    for worker in range(workers):
        data = JobDataset("train", Drawn(range(23)), seed, num_workers=processes)
        loader = Loader(data, batch_size, worker=worker, workers=workers)
        for each_epoch in (0, epoch):  # processes go on from one to the next
            loader.set_epoch(each_epoch, start if each_epoch == epoch else 0)
            batches = list(loader)
        found |= {y: x for batch in batches for x, y in zip(batch[0].tolist(), batch[1].tolist())}
        data.close()
    return found


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_sample_draws_the_same_numbers_on_any_ranks_processes_and_batches():
    torch.manual_seed(5)
    expected, state = drawn(1), torch.get_rng_state()
    assert len(expected) == 23 and len({value for values in expected.values() for value in values}) == 3 * 23
    for others in (drawn(3), drawn(2, batch_size=7), drawn(2, processes=1), drawn(1, processes=3)):
        assert others == expected
    assert torch.equal(torch.get_rng_state(), state), "the model's numbers are its own"
    resumed = drawn(1, start=8)
    assert len(resumed) == 15 and resumed.items() <= expected.items()
    assert drawn(1, epoch=2) != expected != drawn(1, seed=4)


@each("kind", ["Pairs", "tensors", "Subset"])
def test_samples_are_read_as_they_are(kind):
    given = images(9)
    tensors = TensorDataset(torch.stack([x for x, _ in given]), torch.tensor([y for _, y in given]))
    dataset = {"tensors": tensors, "Pairs": Pairs(given), "Subset": Subset(Pairs(given), range(9))}[kind]
    train, test = of_job({"train": dataset, "test": dataset})
    x, y = train.batch([8, 0, 3])
    assert x.flatten(1)[:, 0].tolist() == [8, 0, 3] and y.tolist() == [0, 0, 1]
    assert train.labels().tolist() == [number % 2 for number in range(9)]
    assert train.checksum == test.checksum != JobDataset("train", Pairs(images(8))).checksum


def test_a_collate_fn_pads_samples_of_different_lengths():
    tokens = Pairs([(torch.arange(1, 2 + number), number) for number in range(5)])
    x, y = JobDataset("train", tokens, collate_fn=padded).batch([0, 2])
    assert x.tolist() == [[1, 0, 0], [1, 2, 3]] and y.tolist() == [0, 2]


REFUSED = {
    "data must be Datasets by the names train and test, or data.path a file; got 'train'": {"train": Pairs(images(2))},
    "data must be Datasets by the names train and test, or data.path a file; got none": {},
    "'train'. must be a Dataset with a length; got Stream, which": {"train": Stream(), "test": Pairs(images(2))},
    "'test'. must have at least 1 sample; got none": {"train": Pairs(images(2)), "test": Pairs([])},
    "must have samples that are pairs .x, y.; got float": {"train": Pairs([1.0]), "test": Pairs(images(2))},
    "must have samples of one shape, or the job a collate_fn, .*pad_sequence; got stack expects": {
        "train": Pairs([(torch.ones(2), 0), (torch.ones(3), 1)]), "test": Pairs(images(2)),
    },
    "as many samples as its length says, 3; sample 2 raised an IndexError .*as many labels as samples": {
        "train": Pairs(images(2), length=3), "test": Pairs(images(2)),
    },
    r"pairs of tensors .* for each of the 2 samples; got shapes .2, 1, 2, 2., no tensor. Change": {
        "train": Pairs([(x, str(y)) for x, y in images(2)]), "test": Pairs(images(2)),
    },
}  # fmt: skip


@each("message", REFUSED)
def test_other_data_are_refused(message):
    data = REFUSED[message]
    with pytest.raises(DataError, match=message):
        of_job(data)


def test_an_error_in_a_process_is_told_as_one_of_this_process():
    data = JobDataset("train", Pairs([*images(4), (torch.ones(1), 0), *images(4)]), num_workers=1)
    with pytest.raises(DataError, match="^data..train.. must have samples of one shape"):
        list(Loader(data, 3, shuffle=False))
    data.close()


# --- whole runs -------------------------------------------------------------------------------------------------------
JOB = """
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hpcdist.train import Job, Metric, accuracy


class Words(Dataset):
    def __init__(self, count):
        self.targets = [number % 2 for number in range(count)]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, number):
        length = int(torch.randint(2, 9, ()))  # an augmentation
        return torch.randint(1, 5, (length,)) + 4 * self.targets[number], self.targets[number]


def model():
    return nn.Sequential(nn.EmbeddingBag(9, 2, padding_idx=0), nn.Dropout(0.1))


def collate(samples):
    tokens, labels = zip(*samples)
    return pad_sequence(list(tokens), batch_first=True), torch.tensor(labels)


job = Job(
    model=model, loss=nn.functional.cross_entropy, metrics={"accuracy": Metric(accuracy)}, collate_fn=collate,
    data={"train": Words(96), "test": Words(20)},
    defaults={"epochs": 3, "batch_size": 8, "optimizer": {"name": "Adam", "lr": 0.2}},
)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (path := tmp_path / "words.py").write_text(JOB)
    return path


def test_a_run_on_tokens_of_different_lengths_is_the_same_again_and_resumed(job):
    def run(folder, *settings, ranks=2, **options):
        body = lambda comm: train(comm, job, overrides=list(settings), output=Path(folder), **options)  # noqa: E731
        return run_virtual(body, ranks)[0][1]

    whole = run("whole", "checkpoint.every_steps=4")
    assert whole.metrics["accuracy"] > 0.9 and whole.samples == 3 * 96
    assert run("again").sha256 == whole.sha256 != run("other", "seed=1").sha256
    run("parts", "checkpoint.every_steps=4", "budget.steps=8", "epochs=3")
    resumed = run("parts", "checkpoint.every_steps=4", "epochs=3", resume=True, allow_changes=True)
    assert (resumed.sha256, resumed.metrics) == (whole.sha256, whole.metrics)
    assert list(run("split", "data.split=dirichlet", "data.alpha=0.1").metrics) == ["accuracy", "loss"]


def test_real_ranks_with_processes_that_load_end_on_the_same_bits(job):
    for folder, more in (("none", []), ("one", ["--set", "data.num_workers=1"])):
        done = launch(2, ["-m", "hpcdist", "train", job, "--output", folder, *more])
        assert done.returncode == 0, done.stderr
    assert load_summary("none").sha256 == load_summary("one").sha256


def test_a_thread_that_reads_ahead_is_refused(job):
    with pytest.raises(
        ConfigError, match="data.prefetch must be 0 with torch Datasets, .*; got 2. Set data.num_workers"
    ):
        run_virtual(lambda comm: train(comm, job, overrides=["data.prefetch=2"], output=Path("run")), 1)


def test_a_file_replaces_the_datasets_and_a_missing_one_is_refused(job):
    from hpcdist.data import Split, create

    x, y = np.ones((20, 3), np.int64), np.arange(20) % 2
    create("words.h5", {"train": Split.of(x, y), "test": Split.of(x, y)}, task="classification", classes=["a", "b"])
    body = lambda comm: train(comm, job, overrides=["data.path=words.h5"], output=Path("run"))[1]  # noqa: E731
    assert run_virtual(body, 1)[0].samples == 3 * 20
    with HDF5Dataset("words.h5") as dataset:
        assert len(dataset) == 20 and load_job(job).collate_fn is not None
    with pytest.raises(ConfigError, match="data.path must be a file that exists; got wrds.h5, .* Did you mean 'words'"):
        run_virtual(lambda comm: train(comm, job, overrides=["data.path=wrds.h5"], output=Path("other")), 1)
