"""Data sets of torch, written once into an HDF5 file of hpcdist's layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hpcdist.data.labels import labels_of
from hpcdist.data.writer import Block, Split, create
from hpcdist.errors import ConfigError, DataError

BLOCK = 256  # samples that are in memory at a time


def write_datasets(path: str | Path, datasets: Mapping[str, Any]) -> Path:
    """Write torch Datasets of pairs (x, y) to a file, and return its path.

    Labels that are integers make a classification, with the names in the training set's `classes` if it has them; other
    y are values of a regression. Samples are read once; twice where no attribute of the data set tells its labels.

    Args:
        datasets: with a length, under `train` and `test`; samples are tensors, arrays or numbers of one shape.

    Raises:
        DataError: a data set has no length, no samples, or other samples than pairs of one shape and dtype.
    """
    if set(datasets) != {"train", "test"}:
        raise DataError(f"data must be data sets by the names train and test; got {', '.join(map(repr, datasets))}.")
    splits, firsts = {}, []
    for name, dataset in datasets.items():
        if not hasattr(dataset, "__len__"):
            raise DataError(
                f"data[{name!r}] must be a data set with a length; got {type(dataset).__name__}, which has none. Pass "
                "a function that writes the file, by hpcdist.data.create."
            )
        blocks = _blocks(name, dataset)
        first = next(blocks, None)
        if first is None:
            raise DataError(f"data[{name!r}] must have at least 1 sample; got none.")
        splits[name] = Split(len(dataset), chain([first], blocks))
        firsts.append(first[1])
    labelled = all(y.dtype.kind in "iu" and y.ndim == 1 for y in firsts)
    task = "classification" if labelled else "regression"
    classes = _classes(datasets) if labelled else []
    return create(path, splits, task=task, source=type(datasets["train"]).__name__, classes=classes)


def _classes(datasets: Mapping[str, Any]) -> list[str]:
    """Return the names of all classes, by default their numbers."""
    names = [str(name) for name in getattr(datasets["train"], "classes", ())]
    return names or [str(number) for number in range(1 + max(map(_largest_label, datasets.values())))]


def _largest_label(dataset: Any) -> int:
    try:
        return int(labels_of(dataset).max())
    except ConfigError:  # it has none beside its samples
        return max(int(dataset[number][1]) for number in range(len(dataset)))


def _blocks(name: str, dataset: Any) -> Iterator[Block]:
    numbers = iter(range(len(dataset)))
    while samples := [dataset[number] for number in islice(numbers, BLOCK)]:
        if not all(isinstance(sample, (tuple, list)) and len(sample) == 2 for sample in samples):
            raise DataError(
                f"data[{name!r}] must have samples that are pairs (x, y); got {type(samples[0]).__name__}. Let the "
                "Dataset return pairs."
            )
        columns = zip(*samples, strict=True)
        try:
            x, y = (np.stack([_array(value) for value in column]) for column in columns)
        except ValueError as error:
            raise DataError(
                f"data[{name!r}] must have samples of one shape; got {error}. Pad or crop them in the Dataset."
            ) from None
        yield x, y


def _array(value: Any) -> np.ndarray:
    return value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
