"""Schedules of pipelines: one file each, found by the file's name.

Each has a function `table(ranks, micro_batches, chunks=1)`, which returns the operations of every rank in order. It is
pure: it does not communicate, and all ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcdist.errors import ConfigError
from hpcdist.parallel.schedules.base import Operation, Table, Timing, check, simulate
from hpcdist.registry import catalogue

available = catalogue("schedules").available
load: Callable[[str], Callable[..., Table]] = catalogue("schedules").load


def create(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Return the checked table of a schedule; raise ConfigError if it refuses the numbers, or can't be executed."""
    for setting, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise ConfigError(f"{setting} of a schedule must be at least 1; got {value}. Give a larger number.")
    table = load(name)(ranks, micro_batches, chunks)
    check(table, ranks, micro_batches, chunks)
    return table
