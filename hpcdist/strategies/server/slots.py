"""Slots for tensors in windows: a slot in a rank's memory for each rank that sends to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.compress import Used
from hpcdist.strategies.server.placement import Shard

Ends = Sequence[tuple[int, Shard]]  # ranks, with the shard sent to or received from each
EndsOf = Callable[[int], Ends]  # from a rank


class TensorSlots:
    """Collective. Allocate windows in which each rank has a slot for the tensors of every rank that sends to it.

    Args:
        templates: flat tensors as long as a whole request.
        sources: returns the ranks that send to a rank, with their shards.
        dests: the ranks that this rank sends to, with their shards.

    Attributes:
        n_lengths: number of message lengths to send with the tensors.
        whole: the received tensors of all sources.
    """

    dtype: torch.dtype | None = None  # of the windows; None: the tensors' dtype
    n_lengths = 0

    def __init__(self, comm: Communicator, templates: Sequence[Tensor], sources: EndsOf, dests: Ends):
        local_sources = sources(comm.rank)
        slots, lengths = self._layout(templates, local_sources)
        self._windows = [comm.window(n, self.dtype or t.dtype) for n, t in zip(lengths, templates, strict=True)]
        self._slots = {
            source: [window.local[first:last] for window, (first, last) in zip(self._windows, slot, strict=True)]
            for (source, _), slot in zip(local_sources, slots, strict=True)
        }
        self._starts: dict[int, list[int]] = {}  # offsets of this rank's slot at each destination
        for dest, _ in dests:
            ends = sources(dest)
            slot = [source for source, _ in ends].index(comm.rank)
            self._starts[dest] = [first for first, _ in self._layout(templates, ends)[0][slot]]
        self.whole = [window.local for window in self._windows]

    def room(self, part: Tensor) -> int:
        """Return the number of window elements for a part of a tensor."""
        return part.numel()

    def _layout(self, templates: Sequence[Tensor], ends: Ends) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Place slots in a row: return each rank's range of elements in each window, and the windows' lengths."""
        offsets, slots = [0] * len(templates), []
        for _, shard in ends:
            sizes = map(self.room, shard.of(templates))
            slots.append([(first, first + size) for first, size in zip(offsets, sizes, strict=True)])
            offsets = [last for _, last in slots[-1]]
        return slots, offsets

    def puts(self, dest: int, tensors: Sequence[Tensor], used: Used = None) -> tuple[list[Put], list[int]]:
        """Return the puts that send this shard's `tensors` to `dest`, and the message lengths."""
        targets = zip(self._windows, tensors, self._starts[dest])
        return [Put(window, part, dest, start) for window, part, start in targets if part.numel()], []

    def sent(self, dest: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the last sent `tensors` as the destination decodes them."""
        return tensors

    def read(self, source: int, lengths: Sequence[int]) -> Iterable[Tensor]:
        """Return the received tensors of `source`."""
        return self._slots[source]

    def close(self) -> None:
        """Collective. Close the windows."""
        self._slots.clear()  # views of the windows' memory
        self.whole = []
        for window in self._windows:
            window.close()


OpenSlots = Callable[[Communicator, Sequence[Tensor], EndsOf, Ends], TensorSlots]
