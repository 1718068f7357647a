"""Positions of parameters in flat tensors, for compressors that treat each one, or its matrix, by itself."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdist.model.flat import FlatModel


@dataclass(frozen=True)
class Span:
    """The position of a parameter in a flat tensor, and its shape."""

    start: int
    stop: int
    shape: tuple[int, ...]


def spans(model: FlatModel) -> list[list[Span]]:
    """List the trainable parameters in each of `model.params`, ascending."""
    of_groups: list[list[Span]] = [[] for _ in model.params]
    for _, group, start, stop, shape in model.named_slices():
        of_groups[group].append(Span(start, stop, tuple(shape)))
    return of_groups
