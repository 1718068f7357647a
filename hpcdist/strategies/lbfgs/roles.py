"""Assign roles to ranks: the coordinator first, then shards, then workers."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdist.errors import ConfigError

COORDINATOR = 0


@dataclass(frozen=True)
class LbfgsRoles:
    """The ranks of each role; rank 0 coordinates."""

    shards: tuple[int, ...]
    workers: tuple[int, ...]


def assign_lbfgs(size: int, servers: int) -> LbfgsRoles:
    """Assign roles to `size` ranks. One rank is everything; of two the first is coordinator and shard.

    Raises:
        ConfigError: no rank is left to be a worker.
    """
    if size <= 2:
        return LbfgsRoles((COORDINATOR,), (size - 1,))
    if servers + 1 >= size:
        raise ConfigError(
            f"strategy.servers must leave a rank for the coordinator and at least one to be a worker; got {servers} on "
            f"{size} ranks. Start more ranks, or use fewer servers."
        )
    return LbfgsRoles(tuple(range(1, servers + 1)), tuple(range(servers + 1, size)))
