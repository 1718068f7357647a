"""The watchdog: ends a job that hangs, and says which rank is missing, in which call, at which line.

A thread of every rank looks twice a second at what its communicators are blocked in. Past the deadline it asks every
other rank's watchdog where that rank is. These answer from their own thread, so a rank that computes for ever, sleeps
or reads a slow disk is named with the line it is at; one that does not answer has ended or can't be reached.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import warnings

import numpy as np
from mpi4py import MPI

from hpcdist.comm import mpi
from hpcdist.comm.mpi_request import ANYONE, Call

POLL_S = 0.5
ANSWER_S = 5.0  # how long to wait for the other ranks' answers
QUERY, ANSWER = 1, 2
STATUS = 87  # exit status of a job that the watchdog ended
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Watchdog:
    """Collective. Watches the thread that makes it, until `close` (collective) or the end of the script.

    Args:
        comm: the communicator of all ranks.
    """

    def __init__(self, comm: mpi.MpiCommunicator):
        self._comm, self._mpi = comm, comm.mpi.Dup()
        self.rank, self.size = comm.rank, comm.size
        self._watched = threading.get_ident()
        self._stopped = threading.Event()
        self._sent: list[tuple[MPI.Request, object]] = []  # a buffer must live until it has left
        self._thread = threading.Thread(target=self._run, name="hpcdist-watchdog", daemon=True)
        if self.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread.start()
            mpi.threads.append(self)
        elif self.size > 1 and self.rank == 0:
            warnings.warn(
                "MPI runs without MPI_THREAD_MULTIPLE, so no rank can be watched: one that is missing will make the "
                "others wait for ever. Let mpi4py start MPI, or use an MPI built with threads.",
                stacklevel=3,
            )

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if self in mpi.threads:
            mpi.threads.remove(self)

    def close(self) -> None:
        """Collective. Ends the watch."""
        self.stop()
        self._mpi.Free()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                self._answer()
                self._sent = [(request, text) for request, text in self._sent if not request.Test()]
            except MPI.Exception:
                if not self._comm.tolerant:
                    raise
                self._mpi.Ack_failed(self._mpi.Get_failed().size)  # a rank has died: so much is known now
            late = self._late()
            if late is not None:
                self._end(*late)

    def _late(self) -> tuple[mpi.MpiCommunicator, Call] | None:
        for comm in mpi.live():
            call = comm.call
            if call is not None and time.perf_counter() - call.since > call.deadline_s:
                return comm, call
        return None

    # --- saying where this rank is --------------------------------------------------------------------------------
    def _answer(self) -> None:
        status = MPI.Status()
        while self._mpi.Iprobe(MPI.ANY_SOURCE, QUERY, status):
            self._mpi.Recv(bytearray(1), status.Get_source(), QUERY)
            self._send(self._where().encode(), status.Get_source(), ANSWER)

    def _send(self, text: bytes, rank: int, tag: int) -> None:
        self._sent.append((self._mpi.Isend(text, rank, tag), text))

    def _where(self) -> str:
        line = self._line()
        for comm in mpi.live():
            call = comm.call
            if call is not None:
                whom = f" with {_name(comm, call.peer)}" if call.peer >= 0 else ""
                waited_s = time.perf_counter() - call.since
                return f"{_place(comm, call)}{whom} for {waited_s:.1f} s, at {line}"
        return f"not in a call of hpcdist; at {line}"

    def _line(self) -> str:
        """The watched thread's innermost line outside this package, as file:line in function: source."""
        frame = sys._current_frames().get(self._watched)
        stack = traceback.extract_stack(frame) if frame is not None else []
        own = [entry for entry in stack if not entry.filename.startswith(_PACKAGE)]
        if not own:
            return "the end of its script"
        return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}"

    # --- ending the job -------------------------------------------------------------------------------------------
    def _end(self, comm: mpi.MpiCommunicator, call: Call) -> None:
        answers = self._ask()
        if call.peer >= 0:
            missing = {comm.world_ranks[call.peer]}
        else:  # all that are not in this very call
            missing = {r for r in comm.world_ranks if r in answers and not answers[r].startswith(_place(comm, call))}
            if any(r < self.rank for r in comm.world_ranks if r not in missing):
                time.sleep(POLL_S + ANSWER_S)  # the lowest waiting rank speaks for all; speak if it doesn't
        waited_s = time.perf_counter() - call.since
        report = [
            f"hpcdist: rank {self.rank} waited {waited_s:.1f} s for {_name(comm, call.peer)} {_place(comm, call)}, "
            f"at {self._line()}. The deadline is {call.deadline_s:g} s. Missing:"
        ]
        report += [f"  rank {r}: {answers.get(r, 'this rank itself')}" for r in sorted(missing)]
        report += ["Set a longer deadline_s if that is expected. Ending the job."]
        print("\n".join(report), file=sys.stderr, flush=True)
        mpi.end(STATUS)

    def _ask(self) -> dict[int, str]:
        """Every other rank's answer to where it is."""
        others = [r for r in range(self.size) if r != self.rank]
        for r in others:
            self._send(b"?", r, QUERY)
        answers = dict.fromkeys(others, "does not answer: it has ended, is stopped, or can't be reached")
        until, waiting, status = time.perf_counter() + ANSWER_S, set(others), MPI.Status()
        while waiting and time.perf_counter() < until:
            self._answer()  # others may be asking too
            if self._mpi.Iprobe(MPI.ANY_SOURCE, ANSWER, status):
                text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                self._mpi.Recv(text, status.Get_source(), ANSWER)
                answers[status.Get_source()] = text.tobytes().decode()
                waiting.discard(status.Get_source())
            else:
                time.sleep(0.01)
        return answers


def _place(comm: mpi.MpiCommunicator, call: Call) -> str:
    return f"in {call.what} on {comm.name} (call {comm.calls})"


def _name(comm: mpi.MpiCommunicator, peer: int) -> str:
    """Whom a call waits for, as the launcher numbers ranks."""
    if peer < 0:
        return "any rank" if peer == ANYONE else "every rank"
    return f"rank {comm.world_ranks[peer]}"
