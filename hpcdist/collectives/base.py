"""Base classes of all-reduce algorithms: checks, working memory, chunks, and folding to a power of two of ranks."""

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

TAG = TAG_LIMIT - 1  # strategies use low tags on the same communicator

# The dtype in which a sum is computed: torch's, or a view as another dtype. Two's complement addition ignores the
# sign, and complex numbers are added by real and imaginary parts.
SUMMED_AS = {
    **{dtype: dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)},
    **{dtype: dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)},
    **SIGNED,
    **{torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64},
}


class AllReduce(abc.ABC):
    """Sum a tensor over the ranks of one communicator, in place; the result is bitwise the same on all ranks.

    Create one object per communicator; it keeps its working memory between calls. Constructing, calling and closing it
    are collective. To add an algorithm, write a final subclass in a module of its name.

    Example:
        >>> from hpcdist.collectives import load
        >>> all_reduce, tensor = load("ring")(comm), torch.ones(4)
        >>> all_reduce(tensor)
        >>> tensor
        tensor([2., 2., 2., 2.])
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
            ConfigError: the dtype can't be summed.
        """
        self._call(tensor, self._sum)

    def mean(self, tensor: Tensor) -> None:
        """Collective. Replace `tensor`, of a float or complex type, by its mean over all ranks; see `__call__`."""
        if tensor.is_cpu:
            self._call(tensor, self._mean)
        else:  # divided on its device, not in a copy on the host
            _mean_from_sum(self, tensor, self.comm.size)

    def _call(self, tensor: Tensor, work: Callable[[Tensor], None]) -> None:
        """Check the tensor, and run `work` on its host view in a dtype that torch can add."""
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
            tensor: flat and contiguous, at least 1 element of a dtype that torch can add, on the host unless the
                communicator is device-aware; there are at least 2 ranks. Overwritten.
        """

    def _mean(self, tensor: Tensor) -> None:
        """Collective. Replace `tensor`, as for `_sum`, by its mean over all ranks."""
        _mean_from_sum(self._sum, tensor, self.comm.size)

    def close(self) -> None:
        """Collective. Release memory, windows and communicators."""


def _mean_from_sum(sum_up: Callable[[Tensor], None], tensor: Tensor, size: int) -> None:
    # In float16 (up to 65,504) a sum may overflow where the mean does not. So divide the addends, like
    # DistributedDataParallel; summing in a wider type would cost more bytes.
    narrow = tensor.dtype in (torch.float16, torch.complex32)
    if narrow:
        tensor.div_(size)
    sum_up(tensor)
    if not narrow:
        tensor.div_(size)


class Cost(NamedTuple):
    """The critical path of a call: steps (each one message latency), bytes sent, and bytes added."""

    steps: int
    sent: float
    added: float


class Algorithm(AllReduce):
    """An all-reduce of known cost. `ranks_per_node` matters only to algorithms that distinguish nodes."""

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self.inbox = Scratch()
        if comm.trace.timeline is not None:  # record each call
            name = f"all-reduce by {type(self).__module__.rpartition('.')[2]}"
            self._sum = comm.trace.timeline.span(name, "collective")(self._sum)  # type: ignore[method-assign]
            if type(self)._mean is not AllReduce._mean:  # the base's calls `_sum`, which is traced already
                self._mean = comm.trace.timeline.span(name, "collective")(self._mean)  # type: ignore[method-assign]

    @staticmethod
    def suits(comm: Communicator) -> bool:
        """Return whether the algorithm can run on these ranks and may be the fastest; the same on all ranks."""
        return True

    @staticmethod
    @abc.abstractmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        """Predict the cost of a call.

        Args:
            n_bytes: size of the tensor.
            size: number of ranks.
            ranks_per_node: smallest number of ranks on any node.
        """

    @classmethod
    def cost_s(
        cls, n_bytes: float, size: int, latency_s: float, byte_s: float, reduce_s: float = 0.0, ranks_per_node: int = 1
    ) -> float:
        """Predict the seconds of a call from `cost` and the seconds of a step, a byte sent, and a byte added."""
        steps, sent, added = cls.cost(n_bytes, size, ranks_per_node)
        return steps * latency_s + sent * byte_s + added * reduce_s


class Scratch:
    """Working memory of one algorithm, kept between calls and grown on demand."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def empty_like(self, tensor: Tensor, count: int) -> Tensor:
        """Return `count` uninitialized elements of `tensor`'s dtype and device, valid until the next call."""
        n_bytes = count * tensor.itemsize
        if self._memory.numel() < n_bytes or self._memory.device != tensor.device:
            self._memory = torch.empty(n_bytes, dtype=torch.uint8, device=tensor.device)
        return self._memory[:n_bytes].view(tensor.dtype)


