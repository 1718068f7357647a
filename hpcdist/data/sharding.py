"""Which worker sees which samples in which step. Pure functions of numbers: nothing is read or sent.

The order of an epoch depends on (seed, epoch) alone, and one step takes the next workers * batch_size samples of it.
So the union over the workers, in worker order, is what one process with that global batch would see, and an epoch
may be resumed at any position on any number of workers.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property

import numpy as np

from hpcdist.errors import ConfigError


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one epoch, each sample in exactly one of them, uneven tails included.

    In a full step every worker has `batch_size` samples. The last step deals out what is left in full batches: the
    lower workers have them, one has the rest, and the others have none. Spread evenly it would leave batches of one
    or two samples, which batch normalisation refuses and a server would apply as a whole step each.

    Args:
        n_samples: Samples in the data set.
        workers: Ranks that train (servers don't count).
        batch_size: Samples per worker and step.
        seed, epoch: What the order is drawn from, by NumPy's default generator. The same on every machine that has
            the same version of NumPy.
        shuffle: False takes the samples in the order of the file.
        start: Samples of this epoch that are consumed already, by whatever number of workers.

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

    def __post_init__(self) -> None:
        for name, minimum in (("n_samples", 1), ("workers", 1), ("batch_size", 1), ("seed", 0), ("epoch", 0)):
            _check_range(name, getattr(self, name), minimum)
        _check_range("start", self.start, 0, self.n_samples)

    @cached_property
    def global_batch(self) -> int:
        """Samples of one full step, over all workers."""
        return self.workers * self.batch_size

    @cached_property
    def steps(self) -> int:
        """Steps from `start` to the end of the epoch."""
        return -(-(self.n_samples - self.start) // self.global_batch)

    def position(self, step: int) -> int:
        """Samples of this epoch that are consumed once `step` steps are done: the `start` of a plan that resumes."""
        _check_range("step", step, 0, self.steps)
        return min(self.start + step * self.global_batch, self.n_samples)

    def sizes(self, step: int) -> tuple[int, ...]:
        """Every worker's batch size in `step`."""
        bounds = self._bounds(step)
        return tuple(high - low for low, high in zip(bounds, bounds[1:]))

    def indices(self, step: int, worker: int) -> np.ndarray:
        """The samples of `worker` in `step`: int64, a copy of its own, possibly empty."""
        _check_range("worker", worker, 0, self.workers - 1)
        low, high = self._bounds(step)[worker : worker + 2]
        return self._order[low:high].copy() if self.shuffle else np.arange(low, high)

    def at(self, epoch: int, start: int = 0) -> EpochPlan:
        """The plan of another epoch, everything else being equal."""
        return replace(self, epoch=epoch, start=start)

    def _bounds(self, step: int) -> list[int]:
        """Where in the epoch's order each worker's slice of `step` begins, and where the last one ends."""
        _check_range("step", step, 0, self.steps - 1)
        first = self.start + step * self.global_batch
        return [min(first + worker * self.batch_size, self.n_samples) for worker in range(self.workers + 1)]

    @cached_property
    def _order(self) -> np.ndarray:
        generator = np.random.default_rng(np.random.SeedSequence((self.seed, self.epoch)))
        return generator.permutation(self.n_samples)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_order"}  # drawn anew where needed


def _check_range(name: str, value: int, minimum: int, maximum: int | None = None) -> None:
    if not isinstance(value, (int, np.integer)):
        raise ConfigError(f"{name} must be a whole number; got {value!r}.")
    if value < minimum or (maximum is not None and value > maximum):
        rule = f"at least {minimum}" if maximum is None else f"in {minimum}..{maximum}"
        raise ConfigError(f"{name} must be {rule}; got {value}.")
