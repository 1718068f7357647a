"""How long each all-reduce takes: the figures of `hpcdist bench allreduce`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from hpcdist.collectives.auto import Auto
from hpcdist.collectives.catalogue import load
from hpcdist.collectives.table_cache import DEFAULT_CACHE
from hpcdist.collectives.timing import between, calls_within, interleaved
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError

CALLS_S = 1e-3  # one timing covers as many calls as take about this long together
ROUNDS_S = 0.5  # there are more rounds than asked for, up to MORE times as many, while they take less than that
MORE = 8


def measure(
    comm: Communicator,
    sizes: Sequence[int],
    algorithms: Sequence[str],
    repeats: int,
    peers: Mapping[str, Callable[[Tensor], None]] | None = None,
    cache_dir: Path = DEFAULT_CACHE,
) -> list[dict]:
    """Collective. Times the algorithms, other libraries' all-reduce and a plain copy, all sides in one run.

    Args:
        sizes: lengths in bytes, each a multiple of 4 (float32) and at least 4.
        algorithms: names of `available()`.
        repeats: rounds; each times every side, and the median counts. Short tensors get more.
        peers: other in-place sums of a tensor over the same ranks, by name.
        cache_dir: where the table of `auto` lies; it is measured anew.

    Returns:
        The same rows on all ranks, one per size and side: name, bytes, ranks, median_s (of the slowest rank),
        bytes_sent (by the busiest rank in one call; None for peers, which don't tell) and copies (median_s as a
        multiple of the row `copy`, which every rank makes of its own tensor at the same time; None where that takes
        no time, on virtual ranks).

    Raises:
        ConfigError: a size or the number of repeats breaks its rule.
    """
    for n_bytes in sizes:
        if n_bytes < 4 or n_bytes % 4:
            raise ConfigError(f"sizes must be positive multiples of 4 bytes (float32); got {n_bytes}.")
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1; got {repeats}.")
    own = {n: Auto(comm, cache_dir, refresh=True) if n == "auto" else load(n)(comm) for n in algorithms}
    count = max(sizes, default=0) // 4
    tensor, target = torch.empty(count).zero_(), torch.empty(count).zero_()  # written: their pages exist
    rows = []
    for n_bytes in sizes:
        copy_to = target[: n_bytes // 4].copy_
        sides = {**own, **(peers or {}), "copy": copy_to}
        rows += _rows(comm, sides, tensor[: n_bytes // 4], repeats, set(own))
    for algorithm in own.values():
        algorithm.close()
    return rows


def _rows(
    comm: Communicator, sides: Mapping[str, Callable[[Tensor], object]], tensor: Tensor, repeats: int, counted: set[str]
) -> list[dict]:
    sent = {name: _sent(comm, sides[name], tensor) if name in counted else None for name in sides}
    once_s = {name: min(times) for name, times in interleaved(comm, sides, tensor, rounds=2).items()}
    calls = calls_within(CALLS_S, once_s, 20)
    round_s = sum(calls[name] * once_s[name] for name in sides) or ROUNDS_S
    rounds = between(repeats, ROUNDS_S / round_s, MORE * repeats)
    median_s = {name: median(times) for name, times in interleaved(comm, sides, tensor, rounds, calls).items()}
    return [
        {
            "name": name,
            "bytes": tensor.nbytes,
            "ranks": comm.size,
            "median_s": median_s[name],
            "bytes_sent": 0 if name == "copy" else sent[name],
            "copies": median_s[name] / median_s["copy"] if median_s["copy"] > 0 else None,
        }
        for name in sides
    ]


def _sent(comm: Communicator, side: Callable[[Tensor], object], tensor: Tensor) -> int:
    """Collective. Bytes that the busiest rank sends in one call."""
    before = comm.traffic.bytes_sent
    side(tensor)
    mine = comm.traffic.bytes_sent - before
    return max(int(told) for told in comm.exchange(str(mine).encode()))
