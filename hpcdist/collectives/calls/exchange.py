"""Exchange data between ranks in a collective call, through slots inside a node and by messages across nodes.

Each collective consists of one or two exchanges: a rank sends the same data to all receivers (all-gather, broadcast,
gather, short all-reduces), or has a different part for each rank (all-to-all, scatter, reduce-scatter). Data pass in
segments. All ranks compare the call's fingerprint, a hash of its arguments, before results are written.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from hpcdist.collectives.base import TAG, Scratch
from hpcdist.collectives.calls.tensors import DTYPES, type_of
from hpcdist.comm.chunks import slices
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.slots import Slots
from hpcdist.errors import MismatchError

SLOT_BYTES = 1 << 21  # two slots per rank
MESSAGE_BYTES = 1 << 22
FINGERPRINT_BITS = 40  # of a fingerprint when those of all ranks are added in int64: enough for 2^23 ranks

Counts = Sequence[int]  # by source rank, the elements that a receiver gets from it
Parts = Sequence[Tensor]  # of each rank
Ranks = Collection[int]
Consume = Callable[[int, Parts], None]  # gets the start of a segment, and each rank's data of the segment


class Copies:
    """A `Consume` that copies the received data into tensors.

    Args:
        into: by source rank, the tensor for the received elements; lengths may differ.
    """

    def __init__(self, into: Mapping[int, Tensor] | Sequence[Tensor]):
        self.into = into if isinstance(into, Mapping) else dict(enumerate(into))

    def __call__(self, start: int, received: Parts) -> None:
        for source, whole in self.into.items():
            into = whole[start : start + len(received[source])]
            into.copy_(received[source][: len(into)])


class Exchange(abc.ABC):
    """Moves data between the ranks of a communicator. All methods are collective.

    Tensors are flat, contiguous and on the host. `fingerprint` identifies the call; if it differs between ranks,
    methods return False on all ranks before anything is written.
    """

    def __init__(self, comm: Communicator):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    @abc.abstractmethod
    def agree(self, fingerprint: int) -> bool:
        """Wait for all ranks; return whether all have this fingerprint."""

    @abc.abstractmethod
    def all_gather(self, local: Tensor) -> list[Tensor]:
        """Return copies of all ranks' short tensors, of the same length on all ranks."""

    def move(
        self, fingerprint: int, local: Tensor | Parts, counts: Counts, longest: int, consume: Consume,
        sources: Ranks | None = None, receivers: Ranks | None = None,
    ) -> bool:  # fmt: skip
        """Send the data of each of `sources` to all `receivers` (None: all ranks): the same, or to each its part.

        Args:
            local: this rank's data for all receivers, or a list with a part for each rank; on ranks that are no source,
                any tensors of the dtype.
            counts: number of elements of each rank's data, or part, for this rank.
            longest: number of elements of the longest data, or part, of any rank, known to all ranks.
            consume: called on each receiver for each segment, with one tensor per rank, as long as the segment;
                elements beyond a rank's `counts` are undefined. The next segment overwrites these tensors.
        """
        sources, receivers = (range(self.size) if ranks is None else ranks for ranks in (sources, receivers))
        parts = [local] if isinstance(local, Tensor) else local
        return self._move(fingerprint, parts, counts, longest, consume, sources, receivers, parts is local)

    @abc.abstractmethod
    def _move(
        self, fingerprint: int, parts: Parts, counts: Counts, longest: int, consume: Consume, sources: Ranks,
        receivers: Ranks, dealt: bool,
    ) -> bool:  # fmt: skip
        """Implement `move`. If `dealt`, `parts` has a part for each rank; otherwise its only element is for all."""

    def lengths(
        self, call: str, dtype: torch.dtype, root: int, sent: Sequence[int], expected: Sequence[int]
    ) -> list[list[int]]:
        """Collective. Gather the lengths of all parts; raise MismatchError if senders and receivers disagree.

        Args:
            sent: number of elements that this rank sends to each rank, or NONE; empty if it sends nothing.
            expected: number of elements that it expects from each rank, or NONE; empty if it receives nothing.

        Returns:
            lengths[source][dest]: number of elements.
        """
        size, nothing = self.size, [NONE] * self.size
        numbers = [CALLS.index(call), _NUMBERS[dtype], root, *(sent or nothing), *(expected or nothing)]
        by_rank = [tensor.tolist() for tensor in self.all_gather(torch.tensor(numbers))]
        if len({tuple(other[:3]) for other in by_rank}) != 1:
            refuse(self.comm, call, f"{type_of(dtype)}, root {root}")
        sent_by, expected_by = [other[3 : 3 + size] for other in by_rank], [other[3 + size :] for other in by_rank]
        for source in range(size):
            for dest in range(size):
                if sent_by[source][dest] != expected_by[dest][source]:
                    raise MismatchError(
                        f"{call}: a tensor must have the same length on sender and receiver; got "
                        f"{_count(sent_by[source][dest])} on rank {source} for rank {dest}, which expects "
                        f"{_count(expected_by[dest][source])}. Check the shapes on both ranks."
                    )
        return [[max(0, length) for length in numbers] for numbers in sent_by]

    def close(self) -> None:
        """Release the memory of the exchange."""


