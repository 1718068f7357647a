"""How ranks hand data to each other in a collective call: through slots inside a node, by messages elsewhere.

There are two ways, and each collective is one of them, or both one after the other. In the first, ranks `share`: what a
rank brings is the same for all who take it (all-gather, broadcast, gather, short all-reduces). In the second they
`deal`: each rank has a part for every other one (all-to-all, scatter, reduce-scatter). What is brought passes in
segments. Before anything is taken, all ranks have compared notes of what they call.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from hpcdist.collectives.base import TAG, Scratch
from hpcdist.comm.chunks import slices
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.slots import Slots

SLOT_BYTES = 1 << 21  # two of them per rank
MESSAGE_BYTES = 1 << 22
NOTE_BITS = 40  # so many ranks' notes can be added

Counts = Sequence[int]  # elements of each rank
Parts = Sequence[Tensor]  # of each rank
Ranks = Collection[int]
Take = Callable[[int, Parts], None]  # gets where a segment begins, and what each rank has brought of it


class Copies:
    """A `Take` that copies what ranks bring to where it belongs.

    Args:
        into: by source: where its elements go, which may be fewer than others bring.
    """

    def __init__(self, into: Mapping[int, Tensor] | Sequence[Tensor]):
        self.into = into if isinstance(into, Mapping) else dict(enumerate(into))

    def __call__(self, start: int, found: Parts) -> None:
        for source, whole in self.into.items():
            into = whole[start : start + len(found[source])]
            into.copy_(found[source][: len(into)])


class Exchange(abc.ABC):
    """One way for data between the ranks of a communicator. All methods are Collective.

    Tensors are flat, contiguous and on the host. `fingerprint` stands for what is called, and is the same on all ranks;
    if it is not, the methods return False on all ranks before anything is taken.
    """

    def __init__(self, comm: Communicator):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    @abc.abstractmethod
    def agree(self, fingerprint: int) -> bool:
        """Wait for all ranks; tell whether all have this note."""

    @abc.abstractmethod
    def show_all(self, own: Tensor) -> list[Tensor]:
        """Return every rank's short tensor, of the same length on all; copies."""

    @abc.abstractmethod
    def share(self, fingerprint: int, own: Tensor, counts: Counts, take: Take, sources: Ranks, takers: Ranks) -> bool:
        """Let `takers` take what each of `sources` brings.

        Args:
            own: what this rank brings; on ranks that are no source, anything of the dtype.
            counts: elements that each rank brings, known to all.
            take: called on each taker for each segment, with a tensor of each rank: as long as the segment, but only as
                far as `counts` go is it what that rank brings.
        """

    @abc.abstractmethod
    def deal(self, fingerprint: int, own: Parts, counts: Counts, longest: int, take: Take, sources: Ranks) -> bool:
        """Let every rank take the part that each of `sources` has for it.

        Args:
            own: a tensor for each rank; on ranks that are no source, any of the dtype.
            counts: elements of each rank's part for this one.
            longest: most elements of any part of any rank, known to all.
            take: as with `share`.
        """

    def close(self) -> None:
        """Release what the exchange holds."""


