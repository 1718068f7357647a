"""Compute models of the virtual cluster: how many virtual seconds a step's forward and backward pass take."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from hpcdist.errors import ConfigError


class ComputeModel(abc.ABC):
    """A distribution of step times. Immutable: what varies is drawn from the rank's own generator."""

    @abc.abstractmethod
    def draw(self, rank: int, generator: np.random.Generator) -> float:
        """Seconds that `rank`'s next step takes, 0 or more."""

    def check(self, size: int) -> None:
        """Raises ConfigError if the model speaks of ranks that a run of `size` ranks doesn't have."""


@dataclass(frozen=True)
class Constant(ComputeModel):
    """Every step takes `seconds`."""

    seconds: float

    def __post_init__(self):
        require(at_least_0(self.seconds), "seconds", "a finite number of at least 0", self.seconds)

    def draw(self, rank: int, generator: np.random.Generator) -> float:
        return float(self.seconds)


@dataclass(frozen=True)
class Jitter(ComputeModel):
    """Gamma-distributed step times, always positive, of mean `mean_s` and coefficient of variation `cv`."""

    mean_s: float
    cv: float

    def __post_init__(self):
        require(positive(self.mean_s), "mean_s", "a finite number above 0", self.mean_s)
        require(at_least_0(self.cv), "cv", "a finite number of at least 0 (deviation over mean)", self.cv)

    def draw(self, rank: int, generator: np.random.Generator) -> float:
        variance = self.cv**2
        return float(generator.gamma(1 / variance, self.mean_s * variance) if variance > 0 else self.mean_s)


@dataclass(frozen=True)
class Exponential(ComputeModel):
    """Exponentially distributed step times of mean `mean_s`: far more uneven than most clusters are."""

    mean_s: float

    def __post_init__(self):
        require(positive(self.mean_s), "mean_s", "a finite number above 0", self.mean_s)

    def draw(self, rank: int, generator: np.random.Generator) -> float:
        return float(generator.exponential(self.mean_s))


@dataclass(frozen=True)
class Straggler(ComputeModel):
    """`base` for all ranks, but `rank`'s steps take `factor` times as long."""

    base: ComputeModel
    rank: int
    factor: float

    def __post_init__(self):
        require(isinstance(self.base, ComputeModel), "base", "a compute model", self.base)
        require(isinstance(self.rank, Integral) and self.rank >= 0, "rank", "an integer of at least 0", self.rank)
        require(positive(self.factor), "factor", "a finite number above 0", self.factor)

    def draw(self, rank: int, generator: np.random.Generator) -> float:
        return self.base.draw(rank, generator) * (self.factor if rank == self.rank else 1)

    def check(self, size: int) -> None:
        require(self.rank < size, "rank of Straggler", f"one of the run's {size} ranks, 0..{size - 1}", self.rank)
        self.base.check(size)


def require(holds: bool, setting: str, rule: str, value: object) -> None:
    """Raises ConfigError unless a setting's rule holds."""
    if not holds:
        raise ConfigError(f"{setting} must be {rule}; got {value!r}.")


def at_least_0(value: object) -> bool:
    return isinstance(value, Real) and 0 <= value < math.inf


def positive(value: object) -> bool:
    return isinstance(value, Real) and 0 < value < math.inf
