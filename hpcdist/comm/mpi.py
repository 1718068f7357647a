"""Real ranks: the seam over mpi4py.

Buffers are passed in place, nothing on the hot path is pickled, and a blocking call leaves a note of what it waits
for, which the watchdog (`comm/mpi_watchdog.py`) reads when the deadline passes.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from contextlib import AbstractContextManager

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm import cross_memory
from hpcdist.comm.communicator import (
    ANY,
    TAG_LIMIT,
    Communicator,
    Envelope,
    Request,
    Traffic,
    Window,
    check_flat,
)
from hpcdist.comm.mpi_buffers import NUMBERS, Staging, message, numbers
from hpcdist.comm.waiting import wait_until
from hpcdist.errors import CommunicationError, MismatchError

DEADLINE_S = 600.0
_clock = time.perf_counter
live: weakref.WeakSet[MpiCommunicator] = weakref.WeakSet()  # what the watchdog looks at
_world: MpiCommunicator | None = None


def world(*, deadline_s: float = DEADLINE_S, nodes: tuple[int, ...] | None = None) -> MpiCommunicator:
    """Collective at the first call. The communicator of all ranks; later calls return the same one."""
    global _world
    if _world is None:
        cross_memory.allow_peers()
        _world = MpiCommunicator(MPI.COMM_WORLD.Dup(), deadline_s=deadline_s, nodes=nodes, name="world")
    return _world


def library() -> str:
    """The MPI library's name and version, one line."""
    return MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")


