"""Windows across nodes by messages: a thread of the owner answers requests while the owner computes.

Each request is a small message to the owner's agent, which polls: often while it is being used, seldom while it is
not. Accumulates and atomics always go this way, since only one rank's memory operations exclude each other on every
network; `get` and `put` where it is the faster way (`comm/mpi_across.py`). Needs MPI_THREAD_MULTIPLE.

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

from hpcdist.comm import mpi
from hpcdist.comm.mpi_buffers import message
from hpcdist.comm.waiting import wait_until
from hpcdist.errors import CommunicationError

REQUEST, DATA, REPLY = 1, 2, 3
OPERATIONS = ("get", "put", "accumulate", "fetch_add", "compare_and_swap")
IDLE_S, BUSY_S = 1e-3, 30e-6  # pause between polls; an idle agent uses 1 to 2 % of a core
BUSY_FOR_S = 2e-3  # keep polling often for this long after a request: requests come in bursts
ASKING_S = 100e-6  # the longest pause of who waits for an answer: polling moves its data too
SWITCH_INTERVAL_S = 5e-4  # how long a computing thread may keep the interpreter lock from the agent (default 5 ms)


class Agent:
    """Collective. The thread that serves this rank's windows of one communicator, and makes MPI progress by polling.

    Args:
        comm: the MpiCommunicator whose ranks the requests name; duplicated, so that nothing else receives them.
    """

    def __init__(self, comm: mpi.MpiCommunicator):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CommunicationError(
                "windows across nodes must have an MPI at MPI_THREAD_MULTIPLE; got level "
                f"{MPI.Query_thread()}. Initialise MPI through mpi4py, or use an MPI built with threads."
            )
        self._comm, self._mpi = comm, comm.mpi.Dup()
        self._windows: dict[int, object] = {}
        self._exposed = 0
        self._one_request = threading.Lock()  # a rank's threads ask one after the other
        self._header = np.empty(8, np.int64)
        self._replies: list[tuple[MPI.Request, object]] = []  # on their way, with their buffers
        self._stopped = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._run, name="hpcdist-window-agent", daemon=True)
        self._thread.start()
        mpi.threads.append(self)

    def expose(self, window) -> Served:
        """Collective. Answers requests for `window` from now on."""
        self._exposed += 1  # numbered alike on all ranks
        self._windows[self._exposed] = window
        return Served(self, self._exposed)

    def withdraw(self, number: int) -> None:
        """Stops answering for a window. Nobody may still be asking."""
        del self._windows[number]

    def stop(self) -> None:
        """Ends the thread. Nobody may still be asking."""
        self._stopped = True
        self._thread.join()
        mpi.threads.remove(self)

    def close(self) -> None:
        """Collective. Ends the thread once no rank needs it."""
        self._comm.barrier()
        self.stop()
        self._mpi.Free()

    # --- asking ---------------------------------------------------------------------------------------------------
    def ask(self, what: str, window: int, rank: int, offset: int, count: int, reply, data=None, values=()) -> None:
        """Sends one request to `rank` and waits for the reply."""
        header = np.zeros(8, np.int64)
        header[: 5 + len(values)] = [OPERATIONS.index(what), self._comm.rank, window, offset, count, *values]
        with self._one_request:
            requests = [self._mpi.Irecv(reply, rank, REPLY), self._mpi.Isend(header, rank, REQUEST)]
            if data is not None:
                requests.append(self._mpi.Isend(data, rank, DATA))
            self._comm.communicate(f"window {what}", rank, self._complete, requests, what, rank)

    def _complete(self, requests: list[MPI.Request], what: str, rank: int) -> None:
        # Not MPI's own wait: on a core that others want too it took up to a hundred times as long (`wait_until`).
        wait_until(
            lambda: MPI.Request.Testall(requests),
            self._comm.deadline_s,
            lambda: f"rank {self._comm.rank}: the answer of rank {rank} to a window {what} on {self._comm.name}",
            longest_s=ASKING_S,
        )

    # --- answering ------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._serve()
            MPI.Request.Waitall([request for request, _ in self._replies])
        except Exception:  # without this others would wait for an agent that is no more
            sys.excepthook(*sys.exc_info())

    def _serve(self) -> None:
        # Probing, not a receive from any source posted ahead: MPICH 5.0.2 with UCX loses messages of 40 KB when one
        # thread tests such a receive while another is in a barrier.
        last, status = 0.0, MPI.Status()
        while not self._stopped:
            if self._mpi.Iprobe(MPI.ANY_SOURCE, REQUEST, status):
                self._mpi.Recv(self._header, status.Get_source(), REQUEST)
                what, *numbers = self._header[:7].tolist()
                self._answer(OPERATIONS[what], *numbers)
                last = time.perf_counter()
                continue
            if self._replies:  # one call for all: each gives up the interpreter lock and must get it back
                MPI.Request.Testsome([request for request, _ in self._replies])
                self._replies = [pair for pair in self._replies if pair[0]]
            busy = self._replies or time.perf_counter() - last < BUSY_FOR_S
            time.sleep(BUSY_S if busy else IDLE_S)

    def _answer(self, what: str, source: int, number: int, offset: int, count: int, first: int, second: int) -> None:
        window, here = self._windows[number], self._comm.rank
        reply: object = _nothing()
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
        self._replies.append((self._mpi.Isend(reply, source, REPLY), reply))

    def _receive(self, into: Tensor, source: int) -> None:
        request = self._mpi.Irecv(message(into), source, DATA)
        while not request.Test():  # never a blocking call: it would keep a core busy that the owner needs
            time.sleep(BUSY_S)


class Served:
    """A window's transfers to and from ranks of other nodes, by their agents."""

    def __init__(self, agent: Agent, number: int):
        self._agent, self._number = agent, number

    def get(self, out: Tensor, rank: int, offset: int) -> None:
        self._agent.ask("get", self._number, rank, offset, out.numel(), message(out))

    def put(self, values: Tensor, rank: int, offset: int) -> None:
        self._agent.ask("put", self._number, rank, offset, values.numel(), _nothing(), message(values))

    def accumulate(self, values: Tensor, rank: int, offset: int) -> None:
        self._agent.ask("accumulate", self._number, rank, offset, values.numel(), _nothing(), message(values))

    def atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        before = np.empty(1, np.int64)
        self._agent.ask(what, self._number, rank, offset, 1, before, None, values)
        return int(before[0])

    def close(self) -> None:
        """Nobody may still be asking."""
        self._agent.withdraw(self._number)


def _nothing() -> list:
    return [bytearray(1), 0, MPI.BYTE]
