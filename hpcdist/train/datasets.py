"""torch Datasets as a job's data: samples are read while the job trains, with reproducible random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from hpcdist.data.labels import labels_of
from hpcdist.data.loader import Batch
from hpcdist.errors import ConfigError, DataError
from hpcdist.session.consistency import fingerprints
from hpcdist.session.loader.sampling import seeded

Collate = Callable[[list[Any]], Any]


class JobDataset(Dataset[Any]):
    """A training or test Dataset of a job, as a source of batches for Loader.

    While a sample is read, the generators of Python, NumPy and torch are seeded by the seed, the epoch and the sample's
    index. So augmentations are the same on any number of ranks and processes, and in a resumed run.

    Args:
        name: `train` or `test`, for messages.
        dataset: has a length; its samples are pairs (x, y), unless `collate_fn` takes others.
        seed: of the samples' random numbers.
        collate_fn: joins a list of samples into a batch, a pair of tensors (x, y); None: torch's `default_collate`.
        num_workers: processes that read samples ahead; 0 reads in the training process.

    Raises:
        DataError: the Dataset has no length or no samples, or its first and last sample can't be joined into a batch.
    """

    def __init__(self, name: str, dataset: Any, seed: int = 0, collate_fn: Collate | None = None, num_workers: int = 0):
        self._name, self._dataset, self._seed = f"data[{name!r}]", dataset, seed
        self._collate: Collate = default_collate if collate_fn is None else collate_fn
        if not hasattr(dataset, "__len__"):
            raise DataError(
                f"{self._name} must be a Dataset with a length; got {type(dataset).__name__}, which has none. Add "
                "__len__ and __getitem__, or write the loop yourself: hpcdist.shard takes iterable data sets."
            )
        if not len(dataset):
            raise DataError(f"{self._name} must have at least 1 sample; got none.")
        self._epoch = 0
        self._order: list[tuple[int, np.ndarray]] = []  # epoch and samples of each batch; the DataLoader keeps the list
        self._loader = None if num_workers == 0 else DataLoader(
            self, batch_size=None, sampler=self._order, collate_fn=_identity, num_workers=num_workers,
            persistent_workers=True, generator=torch.Generator(),  # not torch's default one, which the model uses
        )  # fmt: skip
        self.source = type(dataset).__name__
        self.batch([0, -1])

    def __len__(self) -> int:
        return len(self._dataset)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which seeds the random numbers of the next batches."""
        self._epoch = epoch

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Read the samples at these indices."""
        return _raise_error(self[self._epoch, np.asarray(indices) % len(self)])

    def read_ahead(self, indices: Iterable[np.ndarray]) -> Iterator[Batch]:
        """Yield a batch for each array of indices."""
        if self._loader is None:
            return map(self.batch, indices)
        self._order[:] = [(self._epoch, batch) for batch in indices]
        return map(_raise_error, self._loader)

    def __getitem__(self, position: tuple[int, np.ndarray]) -> Batch | DataError:
        """Return the batch at position = (epoch, indices), or an error, for `_raise_error` in the main process."""
        samples = []
        for number in position[1].tolist():
            with seeded((self._seed, position[0]), number):
                try:
                    samples.append(self._dataset[number])
                except IndexError as error:
                    return self._error(
                        f"as many samples as its length says, {len(self)}; sample {number} raised an IndexError "
                        f"({error}). Are there as many labels as samples?"
                    )
        if self._collate is default_collate and not (isinstance(samples[0], (tuple, list)) and len(samples[0]) == 2):
            kind = type(samples[0]).__name__
            return self._error(f"samples that are pairs (x, y); got {kind}. Return pairs, or set the job's collate_fn.")
        try:
            batch = self._collate(samples)
        except (RuntimeError, TypeError) as error:
            if self._collate is not default_collate:
                raise
            return self._error(
                "samples of one shape, or the job a collate_fn, such as one that pads them by "
                f"torch.nn.utils.rnn.pad_sequence; got {error}."
            )
        shapes = [getattr(part, "shape", None) for part in batch] if isinstance(batch, (tuple, list)) else [batch]
        if [shape[0] if isinstance(shape, torch.Size) and shape else None for shape in shapes] != [len(samples)] * 2:
            got = ", ".join(str(tuple(shape)) if isinstance(shape, torch.Size) else "no tensor" for shape in shapes)
            return self._error(
                f"batches that are pairs of tensors (x, y), each with an entry for each of the {len(samples)} samples; "
                f"got shapes {got}. Change the Dataset or the job's collate_fn."
            )
        return cast(Batch, tuple(batch))

    def _error(self, rule: str) -> DataError:
        return DataError(f"{self._name} must have {rule}")

    @property
    def checksum(self) -> str:
        """Return a checksum of the Dataset's files, tensors and lists; samples are not read."""
        values = fingerprints(self._dataset, "")
        rounded = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in values.items()}
        return f"{zlib.crc32(repr((len(self), rounded)).encode()):08x}"

    def labels(self) -> np.ndarray:
        """Return the label of each sample; samples are read if the Dataset has no list of labels."""
        try:
            return labels_of(self._dataset)
        except ConfigError:
            return torch.stack([self.batch([number])[1][0] for number in range(len(self))]).numpy()

    def stored_labels(self) -> torch.Tensor | None:
        """Return a TensorDataset's labels, integers; None for others, which may convert theirs as they read samples."""
        if type(self._dataset) is not TensorDataset or self._collate is not default_collate:
            return None
        y = self._dataset.tensors[-1]
        return y.cpu() if y.dim() == 1 and not y.is_floating_point() else None

    def close(self) -> None:
        """End the processes."""
        self._loader = None


def _raise_error(batch: Batch | DataError) -> Batch:
    if isinstance(batch, DataError):
        raise batch
    return batch


def _identity(batch: Any) -> Any:
    return batch
