"""Sums over the ranks by torch.distributed's process groups, NCCL and Gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.comm.external.base import WATCHDOG_S, OutsideSum, Pending
from hpcdist.comm.external.rendezvous import Rendezvous, meet
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.waiting import wait_until
from hpcdist.errors import ConfigError

POLL_S = 1e-4  # longest pause between two looks at a sum under way
LONGEST_S = 1e7  # that a timeout of torch.distributed may have


class ProcessGroup(OutsideSum):
    """Collective. Sum by torch.distributed, in a process group of its own: no default group is made or needed.

    Ranks meet at an address that rank 0 sends over MPI.

    Args:
        comm: real ranks.
        backend: nccl, for tensors on GPUs, of which each rank has one; or gloo, for tensors anywhere.
        interface: name of a network interface, or a network, to meet on and for Gloo to use; by default the fastest
            one. NCCL chooses its own by NCCL_SOCKET_IFNAME.

    Raises:
        ConfigError: there is no NCCL, or a rank has no GPU.
        CommunicationError: ranks don't reach each other.

    Reference: Shen Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020.
    """

    def __init__(self, comm: MpiCommunicator, backend: str, interface: str = ""):
        super().__init__(comm)
        self.backend, self.label = backend, {"nccl": "NCCL", "gloo": "Gloo"}[backend]
        if backend == "nccl":
            self._require_gpus()
        meeting = meet(comm, interface)
        self._timeout = timedelta(seconds=min(comm.failures.deadline_s + 2 * WATCHDOG_S, LONGEST_S))
        self._store = meeting.store
        self._group = (self._gloo if backend == "gloo" else self._nccl)(meeting)

    def _require_gpus(self) -> None:
        """Collective. Check that every rank has a GPU; raise ConfigError on all ranks otherwise."""
        reason = ""
        if not dist.is_nccl_available():
            reason = "its torch was built without NCCL"
        elif not torch.cuda.is_available():
            reason = "torch finds no CUDA device"
        for rank, text in enumerate(self.comm.gather(reason)):
            if text:
                raise ConfigError(
                    f"NCCL must have a GPU on every rank; rank {rank} has none: {text}. Use provider = "
                    "'hpcdist', 'horovod' or 'gloo' there."
                )

    def _gloo(self, meeting: Rendezvous) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.address)]
        options._timeout = self._timeout
        return dist.ProcessGroupGloo(meeting.store, self.comm.rank, self.comm.size, options)

    def _nccl(self, meeting: Rendezvous) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(meeting.store, self.comm.rank, self.comm.size, options)

    def check(self, tensor: Tensor) -> None:
        if self.backend == "nccl" and not tensor.is_cuda:
            raise ConfigError(
                f"tensors must be on a GPU to be summed by NCCL; got one on {tensor.device}. Move the model there, or "
                "use provider = 'gloo'."
            )

    def _start(self, tensor: Tensor, name: str) -> Pending:
        try:
            return Pending(tensor, self._group.allreduce([tensor]), name, tensor)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _wait(self, pending: Pending, describe: Callable[[], str]) -> None:
        wait_until(pending.handle.is_completed, self.comm.failures.deadline_s + WATCHDOG_S, describe, POLL_S)
        try:
            pending.handle.wait()
        except RuntimeError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        if self._group is not None:
            self.comm.barrier()  # rank 0 keeps the store for all
            getattr(self._group, "shutdown", getattr(self._group, "_shutdown", None))()
            self._group = self._store = None
