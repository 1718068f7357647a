"""Choose the all-reduce algorithm by the tensor's length."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from pathlib import Path
from typing import final

from torch import Tensor

from hpcdist.collectives import load
from hpcdist.collectives.base import SUMMED_AS, AllReduce
from hpcdist.collectives.direct import Direct
from hpcdist.collectives.tuning.table import cached_table, predicted_ranges
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.virtual.network import Network

SLICE_BYTES = 1 << 18  # per rank: longer tensors in memory that all ranks have mapped are summed in place

_NATIVE_DTYPES = {dtype for dtype, summed_as in SUMMED_AS.items() if dtype is summed_as}


@final
class Auto(AllReduce):
    """All-reduce by the algorithm that was fastest on this machine for tensors of similar length.

    The first time on a machine with these ranks the constructor measures for one to three seconds, on a slow network up
    to ten; the table is cached in a file. On virtual ranks the algorithms' cost formulas decide, for the latency and
    bandwidth of the virtual network.

    Args:
        comm: the ranks.
        cache_dir: folder of the table.
        refresh: measure again, and replace the table in the file.

    Example:
        >>> from hpcdist.collectives import load
        >>> all_reduce, tensor = load("auto")(comm), torch.ones(4)
        >>> all_reduce.mean(tensor)
        >>> tensor
        tensor([1., 1., 1., 1.])

    Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
    2005 (choice by length and number of ranks).
    """

    def __init__(self, comm: Communicator, cache_dir: Path | None = None, *, refresh: bool = False):
        super().__init__(comm)
        self.ranges = _ranges(comm, cache_dir, refresh)
        algorithms = {name: load(name)(comm) for name in dict.fromkeys(name for _, name in self.ranges)}
        self._ends = [end for end, _ in self.ranges]
        self._algorithms = [algorithms[name] for _, name in self.ranges]
        self._native = comm.allreduce
        # The fast path of `__call__` (-1: none): tensors of up to _first_bytes, by the algorithm of the first range.
        fastest_short = self.ranges[0][1] if comm.size > 1 else ""
        self._first_bytes = int(min(self._ends[0], sys.maxsize)) if fastest_short in ("native", "shared_memory") else -1
        self._first = comm.allreduce if fastest_short == "native" else self._algorithms[0]
        self._first_dtypes = _NATIVE_DTYPES if fastest_short == "native" else SUMMED_AS.keys()
        self._direct = Direct(comm) if Direct.suits(comm) else None
        self._in_place_bytes = comm.size * SLICE_BYTES

    def __call__(self, tensor: Tensor) -> None:
        """Collective. Replace `tensor` by its sum over all ranks; see `AllReduce.__call__`."""
        # A short tensor is summed in microseconds. If its dtype needs no view, skip `_call`: `_first` checks it.
        n_bytes = tensor.nbytes
        if n_bytes <= self._first_bytes and tensor.dtype in self._first_dtypes and not self._in_place(tensor, n_bytes):
            self._first(tensor)
        else:
            AllReduce.__call__(self, tensor)  # super() would slow down the other branch

    def _sum(self, tensor: Tensor) -> None:
        if tensor.is_cpu:
            self._chosen(tensor)._sum(tensor)
        else:  # the library reads device memory itself; the table has no timings for that
            self._native(tensor)

    def _mean(self, tensor: Tensor) -> None:
        self._chosen(tensor)._mean(tensor)  # on the host, unlike in `_sum`: see `AllReduce.mean`

    def _chosen(self, tensor: Tensor) -> AllReduce:
        """Return the algorithm for a tensor on the host; the table has no timings of shared tensors."""
        if self._direct is not None and self._in_place(tensor, tensor.nbytes):
            return self._direct
        return self._algorithms[bisect_left(self._ends, tensor.nbytes)]

    def _in_place(self, tensor: Tensor, n_bytes: int) -> bool:
        """Return whether the tensor is long and all ranks have mapped it, so that `Direct` sums it without copies."""
        return n_bytes >= self._in_place_bytes and bool(self.comm.memory.mapped(tensor))

    def close(self) -> None:
        for algorithm in dict.fromkeys(self._algorithms):
            algorithm.close()


def _ranges(comm: Communicator, cache_dir: Path | None, refresh: bool) -> list[tuple[float, str]]:
    """Collective. Return (largest number of bytes, algorithm) pairs, ascending; see `TimingTable.ranges`."""
    if comm.size == 1:
        return [(math.inf, "native")]
    if comm.platform.virtual is None:
        return cached_table(comm, cache_dir, refresh=refresh).ranges()
    latency_s, bandwidth_bytes_s = Network(**comm.platform.virtual["network"]).slowest(comm.nodes)
    return predicted_ranges(comm, latency_s, 1 / bandwidth_bytes_s)