class SlotExchange(Exchange):
    """Exchange in the memory of a node: copied into a slot, and taken from there."""

    def __init__(self, comm: Communicator, slots: Slots):
        super().__init__(comm)
        self.slots = slots

    def agree(self, fingerprint: int) -> bool:
        return self.slots.synchronize(fingerprint)

    def show_all(self, own: Tensor) -> list[Tensor]:
        gathered = self.slots.row_buffers(own.dtype, len(own))[self.slots.calls]
        gathered.rows[self.rank].copy_(own)
        return list(gathered.table.clone()) if self.slots.synchronize(0, gathered.gathered) else []

    def share(self, fingerprint: int, own: Tensor, counts: Counts, take: Take, sources: Ranks, takers: Ranks) -> bool:
        slots, step, count = self.slots, self.slots.n_bytes // own.itemsize, max(counts)
        brings, takes = self.rank in sources, self.rank in takers
        for start in range(0, max(count, 1), step):
            length = min(step, count - start)
            gathered = slots.row_buffers(own.dtype, length)[slots.calls]
            if brings:
                chunk = own[start : start + length]
                gathered.rows[self.rank][: len(chunk)].copy_(chunk)
            if not slots.synchronize(fingerprint, gathered.gathered):
                return False
            if takes and length:
                rows = gathered.rows
                if brings and self.size == 2 and len(chunk) == length:  # read where it lies, which is in the cache
                    rows = [chunk, rows[1]] if self.rank == 0 else [rows[0], chunk]
                take(start, rows)
        return True

    def deal(self, fingerprint: int, own: Parts, counts: Counts, longest: int, take: Take, sources: Ranks) -> bool:
        slots, size = self.slots, self.size
        step = slots.n_bytes // own[0].itemsize // size
        in_place = self.size == 2 or isinstance(take, Copies)  # else the own part may be where the result is built up
        for start in range(0, max(longest, 1), step):
            length = min(step, longest - start)
            gathered = slots.row_buffers(own[0].dtype, size * length)[slots.calls]
            if self.rank in sources:
                for rank, into in enumerate(gathered.parts[self.rank]):
                    chunk = own[rank][start : start + length]
                    if rank != self.rank or not in_place:
                        into[: len(chunk)].copy_(chunk)
            if not slots.synchronize(fingerprint, gathered.gathered):
                return False
            if length:
                mine = list(gathered.parts[:, self.rank])
                if self.rank in sources and in_place:
                    mine[self.rank] = own[self.rank][start : start + length]
                take(start, mine)
        return True

    def close(self) -> None:
        self.slots.close()


class MessageExchange(Exchange):
    """Exchange by messages from each rank to each other one: across nodes, and of virtual ranks.

    Args:
        slots: in which ranks agree; None where there are none.
    """

    def __init__(self, comm: Communicator, slots: Slots | None = None):
        super().__init__(comm)
        self._slots = slots
        self._inbox = Scratch()
        self._total = torch.zeros(1, dtype=torch.int64)
        self._word = self._total.numpy()

    def agree(self, fingerprint: int) -> bool:
        if self._slots is not None:
            return self._slots.synchronize(fingerprint)
        self._word[0] = own = fingerprint & ((1 << NOTE_BITS) - 1)
        self.comm.allreduce(self._total)
        return int(self._word[0]) == own * self.size

    def show_all(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._pass(dict.fromkeys(range(self.size), own), dict(enumerate(found)))
        return found

    def share(self, fingerprint: int, own: Tensor, counts: Counts, take: Take, sources: Ranks, takers: Ranks) -> bool:
        if not self.agree(fingerprint):
            return False
        for at in slices(max(counts), MESSAGE_BYTES // own.itemsize):
            outgoing = dict.fromkeys(takers, own[at]) if self.rank in sources else {}
            self._take(own, at, counts, take, outgoing, sources if self.rank in takers else ())
        return True

    def deal(self, fingerprint: int, own: Parts, counts: Counts, longest: int, take: Take, sources: Ranks) -> bool:
        if not self.agree(fingerprint):
            return False
        for at in slices(longest, MESSAGE_BYTES // own[0].itemsize):
            outgoing = {rank: part[at] for rank, part in enumerate(own)} if self.rank in sources else {}
            self._take(own[0], at, counts, take, outgoing, sources)
        return True

    def _take(
        self, like: Tensor, at: slice, counts: Counts, take: Take, outgoing: dict[int, Tensor], sources: Ranks
    ) -> None:
        """Send pieces of a segment, and take one of each source."""
        length = at.stop - at.start
        inbox = self._inbox.empty_like(like, length * self.size).split(length)
        self._pass(outgoing, {source: inbox[source][: max(0, counts[source] - at.start)] for source in sources})
        if sources:
            take(at.start, inbox)

    def _pass(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        """Send to each rank, and receive from each, neighbours first, so that not all send to the same one."""
        comm, size, requests = self.comm, self.size, []
        for source in ((self.rank - step) % size for step in range(1, size)):
            if source in incoming and len(incoming[source]):
                requests.append(comm.irecv(incoming[source], source, TAG))
        for dest in ((self.rank + step) % size for step in range(1, size)):
            if dest in outgoing and len(outgoing[dest]):
                requests.append(comm.isend(outgoing[dest], dest, TAG))
        if self.rank in incoming and self.rank in outgoing:
            incoming[self.rank].copy_(outgoing[self.rank])
        for request in requests:
            request.wait()

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()
