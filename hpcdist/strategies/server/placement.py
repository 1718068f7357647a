"""Assign roles to ranks (server, aggregator, worker), and split the parameters into shards of about equal bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.compress import Span
from hpcdist.errors import ConfigError

Servers = Annotated[int, Field(ge=1)] | Literal["colocated"]
FanIn = Annotated[
    int | None,
    Field(ge=2, description="largest number of children in a tree of aggregators; none: send to the servers"),
]


@dataclass(frozen=True)
class Roles:
    """The roles of all ranks. A rank pushes requests to its parents, which reply.

    `servers` hold a shard each; `parents[r]` are the ranks that rank r pushes to: all servers, or one aggregator.
    """

    servers: tuple[int, ...]
    aggregators: tuple[int, ...]
    workers: tuple[int, ...]
    parents: dict[int, tuple[int, ...]]

    @property
    def needed(self) -> tuple[int, ...]:
        """The ranks that the run cannot continue without."""
        return (*self.servers, *self.aggregators)

    def children(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that push to `rank`, ascending."""
        return tuple(child for child, parents in sorted(self.parents.items()) if rank in parents)

    def height(self, rank: int) -> int:
        """Return the height of a rank in the tree: 0 for a worker, 1 for an aggregator of workers..."""
        return 0 if rank in self.workers else 1 + self.height(self.children(rank)[0])


def assign(size: int, servers: Servers = 1, fan_in: int | None = None) -> Roles:
    """Assign roles to `size` ranks; one rank alone is a worker without a server.

    Args:
        servers: ranks 0 to servers − 1 are servers only; "colocated": every rank is a worker, and serves a shard
            during its steps.
        fan_in: largest number of children of a server or aggregator; there are as many levels of aggregators between
            the server and the workers as necessary. None: workers push to the servers.

    Raises:
        ConfigError: no rank remains to be a worker, or a tree has several roots.
    """
    if fan_in is not None and servers != 1:
        raise ConfigError(
            f"strategy.fan_in must go with one server, the root of the tree; got strategy.servers {servers}. Leave "
            "one of the two out."
        )
    if size == 1:
        return Roles((), (), (0,), {})
    if isinstance(servers, str):  # colocated
        all_ranks = tuple(range(size))
        return Roles(all_ranks, (), all_ranks, dict.fromkeys(all_ranks, all_ranks))
    levels = _levels(size - servers, fan_in) if fan_in is not None else []
    first = servers + sum(levels)
    if first >= size:
        raise ConfigError(
            f"strategy.servers must leave at least one rank to be a worker; got {servers} on {size} ranks. Start more "
            "ranks, or use fewer servers."
        )
    workers = tuple(range(first, size))
    parents: dict[int, tuple[int, ...]] = {}
    upper, next_rank = tuple(range(servers)), servers
    for count in levels:
        level = tuple(range(next_rank, next_rank + count))
        parents |= _deal(level, upper)
        upper, next_rank = level, next_rank + count
    if levels:
        parents |= _deal(workers, upper)
    else:
        parents |= dict.fromkeys(workers, upper)
    return Roles(tuple(range(servers)), tuple(range(servers, first)), workers, parents)


