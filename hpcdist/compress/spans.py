"""Where parameters lie in flat tensors, for compressors that treat each one, or its matrix, by itself."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdist.flat import FlatModel


@dataclass(frozen=True)
class Span:
    """Where a parameter lies in a flat tensor, and its shape."""

    start: int
    stop: int
    shape: tuple[int, ...]


def spans(model: FlatModel) -> list[list[Span]]:
    """The trainable parameters in each of `model.params`, ascending."""
    found: list[list[Span]] = [[] for _ in model.params]
    for _, group, start, stop, shape in model.named_slices():
        found[group].append(Span(start, stop, tuple(shape)))
    return found
