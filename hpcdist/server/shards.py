"""The parameters cut into shards of equal bytes, one per server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpcdist.compress import Span


@dataclass(frozen=True)
class Shard:
    """A range of a flat model: elements [start, stop) of each of its groups, some of them empty."""

    ranges: tuple[tuple[int, int], ...]

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The shard's part of each flat tensor, as views."""
        return [tensor[start:stop] for tensor, (start, stop) in zip(tensors, self.ranges, strict=True)]

    def overlaps(self, group: int, start: int, stop: int) -> bool:
        """Whether elements [start, stop) of a group lie in the shard, at least one of them."""
        first, last = self.ranges[group]
        return max(start, first) < min(stop, last)

    def outside(self, group: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Of a run of elements that the shard has a part of: (group, start, stop) of the parts that it doesn't have."""
        if not self.overlaps(group, start, stop):
            return []
        first, last = self.ranges[group]
        return [(group, a, b) for a, b in ((start, min(first, stop)), (max(last, start), stop)) if a < b]

    def spans(self, spans: Sequence[Sequence[Span]]) -> list[list[Span]]:
        """Where the parameters of each flat tensor lie in the shard's part of it; a cut one is several."""
        return [
            [piece for span in own for piece in _pieces(span, start, stop)]
            for own, (start, stop) in zip(spans, self.ranges, strict=True)
        ]


def _pieces(span: Span, start: int, stop: int) -> Iterator[Span]:
    """What elements [start, stop) have of a parameter, counted from `start`: whole rows of a matrix stay one matrix."""
    first, last = max(span.start, start), min(span.stop, stop)
    if first >= last:
        return
    width = (span.stop - span.start) // span.shape[0] if len(span.shape) > 1 else 1
    top, bottom = (-(-(first - span.start) // width), (last - span.start) // width) if width > 1 else (0, 0)
    if (first, last) == (span.start, span.stop):
        yield Span(first - start, last - start, span.shape)
    elif top >= bottom:
        yield Span(first - start, last - start, (last - first,))
    else:
        ends = (first, span.start + top * width, span.start + bottom * width, last)
        shapes = ((ends[1] - first,), (bottom - top, *span.shape[1:]), (last - ends[2],))
        for begin, end, shape in zip(ends, ends[1:], shapes):
            if begin < end:
                yield Span(begin - start, end - start, shape)


def cut(tensors: Sequence[Tensor], count: int) -> list[Shard]:
    """`count` shards of flat tensors laid end to end, whose bytes differ by at most two elements.

    A shard may begin or end inside a parameter.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    cuts = [total * i // count for i in range(count + 1)]  # in bytes
    shards = []
    for first, last in zip(cuts, cuts[1:]):
        ranges, begin = [], 0
        for tensor in tensors:
            ranges.append((_within(first - begin, tensor), _within(last - begin, tensor)))
            begin += tensor.nbytes
        shards.append(Shard(tuple(ranges)))
    return shards


def _within(n_bytes: int, tensor: Tensor) -> int:
    """The element at a distance in bytes from the tensor's beginning, held within the tensor."""
    return min(max(n_bytes, 0), tensor.nbytes) // tensor.itemsize