def _levels(ranks: int, fan_in: int) -> list[int]:
    """Return the number of aggregators per level, from the server down, for as many workers as possible."""
    for workers in range(ranks, 0, -1):
        levels: list[int] = []
        below = workers
        while below > fan_in:
            below = -(-below // fan_in)
            levels.insert(0, below)
        if workers + sum(levels) <= ranks:
            while remaining := ranks - workers - sum(levels):  # another worker would need more aggregators than remain
                levels.insert(0, min(remaining, levels[0] if levels else workers))
            return levels
    return []


def _deal(children: tuple[int, ...], parents: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return each child's parent: consecutive children have the same one, and parents get equally many, up to one."""
    return {child: (parents[i * len(parents) // len(children)],) for i, child in enumerate(children)}


@dataclass(frozen=True)
class Shard:
    """A shard of a flat model: elements [start, stop) of each flat tensor; ranges may be empty."""

    ranges: tuple[tuple[int, int], ...]

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the shard's part of each flat tensor, as views."""
        return [tensor[start:stop] for tensor, (start, stop) in zip(tensors, self.ranges, strict=True)]

    def overlaps(self, group: int, start: int, stop: int) -> bool:
        """Return whether any of the elements [start, stop) of a group is in the shard."""
        first, last = self.ranges[group]
        return max(start, first) < min(stop, last)

    def outside(self, group: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return the parts (group, start, stop) of [start, stop) outside the shard, if another part is inside."""
        if not self.overlaps(group, start, stop):
            return []
        first, last = self.ranges[group]
        return [(group, a, b) for a, b in ((start, min(first, stop)), (max(last, start), stop)) if a < b]

    def spans(self, spans: Sequence[Sequence[Span]]) -> list[list[Span]]:
        """Return the parameters' spans in the shard's part of each flat tensor; a split parameter has several."""
        return [
            [chunk for span in of_tensor for chunk in _chunks(span, start, stop)]
            for of_tensor, (start, stop) in zip(spans, self.ranges, strict=True)
        ]


def _chunks(span: Span, start: int, stop: int) -> Iterator[Span]:
    """Yield the parts of a parameter in [start, stop), relative to `start`; whole rows of a matrix stay a matrix."""
    first, last = max(span.start, start), min(span.stop, stop)
    if first >= last:
        return
    width = (span.stop - span.start) // span.shape[0] if len(span.shape) > 1 else 1
    # Rows [top, bottom) are complete.
    top, bottom = (-(-(first - span.start) // width), (last - span.start) // width) if width > 1 else (0, 0)
    if (first, last) == (span.start, span.stop):
        yield Span(first - start, last - start, span.shape, span.number)
    elif top >= bottom:
        yield Span(first - start, last - start, (last - first,), span.number)
    else:
        ends = (first, span.start + top * width, span.start + bottom * width, last)
        shapes = ((ends[1] - first,), (bottom - top, *span.shape[1:]), (last - ends[2],))
        for begin, end, shape in zip(ends, ends[1:], shapes):
            if begin < end:
                yield Span(begin - start, end - start, shape, span.number)


def broadcast_shards(comm: Communicator, shards: Iterable[tuple[int, Shard]], tensors: Sequence[Tensor]) -> None:
    """Collective. Broadcast each shard's part of the flat tensors from its rank.

    Args:
        shards: pairs (rank, shard), in the same order on all ranks.
    """
    for rank, shard in shards:
        for part in shard.of(tensors):
            if part.numel():
                comm.broadcast(part, rank)


def create_shards(tensors: Sequence[Tensor], count: int, spans: Sequence[Sequence[Span]] | None = None) -> list[Shard]:
    """Split concatenated flat tensors into `count` shards.

    Args:
        spans: the parameters in each tensor: shards have whole parameters, and the largest shard is as small as
            possible; with fewer parameters than shards some are empty. None: shards differ by at most two elements,
            and may start or end inside a parameter.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    if spans is None:
        cuts = [total * i // count for i in range(count + 1)]  # in bytes
    else:
        sizes = [(s.stop - s.start) * t.itemsize for t, of_flat in zip(tensors, spans, strict=True) for s in of_flat]
        ends = [0, *accumulate(sizes)]
        cuts = [ends[i] for i in _borders(sizes, count)]
    shards = []
    for first, last in pairwise(cuts):
        ranges, offset = [], 0
        for tensor in tensors:
            ranges.append((_within(first - offset, tensor), _within(last - offset, tensor)))
            offset += tensor.nbytes
        shards.append(Shard(tuple(ranges)))
    return shards


def _borders(sizes: Sequence[int], count: int) -> list[int]:
    """Return the borders that split sizes into `count` runs with the smallest possible largest sum."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:  # find the smallest cap for which `count` runs suffice
        cap = (low + high) // 2
        low, high = (low, cap) if len(_fill(sizes, count, cap)) <= count + 1 else (cap + 1, high)
    borders = _fill(sizes, count, low)
    return borders + [len(sizes)] * (count + 1 - len(borders))


def _fill(sizes: Sequence[int], count: int, cap: int) -> list[int]:
    """Fill consecutive runs up to the cap, leaving at least one size for each; return their borders."""
    borders, held = [0], 0
    for i, size in enumerate(sizes):
        needed = i - borders[-1] and len(sizes) - i <= count - len(borders)  # by the remaining runs
        if i and (held + size > cap or needed):
            borders.append(i)
            held = 0
        held += size
    return [*borders, len(sizes)]


def _within(n_bytes: int, tensor: Tensor) -> int:
    """Convert a byte offset to an element offset, clamped to the tensor."""
    return min(max(n_bytes, 0), tensor.nbytes) // tensor.itemsize
