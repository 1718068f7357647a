"""Divide the samples of an epoch among workers and steps. Pure functions of numbers: nothing is read or sent.

The order of an epoch depends only on (seed, epoch), and a step takes the next workers * batch_size samples of it. So
the workers' batches, joined in worker order, are the batch that one process with that global batch would read, and
an epoch can be resumed at any position on any number of workers.
"""

from __future__ import annotations

import itertools
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property

import numpy as np

from hpcdist.errors import ConfigError


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one epoch, each sample in exactly one of them, uneven tails included.

    In a full step every worker has `batch_size` samples. In the last step the first workers have full batches, the next
    one has the rest, and the others have none. Dividing the rest evenly could create batches of one sample. Batch
    normalisation refuses these, and a parameter server would apply each as a whole step.

    Args:
        n_samples: Samples in the data set.
        workers: Ranks that train (servers don't count).
        batch_size: Samples per worker and step.
        seed, epoch: Seeds of the order, by NumPy's default generator: the same with the same version of NumPy.
        shuffle: False takes the samples in the order of the file.
        start: Samples of this epoch that any number of workers have consumed before.
        parts: Sample indices of each worker, e.g. from `data.labels.dirichlet`; empty: any worker may get any sample.
            A worker with a shorter part has no samples in the last steps. An epoch that is resumed on another number
            of workers continues in other parts, at about the same fraction of the epoch.

    Raises:
        ConfigError: a number is out of range.
    """

    n_samples: int
    workers: int
    batch_size: int
    _: KW_ONLY
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    start: int = 0
    parts: tuple[np.ndarray, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, minimum in (("n_samples", 1), ("workers", 1), ("batch_size", 1), ("seed", 0), ("epoch", 0)):
            check_range(name, getattr(self, name), minimum)
        check_range("start", self.start, 0, self.n_samples)

    @cached_property
    def global_batch(self) -> int:
        """Samples of a full step, of all workers."""
        return self.workers * self.batch_size

    @cached_property
    def steps(self) -> int:
        """Steps from `start` to the end of the epoch."""
        if self.parts:
            return (len(self._cuts) - 1) // self.workers - self._steps_before
        return -(-(self.n_samples - self.start) // self.global_batch)

    def position(self, step: int) -> int:
        """Return the samples of this epoch that are consumed after `step` steps: the `start` of a resumed plan."""
        check_range("step", step, 0, self.steps)
        return self._bound(step, 0)

    def sizes(self, step: int) -> tuple[int, ...]:
        """Return all workers' batch sizes in `step`."""
        check_range("step", step, 0, self.steps - 1)
        bounds = [self._bound(step, worker) for worker in range(self.workers + 1)]
        return tuple(high - low for low, high in itertools.pairwise(bounds))

    def indices(self, step: int, worker: int) -> np.ndarray:
        """Return the samples of `worker` in `step`: int64, a copy, possibly empty."""
        check_range("worker", worker, 0, self.workers - 1)
        low, high = self._slice(step, worker)
        return self._order[low:high].copy() if self.shuffle or self.parts else np.arange(low, high)

    def joint(self, step: int, overlap: float = 0.0) -> tuple[np.ndarray, int, int]:
        """Return the samples of all workers in `step`, extended by the last samples of the step before.

        Args:
            overlap: the fraction of a full step's samples that the next step repeats.

        Returns:
            The samples, int64; how many at the start are also in the step before; how many at the end in the next one.
        """
        first, last = self.position(step), self.position(step + 1)
        shared = round(overlap * self.global_batch)
        head, tail = min(shared, first), shared * (last < self.n_samples)
        return (self._order if self.shuffle else np.arange(self.n_samples))[first - head : last], head, tail

    def weight(self, step: int, worker: int) -> float:
        """Return the weight of a worker's batch in the mean over the workers: its size over the mean size."""
        low, high = self._slice(step, worker)
        return (high - low) * self.workers / (self.position(step + 1) - self.position(step))

    def batch(self, step: int, worker: int) -> np.ndarray:
        """Return `indices`; if the worker has no sample in this step, the epoch's first batch, which weighs 0."""
        indices = self.indices(step, worker)
        return indices if indices.size else replace(self, start=0).indices(0, 0)

    def at(self, epoch: int, start: int = 0) -> EpochPlan:
        """Return the plan of another epoch with the same settings."""
        return replace(self, epoch=epoch, start=start)

    def _slice(self, step: int, worker: int) -> tuple[int, int]:
        """Return the start and the end of a worker's batch in the epoch's order."""
        check_range("step", step, 0, self.steps - 1)
        return self._bound(step, worker), self._bound(step, worker + 1)

    def _bound(self, step: int, worker: int) -> int:
        if self.parts:
            return int(self._cuts[(self._steps_before + step) * self.workers + worker])
        return min(self.start + step * self.global_batch + worker * self.batch_size, self.n_samples)

    @cached_property
    def _cuts(self) -> np.ndarray:
        """With parts: the bounds of all batches of a whole epoch in its order, step by step."""
        lengths = np.array(list(map(len, self.parts)))
        firsts = np.arange(0, lengths.max(), self.batch_size)[:, np.newaxis]  # of each step, in a part
        return np.append(0, np.clip(lengths - firsts, 0, self.batch_size).cumsum())

    @cached_property
    def _steps_before(self) -> int:
        """The number of steps after which `start` samples of an epoch with parts are consumed."""
        return int(np.searchsorted(self._cuts[:: self.workers], self.start))

    @cached_property
    def _order(self) -> np.ndarray:
        """All samples of the epoch; with parts step by step: the batches of all workers in turn."""
        if self.parts:
            orders = [self._shuffled(worker, part) for worker, part in enumerate(self.parts)]
            firsts = range(0, max(map(len, orders)), self.batch_size)
            return np.concatenate([part[first : first + self.batch_size] for first in firsts for part in orders])
        generator = np.random.default_rng(np.random.SeedSequence((self.seed, self.epoch)))
        return generator.permutation(self.n_samples)

    def _shuffled(self, worker: int, part: np.ndarray) -> np.ndarray:
        """Return a worker's part in the order of this epoch."""
        if not self.shuffle:
            return part
        return np.random.default_rng(np.random.SeedSequence((self.seed, self.epoch, worker))).permutation(part)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in ("_order", "_cuts")}  # computed again


def check_range(name: str, value: int, minimum: int, maximum: int | None = None) -> None:
    if not isinstance(value, (int, np.integer)):
        raise ConfigError(f"{name} must be a whole number; got {value!r}.")
    if value < minimum or (maximum is not None and value > maximum):
        rule = f"at least {minimum}" if maximum is None else f"in {minimum}..{maximum}"
        raise ConfigError(f"{name} must be {rule}; got {value}.")
