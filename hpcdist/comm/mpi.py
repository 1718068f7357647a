"""Real ranks: the seam over mpi4py.

Buffers are passed in place, nothing on the hot path is pickled, and a blocking call leaves a note of what it waits
for, which the watchdog (`comm/mpi_watchdog.py`) reads when the deadline passes.
"""

from __future__ import annotations

import atexit
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm import cross_memory
from hpcdist.comm.communicator import ANY, Communicator, Envelope, Put, Request, Traffic, Window, check_flat, check_tag
from hpcdist.comm.mpi_allreduce import Summing
from hpcdist.comm.mpi_buffers import Staging, message
from hpcdist.comm.mpi_neighbourhood import Neighbouring
from hpcdist.comm.mpi_node import find_nodes, try_attach, world_ranks
from hpcdist.comm.mpi_request import ANYONE, EVERYONE, Call, MpiRequest
from hpcdist.comm.mpi_rollcall import end, library
from hpcdist.comm.mpi_surviving import Surviving, meet
from hpcdist.comm.waiting import wait_until
from hpcdist.errors import CommunicationError, MismatchError

DEADLINE_S = 600.0
_clock = time.perf_counter
_live: weakref.WeakValueDictionary[int, MpiCommunicator] = weakref.WeakValueDictionary()
_world: MpiCommunicator | None = None
_finish: Callable[[], None] | None = None
threads: list = []  # of this module's kind that run beside the script: each has stop(), which ends it


def world(
    *,
    deadline_s: float = DEADLINE_S,
    nodes: tuple[int, ...] | None = None,
    across: str = "auto",
    tolerant: bool = False,
) -> MpiCommunicator:
    """Collective at the first call. The communicator of all ranks; later calls return the same one.

    Arguments count at the first call only. They are those of MpiCommunicator, and `tolerant`: the launcher keeps the
    job going when a rank dies, and the library tells (`mpirun --with-ft ulfm`).
    """
    global _world, _finish
    if _world is None:
        Surviving.tolerant = tolerant
        cross_memory.allow_peers()
        _world = MpiCommunicator(
            MPI.COMM_WORLD.Dup(), deadline_s=deadline_s, nodes=nodes, across=across, name="world"
        )
        _finish = partial(_leave, _world, MPI.COMM_WORLD.Dup())
        atexit.register(_finish)
    return _world


def finalise() -> None:
    """Collective. What else happens at the end of the script: waits for the other ranks, then ends MPI."""
    if _finish is not None:
        _finish()
        MPI.Finalize()


def live() -> list[MpiCommunicator]:
    """The communicators in use, from whichever thread one asks."""
    return [comm for reference in _live.valuerefs() if (comm := reference()) is not None]


def _leave(comm: MpiCommunicator, all_ranks: MPI.Intracomm) -> None:
    """Collective. Runs when the script has ended: waits for the other ranks, then ends this package's threads.

    Until all ranks are here this one still serves its windows, and its watchdog still tells where it is. MPI must
    not be finalised while a thread may be inside it (MPI 4.1, 11.10).
    """
    if not MPI.Is_finalized():
        with comm.blocked("exit", EVERYONE, math.inf):
            if comm.tolerant:
                meet(all_ranks)
            else:
                wait_until(all_ranks.Ibarrier().Test, math.inf, str)
        for thread in list(threads):
            thread.stop()


