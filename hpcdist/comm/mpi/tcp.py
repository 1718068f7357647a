"""Windows across nodes over TCP: threads of the owner answer requests while the owner computes.

All of them are blocked in the kernel until a request comes, so a window that nobody uses costs its owner nothing, and
neither MPI's progress nor its polling decides how soon an answer comes. Accumulates and atomics always go this way,
since only one rank's memory operations exclude each other on every network; `get` and `put` where it is the faster
way (`comm/mpi/transports.py`). Where ranks may die, they go this way inside a node too (`comm/mpi/window.py`).

On the wire: a header of six int64, the values of a put or accumulate, and one reply: the values of a get, the old
value of an atomic, or one byte for what is done.
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
from typing import Protocol, cast

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm import network
from hpcdist.comm.mpi.messages import memory_at
from hpcdist.errors import (
    CommunicationError,
    DeadlineError,
    HpcdistError,
    RankFailedError,
)

OPERATIONS = ("get", "put", "accumulate", "fetch_add", "compare_and_swap")
HEADER, WORD = struct.Struct("<6q"), struct.Struct("<q")  # operation, window, offset, count, operands; an old value
DONE = b"\1"
PART_BYTES = 1 << 20  # what is accumulated at once: it stays in the core's cache between arriving and being added
SWITCH_INTERVAL_S = 5e-4  # how long a computing thread may keep the interpreter lock from a request (default 5 ms)


class Served(Protocol):
    """A window, as the owner's threads use it; `target` is the owner's rank."""

    local: Tensor

    def add(self, values: Tensor, target: int, offset: int) -> None: ...

    def atomic(self, what: str, target: int, offset: int, *values: int) -> int: ...

    def wake(self, target: int) -> None: ...


class TcpServer:
    """Collective. Serve this rank's windows of one communicator, by a thread for each requesting rank.

    Args:
        comm: the MpiCommunicator whose ranks the requests name.
        interface: the only interface or network to use, see `network.addresses`; any if empty.
    """

    def __init__(self, comm, interface: str = ""):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:  # accumulates and atomics are MPI's own on the owner
            raise CommunicationError(
                "windows across nodes must have an MPI at MPI_THREAD_MULTIPLE; got level "
                f"{MPI.Query_thread()}. Initialise MPI through mpi4py, or use an MPI built with threads."
            )
        self._comm = comm
        self.windows: dict[int, Served] = {}
        self._exposed = 0
        self._adding = threading.Lock()  # the others sleep; inside MPI they would spin
        self._token = secrets.token_bytes(network.TOKEN_BYTES)
        self._own = network.addresses(interface)
        everyone = {stack for stack in comm.gather(network.stack_id()) if stack}  # None: of a rank that has died
        only = str(self._own[0].ip.ip) if interface else network.LOOPBACK if len(everyone) == 1 else ""
        self._listener = network.listen(only)
        self._peers = [_Peer(**(address or {})) for address in comm.gather(self._address(only))]
        self._asking: dict[threading.Thread, socket.socket] = {}  # who serves which connection
        self._unproven: dict[threading.Thread, float] = {}  # the last ones of those who have not proven themselves
        self._stopped = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._listen, name="hpcdist-window-listener", daemon=True)
        self._thread.start()
        comm.process.threads.append(self)

    def _address(self, only: str) -> dict:
        ips = [only] if only else [str(address.ip.ip) for address in self._own]
        here = "" if only else network.stack_id()
        return {"port": self._listener.getsockname()[1], "ips": ips, "here": here, "token": self._token.hex()}

    def expose(self, window: Served) -> TcpTransfers:
        """Collective. Answer requests for `window` from now on."""
        self._exposed += 1  # numbered alike on all ranks
        self.windows[self._exposed] = window
        return TcpTransfers(self, self._exposed)

    def refuse(self) -> None:
        """Refuse new connections; existing ones stay."""
        self._stopped = True
        network.close(self._listener)
        self._thread.join()

    def stop(self) -> None:
        """End all threads and connections. No request may be under way."""
        self.refuse()
        for peer in self._peers:
            peer.drop()
        for thread, connection in list(self._asking.items()):
            network.close(connection)
            thread.join()
        self._comm.process.threads.remove(self)

    def close(self) -> None:
        """Collective. End all threads and connections, once no rank needs them."""
        self._comm.failures.retry_on_failure(self._comm.barrier)
        self.stop()

    # --- asking ---------------------------------------------------------------------------------------------------
    def ask(
        self,
        what: str,
        window: int,
        rank: int,
        offset: int,
        count: int,
        reply: memoryview,
        data: memoryview | bytes = b"",
        operands: tuple[int, ...] = (),
    ) -> None:
        """Send one request to `rank`, with `data`, and wait for the reply, which overwrites `reply`.

        Raises:
            DeadlineError: it has not come in time.
            RankFailedError: the rank has died.
            CommunicationError: the rank can't be reached, or no longer.
        """
        request = HEADER.pack(OPERATIONS.index(what), window, offset, count, *(*operands, 0, 0)[:2])
        self._comm.calls.communicate(f"window {what}", rank, self._transfer, rank, what, request, data, reply)

    def _transfer(self, rank: int, what: str, request: bytes, data: memoryview | bytes, reply: memoryview) -> None:
        with self._peers[rank].lock, self._connected(rank, what) as connection:
            network.send(connection, request, data)
            network.receive(connection, reply)

    def put_all(self, puts: Iterable[tuple[int, int, int, Tensor]]) -> None:
        """Send puts, each a rank, a window, an offset and values on the host, and then wait for all replies.

        An owner deals with its own in their order. Raises as `ask` does; and what `puts` raises, once the puts before
        it are complete.
        """
        owners: list[int] = []
        refused: CommunicationError | None = None

        def accepted() -> Iterator[tuple[int, int, int, Tensor]]:
            nonlocal refused
            try:
                yield from puts
            except CommunicationError as error:
                refused = error

        with ExitStack() as locks:
            try:
                for rank, window, offset, values in accepted():
                    if rank not in owners:
                        locks.enter_context(self._peers[rank].lock)
                    owners.append(rank)
                    request = HEADER.pack(OPERATIONS.index("put"), window, offset, values.numel(), 0, 0)
                    self._comm.calls.communicate("window put", rank, self._send, rank, request, _bytes(values))
                for rank in owners:
                    self._comm.calls.communicate("window put", rank, self._take_reply, rank)
            except BaseException:
                for rank in owners:
                    self._peers[rank].drop()
                raise
        if refused is not None:
            raise refused

    def _send(self, rank: int, request: bytes, data: memoryview) -> None:
        with self._connected(rank, "put") as connection:
            network.send(connection, request, data)

    def _take_reply(self, rank: int) -> None:
        with self._connected(rank, "put") as connection:
            network.receive(connection, _done())

    @contextmanager
    def _connected(self, rank: int, what: str) -> Iterator[socket.socket]:
        """Yield the connection to `rank`, made if necessary; this thread holds its lock, as requests take turns."""
        peer, comm = self._peers[rank], self._comm
        complete = False
        try:
            connection = peer.connection or self._connect(peer)
            network.set_deadline(connection, comm.failures.deadline_s)
            yield connection
            complete = True
        except (BlockingIOError, TimeoutError) as error:
            with comm.calls.blocked(f"window {what}", rank, math.inf):  # the deadline has been minded
                places = comm.failures.locate_ranks()
            raise DeadlineError(
                f"rank {comm.rank}: the answer of rank {rank} to a window {what} on {comm.name} "
                f"did not happen within {comm.failures.deadline_s:g} s.{places}"
            ) from error
        except OSError as error:
            if comm.failures.has_died(rank):
                raise RankFailedError(
                    f"rank {comm.rank} can't reach rank {rank} in a window {what} on {comm.name} ({error}): "
                    f"rank {rank} has died; this call needs all of them. Resume from the last checkpoint."
                ) from error
            raise CommunicationError(
                f"rank {comm.rank} can't reach rank {rank} in a window {what} on {comm.name} ({error}). Either "
                f"rank {rank} has gone away: see what it said last; or hosts share another network: name its "
                "interface, as in internode='tcp:eth0'."
            ) from error
        finally:
            if not complete:
                peer.drop()  # what is on its way there belongs to no later call

    def _connect(self, peer: _Peer) -> socket.socket:
        """Connect to one of a rank's addresses; try again until the deadline if one is slow: its host may be busy."""
        own_host = peer.here and peer.here == network.stack_id()
        ips = [network.LOOPBACK] * bool(own_host) + network.shared_first(peer.ips, self._own)
        until = time.perf_counter() + self._comm.failures.deadline_s
        left = network.ATTEMPTS
        while True:
            problems: list[OSError] = []
            for ip in ips:
                try:
                    left_s = max(0.1, until - time.perf_counter())
                    peer.connection = network.connect(ip, peer.port, peer.token, left_s)
                    if peer.connection is not None:
                        return peer.connection
                except OSError as error:
                    problems.append(error)
            late = [error for error in problems if isinstance(error, TimeoutError)]
            left -= len(problems) < len(ips)  # who hung up is another job's listener, or had to make room for others
            if not (late or (left and len(problems) < len(ips))) or time.perf_counter() > until:
                strangers = ConnectionRefusedError(f"nobody of this job answers at {', '.join(ips) or 'any address'}")
                raise (late or problems or [strangers])[0]
            time.sleep(network.PAUSE_S)

    # --- answering ------------------------------------------------------------------------------------------------
    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # too many open files, such as a stranger's connections, of which some will end
                if self._stopped:
                    return
                time.sleep(network.PAUSE_S)
                continue
            thread = threading.Thread(target=self._serve, args=[connection], name="hpcdist-window", daemon=True)
            self._asking[thread], self._unproven[thread] = connection, time.monotonic()
            thread.start()
            self._make_room()

    def _make_room(self) -> None:
        """Hang up on the oldest of too many that have proven nothing, each after a moment: so a flood costs little."""
        for thread, since in list(self._unproven.items())[: -network.UNPROVEN]:
            time.sleep(max(0.0, since + network.PAUSE_S - time.monotonic()))
            connection = self._asking.get(thread)
            if self._unproven.pop(thread, None) is not None and connection is not None:
                network.wake_and_end(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                if network.accept(connection, self._token):
                    self._unproven.pop(threading.current_thread(), None)
                    self._answer_all(connection)
        except Exception as error:
            if isinstance(error, HpcdistError) or not isinstance(error, OSError):  # an OSError: who asked has gone
                sys.excepthook(*sys.exc_info())  # without this others would wait for a thread that is no more
        finally:
            self._asking.pop(threading.current_thread(), None)

    def _answer_all(self, connection: socket.socket) -> None:
        header = bytearray(HEADER.size)
        part = torch.empty(0, dtype=torch.uint8)  # what arrives to be added
        while True:
            network.receive(connection, memoryview(header))
            operation, number, offset, count, *values = HEADER.unpack(header)
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
                    values = values[: 1 if what == "fetch_add" else 2]
                    with self._adding:
                        reply = WORD.pack(window.atomic(what, self._comm.rank, offset, *values))
                network.send(connection, reply)

    def _accumulate(self, connection: socket.socket, window: Served, offset: int, count: int, part: Tensor) -> None:
        for start in range(0, count, len(part)):
            values = part[: count - start]
            network.receive(connection, _bytes(values))
            with self._adding:
                window.add(values, self._comm.rank, offset + start)


class _Peer:
    """The address of another rank, and the connection for requests to it."""

    def __init__(self, port: int = 0, ips: Sequence[str] = (), here: str = "", token: str = ""):  # by default nowhere
        self.port, self.ips, self.here, self.token = port, ips, here, bytes.fromhex(token)
        self.lock = threading.Lock()
        self.connection: socket.socket | None = None

    def drop(self) -> None:
        if self.connection is not None:
            network.close(self.connection)
            self.connection = None


class TcpTransfers:
    """Carry one window's transfers to and from ranks of other nodes, over TCP."""

    def __init__(self, server: TcpServer, number: int):
        self._server, self.number = server, number

    def get(self, out: Tensor, rank: int, offset: int) -> None:
        self._server.ask("get", self.number, rank, offset, out.numel(), _bytes(out))

    def put(self, values: Tensor, rank: int, offset: int) -> None:
        self._server.ask("put", self.number, rank, offset, values.numel(), _done(), _bytes(values))

    def accumulate(self, values: Tensor, rank: int, offset: int) -> None:
        self._server.ask("accumulate", self.number, rank, offset, values.numel(), _done(), _bytes(values))

    def atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        before = bytearray(WORD.size)
        self._server.ask(what, self.number, rank, offset, 1, memoryview(before), b"", values)
        return WORD.unpack(before)[0]

    def close(self) -> None:
        """Stop serving this window. No request for it may be under way."""
        del self._server.windows[self.number]


def _bytes(tensor: Tensor) -> memoryview:
    """View the tensor's memory as bytes."""
    return memoryview(cast(bytearray, memory_at(tensor.data_ptr(), tensor.nbytes)) if tensor.nbytes else bytearray())


def _done() -> memoryview:
    return memoryview(bytearray(DONE))
