"""Lay out slots for tensors in windows: one in a rank's memory for each rank that sends to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.compress import Used
from hpcdist.strategies.server.placement import Shard

Ends = Sequence[tuple[int, Shard]]  # ranks, and the shard that goes from or to each
EndsOf = Callable[[int], Ends]  # of a rank


class TensorSlots:
    """Collective. Open windows in which each rank has a slot for the tensors of every rank that sends to it.

    Args:
        like: flat tensors as long as a whole request.
        sources: the ranks that send to a rank, each with the shard that its tensors cover.
        dests: the ranks to which this rank sends, likewise.

    Attributes:
        words: how many lengths go beside the tensors.
        whole: what has arrived from all sources, put together.
    """

    dtype: torch.dtype | None = None  # of the windows; None: that of the tensors
    words = 0

    def __init__(self, comm: Communicator, like: Sequence[Tensor], sources: EndsOf, dests: Ends):
        own = sources(comm.rank)
        slots, lengths = self._lay(like, own)
        self._windows = [comm.window(n, self.dtype or t.dtype) for n, t in zip(lengths, like, strict=True)]
        self._slots = {
            source: [window.local[first:last] for window, (first, last) in zip(self._windows, slot, strict=True)]
            for (source, _), slot in zip(own, slots, strict=True)
        }
        self._starts: dict[int, list[int]] = {}  # of this rank's slot, in each window of a rank to which it sends
        for dest, _ in dests:
            ends = sources(dest)
            slot = [source for source, _ in ends].index(comm.rank)
            self._starts[dest] = [first for first, _ in self._lay(like, ends)[0][slot]]
        self.whole = [window.local for window in self._windows]

    def room(self, part: Tensor) -> int:
        """Return how many elements of a window such a part of a tensor takes."""
        return part.numel()

    def _lay(self, like: Sequence[Tensor], ends: Ends) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Return where the slots of these ranks lie in each window, and how long the windows are; in elements."""
        at, slots = [0] * len(like), []
        for _, shard in ends:
            sizes = map(self.room, shard.of(like))
            slots.append([(first, first + size) for first, size in zip(at, sizes, strict=True)])
            at = [last for _, last in slots[-1]]
        return slots, at

    def puts(self, dest: int, tensors: Sequence[Tensor], used: Used = None) -> tuple[list[Put], list[int]]:
        """Return the puts that bring this shard's `tensors`, or none, to `dest`, and the lengths to send along."""
        places = zip(self._windows, tensors, self._starts[dest])
        return [Put(window, part, dest, start) for window, part, start in places if part.numel()], []

    def sent(self, dest: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what the `tensors` sent last stand for at their destination."""
        return tensors

    def read(self, source: int, lengths: Sequence[int]) -> Iterable[Tensor]:
        """Return what has arrived from `source`."""
        return self._slots[source]

    def close(self) -> None:
        """Collective. Close the windows."""
        self._slots.clear()  # their memory goes
        self.whole = []
        for window in self._windows:
            window.close()


OpenSlots = Callable[[Communicator, Sequence[Tensor], EndsOf, Ends], TensorSlots]
