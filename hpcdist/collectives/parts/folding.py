"""Algorithms for powers of two on any number of ranks: the extra ranks fold their vectors into their neighbours'."""

from __future__ import annotations

from torch import Tensor

from hpcdist.collectives.base import TAG
from hpcdist.comm.communicator import Communicator


class Folding:
    """The core of a communicator: the largest power of two of its ranks, 2^k <= p.

    With e = p - 2^k extra ranks, the first 2e ranks form pairs. The odd one of a pair hands its vector to the even
    one, stays out of the algorithm, and receives the result at the end.

    Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
    2005, section 4.5.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.size = 1 << (comm.size.bit_length() - 1)
        self._extra = comm.size - self.size
        self._paired = comm.rank < 2 * self._extra
        self.rank = comm.rank // 2 if self._paired else comm.rank - self._extra

    @property
    def outside(self) -> bool:
        """Tell whether this rank takes no part in the core."""
        return self._paired and self.comm.rank % 2 == 1

    def peer(self, core_rank: int) -> int:
        """Convert a rank of the core to the communicator's."""
        return 2 * core_rank if core_rank < self._extra else core_rank + self._extra

    def fold(self, tensor: Tensor, scratch: Tensor) -> None:
        """Collective. Add the outside ranks' `tensor` to their partners'. `scratch`: same length, overwritten."""
        if self.outside:
            self.comm.isend(tensor, self.comm.rank - 1, TAG).wait()
        elif self._paired:
            self.comm.irecv(scratch, self.comm.rank + 1, TAG).wait()
            tensor.add_(scratch)

    def unfold(self, tensor: Tensor) -> None:
        """Collective. Copy the result from the partners to the outside ranks."""
        if self.outside:
            self.comm.irecv(tensor, self.comm.rank - 1, TAG).wait()
        elif self._paired:
            self.comm.isend(tensor, self.comm.rank + 1, TAG).wait()


def core_steps(size: int) -> tuple[int, bool]:
    """Compute the base-2 logarithm of the core's size, and tell whether ranks are left to fold."""
    steps = size.bit_length() - 1
    return steps, size != 1 << steps
