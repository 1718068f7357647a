"""Windows across nodes over TCP: threads of the owner serve requests while the owner computes.

The threads are blocked in the kernel until a request arrives, so an idle window costs its owner nothing, and the reply
time does not depend on MPI's progress or polling. Accumulates and atomics across nodes always use TCP, as only
operations of one rank's threads are mutually exclusive on every network; `get` and `put` use it if it is the faster
transport (`comm/mpi/transports.py`). If the job tolerates deaths, they use it inside a node, too
(`comm/mpi/window.py`).

On the wire: a header of six int64, the values of a put or accumulate, and one reply: the values of a get, the old
value of an atomic, or one byte as acknowledgement.
"""

from __future__ import annotations

import math
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, cast

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm import network
from hpcdist.comm.mpi.messages import memory_at
from hpcdist.errors import CommunicationError, DeadlineError, HpcdistError, RankFailedError

OPERATIONS = ("get", "put", "accumulate", "fetch_add", "compare_and_swap")
HEADER, VALUE = struct.Struct("<6q"), struct.Struct("<q")  # operation, window, offset, count, operands; an old value
DONE = b"\1"
PART_BYTES = 1 << 20  # an accumulate's values are received and added in parts, which stay in the core's cache
SWITCH_INTERVAL_S = 5e-4  # how long a computing thread may keep the interpreter lock from a request (default 5 ms)


class Served(Protocol):
    """The operations of a window that the owner's threads use; `target` is the owner's rank."""

    local: Tensor

    def add(self, values: Tensor, target: int, offset: int) -> None: ...

    def atomic(self, what: str, target: int, offset: int, *values: int) -> int: ...

    def wake(self, target: int) -> None: ...


