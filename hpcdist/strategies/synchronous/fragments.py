"""Cut a model's parameters into fragments, by layers, to exchange one at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from hpcdist.compress import Span
from hpcdist.model.flat import FlatModel

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")  # in a parameter's name, of a member of a list


class Fragment:
    """Some of a model's parameters.

    Args:
        chunks: in `model.params`: by group the slices, ascending; each group has at least one.
        spans: of each group: the parameters, one after the other as `take` puts them, numbered in this order.
        numbers: of these parameters, in the same order, among the model's.

    Attributes:
        which: `numbers` as an index of a tensor of flags; consecutive numbers are a slice, which is faster.
        contiguous: each group has one slice, so that `take` returns views.
    """

    def __init__(self, chunks: dict[int, list[slice]], spans: list[list[Span]], numbers: list[int]):
        self.chunks, self.spans, self.numbers = chunks, spans, numbers
        run = slice(numbers[0], numbers[0] + len(numbers))
        self.which = run if numbers == list(range(run.start, run.stop)) else numbers
        self.contiguous = all(len(of_group) == 1 for of_group in chunks.values())
        self._places = [(group, chunk) for group, of_group in chunks.items() for chunk in of_group]

    def take(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the fragment's elements, a flat tensor for each group: a view where they lie one after the other."""
        return [_joined([flats[group][chunk] for chunk in chunks]) for group, chunks in self.chunks.items()]

    def put(self, values: Sequence[Tensor], flats: Sequence[Tensor]) -> None:
        """Copy what `take` has returned, of these or others, to its places."""
        for value, (group, chunks) in zip(values, self.chunks.items(), strict=True):
            lengths = [chunk.stop - chunk.start for chunk in chunks]
            for chunk, part in zip(chunks, value.split(lengths), strict=True):
                flats[group][chunk].copy_(part)

    def views(self, *flats: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return matching views into several lists of flat tensors, piece by piece."""
        return [tuple([of[group][chunk] for of in flats]) for group, chunk in self._places]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_layers(model: FlatModel, layers: int | None, order: Literal["strided", "sequential"]) -> list[Fragment]:
    """Cut a model into fragments of so many layers each.

    Layers are the members of the model's longest list of modules, such as the blocks of a transformer; what stands
    before the first one goes with it, and what stands after the last one with that. Without such a list each module
    that has parameters is a layer.

    Args:
        layers: None: one fragment of all.
        order: sequential: layers that follow each other; strided: with F fragments every F-th layer.
    """
    places = _layers([slot.name for slot in model.slots])
    count = max(places, default=0) + 1
    fragments = 1 if layers is None else -(-count // layers)
    of_layer = (lambda layer: layer % fragments) if order == "strided" else (lambda layer: layer // (layers or count))
    found: list[list[tuple[int, int, int, int, tuple[int, ...]]]] = [[] for _ in range(fragments)]
    for number, (slot, layer) in enumerate(zip(model.slots, places, strict=True)):
        found[of_layer(layer)].append((slot.group, slot.start, slot.stop, number, tuple(slot.shape)))
    return [_fragment(sorted(parts)) for parts in found if parts]


def _fragment(parts: Sequence[tuple[int, int, int, int, tuple[int, ...]]]) -> Fragment:
    chunks: dict[int, list[slice]] = {}
    spans: dict[int, list[Span]] = {}
    for number, (group, start, stop, _, shape) in enumerate(parts):
        of_group, of_spans = chunks.setdefault(group, []), spans.setdefault(group, [])
        if of_group and of_group[-1].stop == start:
            of_group[-1] = slice(of_group[-1].start, stop)
        else:
            of_group.append(slice(start, stop))
        at = of_spans[-1].stop if of_spans else 0
        of_spans.append(Span(at, at + stop - start, shape, number))
    return Fragment(chunks, list(spans.values()), [number for _, _, _, number, _ in parts])


def _layers(names: Sequence[str]) -> list[int]:
    """Return the number of the layer of each parameter, counted from 0."""
    indexed = [[(name[: found.start()], int(found[0])) for found in _NUMBER.finditer(name)] for name in names]
    members = Counter(prefix for prefix, _ in {pair for pairs in indexed for pair in pairs})
    if not members or max(members.values()) < 2:
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        return [modules.index(name.rpartition(".")[0]) for name in names]
    longest = max(members, key=lambda prefix: (members[prefix], -len(prefix)))
    own = [next((number for prefix, number in pairs if prefix == longest), None) for pairs in indexed]
    order = {number: place for place, number in enumerate(sorted({number for number in own if number is not None}))}
    first = next(place for place, number in enumerate(own) if number is not None)
    places = [None if number is None else order[number] for number in own]
    last = len(order) - 1
    return [(0 if at < first else last) if place is None else place for at, place in enumerate(places)]
