"""Ring all-reduce: bandwidth-optimal at any number of ranks, latency grows with it."""

from __future__ import annotations

from typing import final

from torch import Tensor

from hpcdist.collectives.base import TAG, Algorithm, Cost, chunks, segment_count

SEGMENT_BYTES = 1 << 20  # fits the second-level cache of current cores together with the memory it is added to
AHEAD = 2  # segments under way: the latency of one is hidden by the transfer of the other


@final
class Ring(Algorithm):
    """A reduce-scatter round the ring, then an all-gather round the ring.

    Steps: 2(p-1), each sending one of p chunks to the right and receiving one from the left. Bytes sent per rank:
    2n(p-1)/p. Chunks longer than SEGMENT_BYTES travel in segments: while one is added the next is on its way, and
    each goes on soon after it is added, without waiting for the rest of its chunk.

    Reference: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """

    def _sum(self, tensor: Tensor) -> None:
        self._pass_round(tensor, first=self.comm.rank - 1, add=True)  # then chunk r is summed on rank r
        self._pass_round(tensor, first=self.comm.rank, add=False)

    def _pass_round(self, tensor: Tensor, first: int, add: bool) -> None:
        """Send chunk `first` to the right and pass on the chunks that come from the left, size - 1 times."""
        comm, size = self.comm, self.comm.size
        right, left = (comm.rank + 1) % size, (comm.rank - 1) % size
        parts = chunks(tensor, size)
        longest = max(part.numel() for part in parts)
        segments = segment_count(longest * tensor.itemsize, SEGMENT_BYTES)
        # In step s the chunk first - s leaves, and the one before it arrives, to leave in step s + 1.
        route = [chunks(parts[(first - step) % size], segments) for step in range(size)]
        leaving = [segment for chunk in route[:-1] for segment in chunk]
        arriving = [segment for chunk in route[1:] for segment in chunk]
        ahead = min(segments, AHEAD)  # no more can be sent before the first has been received
        landing = self._landing(tensor, arriving, -(-longest // segments)) if add else arriving

        receives = [comm.irecv(buffer, left, TAG) for buffer in landing[:ahead]]
        sends = [comm.isend(segment, right, TAG) for segment in leaving[:ahead]]
        for i, segment in enumerate(arriving):
            receives[i].wait()
            if add:
                segment.add_(landing[i])
            if i + ahead < len(arriving):
                receives.append(comm.irecv(landing[i + ahead], left, TAG))
                sends.append(comm.isend(leaving[i + ahead], right, TAG))
        for send in sends:
            send.wait()

    def _landing(self, tensor: Tensor, arriving: list[Tensor], longest: int) -> list[Tensor]:
        """List the buffers that the segments to be added arrive in: one is added while the others fill."""
        inbox = self.inbox.like(tensor, AHEAD * longest)
        return [inbox[i % AHEAD * longest :][: segment.numel()] for i, segment in enumerate(arriving)]

    @staticmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        steps, chunk = size - 1, n_bytes / size
        return Cost(2 * steps, 2 * steps * chunk, steps * chunk)
