"""All-reduce by other libraries (Horovod, torch.distributed), with the `Work` handles of hpcdist's calls."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcdist.comm.transfer import check_flat
from hpcdist.comm.waiting import wait_until
from hpcdist.comm.work import Work
from hpcdist.errors import CommunicationError, RankFailedError

if TYPE_CHECKING:  # it starts MPI, which importing a strategy must not
    from hpcdist.comm.mpi.communicator import MpiCommunicator

WATCHDOG_S = 15.0  # past the deadline the watchdog first has this time to report the missing rank
POLL_S = 1e-4  # longest pause between two checks of a sum in flight; Horovod itself checks once per cycle of 1 ms


class OtherLibrary(abc.ABC):
    """Collective. Sum flat tensors over the ranks of `comm`, in place, by another library than MPI.

    A missing rank is waited for until the communicator's deadline.

    Args:
        comm: real ranks. Bytes are counted in its traffic, as for a ring all-reduce.
    """

    label: str  # the library's name, for messages

    def __init__(self, comm: MpiCommunicator):
        self.comm = comm

    def all_reduce(self, tensor: Tensor, name: str = "", *, divisor: int = 1, async_op: bool = False) -> Work | None:
        """Collective. Replace `tensor` by its sum, or another reduction chosen at construction, over all ranks.

        Args:
            tensor: flat and contiguous, same length and dtype on all ranks. Overwritten.
            name: the same on all ranks, and unique among the tensors in flight.
            divisor: divide the result by it; for float16 divide the addends, like DistributedDataParallel.
            async_op: return a work immediately. All ranks must start sums in the same order.

        Raises:
            ConfigError: the library can't sum this dtype, or tensors on this device.
            DeadlineError: a rank did not join in time.
            RankFailedError, CommunicationError: a rank has died, or the library has failed.
        """
        check_flat(tensor)
        self.check(tensor)
        comm, name, hops = self.comm, name or f"{tensor.numel()} {tensor.dtype}", 2 * (self.comm.size - 1)
        if tensor.numel() == 0:
            return Work(tensor) if async_op else None
        divides_first = tensor.dtype is torch.float16
        if divides_first and divisor != 1:
            tensor.div_(divisor)
        sent = self._sent(tensor)
        try:
            handle = self._start(sent, name)
        except (ValueError, RuntimeError) as error:
            raise self._failure(error) from error
        comm.trace.traffic.sent(hops * sent.nbytes // comm.size, hops)

        def block() -> None:
            from hpcdist.comm.mpi.calls import ALL_RANKS  # starts MPI, too

            what, limit_s = f"an all-reduce by {self.label}", comm.failures.deadline_s
            with comm.calls.blocked(what, ALL_RANKS, limit_s):
                describe = f"rank {comm.rank} of {comm.size}: {what} of {name}"
                wait_until(lambda: self._poll(handle), limit_s + WATCHDOG_S, lambda: describe, POLL_S)

        def finish() -> None:
            try:
                self._finish(handle)
            except RuntimeError as error:  # Horovod's error class
                raise self._failure(error) from error
            if sent is not tensor:
                tensor.copy_(sent)
            if not divides_first and divisor != 1:
                tensor.div_(divisor)

        work = Work(tensor, lambda: self._poll(handle), block, finish)
        if async_op:
            return work
        start = comm.now()
        work.wait()
        comm.trace.traffic.communicating_s += comm.now() - start
        return None

    @abc.abstractmethod
    def check(self, tensor: Tensor) -> None:
        """Check that the library can sum a tensor of this dtype on this device; raise ConfigError otherwise."""

    def _sent(self, tensor: Tensor) -> Tensor:
        """Return the tensor to sum in place: `tensor` itself, or a copy in another dtype or on the host."""
        return tensor

    @abc.abstractmethod
    def _start(self, tensor: Tensor, name: str) -> Any:
        """Start the library's all-reduce; return its handle."""

    @abc.abstractmethod
    def _poll(self, handle: Any) -> bool:
        """Return whether the all-reduce is complete."""

    @abc.abstractmethod
    def _finish(self, handle: Any) -> None:
        """Finish a complete all-reduce; raise RuntimeError if it has failed."""

    def _failure(self, error: Exception) -> CommunicationError:
        """Return the error for a failure of the library."""
        dead, lines = self.comm.failures.failed(), str(error).strip().splitlines()
        cls = RankFailedError if dead else CommunicationError
        who = f"ranks {', '.join(map(str, dead))} died" if dead else "the rank that failed first reports the reason"
        return cls(
            f"an all-reduce by {self.label} failed on rank {self.comm.rank}: {''.join(lines[:1])} ({who}). Resume from "
            "the last checkpoint."
        )

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Release the library's resources."""


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context with these environment variables, for a library that reads its settings from there."""
    saved = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
            if name in saved:
                os.environ[name] = saved[name]
