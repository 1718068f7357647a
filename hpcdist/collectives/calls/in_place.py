"""Weighted means of all ranks' tensors, in memory that the ranks of a node have mapped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hpcdist.collectives.base import Scratch, bounds
from hpcdist.collectives.calls.tensors import zeros_like
from hpcdist.comm.chunks import CACHED, slices
from hpcdist.comm.communicator import Communicator

_SHORTEST = 1 << 12  # elements of a chunk: shorter ones cost more calls


class MeansInPlace:
    """Replaces each rank's tensors by weighted means of all ranks' tensors, xᵢ ← Σⱼ Wᵢⱼ xⱼ, without messages.

    Rank r computes slice r of the elements for all ranks, so that memory is read once and written once. Ranks
    synchronize before and after that.
    """

    def __init__(self, comm: Communicator):
        self._comm, self._before = comm, Scratch()

    def share(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Collective. Return copies in memory that a node's ranks have mapped; device tensors themselves."""
        shared = zeros_like(self._comm, tensors)
        return tensors if shared is None else [into.copy_(t) for into, t in zip(shared, tensors, strict=True)]

    def suits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all ranks have mapped these tensors; the same on all ranks."""
        return all(self._comm.memory.mapped(tensor) for tensor in tensors)

    def __call__(self, tensors: Sequence[Tensor], rows: Sequence[Mapping[int, float]]) -> None:
        """Collective. Replace `tensors` by their means; `rows`: for each rank i the weights Wᵢⱼ by j, Wᵢᵢ included."""
        comm, size = self._comm, self._comm.size
        comm.barrier()  # every rank has written its tensors
        with torch.no_grad():
            for tensor in tensors:
                start, end = bounds(len(tensor), size)[comm.rank : comm.rank + 2]
                shared = [each[start:end] for each in comm.memory.mapped(tensor)]
                for part in slices(end - start, max(_SHORTEST, 2 * CACHED // size)):
                    chunk = [each[part] for each in shared]
                    before = self._before.empty_like(tensor, size * len(chunk[0])).view(size, -1)
                    torch.stack(chunk, out=before)
                    for rank, (local, row) in enumerate(zip(chunk, rows, strict=True)):
                        average(local, row[rank], ((row[peer], before[peer]) for peer in row if peer != rank))
        comm.barrier()  # every rank has written its slice


def average(local: Tensor, local_weight: float, others: Iterable[tuple[float, Tensor]]) -> None:
    """Replace `local` by its weighted sum with others, by differences: equal values stay the same to the bit."""
    total = local_weight
    for weight, part in others:
        total += weight
        local.lerp_(part, weight / total)
    if not math.isclose(total, 1):  # only columns of W add up to 1
        local.mul_(total)
