"""A job whose data are torch Datasets: the file that is written of them, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from harness.cases import each
from hpcdist.data import HDF5Dataset, describe
from hpcdist.data.datasets import BLOCK, write_datasets
from hpcdist.errors import DataError


class Pairs(Dataset):
    """Samples that only `__getitem__` tells."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        return self.samples[number]


class Named(Pairs):
    classes = ("cat", "dog")


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(1.0, 0)])


def images(count: int) -> list[tuple[torch.Tensor, int]]:
    return [(torch.full((1, 2, 2), number % 200, dtype=torch.uint8), number % 2) for number in range(count)]


@each("kind", ["Pairs", "Named", "tensors"])
@each("count", [3, BLOCK + 5])
def test_samples_are_read_back_as_they_are(kind, count, tmp_path):
    given = images(count)
    tensors = TensorDataset(torch.stack([x for x, _ in given]), torch.tensor([y for _, y in given]))
    train = {"tensors": tensors, "Pairs": Pairs(given), "Named": Named(given)}[kind]
    path = write_datasets(tmp_path / f"{kind}{count}.h5", {"train": train, "test": Pairs(images(2))})
    with HDF5Dataset(path, "train") as found:
        x, y = found.batch(np.arange(count))
    assert torch.equal(x, torch.stack([one for one, _ in given])) and y.tolist() == [label for _, label in given]
    described = describe(path)
    assert described["task"] == "classification"
    assert list(described["classes"]) == (["cat", "dog"] if kind == "Named" else ["0", "1"])


def test_values_that_are_no_labels_are_a_regression(tmp_path):
    data = TensorDataset(torch.randn(5, 3), torch.randn(5, 2))
    path = write_datasets(tmp_path / "data.h5", {"train": data, "test": data})
    assert describe(path)["task"] == "regression"
    with HDF5Dataset(path, "test") as found:
        assert torch.equal(found.batch(np.arange(5))[1], data.tensors[1])


REFUSED = {
    "data must be data sets by the names train and test; got 'train'": {"train": Pairs(images(2))},
    "must be a data set with a length; got Stream": {"train": Stream(), "test": Pairs(images(2))},
    "must have at least 1 sample; got none": {"train": Pairs(images(2)), "test": Pairs([])},
    "must have samples that are pairs .x, y.; got float": {"train": Pairs([1.0]), "test": Pairs(images(2))},
    "must have samples of one shape; got .*Pad or crop them in the Dataset": {
        "train": Pairs([(torch.ones(2), 0), (torch.ones(3), 1)]), "test": Pairs(images(2)),
    },
    "/train/x must have samples of shape .2,.": {
        "train": Pairs([(torch.ones(2), 0)] * BLOCK + [(torch.ones(3), 1)]), "test": Pairs(images(2)),
    },
}  # fmt: skip


@each("message", REFUSED)
def test_other_data_are_refused(message, tmp_path):
    with pytest.raises(DataError, match=message):
        write_datasets(tmp_path / "data.h5", REFUSED[message])
    assert list(tmp_path.iterdir()) == []
