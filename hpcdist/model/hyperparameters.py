"""The numbers in an optimiser's param_groups: learning rate, momentum, decay...

A schedule changes them only on its own rank. So they are sent with the gradients to the ranks that apply these, and
ranks that need equal ones compare them.
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
_LEFT_OUT = {"params", "initial_lr"}  # the second belongs to the schedule
_LEAVE_OUT = "Run backward() and step() for every batch on every rank, or leave a batch out on all of them."
_Place = tuple[int, str, int | None]  # group, setting, and index within a setting that is a tuple


class Hyperparameters:
    """The numbers of all param_groups as one vector of float64, to be sent, compared and set.

    Booleans, integers and NumPy's numbers count as numbers, tuples (Adam's betas) as several, tensors of one element (a
    learning rate for `capturable`) as one. Other values (None, names) do not change in training and are left out.

    Attributes:
        own: group and setting of numbers that the optimiser's step changes by itself, such as a count of steps. They
            belong to the rank whose optimiser steps, and are neither set nor compared.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None):
        self._optimizer: Any = optimizer  # its list of groups is another one after load_state_dict
        self._places = [] if optimizer is None else list(_find(optimizer.param_groups))
        self.own: set[tuple[int, str]] = set()

    def __len__(self) -> int:
        return len(self._places)

    def values(self) -> list[float]:
        """Return the current numbers.

        Raises:
            ConfigError: settings or groups were added or removed.
        """
        groups = self._optimizer.param_groups if self._places else []
        try:
            items = [groups[n][key] if index is None else groups[n][key][index] for n, key, index in self._places]
            return [float(value) for value in items]
        except (KeyError, IndexError, TypeError):
            raise ConfigError(
                f"param_groups must keep their settings in training; got {len(groups)} groups in which "
                f"{self.names()[0]} or another one is no number any more. Change values, not their kind."
            ) from None

    def names(self) -> list[str]:
        """Name each number, such as "lr", or "betas[0] of group 1"."""
        return [
            key + ("" if index is None else f"[{index}]") + (f" of group {number}" if number else "")
            for number, key, index in self._places
        ]

    def noting(self, update: Callable[[], None]) -> Callable[[], None]:
        """Return an optimiser's step that notes which numbers it changes by itself."""

        def noted() -> None:
            before = self.values()
            update()
            for (number, key, _), old, new in zip(self._places, before, self.values(), strict=True):
                if old != new:
                    self.own.add((number, key))

        return noted

    def set(self, values: Sequence[float]) -> None:
        """Write the numbers into the param_groups, each in its old type if that can hold it; all but `own`."""
        for (number, key, index), value in zip(self._places, values, strict=True):
            if (number, key) in self.own:
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
        """Return d and d² modulo a prime, d being a checksum of the numbers but `own`, and of `others`, of 31 bits.

        Their sums over the ranks tell whether all have the same numbers, see `sums_are_of_equals`.
        """
        compared = [value for value, place in zip(self.values(), self._places) if place[:2] not in self.own]
        values = [*compared, *others]
        digest = zlib.crc32(struct.pack(f"{len(values)}d", *values)) >> 1
        return [digest, digest * digest % _PRIME]


def _find(groups: Sequence[Mapping[str, Any]]) -> Iterator[_Place]:
    for number, group in enumerate(groups):
        for key, value in group.items():
            if key in _LEFT_OUT:
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


def require_equal_values(comm: Communicator, mine: Hyperparameters, step: int, batch: int = 0) -> None:
    """Collective. Raise MismatchError if ranks have different numbers or are at different batches. Sends 16 bytes."""
    word = torch.tensor(mine.digests(batch), dtype=torch.int64)
    comm.allreduce(word)
    if not sums_are_of_equals(word.tolist(), len(comm.failures.alive)):
        raise difference(comm, mine, step)


def sums_are_of_equals(sums: Sequence[int], count: int) -> bool:
    """Tell whether Σd and Σ(d² mod a prime) can come from `count` equal digests d."""
    total, squares = sums
    digest, rest = divmod(total, count)
    return rest == 0 and squares == count * (digest * digest % _PRIME)


def difference(comm: Communicator, mine: Hyperparameters, step: int) -> MismatchError:
    """Collective. Make the error that names the differing number and rank."""
    values = {rank: numbers for rank, numbers in enumerate(comm.gather(mine.values())) if numbers is not None}
    error = unequal(mine, values, f"every rank at step {step}")
    if error is not None:
        return error
    return MismatchError(f"ranks must take the same steps; at step {step} they are at different batches. {_LEAVE_OUT}")


def unequal_steps(counts: Mapping[int, int], what: str) -> MismatchError | None:
    """Make the error for ranks whose numbers of `what` differ; None if they are equal."""
    if len(set(counts.values())) < 2:
        return None
    listed = ", ".join(f"{count} on rank {rank}" for rank, count in sorted(counts.items()))
    return MismatchError(f"ranks must take the same steps; {what} are {listed}. {_LEAVE_OUT}")


def unequal(mine: Hyperparameters, values_of: Mapping[int, Sequence[float]], where: str) -> MismatchError | None:
    """Make the error that names the first number in which a rank differs from the lowest rank; None if none does."""
    first = min(values_of)
    for rank, values in sorted(values_of.items()):
        for place, name, own, theirs in zip(mine._places, mine.names(), values_of[first], values):  # more may follow
            if own != theirs and place[:2] not in mine.own:
                return MismatchError(
                    f"hyper-parameters must be the same on {where}; {name} is {own:.6g} on rank {first} and "
                    f"{theirs:.6g} on rank {rank}. Step schedules alike everywhere: a ReduceLROnPlateau on the mean of "
                    "all ranks' losses (hpcdist.metric), not on this rank's own."
                )
    return None
