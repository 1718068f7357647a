"""Assign roles to ranks: servers, aggregators, workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hpcdist.errors import ConfigError

Servers = Annotated[int, Field(ge=1)] | Literal["colocated"]
FanIn = Annotated[
    int | None,
    Field(ge=2, description="send to a tree of aggregators with at most so many children each; none: to the servers"),
]


@dataclass(frozen=True)
class Roles:
    """Give each rank its role. A rank pushes requests to its parents, which reply.

    `servers` hold a shard each; `parents[r]` are the ranks to which rank r pushes: all servers, or its one aggregator.
    """

    servers: tuple[int, ...]
    aggregators: tuple[int, ...]
    workers: tuple[int, ...]
    parents: dict[int, tuple[int, ...]]

    @property
    def needed(self) -> tuple[int, ...]:
        """Return the ranks without which the others can't go on."""
        return (*self.servers, *self.aggregators)

    def children(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that push to `rank`, ascending."""
        return tuple(child for child, parents in sorted(self.parents.items()) if rank in parents)

    def height(self, rank: int) -> int:
        """Return how high a rank stands above workers: 1 for an aggregator of workers, 2 above such aggregators..."""
        return 0 if rank in self.workers else 1 + self.height(self.children(rank)[0])


def assign(size: int, servers: Servers = 1, fan_in: int | None = None) -> Roles:
    """Assign roles to `size` ranks; one rank alone is a worker without a server.

    Args:
        servers: ranks 0 to servers − 1 serve and do nothing else; "colocated": every rank is a worker and serves a
            shard while it is inside a step.
        fan_in: a server or aggregator has at most so many children; aggregators between the one server and the
            workers form as many levels as that takes. None: all workers push to the servers themselves.

    Raises:
        ConfigError: no rank is left to be a worker, or a tree has several roots.
    """
    if fan_in is not None and servers != 1:
        raise ConfigError(
            f"strategy.fan_in must go with one server, the root of the tree; got strategy.servers {servers}. Leave "
            "one of the two out."
        )
    if size == 1:
        return Roles((), (), (0,), {})
    if isinstance(servers, str):  # colocated
        everyone = tuple(range(size))
        return Roles(everyone, (), everyone, dict.fromkeys(everyone, everyone))
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
    """Return the aggregators per level, from the server down, so that they and their workers are `ranks` together."""
    for workers in range(ranks, 0, -1):
        levels: list[int] = []
        below = workers
        while below > fan_in:
            below = -(-below // fan_in)
            levels.insert(0, below)
        if workers + sum(levels) <= ranks:
            while left := ranks - workers - sum(levels):  # one worker more would take more aggregators than are left
                levels.insert(0, min(left, levels[0] if levels else workers))
            return levels
    return []


def _deal(children: tuple[int, ...], parents: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Assign consecutive children to each parent, in runs that differ by at most one."""
    return {child: (parents[i * len(parents) // len(children)],) for i, child in enumerate(children)}
