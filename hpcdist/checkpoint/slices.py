"""Slices: the part of a whole tensor that a rank holds, with its position, so that other ranks can read theirs.

A rank holds a *part* of a parameter: all of it, or a box that a device mesh has cut out, perhaps padded at its ends. A
parameter server holds only a *span* of a part: a run of its elements in row-major order. Complex numbers in flat memory
are stored as pairs: a last dimension of 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpcdist.errors import CheckpointError


@dataclass(frozen=True)
class SlicePosition:
    """The position of a slice in a whole tensor."""

    name: str  # of the parameter
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...] | None  # of the part in it; None if only torch on the same ranks can join the parts
    size: tuple[int, ...]  # the part's shape without padding
    part: tuple[int, ...]  # the part's shape with padding
    span: tuple[int, int] | None = None  # elements [first, last) of the part on the rank, row-major; None: all of them

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> SlicePosition:
        """Return the position of a tensor that a rank holds completely."""
        return cls(name, shape, (0,) * len(shape), shape, shape)

    @property
    def is_whole(self) -> bool:
        return self.offset is not None and self.span is None and self.shape == self.size == self.part

    @property
    def numel(self) -> int:
        """The number of elements that the rank holds."""
        return math.prod(self.part) if self.span is None else self.span[1] - self.span[0]

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> SlicePosition:
        """Return the position with these fields, with lists for tuples, as JSON has them.

        Raises:
            ValueError, TypeError: a number is no integer of at least 0, or the slice is not inside the whole tensor.
        """
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in description.items()}
        position = cls(**fields)
        offset, span = position.offset or (0,) * len(position.shape), position.span or (0, 0)
        numbers = (*position.shape, *offset, *position.size, *position.part, *span)
        dimensions = list(zip(position.shape, offset, position.size, position.part, strict=True))
        if (
            not isinstance(position.name, str)
            or any(type(number) is not int or number < 0 for number in numbers)
            or any(size > part for *_, size, part in dimensions)
            or (position.offset is not None and any(start + size > whole for whole, start, size, _ in dimensions))
            or len(span) != 2
            or not span[0] <= span[1] <= math.prod(position.part)
        ):
            raise ValueError(f"a slice must be inside its whole tensor; got {description!r:.200}")
        return position


@dataclass(frozen=True)
class Slice:
    """A slice of a tensor: its position, and its elements, or a function that reads them."""

    position: SlicePosition
    values: Tensor | Callable[[], Tensor]

    @property
    def tensor(self) -> Tensor:
        """The elements, in the part's shape, or 1-D if they are a span of it; raises ValueError for other shapes."""
        tensor = self.values if isinstance(self.values, Tensor) else self.values()
        expected = self.position.part if self.position.span is None else (self.position.numel,)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"a slice of {self.position.name!r} must have shape {list(expected)}; got {tensor.shape}")
        return tensor


def join(slices: Mapping[SlicePosition, Tensor], path: Any) -> Tensor:
    """Join slices to the whole tensor. Elements without a slice are zero.

    Args:
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: the offset of a slice is unknown.
    """
    (first, tensor), *_ = slices.items()
    if first.is_whole:
        return tensor
    parts: dict[tuple[Any, ...], Tensor] = {}
    for position, values in slices.items():
        if position.offset is None:
            raise CheckpointError(
                f"parts of parameters must be contiguous chunks to be joined; got {position.name!r} in {path}, which "
                "has another placement. Gather it in a program on the same ranks: torch's get_model_state_dict inside "
                "hpcdist.consensus."
            )
        box = position.offset, position.size, position.part
        if position.span is None:
            parts[box] = values
        else:
            part = parts.setdefault(box, values.new_zeros(position.part))
            part.view(-1)[slice(*position.span)] = values
    whole = tensor.new_zeros(first.shape)
    for (offset, size, _), part in parts.items():
        whole[_box(offset, size)] = part[_box((0,) * len(size), size)]
    return whole


def cut(whole: Tensor, position: SlicePosition, path: Any) -> Tensor:
    """Return the slice at a position of a tensor, padded with zeros; raise CheckpointError if its offset is unknown."""
    if position.is_whole:
        return whole
    if position.offset is None:
        raise CheckpointError(
            f"parameters must be cut into contiguous chunks to resume from another mesh; got {position.name!r}, which "
            f"has another placement than in {path}. Resume on the mesh of the checkpoint."
        )
    part = whole.new_zeros(position.part)
    part[_box((0,) * len(position.size), position.size)] = whole[_box(position.offset, position.size)]
    return part if position.span is None else part.reshape(-1)[slice(*position.span)]


def _box(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
