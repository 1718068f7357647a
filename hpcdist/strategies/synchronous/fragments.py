"""Split a model's parameters into fragments, by layers, to exchange one at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from hpcdist.compress import Span, spans
from hpcdist.model.flat import FlatModel

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")  # index of a list's member in a parameter's name


class Fragment:
    """Some of a model's parameters.

    Args:
        parts: the parameters' spans in the tensors of `model.params` that have some, by the tensors' numbers.

    Attributes:
        chunks: slices of each tensor in `model.params`, ascending; neighbours' spans are joined.
        spans: the parameters' spans in each tensor that `take` returns.
        numbers: the parameters' numbers in the model, in the same order.
        flag_index: `numbers` as an index of a tensor of flags; a slice, which is faster, if they are consecutive.
        contiguous: every group has a single slice, so that `take` returns views.
    """

    def __init__(self, parts: dict[int, list[Span]]):
        self.numbers = numbers = [span.number for of_group in parts.values() for span in of_group]
        self.chunks: dict[int, list[slice]] = {}
        self.spans: list[list[Span]] = []
        for group, of_group in parts.items():
            chunks, ends = list[slice](), [0, *accumulate(span.stop - span.start for span in of_group)]
            for span in of_group:
                if chunks and chunks[-1].stop == span.start:
                    chunks[-1] = slice(chunks[-1].start, span.stop)
                else:
                    chunks.append(slice(span.start, span.stop))
            self.chunks[group] = chunks
            self.spans.append([replace(s, start=a, stop=b) for s, (a, b) in zip(of_group, pairwise(ends), strict=True)])
        run = slice(numbers[0], numbers[0] + len(numbers))
        self.flag_index = run if numbers == list(range(run.start, run.stop)) else numbers
        self.contiguous = all(len(of_group) == 1 for of_group in self.chunks.values())
        self._chunks = [(group, chunk) for group, of_group in self.chunks.items() for chunk in of_group]

    def take(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the fragment's elements, a flat tensor for each group; a view if they are contiguous."""
        return [_joined([flats[group][chunk] for chunk in chunks]) for group, chunks in self.chunks.items()]

    def put(self, values: Sequence[Tensor], flats: Sequence[Tensor]) -> None:
        """Copy tensors like the result of `take` into the fragment's elements of `flats`."""
        for value, (group, chunks) in zip(values, self.chunks.items(), strict=True):
            lengths = [chunk.stop - chunk.start for chunk in chunks]
            for chunk, part in zip(chunks, value.split(lengths), strict=True):
                flats[group][chunk].copy_(part)

    def views(self, *flats: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return matching views of several lists of flat tensors, chunk by chunk."""
        return [tuple([of[group][chunk] for of in flats]) for group, chunk in self._chunks]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_layers(model: FlatModel, layers: int | None, order: Literal["strided", "sequential"]) -> list[Fragment]:
    """Split a model into fragments of `layers` layers each.

    Layers are the members of the model's longest list of modules, such as the blocks of a transformer; parameters
    before the first layer belong to it, parameters after the last layer to the last. Without such a list each module
    with parameters is a layer.

    Args:
        layers: number of layers in a fragment; None: a single fragment.
        order: sequential: consecutive layers; strided: every F-th layer, for F fragments.
    """
    layer_of = _layers([slot.name for slot in model.slots])
    count = max(layer_of, default=0) + 1
    fragments = 1 if layers is None else -(-count // layers)
    index_of = (lambda layer: layer % fragments) if order == "strided" else (lambda layer: layer // (layers or count))
    parts: list[dict[int, list[Span]]] = [{} for _ in range(fragments)]
    for group, of_group in enumerate(spans(model)):
        for span in of_group:
            parts[index_of(layer_of[span.number])].setdefault(group, []).append(span)
    return [Fragment(part) for part in parts if part]


def _layers(names: Sequence[str]) -> list[int]:
    """Return the layer of each parameter, counted from 0, by names such as blocks.3.weight, see `split_layers`."""
    # For each name the lists of modules in it, and the index in each: [("blocks.", 3)].
    lists_of = [[(name[: match.start()], int(match[0])) for match in _NUMBER.finditer(name)] for name in names]
    lengths = Counter(prefix for prefix, _ in {pair for pairs in lists_of for pair in pairs})
    if not lengths or max(lengths.values()) < 2:
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        return [modules.index(name.rpartition(".")[0]) for name in names]
    longest = max(lengths, key=lambda prefix: (lengths[prefix], -len(prefix)))
    indices = [next((i for prefix, i in pairs if prefix == longest), None) for pairs in lists_of]
    order = {i: position for position, i in enumerate(sorted({i for i in indices if i is not None}))}
    first = next(position for position, i in enumerate(indices) if i is not None)
    layers = [None if i is None else order[i] for i in indices]
    last = len(order) - 1
    return [(0 if index < first else last) if position is None else position for index, position in enumerate(layers)]
