"""The time of each all-reduce, beside other libraries' and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import runner
from benchmarks.runner import Row, Side, beside, check, count_bytes, table, timed, warm_up
from hpcdist.collectives import load
from hpcdist.collectives.auto import Auto
from hpcdist.collectives.base import AllReduce
from hpcdist.collectives.tuning.table import candidates
from hpcdist.collectives.tuning.timing import calls_within, clamp
from hpcdist.comm.communicator import Communicator
from hpcdist.torch_backend.default_group import default_group

if TYPE_CHECKING:  # it starts MPI
    from hpcdist.comm.mpi.communicator import MpiCommunicator

Call = Callable[[Tensor], object]
SIZES = tuple(4 << exponent for exponent in range(10, 27, 2))  # 4 KiB to 256 MiB
CALLS_S = 1e-3  # one timing covers as many calls as take about this long together
ROUNDS_S = 0.5  # there are more rounds than asked for, up to MORE times as many, while they take less than that
MORE = 8
COPY = "copy"
COLUMNS = ("name", "bytes", "ranks", "median_s", "bytes_sent", "copies")


def measure(
    comm: MpiCommunicator, sizes: Sequence[int] = SIZES, algorithms: Sequence[str] | None = None, rounds: int = 15
) -> list[Row]:
    """Collective. Time our algorithms, MPI's own sum, gloo's, Horovod's where it is installed, and a plain copy.

    Args:
        algorithms: names of `available()`; by default `auto` and all that can run on these ranks.

    Returns:
        Rows as `measure_beside`'s, by size, with speedup: how many times as fast as the best of the other libraries.
    """
    from mpi4py import MPI  # starts MPI: not at import

    from hpcdist.comm.external import horovod

    others: dict[str, Call] = {
        "mpi": lambda tensor: comm.mpi.Allreduce(MPI.IN_PLACE, tensor.numpy()),
        "gloo": dist.all_reduce,
    }
    with default_group(comm, "gloo"):
        rows = measure_beside(comm, sizes, algorithms or ["auto", *candidates(comm)], rounds, others)
    if not horovod.obstacle():  # apart: its thread is at work all the time
        theirs = horovod.Horovod(comm)
        others["horovod"] = theirs.all_reduce
        more = measure_beside(comm, sizes, [], rounds, {"horovod": theirs.all_reduce})
        rows += [row for row in more if row["name"] == "horovod"]
        theirs.close()
    by_size = [[row for row in rows if row["bytes"] == size] for size in sorted(set(sizes))]
    return [row for of_size in by_size for row in beside(of_size, others, speedup="speedup")]


def measure_beside(
    comm: Communicator,
    sizes: Sequence[int],
    algorithms: Sequence[str],
    rounds: int,
    others: Mapping[str, Call] | None = None,
    cache_dir: Path | None = None,
) -> list[Row]:
    """Collective. Time algorithms, others' in-place sums and a plain copy.

    Args:
        algorithms: names of `available()`.
        rounds: at least; short tensors get more.
        others: in-place sums of a tensor over the same ranks, by name.
        cache_dir: where the table of `auto` lies; it is measured anew.

    Returns:
        One row per size and side: name, bytes, ranks, median_s, bytes_sent (by the busiest rank in one call; None for
        others, which don't tell) and copies (median_s as a multiple of the row `copy`, which every rank makes of its
        own tensor at the same time; None where that takes no time, on virtual ranks).
    """
    check(comm, rounds, sizes_bytes=sizes)
    own: dict[str, AllReduce] = {}
    for name in algorithms:
        own[name] = Auto(comm, cache_dir, refresh=True) if name == "auto" else load(name)(comm)
    count = max(sizes, default=0) // 4
    tensor, target = torch.empty(count).zero_(), torch.empty(count).zero_()  # written: their pages exist
    rows = []
    for n_bytes in sizes:
        part, copy = tensor[: n_bytes // 4], target[: n_bytes // 4].copy_
        tried: dict[str, Call] = {**own, **(others or {}), COPY: copy}
        calls = {name: partial(call, part) for name, call in tried.items()}
        sent = {name: count_bytes(comm, calls[name]) for name in own} | {COPY: 0}
        sides = [
            Side(name, timed(comm, call), {"bytes": n_bytes, "bytes_sent": sent.get(name)})
            for name, call in calls.items()
        ]
        once_s = warm_up(comm, sides, 1, 1)
        steps = calls_within(CALLS_S, once_s, 20)
        round_s = sum(steps[name] * once_s[name] for name in steps) or ROUNDS_S
        found = runner.measure(comm, sides, clamp(ROUNDS_S / round_s, rounds, MORE * rounds), steps)
        rows += beside(found, [COPY], copies="multiple")
    for algorithm in own.values():
        algorithm.close()
    return table(rows, COLUMNS)
