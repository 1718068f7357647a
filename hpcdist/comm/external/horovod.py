"""Horovod's sums over the ranks. It is imported here and in `horovod_process.py` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from hpcdist.comm.communicator import concurrent
from hpcdist.comm.external.base import WATCHDOG_S, OutsideSum, Pending
from hpcdist.comm.external.horovod_process import Tuning, built_with, join, leave, obstacle
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.waiting import wait_until
from hpcdist.errors import CommunicationError, ConfigError

__all__ = ["Horovod", "built_with", "obstacle"]

SUMMED = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
POLL_S = 1e-4  # longest pause between two looks at a sum under way; Horovod itself looks once per cycle, of 1 ms

Op = Literal["sum", "average", "adasum"]


class Horovod(OutsideSum):
    """Collective. Sum by Horovod: GPU tensors by its NCCL operations where it was built with them, others by MPI.

    Horovod sends tensors that are ready at about the same time as one, and says at the end of each cycle which ranks
    have them, so that a sum takes a cycle's time at least, however short.

    The first object starts Horovod on the ranks of `comm`, and the last one that is closed ends it. While it runs,
    another one's ranks must be among these, and all of these make one at the same time, each for the ranks of its own
    group: a process set.

    Args:
        comm: real ranks, of an MPI that was started with MPI_THREAD_MULTIPLE.
        op: the reduction: the sum, the mean, or Adasum, which adds the orthogonal parts of the ranks' tensors and
            averages the parallel ones, for 1, 2, 4, 8... ranks.
        compression: "fp16" sends and sums tensors of floating-point numbers in half precision.
        fusion_bytes: tensors are sent together up to this size; 128 MiB by default.
        cycle_time_ms: pause between two rounds in which ranks announce their tensors; 1 ms by default. Where it is
            given, Horovod runs with it to the end of the process, and without groups.

    Raises:
        ConfigError: Horovod is not installed, or can't run with these arguments.
        CommunicationError: MPI was started without threads, or Horovod loads another MPI than mpi4py.

    Reference: Alexander Sergeev, Mike Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
    2018; Saeed Maleki et al., "Scaling distributed training with adaptive summation", 2020.
    """

    label = "Horovod"

    def __init__(
        self,
        comm: MpiCommunicator,
        *,
        op: Op = "sum",
        compression: Literal["none", "fp16"] = "none",
        fusion_bytes: int | None = None,
        cycle_time_ms: float | None = None,
    ):
        super().__init__(comm)
        if not concurrent(comm):
            raise CommunicationError(
                "MPI must be started with MPI_THREAD_MULTIPLE for Horovod, whose thread communicates beside this one; "
                "got less. Let mpi4py start MPI, or use an MPI built with threads."
            )
        if op == "adasum" and comm.size & (comm.size - 1):
            raise ConfigError(f"Adasum must run on 1, 2, 4, 8... ranks; got {comm.size}. Use op = 'average'.")
        self._running, self._ranks = join(comm, Tuning.of(fusion_bytes, cycle_time_ms))
        if op == "adasum" and comm.size < self._running.comm.size:
            leave()
            raise ConfigError(
                f"Adasum must run on all ranks that Horovod runs on, {self._running.comm.size}; got {comm.size} of "
                "them. Use op = 'average' for groups."
            )
        self._prefix = f"hpcdist {self._running.made}"  # the same on all ranks, which make objects at the same time
        hvd = self._hvd = self._running.hvd
        self._op = {"sum": hvd.Sum, "average": hvd.Average, "adasum": hvd.Adasum}[op]
        self._half = compression == "fp16"
        self._closed = False

    def check(self, tensor: Tensor) -> None:
        if tensor.dtype not in SUMMED:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMED)
            raise ConfigError(
                f"dtype must be one of {known} to be summed by Horovod; got {tensor.dtype}. Convert it, or use "
                "provider = 'hpcdist'."
            )

    def _start(self, tensor: Tensor, name: str) -> Pending:
        sent = tensor
        if self._half and tensor.is_floating_point():
            sent = sent.half()
        if sent.is_cuda and not self._hvd.cuda_built():
            sent = sent.cpu()
        name = f"{self._prefix} {name}"
        try:
            group = self._running.group(self._ranks)
            handle = self._hvd.allreduce_async_(sent, name=name, op=self._op, process_set=group)
        except (ValueError, RuntimeError) as error:
            raise self._failure(error) from error
        return Pending(tensor, handle, name, sent)

    def _wait(self, pending: Pending, describe: Callable[[], str]) -> None:
        done = self._hvd.poll
        wait_until(lambda: done(pending.handle), self.comm.failures.deadline_s + WATCHDOG_S, describe, POLL_S)
        try:
            self._hvd.synchronize(pending.handle)
        except self._hvd.HorovodInternalError as error:
            self._running.broken = True
            raise self._failure(error) from error

    def close(self) -> None:
        """Collective. End Horovod in this process, unless another object uses it."""
        if not self._closed:
            self._closed = True
            leave()