class MpiCommunicator(Communicator):
    """Collective. The seam over one MPI communicator, which it owns and frees.

    Args:
        mpi: an intracommunicator.
        deadline_s: seconds after which a blocking call ends the run with a message.
        nodes: node index of each rank; by default ranks that can share memory are on one node.
        device_aware: the MPI library reads and writes device memory itself; off unless the user asks.
        name: how messages call this communicator.
    """

    def __init__(
        self,
        mpi: MPI.Intracomm,
        *,
        deadline_s: float = DEADLINE_S,
        nodes: tuple[int, ...] | None = None,
        device_aware: bool = False,
        name: str = "communicator",
    ):
        self._mpi = mpi
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        self.name, self.deadline_s, self.traffic = name, deadline_s, Traffic()
        self.nodes = nodes if nodes is not None else _find_nodes(mpi)
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.staging = Staging(device_aware)
        self.pids = [int.from_bytes(p, "little") for p in self.exchange(os.getpid().to_bytes(8, "little"))]
        self._attachable = self._try_attach()
        self.can_attach = self._attachable and len(set(self.nodes)) == 1
        self._node_mpi: MPI.Intracomm | None = None
        self._agent = None
        live.add(self)

    # --- every blocking call passes here: timed, and visible to the watchdog ---------------------------------------
    call: tuple[str, int, float] | None = None  # what this rank is blocked in: call, peer (-1: everyone), since
    calls = 0  # collective calls begun; ranks in step have equal counts

    def _communicate(self, what: str, peer: int, function, *args) -> None:
        start = _clock()
        self.call = (what, peer, start)
        try:
            function(*args)
        except MPI.Exception as error:
            raise CommunicationError(self._explain(what, peer, error)) from error
        finally:
            self.call = None
            self.traffic.communicating_s += _clock() - start

    def _explain(self, what: str, peer: int, error: MPI.Exception) -> str:
        whom = "" if peer < 0 else f" with rank {peer}"
        hint = ""
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            hint = " A message was longer than the tensor it was received into: lengths and dtypes must agree."
        return f"{what}{whom} on {self.name} failed on rank {self.rank}: {error.Get_error_string()}.{hint}"

    # --- point to point -------------------------------------------------------------------------------------------
    def sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int = 0) -> None:
        self.check_peer(dest, "dest")
        self.check_peer(source, "source")
        if self.staging.direct(send) and self.staging.direct(recv):
            args = (message(send), dest, tag, message(recv), source, tag)
            self._communicate("sendrecv", source, self._mpi.Sendrecv, *args)
        else:
            with self.staging.host(send, write=False, slot="send") as out, self.staging.host(recv, read=False) as into:
                args = (message(out), dest, tag, message(into), source, tag)
                self._communicate("sendrecv", source, self._mpi.Sendrecv, *args)
        self.traffic.sent(send.nbytes)

    def isend(self, tensor: Tensor, dest: int, tag: int = 0) -> Request:
        check_flat(tensor)
        self.check_peer(dest, "dest")
        _check_tag(tag)
        host = tensor if self.staging.direct(tensor) else tensor.cpu()
        self.traffic.sent(tensor.nbytes)
        return MpiRequest(self, self._mpi.Isend(message(host), dest, tag), "isend", dest, host, None)

    def irecv(self, tensor: Tensor, source: int = ANY, tag: int = ANY) -> Request:
        check_flat(tensor)
        if source != ANY:
            self.check_peer(source, "source")
        host = tensor if self.staging.direct(tensor) else torch.empty_like(tensor, device="cpu", pin_memory=True)
        source, tag = (MPI.ANY_SOURCE if source == ANY else source), (MPI.ANY_TAG if tag == ANY else tag)
        request = self._mpi.Irecv(message(host), source, tag)
        return MpiRequest(self, request, "irecv", source, host, None if host is tensor else tensor)

    def probe(self, source: int = ANY, tag: int = ANY, *, block: bool = True) -> Envelope | None:
        status = MPI.Status()
        wanted = (MPI.ANY_SOURCE if source == ANY else source, MPI.ANY_TAG if tag == ANY else tag)

        def arrived() -> bool:
            return self._mpi.Iprobe(*wanted, status)

        if block:
            whom = "any rank" if source == ANY else f"rank {source}"
            self.traffic.waiting_s += wait_until(
                arrived, self.deadline_s, lambda: f"rank {self.rank}: a message from {whom} on {self.name}"
            )
        elif not arrived():
            return None
        return Envelope(status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE))

    # --- collective -----------------------------------------------------------------------------------------------
    def allreduce(self, tensor: Tensor) -> None:
        """Collective. Sums `tensor` over all ranks in place, by MPI's own all-reduce.

        MPI has no 16-bit floats: those are summed in float32 and rounded once. Bytes counted are those of a ring,
        2n(p-1)/p, the least that any algorithm sends for large n; MPI does not tell what it really sent.
        """
        if tensor.dtype not in NUMBERS or not self.staging.direct(tensor):
            return self._allreduce_converted(tensor)
        self.calls += 1
        self._communicate("allreduce", -1, self._mpi.Allreduce, MPI.IN_PLACE, numbers(tensor))
        self.traffic.sent(2 * tensor.nbytes * (self.size - 1) // self.size)

    def _allreduce_converted(self, tensor: Tensor) -> None:
        if tensor.dtype in (torch.float16, torch.bfloat16):
            wide = tensor.float()
            self.allreduce(wide)
            tensor.copy_(wide)
        elif tensor.dtype in NUMBERS:
            with self.staging.host(tensor) as host:
                self.allreduce(host)
        else:
            raise CommunicationError(f"dtype of an all-reduce must be a number; got {tensor.dtype}. Convert it first.")

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        check_flat(tensor)
        self.check_peer(root, "root")
        self.calls += 1
        with self.staging.host(tensor, read=self.rank == root, write=self.rank != root) as host:
            self._communicate("broadcast", root, self._mpi.Bcast, message(host), root)
        if self.rank == root and self.size > 1:
            self.traffic.sent(tensor.nbytes)

    def exchange(self, data: bytes) -> list[bytes]:
        lengths = np.empty(self.size, np.int64)
        self.calls += 1
        self._communicate("exchange", -1, self._mpi.Allgather, np.array([len(data)], np.int64), lengths)
        gathered = bytearray(int(lengths.sum()))
        into = [gathered, lengths, np.concatenate([[0], lengths[:-1].cumsum()]), MPI.BYTE]
        self._communicate("exchange", -1, self._mpi.Allgatherv, [data, len(data), MPI.BYTE], into)
        self.traffic.sent(len(data) * (self.size - 1), self.size - 1)
        ends = lengths.cumsum()
        return [bytes(gathered[end - n : end]) for n, end in zip(lengths, ends, strict=True)]

    def barrier(self) -> None:
        start = _clock()
        self.calls += 1
        self.call = ("barrier", -1, start)
        self._mpi.Barrier()
        self.call = None
        self.traffic.waiting_s += _clock() - start

    def split(self, color: int | None, key: int = 0, *, name: str | None = None) -> MpiCommunicator | None:
        members = [int(c) for c in self.exchange(str(-1 if color is None else color).encode())]
        mpi = self._mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        mine = [r for r in range(self.size) if members[r] == color]
        world_ranks = MPI.Group.Translate_ranks(mpi.Get_group(), list(range(len(mine))), self._mpi.Get_group())
        found = [self.nodes[r] for r in world_ranks]
        dense = {node: i for i, node in enumerate(dict.fromkeys(found))}
        return MpiCommunicator(
            mpi,
            deadline_s=self.deadline_s,
            nodes=tuple(dense[n] for n in found),
            device_aware=self.staging.device_aware,
            name=name or f"{self.name}/{color}",
        )

    def window(self, count: int, dtype: torch.dtype = torch.float32) -> Window:
        from hpcdist.comm.mpi_window import MpiWindow  # the window's module needs this one

        return MpiWindow(self, count, dtype)

    def attach(self, tensor: Tensor) -> Window:
        from hpcdist.comm.mpi_window import AttachedWindow

        if not self.can_attach:
            raise CommunicationError(
                f"{self.name} must lie within one node whose kernel allows cross-memory attach; "
                "can_attach tells. Use a window, or another collective."
            )
        own = np.array([tensor.data_ptr(), tensor.nbytes], np.int64)
        found = np.empty((self.size, 2), np.int64)
        self.calls += 1
        self._communicate("attach", -1, self._mpi.Allgather, own, found)
        if (found[:, 1] != tensor.nbytes).any():
            raise MismatchError(
                f"tensors attached together must have the same number of bytes on every rank; "
                f"got {found[:, 1].tolist()} in rank order."
            )
        return AttachedWindow(self, tensor, found[:, 0].tolist())

    def host(self, tensor: Tensor) -> AbstractContextManager[Tensor]:
        """See Communicator.host."""
        return self.staging.host(tensor)

    # --- time and end ---------------------------------------------------------------------------------------------
    def compute(self) -> float:
        return 0.0

    def now(self) -> float:
        return _clock()

    def abort(self, status: int = 1) -> None:
        """Ends every rank of the job at once, with this exit status."""
        MPI.COMM_WORLD.Abort(status)

    def close(self) -> None:
        live.discard(self)
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        if self._node_mpi is not None:
            self._node_mpi.Free()
            self._node_mpi = None
        self._mpi.Free()

    # --- what windows need ----------------------------------------------------------------------------------------
    def node_mpi(self) -> MPI.Intracomm:
        """Collective at the first call. MPI's communicator of the ranks on this rank's node."""
        if self._node_mpi is None:
            self._node_mpi = self._mpi.Split(self.nodes[self.rank], self.rank)
        return self._node_mpi

    def agent(self):
        """Collective at the first call. The thread that serves windows to ranks of other nodes."""
        if self._agent is None:
            from hpcdist.comm.mpi_agent import Agent

            self._agent = Agent(self)
        return self._agent

    def _try_attach(self) -> bool:
        """Collective. True if every rank could read a secret of every other rank of its node."""
        secret = np.frombuffer(secrets.token_bytes(16), np.uint8).copy()
        found = self.exchange(secret.ctypes.data.to_bytes(8, "little") + secret.tobytes())
        seen, works = np.empty(16, np.uint8), True
        for peer, (pid, told) in enumerate(zip(self.pids, found, strict=True)):
            if self.nodes[peer] == self.nodes[self.rank] and peer != self.rank:
                try:
                    address = int.from_bytes(told[:8], "little")
                    cross_memory.PeerMemory(pid).read(seen.ctypes.data, address, 16)
                except CommunicationError:
                    works = False
                works = works and seen.tobytes() == told[8:]
        return all(answer == b"y" for answer in self.exchange(b"y" if works else b"n"))


class MpiRequest(Request):
    """A transfer under way; keeps its buffer alive, and copies it back to the device where it was staged."""

    def __init__(self, comm: MpiCommunicator, request: MPI.Request, what: str, peer: int, host: Tensor, device):
        self._comm, self._request, self._what, self._peer = comm, request, what, peer
        self._host, self._device = host, device

    def done(self) -> bool:
        if self._request.Test():
            self._finish()
            return True
        return False

    def wait(self) -> None:
        self._comm._communicate(self._what, self._peer, self._request.Wait)
        self._finish()

    def _finish(self) -> None:
        if self._device is not None:
            self._device.copy_(self._host)
            self._device = None


def _find_nodes(mpi: MPI.Intracomm) -> tuple[int, ...]:
    """Collective. Node index of each rank: ranks that can share memory are on one node; nodes in order of rank."""
    node = mpi.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([mpi.Get_rank()], np.int64)
    node.Allreduce(MPI.IN_PLACE, first, MPI.MIN)
    node.Free()
    firsts = np.empty(mpi.Get_size(), np.int64)
    mpi.Allgather(first, firsts)
    index = {leader: i for i, leader in enumerate(sorted(set(firsts.tolist())))}
    return tuple(index[leader] for leader in firsts.tolist())


def _check_tag(tag: int) -> None:
    if not 0 <= tag < TAG_LIMIT:
        raise CommunicationError(f"tag must be in 0..{TAG_LIMIT - 1}; got {tag}.")
