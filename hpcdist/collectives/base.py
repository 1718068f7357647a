"""The base of all all-reduce algorithms: the call, the checks, working memory, chunks, and powers of two of ranks."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdist.comm.communicator import TAG_LIMIT, Communicator, check_flat
from hpcdist.comm.transfer import SIGNED, WIDE
from hpcdist.errors import ConfigError

TAG = TAG_LIMIT - 1  # apart from the low tags that strategies use on the same communicator

# What torch adds as it is, and what it adds under another name: two's complement addition knows no sign, and the sum
# of complex numbers is that of their parts.
SUMMED_AS = {
    **{dtype: dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)},
    **{dtype: dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)},
    **SIGNED,
    **{torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64},
}


class AllReduce(abc.ABC):
    """Sum a tensor over the ranks of one communicator, in place; the result is bitwise the same on all ranks.

    An object is made once per communicator (Collective, as are its calls and `close`) and keeps its working memory
    between calls. Subclasses are final, one per module; the module's name is the algorithm's.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm

    def __call__(self, tensor: Tensor) -> None:
        """Collective. Replace `tensor` by its sum over all ranks.

        Args:
            tensor: flat and contiguous, same length and dtype on all ranks; any float, complex or integer type.
                Overwritten.

        Raises:
            CommunicationError: the tensor is not flat and contiguous, or a transfer fails.
            ConfigError: its dtype has no sum.
        """
        self._call(tensor, self._sum)

    def mean(self, tensor: Tensor) -> None:
        """Collective. Replace `tensor`, of a float or complex type, by its mean: the sum over all ranks, divided.

        Args and errors are those of `__call__`.
        """
        if tensor.is_cpu:
            self._call(tensor, self._mean)
        else:  # divided on its device, not in a copy on the host
            _mean_by(self, tensor, self.comm.size)

    def _call(self, tensor: Tensor, work: Callable[[Tensor], None]) -> None:
        check_flat(tensor)
        dtype = SUMMED_AS.get(tensor.dtype)
        if dtype is None:
            raise ConfigError(
                f"dtype must be a floating-point, complex or integer type that torch can add; got {tensor.dtype}. "
                "Convert the tensor first."
            )
        if self.comm.size > 1 and tensor.numel() > 0:
            view = tensor if dtype is tensor.dtype else tensor.view(dtype)
            with self.comm.failures.collective, self.comm.memory.host(view) as host:
                work(host)

    @abc.abstractmethod
    def _sum(self, tensor: Tensor) -> None:
        """Collective. Replace `tensor` by its sum over all ranks: the algorithm itself.

        Args:
            tensor: flat and contiguous, of at least 1 element and a dtype that torch adds, on the host unless the
                communicator is device-aware; there are at least 2 ranks. Overwritten.
        """

    def _mean(self, tensor: Tensor) -> None:
        """Collective. Replace `tensor`, as `_sum` gets it, by its mean over all ranks."""
        _mean_by(self._sum, tensor, self.comm.size)

    def close(self) -> None:
        """Collective. Release memory, windows and communicators; the object must not be called afterwards."""


def _mean_by(sum_up: Callable[[Tensor], None], tensor: Tensor, size: int) -> None:
    # Numbers of float16 end at 65,504: a sum may pass that where its mean does not. So its addends are divided, as
    # DistributedDataParallel's are, which costs no more bytes than another type.
    narrow = tensor.dtype in (torch.float16, torch.complex32)
    if narrow:
        tensor.div_(size)
    sum_up(tensor)
    if not narrow:
        tensor.div_(size)


class Cost(NamedTuple):
    """What a call takes, one after the other: steps, each a message's latency; bytes sent; bytes added."""

    steps: int
    sent: float
    added: float


class Algorithm(AllReduce):
    """An all-reduce of known cost. `ranks_per_node` matters only to algorithms that distinguish nodes."""

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self.inbox = Scratch()
        if comm.trace.timeline is not None:
            name = f"all-reduce by {type(self).__module__.rpartition('.')[2]}"
            self._sum = comm.trace.timeline.noted(name, "collective", self._sum)  # type: ignore[method-assign]
            if type(self)._mean is not AllReduce._mean:  # which calls the other
                self._mean = comm.trace.timeline.noted(name, "collective", self._mean)  # type: ignore[method-assign]

    @staticmethod
    def suits(comm: Communicator) -> bool:
        """Tell whether the algorithm can run on these ranks, and may be the fastest; the same on all of them."""
        return True

    @staticmethod
    @abc.abstractmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        """Predict what a call takes.

        Args:
            n_bytes: of the tensor.
            size: number of ranks.
            ranks_per_node: the fewest ranks on any node.
        """

    @classmethod
    def cost_s(
        cls, n_bytes: float, size: int, latency_s: float, byte_s: float, reduce_s: float = 0.0, ranks_per_node: int = 1
    ) -> float:
        """Predict the seconds of a call by `cost`, where each step, byte sent and byte added takes so long."""
        steps, sent, added = cls.cost(n_bytes, size, ranks_per_node)
        return steps * latency_s + sent * byte_s + added * reduce_s


class Scratch:
    """Working memory of one algorithm, kept between calls and grown on demand."""

    def __init__(self):
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, tensor: Tensor, count: int) -> Tensor:
        """Return `count` elements of arbitrary content, of `tensor`'s dtype and device, valid until the next call."""
        n_bytes = count * tensor.itemsize
        if self._memory.numel() < n_bytes or self._memory.device != tensor.device:
            self._memory = torch.empty(n_bytes, dtype=torch.uint8, device=tensor.device)
        return self._memory[:n_bytes].view(tensor.dtype)


def sum_in_rank_order(
    own: Tensor, rank: int, size: int, read: Callable[[int], Tensor], partial: Callable[[], Tensor], divisor: int = 1
) -> None:
    """Replace `own`, this rank's addend, by x_0 + x_1 + ... + x_(size - 1), added in this order.

    The result is bitwise that of a loop over the ranks, in float32 where the addends are 16-bit floats.

    Args:
        own: overwritten by the sum.
        read: returns the addend of another rank, valid until the next call.
        partial: returns memory for the sum so far, while `own` is still needed as an addend; it may be that of
            `read(0)`.
        divisor: by which the sum is divided, before it is rounded.
    """
    if own.dtype in WIDE:
        wide = (own if rank == 0 else read(0)).to(WIDE[own.dtype])
        for peer in range(1, size):
            wide.add_(own if peer == rank else read(peer))
        own.copy_(wide.div_(divisor))
        return
    total = own if rank == 0 else read(0)
    for peer in range(1, size):
        addend = own if peer == rank else read(peer)
        total = torch.add(total, addend, out=own if rank == 0 or peer == size - 1 else partial())
    if divisor != 1:
        own.div_(divisor)  # while the processor has it in its cache


def bounds(count: int, parts: int) -> list[int]:
    """Cut `count` elements into `parts` runs that differ by at most one; return parts + 1 ascending offsets."""
    return [count * part // parts for part in range(parts + 1)]


def chunks(tensor: Tensor, parts: int) -> Sequence[Tensor]:
    """Cut `tensor` into `parts` consecutive views that differ by at most one element in length."""
    cuts = bounds(tensor.numel(), parts)
    return [tensor[start:end] for start, end in itertools.pairwise(cuts)]


def segment_count(n_bytes: int, segment_bytes: int) -> int:
    """Count the segments of at most `segment_bytes` into which `n_bytes` are cut: at least 1."""
    return max(1, -(-n_bytes // segment_bytes))


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
