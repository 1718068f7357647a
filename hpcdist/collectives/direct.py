"""Direct all-reduce inside one node: each rank sums one slice, directly in the other ranks' memory."""

from __future__ import annotations

from typing import final

from torch import Tensor

from hpcdist.collectives.base import Algorithm, Cost, bounds, chunks, segment_count, sum_in_rank_order
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError

SEGMENT_BYTES = 1 << 20  # stays in a core's second-level cache while it is summed


@final
class Direct(Algorithm):
    """Read, sum and write one slice of the tensor per rank, directly in the other ranks' memory.

    Rank r reads slice r of every other rank's tensor, sums, and writes the sum into every other rank's tensor. Only
    rank r reads and writes slice r, so no rank waits before the end: one exchange of addresses, one barrier. With p
    ranks and n bytes each rank reads n(p-1)/p bytes of other ranks' memory and writes as many. Addends are added in
    rank order, so results are reproducible. The kernel copies the data, except for tensors from `RankMemory.zeros`: all
    ranks have mapped these, and access them in place.

    Reference: J. Hashmi, S. Chakraborty, M. Bayatpour, H. Subramoni, D. Panda, "Designing efficient shared address
    space reduction collectives for multi-/many-cores", 2018.
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        if not self.suits(comm):
            raise ConfigError(
                "ranks of the direct all-reduce must be on one node whose kernel lets them read each other's "
                f"memory; got {comm.size} ranks on {len(set(comm.nodes))} nodes that can't. "
                "Use another algorithm, or auto."
            )

    @staticmethod
    def suits(comm: Communicator) -> bool:
        return comm.memory.can_attach

    def _sum(self, tensor: Tensor) -> None:
        self._reduce(tensor, divisor=1)

    def _mean(self, tensor: Tensor) -> None:
        self._reduce(tensor, divisor=self.comm.size)

    def _reduce(self, tensor: Tensor, divisor: int) -> None:
        """Sum this rank's slice over all ranks, divide the sum, and write it into all ranks' tensors."""
        if not tensor.is_cpu:
            raise ConfigError(
                f"tensors of the direct all-reduce must be in host memory; got one on {tensor.device}. Use native, or "
                "a communicator that is not device-aware."
            )
        comm = self.comm
        start, end = bounds(tensor.numel(), comm.size)[comm.rank : comm.rank + 2]
        others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]  # start with different ranks
        window = comm.memory.attach(tensor)
        for segment in chunks(tensor[start:end], segment_count((end - start) * tensor.itemsize, SEGMENT_BYTES)):
            offset, count = int(segment.storage_offset() - tensor.storage_offset()), segment.numel()
            if count > 0:
                memory = self.inbox.empty_like(segment, 2 * count)
                total, addend = memory[:count], memory[count:]  # total: at first rank 0's addend

                def read(peer: int) -> Tensor:
                    return window.read(peer, offset, count, total if peer == 0 else addend)

                sum_in_rank_order(segment, comm.rank, comm.size, read, lambda: total, divisor)
                for peer in others:
                    window.put(segment, peer, offset)
        comm.barrier()
        window.close()

    @staticmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        """Predict the cost: a get is a request and a reply; a put is acknowledged."""
        peers, slice_bytes = size - 1, n_bytes / size
        return Cost(4 * peers, 2 * peers * slice_bytes, peers * slice_bytes)
