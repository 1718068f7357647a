"""Sums over the ranks by other libraries, called as our own all-reduce algorithms are; they may be under way."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpcdist.comm.transfer import check_flat
from hpcdist.errors import CommunicationError, RankFailedError

if TYPE_CHECKING:  # it starts MPI, which importing a strategy must not
    from hpcdist.comm.mpi.communicator import MpiCommunicator

WATCHDOG_S = 15.0  # past the deadline a watchdog, where one runs, first has this long to name who is missing


@dataclass
class Pending:
    """A sum under way: its tensor, and the library's handle."""

    tensor: Tensor
    handle: Any
    name: str
    sent: Tensor  # summed in place: the tensor itself, or a copy in another dtype or on the host


class OutsideSum(abc.ABC):
    """Collective. Sum flat tensors over the ranks of `comm`, in place, by another library.

    Sums may be begun without waiting for them, in the same order on all ranks, under names that are the same there.
    A rank that does not come is waited for until the communicator's deadline.

    Args:
        comm: real ranks. Its MPI moves nothing of the tensors; bytes are counted there, as those of a ring.
    """

    label: str  # the library's name, for messages

    def __init__(self, comm: MpiCommunicator):
        self.comm = comm

    def __call__(self, tensor: Tensor) -> None:
        """Collective. Replace `tensor` by its sum over all ranks, or by the other reduction that this was made for.

        Args:
            tensor: flat and contiguous, same length and dtype on all ranks. Overwritten.

        Raises:
            ConfigError: the library can't sum its dtype, or not where it lies.
            DeadlineError: some rank did not come in time.
            RankFailedError, CommunicationError: a rank has died, or the library has failed.
        """
        start = self.comm.now()
        if tensor.numel() > 0:
            self.finish(self.start(tensor, f"{tensor.numel()} {tensor.dtype}"))
        self.comm.trace.traffic.communicating_s += self.comm.now() - start

    def start(self, tensor: Tensor, name: str) -> Pending:
        """Collective. Start a sum; `tensor` must not be used until `finish`. No two under way have one name."""
        check_flat(tensor)
        self.check(tensor)
        pending = self._start(tensor, name)
        hops = 2 * (self.comm.size - 1)
        self.comm.trace.traffic.sent(hops * pending.sent.nbytes // self.comm.size, hops)
        return pending

    def finish(self, pending: Pending) -> None:
        """Block until the sum is in its tensor."""
        from hpcdist.comm.mpi.calls import EVERYONE  # starts MPI, too

        what = f"an all-reduce by {self.label}"
        with self.comm.calls.blocked(what, EVERYONE, self.comm.failures.deadline_s):
            self._wait(pending, lambda: f"rank {self.comm.rank} of {self.comm.size}: {what} of {pending.name}")
        if pending.sent is not pending.tensor:
            pending.tensor.copy_(pending.sent)

    @abc.abstractmethod
    def check(self, tensor: Tensor) -> None:
        """Check that the library can sum a tensor of this dtype on this device; raise ConfigError otherwise."""

    @abc.abstractmethod
    def _start(self, tensor: Tensor, name: str) -> Pending:
        """Hand the tensor to the library."""

    @abc.abstractmethod
    def _wait(self, pending: Pending, describe: Callable[[], str]) -> None:
        """Block until the library is done; raise DeadlineError past the deadline and WATCHDOG_S more."""

    def _failure(self, error: Exception) -> CommunicationError:
        """Make the error for a failure of the library."""
        dead, lines = self.comm.failures.failed(), str(error).strip().splitlines()
        cls = RankFailedError if dead else CommunicationError
        who = f"ranks {', '.join(map(str, dead))} died" if dead else "the rank that fails first says why"
        return cls(
            f"an all-reduce by {self.label} failed on rank {self.comm.rank}: {''.join(lines[:1])} ({who}). Resume from "
            "the last checkpoint."
        )

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Release what the library holds."""
