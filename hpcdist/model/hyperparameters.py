"""The numbers in an optimiser's param_groups: learning rate, momentum, decay...

A schedule changes them on its rank. They are sent with the gradients to servers, or compared between equal replicas.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError, MismatchError

_PRIME = (1 << 31) - 1
_SKIPPED = {"params", "initial_lr"}  # `initial_lr` belongs to the schedule
_SAME_STEPS = "Run backward() and step() for every batch on every rank, or skip a batch on all of them."
_Position = tuple[int, str, int | None]  # group, setting, and index within a setting that is a tuple


class Hyperparameters:
    """The numbers of all param_groups as one vector of float64, to be sent, compared and set.

    Booleans, integers and NumPy's numbers count as numbers, tuples (Adam's betas) as several, tensors of one element (a
    learning rate for `capturable`) as one. Other values (None, names) do not change in training and are skipped.

    Attributes:
        counters: (group, setting) of numbers that the optimiser's step changes, such as a count of steps. They belong
            to the rank whose optimiser steps, and are neither set nor compared.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None):
        self._optimizer: Any = optimizer  # not its list of groups, which load_state_dict replaces
        self._positions = [] if optimizer is None else list(_find(optimizer.param_groups))
        self.counters: set[tuple[int, str]] = set()

    def __len__(self) -> int:
        return len(self._positions)

    def values(self) -> list[float]:
        """Return the current numbers; raise ConfigError if settings or groups were added or removed."""
        groups = self._optimizer.param_groups if self._positions else []
        try:
            items = [groups[n][key] if index is None else groups[n][key][index] for n, key, index in self._positions]
            return [float(value) for value in items]
        except (KeyError, IndexError, TypeError):
            raise ConfigError(
                f"param_groups must keep their settings in training; got {len(groups)} groups in which "
                f"{self.names()[0]} or another one is not a number any more. Change values, not their types."
            ) from None

    def names(self) -> list[str]:
        """Name each number, such as "lr", or "betas[0] of group 1"."""
        return [
            key + ("" if index is None else f"[{index}]") + (f" of group {number}" if number else "")
            for number, key, index in self._positions
        ]

    def track_counters(self, update: Callable[[], None]) -> Callable[[], None]:
        """Return an optimiser's step that adds the numbers that it changes to `counters`."""

        def tracked() -> None:
            before = self.values()
            update()
            for (number, key, _), old, new in zip(self._positions, before, self.values(), strict=True):
                if old != new:
                    self.counters.add((number, key))

        return tracked

    def set(self, values: Sequence[float]) -> None:
        """Write the numbers, except `counters`, to the param_groups, each in its old type if that can hold it."""
        for (number, key, index), value in zip(self._positions, values, strict=True):
            if (number, key) in self.counters:
                continue
            group = self._optimizer.param_groups[number]
            old = group[key] if index is None else group[key][index]
            if isinstance(old, Tensor):
                old.fill_(value)
                continue
            new = _as_type(type(old), value)
            if index is None:
                group[key] = new
            else:
                group[key] = type(group[key])(new if i == index else v for i, v in enumerate(group[key]))

    def digests(self, *others: float) -> list[int]:
        """Return d and d² modulo a prime, where d is a 31-bit checksum of the numbers without `counters`, and `others`.

        From the sums of both over the ranks `digests_are_equal` finds whether all ranks have the same numbers.
        """
        compared = [v for v, position in zip(self.values(), self._positions) if position[:2] not in self.counters]
        values = [*compared, *others]
        digest = zlib.crc32(struct.pack(f"{len(values)}d", *values)) >> 1
        return [digest, digest * digest % _PRIME]


def _find(groups: Sequence[Mapping[str, Any]]) -> Iterator[_Position]:
    """Yield the positions of all numbers in param_groups."""
    for number, group in enumerate(groups):
        for key, value in group.items():
            if key in _SKIPPED:
                continue
            if isinstance(value, (tuple, list)) and all(isinstance(item, Real) for item in value):
                yield from ((number, key, index) for index in range(len(value)))
            elif isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
                yield number, key, None


def _as_type(kind: Any, value: float) -> Any:
    """Convert a number to a type if that can hold it: the integer 0 may become 0.3."""
    if issubclass(kind, bool):
        return kind(round(value))
    if issubclass(kind, Integral) and not value.is_integer():
        return value
    return kind(value) if kind(value) == value else value


def require_equal_values(comm: Communicator, numbers: Hyperparameters, step: int, batch: int = 0) -> None:
    """Collective. Raise MismatchError if ranks have different numbers or are at different batches. Sends 16 bytes."""
    sums = torch.tensor(numbers.digests(batch), dtype=torch.int64)
    comm.allreduce(sums)
    if not digests_are_equal(sums.tolist(), len(comm.failures.alive)):
        raise difference(comm, numbers, step)


def digests_are_equal(sums: Sequence[int], count: int) -> bool:
    """Return whether Σd and Σ(d² mod a prime) can come from `count` equal digests d."""
    total, squares = sums
    digest, remainder = divmod(total, count)
    return remainder == 0 and squares == count * (digest * digest % _PRIME)


def difference(comm: Communicator, numbers: Hyperparameters, step: int) -> MismatchError:
    """Collective. Return the error that names the differing number and rank."""
    values = {rank: each for rank, each in enumerate(comm.gather(numbers.values())) if each is not None}
    error = unequal(numbers, values, f"every rank at step {step}")
    if error is not None:
        return error
    return MismatchError(f"ranks must take the same steps; at step {step} they are at different batches. {_SAME_STEPS}")


def unequal_steps_error(counts: Mapping[int, int], what: str) -> MismatchError | None:
    """Return the error for ranks whose numbers of `what` differ; None if they are equal."""
    if len(set(counts.values())) < 2:
        return None
    listed = ", ".join(f"{count} on rank {rank}" for rank, count in sorted(counts.items()))
    return MismatchError(f"ranks must take the same steps; {what} are {listed}. {_SAME_STEPS}")


def unequal(numbers: Hyperparameters, values_of: Mapping[int, Sequence[float]], where: str) -> MismatchError | None:
    """Return the error that names the first number in which a rank differs from the lowest rank; None if none does.

    Args:
        values_of: by rank, the result of `numbers.values()` there, perhaps followed by others.
    """
    first = min(values_of)
    for rank, values in sorted(values_of.items()):
        rows = zip(numbers._positions, numbers.names(), values_of[first], values)  # `values` may be longer
        for position, name, expected, got in rows:
            if expected != got and position[:2] not in numbers.counters:
                return MismatchError(
                    f"hyper-parameters must be the same on {where}; {name} is {expected:.6g} on rank {first} and "
                    f"{got:.6g} on rank {rank}. Step schedules on all ranks in the same way: a ReduceLROnPlateau by "
                    "the mean of all ranks' losses (hpcdist.metric), not by this rank's loss."
                )
    return None