class SlotExchange(Exchange):
    """Exchange through slots, the shared memory of a node."""

    def __init__(self, comm: Communicator, slots: Slots):
        super().__init__(comm)
        self.slots = slots

    def agree(self, fingerprint: int) -> bool:
        return self.slots.synchronize(fingerprint)

    def all_gather(self, local: Tensor) -> list[Tensor]:
        buffer = self.slots.row_buffers(local.dtype, len(local))[self.slots.calls]
        buffer.rows[self.rank].copy_(local)
        return list(buffer.table.clone()) if self.slots.synchronize(0, buffer.gathered) else []

    def _move(
        self, fingerprint: int, parts: Parts, counts: Counts, longest: int, consume: Consume, sources: Ranks,
        receivers: Ranks, dealt: bool,
    ) -> bool:  # fmt: skip
        slots, dtype, is_source = self.slots, parts[0].dtype, self.rank in sources
        segment_length = slots.n_bytes // dtype.itemsize // len(parts)  # of each part
        # The local part need not pass through the slot, unless a result may overwrite it early.
        skips_copy = dealt and (self.size == 2 or isinstance(consume, Copies))
        for start in range(0, max(longest, 1), segment_length):  # at least one segment, to compare fingerprints
            length = min(segment_length, longest - start)
            buffer = slots.row_buffers(dtype, len(parts) * length)[slots.calls]
            segments = [part[start : start + length] for part in parts]
            if is_source:
                for rank, into in enumerate(buffer.parts[self.rank] if dealt else [buffer.rows[self.rank]]):
                    if not skips_copy or rank != self.rank:
                        into[: len(segments[rank])].copy_(segments[rank])
            if not slots.synchronize(fingerprint, buffer.gathered):
                return False
            if self.rank in receivers and length:
                received = list(buffer.parts[:, self.rank] if dealt else buffer.rows)
                local = segments[self.rank if dealt else 0]
                # On two ranks read the shared local tensor, too: it is in the cache.
                if is_source and (skips_copy or (not dealt and self.size == 2 and len(local) == length)):
                    received[self.rank] = local
                consume(start, received)
        return True

    def close(self) -> None:
        self.slots.close()


class MessageExchange(Exchange):
    """Exchange by messages between all pairs of ranks: across nodes, and on virtual ranks.

    Args:
        slots: for comparing fingerprints; None: by an all-reduce.
    """

    def __init__(self, comm: Communicator, slots: Slots | None = None):
        super().__init__(comm)
        self._slots = slots
        self._inbox = Scratch()
        self._total = torch.zeros(1, dtype=torch.int64)
        self._total_array = self._total.numpy()

    def agree(self, fingerprint: int) -> bool:
        """Wait for all ranks; return whether all have this fingerprint: without slots, if the sum is `size` times it.

        It is masked, so that the sum fits in int64. Unequal fingerprints have this sum only by chance.
        """
        if self._slots is not None:
            return self._slots.synchronize(fingerprint)
        self._total_array[0] = local = fingerprint & ((1 << FINGERPRINT_BITS) - 1)
        self.comm.allreduce(self._total)
        return int(self._total_array[0]) == local * self.size

    def all_gather(self, local: Tensor) -> list[Tensor]:
        received = [torch.empty_like(local) for _ in range(self.size)]
        self._transfer(dict.fromkeys(range(self.size), local), dict(enumerate(received)))
        return received

    def _move(
        self, fingerprint: int, parts: Parts, counts: Counts, longest: int, consume: Consume, sources: Ranks,
        receivers: Ranks, dealt: bool,
    ) -> bool:  # fmt: skip
        if not self.agree(fingerprint):
            return False
        outgoing = dict(enumerate(parts)) if dealt else dict.fromkeys(receivers, parts[0])
        for segment in slices(longest, MESSAGE_BYTES // parts[0].itemsize):
            length = segment.stop - segment.start
            inbox = self._inbox.empty_like(parts[0], length * self.size).split(length)
            sent = {rank: part[segment] for rank, part in outgoing.items()} if self.rank in sources else {}
            senders = sources if self.rank in receivers else ()
            self._transfer(sent, {rank: inbox[rank][: max(0, counts[rank] - segment.start)] for rank in senders})
            if senders:
                consume(segment.start, inbox)
        return True

    def _transfer(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        """Send and receive tensors, given by rank, from the neighbours on, to spread load. Empty ones are not sent."""
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


# --- agreement --------------------------------------------------------------------------------------------------------
CALLS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all"),
    *("barrier",),
)
NONE = -1  # length of a part that is neither sent nor received
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


def fingerprint_of(call: str, dtype: torch.dtype, *more: int) -> int:
    """Hash everything that must be the same on all ranks in a call into one integer. Never 0: that is no call's.

    `more` must be integers: Python's hash of a text differs between processes.
    """
    return hash((CALLS.index(call), _NUMBERS[dtype], *more)) or 1


def shape_numbers(tensors: Sequence[Tensor]) -> list[int]:
    """Encode shapes as one list of integers, different for different shapes."""
    return [number for tensor in tensors for number in (tensor.dim(), *tensor.shape)]


def refuse(comm: Communicator, call: str, detail: str | int, *tensors: Tensor) -> None:
    """Collective, once all ranks know that their calls differ. Raise MismatchError with each rank's call.

    Args:
        detail: the operation, or the root.
        tensors: the local tensors.
    """
    described = [f"{type_of(tensor.dtype)} {tuple(tensor.shape)}" for tensor in tensors]
    described.append(f"root {detail}" if isinstance(detail, int) else detail)
    text = f"{call}: {', '.join(filter(None, described))}".rstrip(": ")
    ranks_of: dict[str, list[int]] = {}
    for rank, other in enumerate(comm.gather(text)):
        ranks_of.setdefault(other, []).append(rank)
    differ = "; ".join(f"{other} on {_named(ranks)}" for other, ranks in ranks_of.items())
    raise MismatchError(f"all ranks must make the same collective call; got {differ}. Check the call on each rank.")


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _count(length: int) -> str:
    return "nothing" if length == NONE else f"{length} elements"
