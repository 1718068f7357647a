"""Ring all-reduce: bandwidth-optimal for any number of ranks; its latency grows with that number."""

from __future__ import annotations

from typing import final

from torch import Tensor

from hpcdist.collectives.base import TAG, Algorithm, Cost, chunks, segment_count

SEGMENT_BYTES = 1 << 20  # fits a core's second-level cache with the memory it is added to
AHEAD = 2  # segments in flight: the transfer of one hides the latency of the other


@final
class Ring(Algorithm):
    """All-reduce by a reduce-scatter around a ring, then an all-gather around the ring.

    Steps for p ranks: 2(p-1), each sending one of p chunks to the right and receiving one from the left. Bytes sent per
    rank: 2n(p-1)/p for n bytes. Chunks longer than SEGMENT_BYTES are pipelined in segments: one is added while the next
    is in flight, and is forwarded without waiting for the rest of its chunk.

    Reference: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """

    def _sum(self, tensor: Tensor) -> None:
        self._pass_round(tensor, first=self.comm.rank - 1, add=True)  # then chunk r is summed on rank r
        self._pass_round(tensor, first=self.comm.rank, add=False)

    def _pass_round(self, tensor: Tensor, first: int, add: bool) -> None:
        """Send chunk `first` to the right, then forward what arrives from the left (`add`: plus this rank's chunk)."""
        comm, size = self.comm, self.comm.size
        right, left = (comm.rank + 1) % size, (comm.rank - 1) % size
        parts = chunks(tensor, size)
        longest = max(part.numel() for part in parts)
        segments = segment_count(longest * tensor.itemsize, SEGMENT_BYTES)
        # In step s chunk first - s is sent, and chunk first - s - 1 arrives, to be sent in step s + 1.
        route = [chunks(parts[(first - step) % size], segments) for step in range(size)]
        leaving = [segment for chunk in route[:-1] for segment in chunk]
        arriving = [segment for chunk in route[1:] for segment in chunk]
        ahead = min(segments, AHEAD)  # not more: leaving[i + segments] is arriving[i]
        landing = self._receive_buffers(tensor, arriving, -(-longest // segments)) if add else arriving

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

    def _receive_buffers(self, tensor: Tensor, arriving: list[Tensor], longest: int) -> list[Tensor]:
        """Return the buffers in which segments to be added arrive: one is added while the others fill."""
        inbox = self.inbox.empty_like(tensor, AHEAD * longest)
        return [inbox[i % AHEAD * longest :][: segment.numel()] for i, segment in enumerate(arriving)]

    @staticmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        steps, chunk = size - 1, n_bytes / size
        return Cost(2 * steps, 2 * steps * chunk, steps * chunk)
