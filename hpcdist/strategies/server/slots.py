"""Lay out the slots through which tensors go one way between children and parents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.compress import Used
from hpcdist.strategies.server.codec import Codec, Coding, buffers, room
from hpcdist.strategies.server.placement import Shard

Ends = Sequence[tuple[int, Shard]]  # ranks, and the shard that goes from or to each
EndsOf = Callable[[int], Ends]  # of a rank


class TensorSlots:
    """Collective. Open windows in which each rank has a slot for the tensors of every rank that sends to it.

    Args:
        codec: how the tensors are compressed; None: not at all.
        like: flat tensors as long as a whole request; if values are sent, those that both ends have by now.
        sources: the ranks that send to a rank, each with the shard that its tensors cover.
        dests: the ranks to which this rank sends, likewise.
        up: the tensors go from children to parents.

    Attributes:
        words: how many lengths go beside the tensors.
        coding: compresses; None where nothing is compressed.
        arrived: what has arrived from all sources, put together.
    """

    def __init__(
        self, comm: Communicator, codec: Codec | None, like: Sequence[Tensor], sources: EndsOf, dests: Ends, up: bool
    ):
        self._wide: Sequence[Tensor] = like if codec is None else buffers(like)
        self._room: Callable[[Tensor], int] = Tensor.numel if codec is None else room
        self.words = 0 if codec is None else len(like)
        own = sources(comm.rank)
        slots, lengths = self._lay(own)
        dtypes = [t.dtype if codec is None else torch.uint8 for t in like]
        self._windows = [comm.window(n, dtype) for n, dtype in zip(lengths, dtypes, strict=True)]
        self._slots = {
            source: [window.local[first:last] for window, (first, last) in zip(self._windows, slot, strict=True)]
            for (source, _), slot in zip(own, slots, strict=True)
        }
        self._begins = {dest: self._own_slot(sources(dest), comm.rank) for dest, _ in dests}
        self.coding = None if codec is None else Coding(comm, codec, like, self._slots, own, dests, up)
        self.arrived = [window.local for window in self._windows] if self.coding is None else self.coding.whole

    def _lay(self, ends: Ends) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Return where the slots of these ranks lie in each window, and how long the windows are; in elements."""
        at, slots = [0] * len(self._wide), []
        for _, shard in ends:
            sizes = [self._room(part) for part in shard.of(self._wide)]
            slots.append([(first, first + size) for first, size in zip(at, sizes, strict=True)])
            at = [last for _, last in slots[-1]]
        return slots, at

    def _own_slot(self, ends: Ends, rank: int) -> list[int]:
        """Return where this rank's slot begins in each window of a rank to which these send."""
        slot = [source for source, _ in ends].index(rank)
        return [first for first, _ in self._lay(ends)[0][slot]]

    def puts(self, dest: int, tensors: Sequence[Tensor], used: Used = None) -> tuple[list[Put], list[int]]:
        """Return the puts that bring this shard's `tensors`, or none, to `dest`, and the lengths to send along."""
        payload, lengths = (tensors, []) if self.coding is None else self.coding.encode(dest, tensors, used)
        places = zip(self._windows, payload, self._begins[dest])
        return [Put(window, part, dest, begin) for window, part, begin in places if part.numel()], lengths

    def sent(self, dest: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what the `tensors` sent last stand for at their destination."""
        return tensors if self.coding is None else self.coding.sent(dest)

    def read(self, source: int, lengths: Sequence[int]) -> Iterable[Tensor]:
        """Return what has arrived from `source`; compressed gradients can be gone through once."""
        return self._slots[source] if self.coding is None else self.coding.decode(source, lengths)

    def close(self) -> None:
        """Collective. Close the windows."""
        self._slots.clear()  # their memory goes
        self.arrived, self.coding = [], None
        for window in self._windows:
            window.close()