class TcpServer:
    """Collective. Serves this rank's windows of one communicator, with a thread for each requesting rank.

    Args:
        comm: the MpiCommunicator.
        interface: use only this interface or network, see `network.addresses`; any if empty.
    """

    def __init__(self, comm: Any, interface: str = ""):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:  # the owner's threads use MPI for accumulates and atomics
            raise CommunicationError(
                "windows across nodes must have an MPI at MPI_THREAD_MULTIPLE; got level "
                f"{MPI.Query_thread()}. Initialize MPI by mpi4py, or use an MPI built with threads."
            )
        self._comm = comm
        self.windows: dict[int, Served] = {}
        self._exposed = 0
        self._adding = threading.Lock()  # waiting threads sleep; inside MPI they would spin
        self._token = secrets.token_bytes(network.TOKEN_BYTES)
        self._addresses = network.addresses(interface)
        stacks = {stack for stack in comm.gather(network.stack_id()) if stack}  # None for dead ranks
        only = str(self._addresses[0].ip.ip) if interface else network.LOOPBACK if len(stacks) == 1 else ""
        self._listener = network.listen(only)
        self._peers = [_Peer(**(address or {})) for address in comm.gather(self._address(only))]
        self._serving: dict[threading.Thread, socket.socket] = {}  # the connection that each thread serves
        self._unproven: dict[threading.Thread, float] = {}  # start times of recent connections without proof
        self._stopped = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._listen, name="hpcdist-window-listener", daemon=True)
        self._thread.start()
        comm.process.threads.append(self)

    def _address(self, only: str) -> dict:
        """Return the arguments of `_Peer` for this rank. `only`: its listener's address; empty: all addresses."""
        ips = [only] if only else [str(address.ip.ip) for address in self._addresses]
        here = "" if only else network.stack_id()
        return {"port": self._listener.getsockname()[1], "ips": ips, "here": here, "token": self._token.hex()}

    def expose(self, window: Served) -> TcpTransfers:
        """Collective. Serve requests for `window` from now on."""
        self._exposed += 1  # the same number on all ranks
        self.windows[self._exposed] = window
        return TcpTransfers(self, self._exposed)

    def refuse(self) -> None:
        """Refuse new connections; keep existing ones."""
        self._stopped = True
        network.close(self._listener)
        self._thread.join()

    def stop(self) -> None:
        """End all threads and connections. No request may be in flight."""
        self.refuse()
        for peer in self._peers:
            peer.drop()
        for thread, connection in list(self._serving.items()):
            network.close(connection)
            thread.join()
        self._comm.process.threads.remove(self)

    def close(self) -> None:
        """Collective. Wait for all ranks, then end all threads and connections."""
        self._comm.failures.retry_on_failure(self._comm.barrier)
        self.stop()

    # --- requests -------------------------------------------------------------------------------------------------
    def request(
        self, what: str, window: int, rank: int, offset: int, count: int, reply: memoryview,
        data: memoryview | bytes = b"", operands: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Send a request with `data` to `rank` and wait for the reply, which overwrites `reply`.

        Raises:
            DeadlineError: the reply did not arrive in time.
            RankFailedError: the rank has died.
            CommunicationError: the rank can't be reached.
        """
        header = HEADER.pack(OPERATIONS.index(what), window, offset, count, *(*operands, 0, 0)[:2])
        self._comm.calls.communicate(f"window {what}", rank, self._transfer, rank, what, header, data, reply)

    def _transfer(self, rank: int, what: str, request: bytes, data: memoryview | bytes, reply: memoryview) -> None:
        with self._peers[rank].lock, self._connected(rank, what) as connection:
            network.send(connection, request, data)
            network.receive(connection, reply)

    def put_all(self, puts: Iterable[tuple[int, int, int, Tensor]]) -> None:
        """Send puts (rank, window, offset, values on the host), then wait for all replies.

        Each owner handles its puts in order. Raises like `request`, and what the iterator `puts` raises.
        """
        owners: list[int] = []
        with ExitStack() as locks:
            try:
                for rank, window, offset, values in puts:
                    if rank not in owners:
                        locks.enter_context(self._peers[rank].lock)
                    owners.append(rank)  # once per put, as each gets a reply
                    request = HEADER.pack(OPERATIONS.index("put"), window, offset, values.numel(), 0, 0)
                    self._comm.calls.communicate("window put", rank, self._send, rank, request, _bytes(values))
                for rank in owners:
                    self._comm.calls.communicate("window put", rank, self._receive_reply, rank)
            except BaseException:
                for rank in owners:
                    self._peers[rank].drop()
                raise

    def _send(self, rank: int, request: bytes, data: memoryview) -> None:
        with self._connected(rank, "put") as connection:
            network.send(connection, request, data)

    def _receive_reply(self, rank: int) -> None:
        with self._connected(rank, "put") as connection:
            network.receive(connection, _done())

    @contextmanager
    def _connected(self, rank: int, what: str) -> Iterator[socket.socket]:
        """Yield the connection to `rank`, opened if necessary; the caller holds the peer's lock."""
        peer, comm = self._peers[rank], self._comm
        complete = False
        try:
            connection = peer.connection or self._connect(peer)
            network.set_deadline(connection, comm.failures.deadline_s)
            yield connection
            complete = True
        except (BlockingIOError, TimeoutError) as error:
            with comm.calls.blocked(f"window {what}", rank, math.inf):  # the deadline has passed already
                locations = comm.failures.locate_ranks()
            raise DeadlineError(
                f"rank {comm.rank}: the reply of rank {rank} to a window {what} on {comm.name} "
                f"did not happen within {comm.failures.deadline_s:g} s.{locations}"
            ) from error
        except OSError as error:
            if comm.failures.has_died(rank):
                raise RankFailedError(
                    f"rank {comm.rank} can't reach rank {rank} in a window {what} on {comm.name} ({error}): "
                    f"rank {rank} has died; this call needs all of them. Resume from the last checkpoint."
                ) from error
            raise CommunicationError(
                f"rank {comm.rank} can't reach rank {rank} in a window {what} on {comm.name} ({error}). Either "
                f"rank {rank} has ended: see its last output; or the hosts share another network: name its "
                "interface, as in internode='tcp:eth0'."
            ) from error
        finally:
            if not complete:
                peer.drop()  # data in flight on it belong to no later call

    def _connect(self, peer: _Peer) -> socket.socket:
        """Connect to one of a rank's addresses; retry slow ones until the deadline, and rejecting ones a few times."""
        same_host = peer.here and peer.here == network.stack_id()
        ips = [network.LOOPBACK] * bool(same_host) + network.shared_first(peer.ips, self._addresses)
        until = time.perf_counter() + self._comm.failures.deadline_s
        attempts = network.ATTEMPTS
        while True:
            problems: list[OSError] = []
            for ip in ips:
                try:
                    remaining_s = max(0.1, until - time.perf_counter())
                    peer.connection = network.connect(ip, peer.port, peer.token, remaining_s)
                    if peer.connection is not None:
                        return peer.connection
                except OSError as error:
                    problems.append(error)
            timeouts = [error for error in problems if isinstance(error, TimeoutError)]
            attempts -= len(problems) < len(ips)  # rejected by another job's listener, or by one that is overloaded
            if not (timeouts or (attempts and len(problems) < len(ips))) or time.perf_counter() > until:
                no_rank = ConnectionRefusedError(f"no rank of this job replies at {', '.join(ips) or 'any address'}")
                raise (timeouts or problems or [no_rank])[0]
            time.sleep(network.PAUSE_S)

    # --- serving --------------------------------------------------------------------------------------------------
    def _listen(self) -> None:
        """Accept connections, with a thread for each."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # too many open files, such as connections of strangers, some of which will end
                if self._stopped:
                    return
                time.sleep(network.PAUSE_S)
                continue
            thread = threading.Thread(target=self._serve, args=[connection], name="hpcdist-window", daemon=True)
            self._serving[thread], self._unproven[thread] = connection, time.monotonic()
            thread.start()
            self._limit_unproven()

    def _limit_unproven(self) -> None:
        """Close the oldest connections without proof if there are too many; the pauses keep a flood cheap."""
        for thread, since in list(self._unproven.items())[: -network.UNPROVEN]:
            time.sleep(max(0.0, since + network.PAUSE_S - time.monotonic()))
            connection = self._serving.get(thread)
            if self._unproven.pop(thread, None) is not None and connection is not None:
                network.wake_and_end(connection)

    def _serve(self, connection: socket.socket) -> None:
        """Serve one connection until the other end closes it."""
        try:
            with connection:
                if network.accept(connection, self._token):
                    self._unproven.pop(threading.current_thread(), None)
                    self._serve_requests(connection)
        except Exception as error:
            if isinstance(error, HpcdistError) or not isinstance(error, OSError):  # OSError: the other end closed
                sys.excepthook(*sys.exc_info())  # else other ranks would wait for a thread that has ended
        finally:
            self._serving.pop(threading.current_thread(), None)

    def _serve_requests(self, connection: socket.socket) -> None:
        """Receive requests, execute them on the windows, and reply."""
        header = bytearray(HEADER.size)
        part = torch.empty(0, dtype=torch.uint8)  # buffer for values to accumulate
        while True:
            network.receive(connection, memoryview(header))
            operation, number, offset, count, *operands = HEADER.unpack(header)
            what, window = OPERATIONS[operation], self.windows[number]
            reply: bytes | memoryview = DONE
            with self._comm.trace.span("serve", "window", operation=what, elements=count):
                if what == "get":
                    reply = _bytes(window.local[offset : offset + count])
                elif what == "put":
                    network.receive(connection, _bytes(window.local[offset : offset + count]))
                    window.wake(self._comm.rank)
                elif what == "accumulate":
                    if not len(part):
                        part = torch.empty(PART_BYTES, dtype=torch.uint8)
                    self._accumulate(connection, window, offset, count, part.view(window.local.dtype))
                else:
                    operands = operands[: 1 if what == "fetch_add" else 2]
                    with self._adding:
                        reply = VALUE.pack(window.atomic(what, self._comm.rank, offset, *operands))
                network.send(connection, reply)

    def _accumulate(self, connection: socket.socket, window: Served, offset: int, count: int, part: Tensor) -> None:
        """Receive `count` values in parts, and add them to this rank's memory. `part`: a buffer."""
        for start in range(0, count, len(part)):
            values = part[: count - start]
            network.receive(connection, _bytes(values))
            with self._adding:
                window.add(values, self._comm.rank, offset + start)


class _Peer:
    """The address of another rank, and the connection for requests to it.

    `here`: its `network.stack_id`; empty if it listens at a single address.
    """

    def __init__(self, port: int = 0, ips: Sequence[str] = (), here: str = "", token: str = ""):  # default: a dead rank
        self.port, self.ips, self.here, self.token = port, ips, here, bytes.fromhex(token)
        self.lock = threading.Lock()
        self.connection: socket.socket | None = None

    def drop(self) -> None:
        if self.connection is not None:
            network.close(self.connection)
            self.connection = None


class TcpTransfers:
    """One window's transfers to and from ranks of other nodes, over TCP."""

    def __init__(self, server: TcpServer, number: int):
        self._server, self.number = server, number

    def get(self, out: Tensor, rank: int, offset: int) -> None:
        self._server.request("get", self.number, rank, offset, out.numel(), _bytes(out))

    def put(self, values: Tensor, rank: int, offset: int) -> None:
        self._server.request("put", self.number, rank, offset, values.numel(), _done(), _bytes(values))

    def accumulate(self, values: Tensor, rank: int, offset: int) -> None:
        self._server.request("accumulate", self.number, rank, offset, values.numel(), _done(), _bytes(values))

    def atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        before = bytearray(VALUE.size)
        self._server.request(what, self.number, rank, offset, 1, memoryview(before), b"", values)
        return VALUE.unpack(before)[0]

    def close(self) -> None:
        """Stop serving this window. No request for it may be in flight."""
        del self._server.windows[self.number]


def _bytes(tensor: Tensor) -> memoryview:
    """View the tensor's memory as bytes."""
    return memoryview(cast(bytearray, memory_at(tensor.data_ptr(), tensor.nbytes)) if tensor.nbytes else bytearray())


def _done() -> memoryview:
    return memoryview(bytearray(DONE))