class MpiCommunicator(Summing, Surviving, Neighbouring, Communicator):
    """Collective. The seam over one MPI communicator, which it owns and frees.

    Args:
        mpi: an intracommunicator.
        deadline_s: seconds after which a blocking call ends the run with a message.
        nodes: node index of each rank; by default ranks that can share memory are on one node.
        device_aware: the MPI library reads and writes device memory itself; off unless the user asks.
        across: how windows are read and written across nodes: `tcp`, `rma`, or `auto` for what a self-test finds
            faster (`comm/mpi_across.py`). `tcp:ib0`, `auto:10.1.0.0/16`: by this interface or network.
        name: how messages call this communicator.
    """

    def __init__(
        self,
        mpi: MPI.Intracomm,
        *,
        deadline_s: float = DEADLINE_S,
        nodes: tuple[int, ...] | None = None,
        device_aware: bool = False,
        across: str = "auto",
        name: str = "communicator",
    ):
        self.mpi = mpi
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        self.begin_whole()
        self.name, self.deadline_s, self.traffic = name, deadline_s, Traffic()
        self.library = library()
        self.prepare_sums()
        self.nodes = _checked_nodes(nodes, self.size) if nodes is not None else find_nodes(mpi)
        self.world_ranks = world_ranks(mpi)
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.staging = Staging(device_aware)
        self.pids = [int.from_bytes(p, "little") for p in self.exchange(os.getpid().to_bytes(8, "little"))]
        self.can_attach = try_attach(self) and len(set(self.nodes)) == 1
        self._node_mpi: MPI.Intracomm | None = None
        self._server = None
        self._across = across
        _live[id(self)] = self

    # --- every blocking call passes here: timed, and visible to the watchdog ---------------------------------------
    call: Call | None = None  # what this rank is blocked in
    calls = 0  # collective calls begun; ranks in step have equal counts

    @contextmanager
    def blocked(self, what: str, peer: int, deadline_s: float) -> Iterator[None]:
        """Lets the watchdog know that this rank waits."""
        outer, self.call = self.call, Call(what, peer, _clock(), deadline_s)
        try:
            yield
        finally:
            self.call = outer

    def communicate(self, what: str, peer: int, function: Callable, *args: Any) -> None:
        """A call that moves data; counted as such."""
        start = _clock()
        outer, self.call = self.call, Call(what, peer, start, self.deadline_s)
        try:
            function(*args)
        except MPI.Exception as error:
            raise self.failure(what, peer, error) from error
        finally:
            self.call = outer
            self.traffic.communicating_s += _clock() - start

    def attempt(self, what: str, peer: int, function: Callable, *args: Any) -> Any:
        """A call that returns at once."""
        try:
            return function(*args)
        except MPI.Exception as error:
            raise self.failure(what, peer, error) from error

    def _explain(self, what: str, peer: int, error: MPI.Exception) -> str:
        if self.mpi == MPI.COMM_NULL:
            return "a communicator must not be used once it is closed. Close it after its last use."
        whom = "" if peer < 0 else f" with rank {peer}"
        hint = ""
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            hint = " A message was longer than the tensor it was received into: lengths and dtypes must agree."
        if dead := self.failed():
            ranks = f"ranks {', '.join(map(str, dead))} have" if len(dead) > 1 else f"rank {dead[0]} has"
            hint = f" {ranks} died; this call needs all of them. Resume from the last checkpoint."
        return f"{what}{whom} on {self.name} failed on rank {self.rank}: {error.Get_error_string()}.{hint}"

    # --- point to point -------------------------------------------------------------------------------------------
    def sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int = 0) -> None:
        check_flat(send, "send")
        check_flat(recv, "recv")
        self.check_peer(dest, "dest")
        self.check_peer(source, "source")
        check_tag(tag)
        if self.staging.direct(send) and self.staging.direct(recv):
            args = (message(send), dest, tag, message(recv), source, tag)
            self.communicate("sendrecv", source, self.mpi.Sendrecv, *args)
        else:
            with self.staging.host(send, write=False, slot="send") as out, self.staging.host(recv, read=False) as into:
                args = (message(out), dest, tag, message(into), source, tag)
                self.communicate("sendrecv", source, self.mpi.Sendrecv, *args)
        self.traffic.sent(send.nbytes)

    def isend(self, tensor: Tensor, dest: int, tag: int = 0) -> Request:
        check_flat(tensor)
        self.check_peer(dest, "dest")
        check_tag(tag)
        host, start = tensor, _clock()
        if not self.staging.direct(tensor):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        request = self.attempt("isend", dest, self.mpi.Isend, message(host), dest, tag)
        self.traffic.communicating_s += _clock() - start  # MPI copies or sends here what goes at once
        self.traffic.sent(tensor.nbytes)
        return MpiRequest(self, request, "isend", dest, host, None)

    def irecv(self, tensor: Tensor, source: int = ANY, tag: int = ANY) -> Request:
        check_flat(tensor)
        source, tag, peer = self._wanted(source, tag)
        host = tensor if self.staging.direct(tensor) else torch.empty_like(tensor, device="cpu", pin_memory=True)
        request = self.attempt("irecv", peer, self.mpi.Irecv, message(host), source, tag)
        return MpiRequest(self, request, "irecv", peer, host, None if host is tensor else tensor)

    def probe(self, source: int = ANY, tag: int = ANY, *, block: bool = True) -> Envelope | None:
        source, tag, peer = self._wanted(source, tag)
        status = MPI.Status()

        def arrived() -> bool:
            return self.attempt("probe", peer, self.mpi.Iprobe, source, tag, status)

        if block:
            whom = "any rank" if peer == ANYONE else f"rank {source}"
            with self.blocked("probe", peer, math.inf):
                self.traffic.waiting_s += wait_until(
                    arrived, self.deadline_s, lambda: f"rank {self.rank}: a message from {whom} on {self.name}"
                )
        elif not arrived():
            return None
        return Envelope(status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE))

    def _wanted(self, source: int, tag: int) -> tuple[int, int, int]:
        """MPI's source and tag of a message to receive, and whom that waits for."""
        if source != ANY:
            self.check_peer(source, "source")
        if tag != ANY:
            check_tag(tag)
        any_tag = MPI.ANY_TAG if tag == ANY else tag
        return (MPI.ANY_SOURCE, any_tag, ANYONE) if source == ANY else (source, any_tag, source)

    # --- collective -----------------------------------------------------------------------------------------------
    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        check_flat(tensor)
        self.check_peer(root, "root")
        self.calls += 1
        with self.staging.host(tensor, read=self.rank == root, write=self.rank != root) as host:
            self.communicate("broadcast", root, self.members.Bcast, message(host), self.living.index(root))
        if self.rank == root and self.size > 1:
            self.traffic.sent(tensor.nbytes)

    def exchange(self, data: bytes) -> list[bytes]:
        lengths = np.zeros(len(self.living), np.int64)
        self.calls += 1
        self.communicate("exchange", EVERYONE, self.members.Allgather, np.array([len(data)], np.int64), lengths)
        gathered, ends = bytearray(int(lengths.sum())), lengths.cumsum()
        into = [gathered, lengths, ends - lengths, MPI.BYTE]
        self.communicate("exchange", EVERYONE, self.members.Allgatherv, [data, len(data), MPI.BYTE], into)
        others = len(self.living) - 1
        self.traffic.sent(len(data) * others, others)
        found = [b""] * self.size
        for rank, n, end in zip(self.living, lengths, ends, strict=True):
            found[rank] = bytes(gathered[end - n : end])
        return found

    def barrier(self) -> None:
        start = _clock()
        self.calls += 1
        with self.blocked("barrier", EVERYONE, self.deadline_s):
            self.attempt("barrier", EVERYONE, self.members.Barrier)
        self.traffic.waiting_s += _clock() - start

    def split(self, color: int | None, key: int = 0, *, name: str | None = None) -> MpiCommunicator | None:
        if color is not None and color < 0:
            raise CommunicationError(f"color must be an integer of at least 0, or None; got {color}.")
        told = [data.decode().split() for data in self.exchange(f"{color} {key}".encode())]
        mpi = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        members = sorted((int(k), r) for r, (c, k) in enumerate(told) if c == str(color))
        found = [self.nodes[r] for _, r in members]
        index = {node: i for i, node in enumerate(dict.fromkeys(found))}
        return MpiCommunicator(
            mpi,
            deadline_s=self.deadline_s,
            nodes=tuple(index[node] for node in found),
            device_aware=self.staging.device_aware,
            across=self._across,
            name=name or f"{self.name}/{color}",
        )

    def apart(self, across: str = "auto") -> MpiCommunicator:
        """Collective. A copy whose ranks count as being on nodes of their own: for tests and measurements."""
        nodes = tuple(range(self.size))
        return MpiCommunicator(
            self.mpi.Dup(), deadline_s=self.deadline_s, nodes=nodes, across=across, name=f"{self.name}/apart"
        )

    def window(self, count: int, dtype: torch.dtype = torch.float32) -> Window:
        from hpcdist.comm.mpi_window import MpiWindow  # which needs this module

        return MpiWindow(self, count, dtype)

    def put_all(self, puts: Iterable[Put]) -> None:
        from hpcdist.comm.mpi_window import put_all

        put_all(self, puts)

    def attach(self, tensor: Tensor) -> Window:
        from hpcdist.comm.mpi_window import AttachedWindow

        if not self.can_attach:
            raise CommunicationError(
                f"{self.name} must lie within one node whose kernel allows cross-memory attach; "
                "can_attach tells. Use a window, or another collective."
            )
        check_flat(tensor)
        own = np.array([tensor.data_ptr(), tensor.nbytes], np.int64)
        found = np.empty((self.size, 2), np.int64)
        self.calls += 1
        self.communicate("attach", EVERYONE, self.mpi.Allgather, own, found)
        if (found[:, 1] != found[0, 1]).any():
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
        """Ends every rank of the job, with this exit status; where ranks outlive others and one has died, this rank."""
        if self.tolerant:
            self.end_alone(status)
        end(status)

    def close(self) -> None:
        global _world
        _live.pop(id(self), None)
        if _world is self:
            _world = None
        if self._server is not None:
            self._server.close()
            self._server = None
        if self.tolerant:
            return  # freeing is collective, and any rank may be dead by now; the job's end does it
        if self._node_mpi is not None:
            self._node_mpi.Free()
            self._node_mpi = None
        self.mpi.Free()

    # --- what windows need ----------------------------------------------------------------------------------------
    def node_mpi(self) -> MPI.Intracomm:
        """Collective at the first call. MPI's communicator of the ranks on this rank's node."""
        if self._node_mpi is None:
            self._node_mpi = self.mpi.Split(self.nodes[self.rank], self.rank)
        return self._node_mpi

    def server(self):
        """Collective at the first call. What serves windows to ranks of other nodes."""
        if self._server is None:
            from hpcdist.comm.mpi_tcp import Server

            self._server = Server(self, self._across.partition(":")[2])
        return self._server

    def choose_across(self) -> str:
        """Collective. How windows are read and written across nodes; measured at the first call if need be."""
        from hpcdist.comm.mpi_across import choose

        way, colon, interface = self._across.partition(":")
        self._across = choose(self, way) + colon + interface
        return self.across

    @property
    def across(self) -> str | None:
        """The way in use: `tcp` or `rma`; `auto` before the first window; None where there is one node only."""
        return self._across.partition(":")[0] if len(set(self.nodes)) > 1 else None

    @across.setter
    def across(self, wanted: str) -> None:
        self._across = wanted  # counts for windows made from now on, by the interface of the first


def _checked_nodes(nodes: tuple[int, ...], size: int) -> tuple[int, ...]:
    if len(nodes) != size:
        raise CommunicationError(f"nodes must have one index for each of the {size} ranks; got {len(nodes)}.")
    return tuple(nodes)