def sum_in_rank_order(
    local: Tensor, rank: int, size: int, read: Callable[[int], Tensor], partial: Callable[[], Tensor], divisor: int = 1
) -> None:
    """Replace `local`, this rank's addend, by x_0 + x_1 + ... + x_(size - 1), added in this order.

    The result is bitwise equal on all ranks. 16-bit floats are added in float32 and rounded once.

    Args:
        local: overwritten by the sum.
        rank: this rank, whose addend is `local`.
        size: number of ranks.
        read: returns the addend of another rank, valid until the next call.
        partial: returns memory for partial sums while `local` is still needed as an addend; may be that of `read(0)`.
        divisor: the sum is divided by it before rounding.
    """
    if local.dtype in WIDE:
        wide = (local if rank == 0 else read(0)).to(WIDE[local.dtype])
        for peer in range(1, size):
            wide.add_(local if peer == rank else read(peer))
        local.copy_(wide.div_(divisor))
        return
    total = local if rank == 0 else read(0)
    for peer in range(1, size):
        addend = local if peer == rank else read(peer)
        # `local` holds partial sums only on rank 0; on other ranks it is still needed as an addend.
        total = torch.add(total, addend, out=local if rank == 0 or peer == size - 1 else partial())
    if divisor != 1:
        local.div_(divisor)  # while it is in the cache


def bounds(count: int, parts: int) -> list[int]:
    """Split `count` elements into `parts` consecutive parts of nearly equal length; return the parts + 1 offsets."""
    return [count * part // parts for part in range(parts + 1)]


def chunks(tensor: Tensor, parts: int) -> Sequence[Tensor]:
    """Split `tensor` into `parts` consecutive views that differ by at most one element in length."""
    cuts = bounds(tensor.numel(), parts)
    return [tensor[start:end] for start, end in itertools.pairwise(cuts)]


def segment_count(n_bytes: int, segment_bytes: int) -> int:
    """Return the number of segments of at most `segment_bytes` for `n_bytes`: at least 1."""
    return max(1, -(-n_bytes // segment_bytes))


class Folding:
    """Runs an algorithm for 2^k ranks on any number p of ranks: on the core, the largest 2^k <= p ranks.

    With e = p - 2^k extra ranks, the first 2e ranks form pairs. The odd rank of a pair sends its vector to the even
    rank, takes no part in the algorithm, and receives the result at the end.

    Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
    2005, section 4.5.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.size = 1 << (comm.size.bit_length() - 1)  # of the core
        self._extra = comm.size - self.size
        self._paired = comm.rank < 2 * self._extra
        # In the core; an extra rank has its partner's.
        self.rank = comm.rank // 2 if self._paired else comm.rank - self._extra

    @property
    def is_extra(self) -> bool:
        """Return whether this rank is not in the core."""
        return self._paired and self.comm.rank % 2 == 1

    def peer(self, core_rank: int) -> int:
        """Convert a rank of the core to a rank of the communicator."""
        return 2 * core_rank if core_rank < self._extra else core_rank + self._extra

    def fold(self, tensor: Tensor, scratch: Tensor) -> None:
        """Collective. Add the extra ranks' `tensor` to their partners'. `scratch`: same length, overwritten."""
        if self.is_extra:
            self.comm.isend(tensor, self.comm.rank - 1, TAG).wait()
        elif self._paired:
            self.comm.irecv(scratch, self.comm.rank + 1, TAG).wait()
            tensor.add_(scratch)

    def unfold(self, tensor: Tensor) -> None:
        """Collective. Copy the result from the partners to the extra ranks."""
        if self.is_extra:
            self.comm.irecv(tensor, self.comm.rank - 1, TAG).wait()
        elif self._paired:
            self.comm.isend(tensor, self.comm.rank + 1, TAG).wait()


def core_steps(size: int) -> tuple[int, bool]:
    """Return the base-2 logarithm of the core's size (see `Folding`), and whether there are extra ranks."""
    steps = size.bit_length() - 1
    return steps, size != 1 << steps
