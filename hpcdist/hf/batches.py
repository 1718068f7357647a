"""Give the Trainer's loop, which reads batches ahead, this rank's batches, and announce each when it is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hpcdist.model.flat import FlatModel
from hpcdist.session import rules
from hpcdist.session.loader.batches import AroundLoader
from hpcdist.session.loader.sharded import shard


def torch_loader(loader: Any) -> Any:
    """Return torch's loader inside of Accelerate's, unless it reads an iterable data set."""
    return loader if isinstance(loader.dataset, IterableDataset) else getattr(loader, "base_dataloader", loader)


class TrainingBatches(AroundLoader):
    """This rank's batches of an epoch, which the loop may leave for an evaluation and continue."""

    def __init__(self, plain: DataLoader[Any]):
        self._loader, self.sharded = plain, shard(torch_loader(plain))
        self.sized = not isinstance(plain.dataset, IterableDataset)  # else the length of a rank's share is unknown
        self.open = False  # the loop is inside of an epoch; server ranks, if any, are serving
        self.weights: list[float] = []  # of the batches that were read and not computed yet
        self._epoch = self._drawn = 0
        self._resumes = False  # at the sharded loader's position
        self._batches: Iterator[Any] = iter(())

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError  # as loaders without a length: the Trainer then requires max_steps
        return len(self.sharded)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also for the plain loader's sampler."""
        self._epoch = epoch
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)

    def resume(self, drawn: int, epoch: int | None = None) -> None:
        """Start the next iteration after `drawn` batches: of this epoch, or at the sharded loader's loaded position."""
        if epoch is not None and self.sized:
            self.sharded.set_epoch(epoch, drawn)
        self._resumes, self._drawn = True, drawn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch. Collective at an epoch's first batch, and at the first one after a pause."""
        if not self.open:
            if not self._resumes:
                self.sharded.set_epoch(self._epoch)
                self._drawn = 0
            self._batches, self._resumes, self.open = iter(self.sharded), False, True
        batch = next(self._batches)
        self._drawn += 1
        self.weights.append(self.sharded.weight)
        return batch

    @property
    def exhausted(self) -> bool:
        """Whether all batches of the epoch were read."""
        return self.open and self.sized and self._drawn == len(self)

    def leave(self) -> None:
        """Leave the epoch: its server ranks stop serving."""
        if self.exhausted:
            next(self._batches, None)  # the end of an epoch checks its training
        self._batches.close()  # type: ignore[attr-defined]
        self.open = False

    def pause(self) -> None:
        """Leave the epoch; the next batch continues it."""
        if not self.sized:
            raise rules.error("an epoch of a stream is left for an evaluation")
        self.leave()
        self.sharded.load_state_dict(self.sharded.state_dict())
        self.resume(self._drawn)


class UpdateBatches(list[Any]):
    """The batches whose gradients form one update. Iterating announces each, with its weight, to the model."""

    def __init__(self, batches: Sequence[Any], weights: Sequence[float], reported: Sequence[float], model: FlatModel):
        super().__init__(batches)
        self.reported = 1.0  # weight of the current batch's loss in logs
        self._rows, self._model = list(zip(batches, weights, reported, strict=True)), model
        self._ends_epoch = model.gradients.ends_epoch  # set for the last batch that was read

    def __iter__(self) -> Iterator[Any]:
        for position, (batch, weight, reported) in enumerate(self._rows, start=1):
            self.reported = reported
            self._model.gradients.start_batch(weight, ends_epoch=self._ends_epoch and position == len(self))
            yield batch
