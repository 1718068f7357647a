"""Windows across nodes: a thread of the owner answers the others' requests while the owner computes.

MPI's own one-sided calls to another node progress only while the owner is inside MPI, which a rank that computes is
not; and libraries differ by a hundred times in how fast they are even then. So each request is a small message to a
thread of the owner's, which polls: often while it is being used, seldom while it is not. Needs MPI_THREAD_MULTIPLE.

On the wire: a header of eight int64 on tag REQUEST, the values of a put or accumulate on tag DATA, and one reply on
tag REPLY: the values of a get, the old value of an atomic, or an empty acknowledgement.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.mpi_buffers import message
from hpcdist.errors import CommunicationError

REQUEST, DATA, REPLY = 1, 2, 3
OPERATIONS = ("get", "put", "accumulate", "fetch_add", "compare_and_swap", "stop")
IDLE_S, BUSY_S = 500e-6, 30e-6  # pause between polls; 500 µs costs the owner's step under 1 % (bench window)
BUSY_FOR_S = 2e-3  # keep polling often for this long after a request: requests come in bursts
SWITCH_INTERVAL_S = 5e-4  # how long a computing thread may keep the interpreter lock from the agent (default 5 ms)


class Agent:
    """Collective. Serves the windows of one communicator from a thread.

    Args:
        comm: the MpiCommunicator whose ranks the requests name; duplicated, so that nothing else receives them.
    """

    def __init__(self, comm):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CommunicationError(
                "windows across nodes must have an MPI at MPI_THREAD_MULTIPLE; got level "
                f"{MPI.Query_thread()}. Initialise MPI through mpi4py, or use an MPI built with threads."
            )
        self._comm, self._mpi = comm, comm.mpi.Dup()
        self._windows: dict[int, object] = {}
        self._exposed = 0
        self._one_request = threading.Lock()  # a rank's threads ask one after the other
        self._sends: list[tuple[MPI.Request, object]] = []  # replies on their way, with their buffers
        self._header = np.empty(8, np.int64)
        self.served = 0
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._run, name="hpcdist-window-agent", daemon=True)
        self._thread.start()

    def expose(self, window) -> int:
        """Collective. Answers requests for `window` from now on; its number, the same on all ranks."""
        self._exposed += 1
        self._windows[self._exposed] = window
        return self._exposed

    def withdraw(self, number: int) -> None:
        """Stops answering for a window. Nobody may still be asking."""
        del self._windows[number]

    def close(self) -> None:
        """Collective. Ends the thread."""
        self._comm.barrier()
        header = np.array([OPERATIONS.index("stop")] + [0] * 7, np.int64)
        self._mpi.Send(header, self._comm.rank, REQUEST)
        self._thread.join()
        self._mpi.Free()

    # --- asking ---------------------------------------------------------------------------------------------------
    def get(self, window: int, out: Tensor, rank: int, offset: int) -> None:
        self._ask("get", window, rank, offset, out.numel(), message(out))

    def put(self, window: int, values: Tensor, rank: int, offset: int) -> None:
        self._ask("put", window, rank, offset, values.numel(), [bytearray(1), 0, MPI.BYTE], message(values))

    def accumulate(self, window: int, values: Tensor, rank: int, offset: int) -> None:
        self._ask("accumulate", window, rank, offset, values.numel(), [bytearray(1), 0, MPI.BYTE], message(values))

    def atomic(self, window: int, what: str, rank: int, offset: int, *values: int) -> int:
        before = np.empty(1, np.int64)
        self._ask(what, window, rank, offset, 1, before, None, values)
        return int(before[0])

    def _ask(self, what: str, window: int, rank: int, offset: int, count: int, reply, data=None, values=()) -> None:
        header = np.zeros(8, np.int64)
        header[: 4 + len(values)] = [OPERATIONS.index(what), window, offset, count, *values]
        with self._one_request:
            answer = self._mpi.Irecv(reply, rank, REPLY)
            sends = [self._mpi.Isend(header, rank, REQUEST)]
            if data is not None:
                sends.append(self._mpi.Isend(data, rank, DATA))
            self._comm.communicate(f"window {what}", rank, MPI.Request.Waitall, [answer, *sends])

    # --- answering ------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        last, status = 0.0, MPI.Status()
        while True:
            if self._mpi.Iprobe(MPI.ANY_SOURCE, REQUEST, status):
                source = status.Get_source()
                self._mpi.Recv(self._header, source, REQUEST)
                what = OPERATIONS[self._header[0]]
                if what == "stop":
                    break
                self._answer(what, source, *(int(x) for x in self._header[1:6]))
                last = time.perf_counter()
                continue
            self._sends = [(request, buffer) for request, buffer in self._sends if not request.Test()]
            busy = self._sends or time.perf_counter() - last < BUSY_FOR_S
            time.sleep(BUSY_S if busy else IDLE_S)
        MPI.Request.Waitall([request for request, _ in self._sends])

    def _answer(self, what: str, source: int, number: int, offset: int, count: int, first: int, second: int) -> None:
        window, here = self._windows[number], self._comm.rank
        self.served += 1
        reply: object = [bytearray(1), 0, MPI.BYTE]
        if what == "get":
            reply = message(window.local[offset : offset + count])
        elif what == "put":
            self._receive(window.local[offset : offset + count], source)
        elif what == "accumulate":
            values = torch.empty(count, dtype=window.dtype)
            self._receive(values, source)
            window.add(values, here, offset)
        else:
            values = (first,) if what == "fetch_add" else (first, second)
            reply = np.array([window.atomic(what, here, offset, *values)], np.int64)
        self._sends.append((self._mpi.Isend(reply, source, REPLY), reply))

    def _receive(self, into: Tensor, source: int) -> None:
        request = self._mpi.Irecv(message(into), source, DATA)
        while not request.Test():  # never a blocking call: it would keep a core busy that the owner needs
            time.sleep(BUSY_S)
