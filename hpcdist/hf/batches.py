"""Give the Trainer's loop this rank's batches, which it draws ahead, and announce each where it is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hpcdist.model.flat import FlatModel
from hpcdist.session import rules
from hpcdist.session.loader.sharded import shard


def torch_loader(loader: Any) -> Any:
    """Return torch's loader inside of Accelerate's, of which a map-style data set needs nothing."""
    return loader if isinstance(loader.dataset, IterableDataset) else getattr(loader, "base_dataloader", loader)


class TrainingBatches:
    """This rank's batches of an epoch, which the loop may leave for an evaluation and take up again.

    Attributes:
        sharded: deals them out.
        sized: the data set has a length; else nobody knows a rank's share.
        open: the loop is inside of an epoch; where some ranks serve, they are serving.
        weights: of the batches that were drawn and not computed yet.
    """

    def __init__(self, plain: DataLoader[Any]):
        self._plain, self.sharded = plain, shard(torch_loader(plain))
        self.sized = not isinstance(plain.dataset, IterableDataset)
        self.open = False
        self.weights: list[float] = []
        self._epoch = self._drawn = 0
        self._resumes = False  # the sharded loader knows where
        self._batches: Iterator[Any] = iter(())

    def __getattr__(self, name: str) -> Any:
        """Return what the plain loader has by this name, such as its `dataset` or `batch_size`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._plain, name)

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError  # as a loader without a length does: the Trainer then asks for max_steps
        return len(self.sharded)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, for a sampler that draws by it too."""
        self._epoch = epoch
        if hasattr(self._plain, "set_epoch"):
            self._plain.set_epoch(epoch)

    def resume(self, drawn: int) -> None:
        """Begin the next iteration where the sharded loader stands, after so many batches of its epoch."""
        self._resumes, self._drawn = True, drawn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Collective at an epoch's first batch, and at the first one after a pause."""
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
        """Whether all batches of the epoch were drawn."""
        return self.open and self.sized and self._drawn == len(self)

    def leave(self) -> None:
        """Leave the epoch: ranks that serve it stop serving."""
        if self.exhausted:
            next(self._batches, None)  # its end compares what an epoch has trained
        self._batches.close()  # type: ignore[attr-defined]
        self.open = False

    def pause(self) -> None:
        """Leave the epoch, which goes on at the next batch."""
        if not self.sized:
            raise rules.error("an epoch of a stream is left for an evaluation")
        self.leave()
        self.sharded.load_state_dict(self.sharded.state_dict())
        self.resume(self._drawn)


class UpdateBatches(list[Any]):
    """The batches whose gradients make one update. Iterating announces each, with its weight, to the model.

    Attributes:
        reported: the factor by which the loss of the current batch counts in what is logged.
    """

    def __init__(self, batches: Sequence[Any], weights: Sequence[float], reported: Sequence[float], model: FlatModel):
        super().__init__(batches)
        self.reported = 1.0
        self._rows, self._model = list(zip(batches, weights, reported, strict=True)), model
        self._ends_epoch = model.gradients.ends_epoch  # said of the batch that was drawn last

    def __iter__(self) -> Iterator[Any]:
        for position, (batch, weight, reported) in enumerate(self._rows, start=1):
            self.reported = reported
            self._model.gradients.start_batch(weight, ends_epoch=self._ends_epoch and position == len(self))
            yield batch
