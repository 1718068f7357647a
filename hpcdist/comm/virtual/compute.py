"""Compute models of the virtual cluster: the virtual seconds of a step's forward and backward pass."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from hpcdist.errors import ConfigError


class ComputeModel(abc.ABC):
    """A distribution of step times. Immutable: the rank's generator is passed in."""

    @abc.abstractmethod
    def sample(self, rank: int, generator: np.random.Generator) -> float:
        """Sample the seconds of `rank`'s next step, at least 0."""

    def check(self, size: int) -> None:
        """Check that the model suits a run of `size` ranks; raise ConfigError otherwise."""


@dataclass(frozen=True)
class Constant(ComputeModel):
    """Constant step times: every step takes `seconds`."""

    seconds: float

    def __post_init__(self) -> None:
        require(at_least_0(self.seconds), "seconds", "a finite number of at least 0", self.seconds)

    def sample(self, rank: int, generator: np.random.Generator) -> float:
        return float(self.seconds)


@dataclass(frozen=True)
class Jitter(ComputeModel):
    """Gamma-distributed step times, always positive, of mean `mean_s` and coefficient of variation `cv`."""

    mean_s: float
    cv: float

    def __post_init__(self) -> None:
        require(positive(self.mean_s), "mean_s", "a finite number above 0", self.mean_s)
        require(at_least_0(self.cv), "cv", "a finite number of at least 0 (deviation over mean)", self.cv)

    def sample(self, rank: int, generator: np.random.Generator) -> float:
        variance = self.cv**2
        return float(generator.gamma(1 / variance, self.mean_s * variance) if variance > 0 else self.mean_s)


@dataclass(frozen=True)
class Exponential(ComputeModel):
    """Exponentially distributed step times of mean `mean_s`: far more variable than on most clusters."""

    mean_s: float

    def __post_init__(self) -> None:
        require(positive(self.mean_s), "mean_s", "a finite number above 0", self.mean_s)

    def sample(self, rank: int, generator: np.random.Generator) -> float:
        return float(generator.exponential(self.mean_s))


@dataclass(frozen=True)
class Straggler(ComputeModel):
    """Step times of `base`, `factor` times as long on `rank`."""

    base: ComputeModel
    rank: int
    factor: float

    def __post_init__(self) -> None:
        require(isinstance(self.base, ComputeModel), "base", "a compute model", self.base)
        require(isinstance(self.rank, Integral) and self.rank >= 0, "rank", "an integer of at least 0", self.rank)
        require(positive(self.factor), "factor", "a finite number above 0", self.factor)

    def sample(self, rank: int, generator: np.random.Generator) -> float:
        return self.base.sample(rank, generator) * (self.factor if rank == self.rank else 1)

    def check(self, size: int) -> None:
        require(self.rank < size, "rank of Straggler", f"one of the run's {size} ranks, 0..{size - 1}", self.rank)
        self.base.check(size)


@dataclass(frozen=True)
class SlowSteps(ComputeModel):
    """Step times of `base`; each step of each rank is `factor` times as long with probability `probability`."""

    base: ComputeModel
    probability: float
    factor: float

    def __post_init__(self) -> None:
        require(isinstance(self.base, ComputeModel), "base", "a compute model", self.base)
        rule = "a number from 0 to 1"
        require(at_least_0(self.probability) and self.probability <= 1, "probability", rule, self.probability)
        require(positive(self.factor), "factor", "a finite number above 0", self.factor)

    def sample(self, rank: int, generator: np.random.Generator) -> float:
        slow = generator.random() < self.probability
        return self.base.sample(rank, generator) * (self.factor if slow else 1)

    def check(self, size: int) -> None:
        self.base.check(size)


class Replay(ComputeModel):
    """Measured step times of a run, repeated cyclically. Create a new object for each run.

    Args:
        source: name of the run, for `run.json`.
        seconds: by rank, the seconds of each step.
    """

    def __init__(self, source: str, seconds: Sequence[Sequence[float]]):
        self.source, self._steps = source, [itertools.cycle(of_rank) for of_rank in seconds]

    def sample(self, rank: int, generator: np.random.Generator) -> float:
        return next(self._steps[rank])

    def check(self, size: int) -> None:
        known = len(self._steps)
        require(size <= known, "ranks of Replay", f"at most the {known} of {self.source}", size)


def describe(model: ComputeModel) -> dict[str, Any]:
    """Return a compute model's class name, as `model`, and its parameters, nested models alike: for `run.json`."""
    public = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    values = {key: describe(value) if isinstance(value, ComputeModel) else value for key, value in public.items()}
    return {"model": type(model).__name__, **values}


def require(holds: bool, setting: str, rule: str, value: object) -> None:
    """Check that a setting's rule holds; raise ConfigError otherwise."""
    if not holds:
        raise ConfigError(f"{setting} must be {rule}; got {value!r}.")


def at_least_0(value: object) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < math.inf


def positive(value: object) -> bool:
    return isinstance(value, Real) and 0 < float(value) < math.inf
