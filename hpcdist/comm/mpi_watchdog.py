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

import numpy as np
from mpi4py import MPI

from hpcdist.comm import mpi

POLL_S = 0.5
ANSWER_S = 5.0  # how long to wait for the other ranks' answers
QUERY, ANSWER = 1, 2
STATUS = 87  # exit status of a job that the watchdog ended
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Watchdog:
    """Collective. Watches the thread that makes it; `close` (collective) ends it."""

    def __init__(self, comm: mpi.MpiCommunicator):
        self._mpi = comm._mpi.Dup()
        self.rank, self.size = comm.rank, comm.size
        self._watched = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcdist-watchdog", daemon=True)
        if self.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._mpi.Free()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._answer()
            late = self._late()
            if late is not None:
                self._end(*late)

    def _late(self) -> tuple[mpi.MpiCommunicator, tuple[str, int, float]] | None:
        for comm in list(mpi.live):
            call = comm.call
            if call is not None and time.perf_counter() - call[2] > comm.deadline_s:
                return comm, call
        return None

    # --- saying where this rank is --------------------------------------------------------------------------------
    def _answer(self) -> None:
        status = MPI.Status()
        while self._mpi.Iprobe(MPI.ANY_SOURCE, QUERY, status):
            self._mpi.Recv(bytearray(1), status.Get_source(), QUERY)
            self._mpi.Isend(self._where().encode(), status.Get_source(), ANSWER).Free()

    def _where(self) -> str:
        line = self._line()
        for comm in list(mpi.live):
            if comm.call is not None:
                what, peer, since = comm.call
                whom = "" if peer < 0 else f" with rank {peer}"
                waited_s = time.perf_counter() - since
                return f"in {what}{whom} on {comm.name} (call {comm.calls}) for {waited_s:.1f} s, at {line}"
        return f"not in a call of hpcdist; at {line}"

    def _line(self) -> str:
        """The watched thread's innermost line outside this package, as file:line in function: source."""
        frame = sys._current_frames().get(self._watched)
        if frame is None:
            return "its end (the thread has finished)"
        stack = traceback.extract_stack(frame)
        own = [entry for entry in stack if not entry.filename.startswith(_PACKAGE)] or stack
        entry = own[-1]
        return f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line}"

    # --- ending the job -------------------------------------------------------------------------------------------
    def _end(self, comm: mpi.MpiCommunicator, call: tuple[str, int, float]) -> None:
        what, peer, since = call
        answers = self._ask()
        key = f"in {what} on {comm.name} (call {comm.calls})"
        missing = {r: text for r, text in answers.items() if (not text.startswith(key) if peer < 0 else r == peer)}
        if peer < 0 and any(r < self.rank for r in answers if r not in missing):
            time.sleep(POLL_S + ANSWER_S)  # the lowest waiting rank speaks for all; speak if it doesn't
        whom = "every rank" if peer < 0 else f"rank {peer}"
        report = [
            f"hpcdist: rank {self.rank} waited {time.perf_counter() - since:.1f} s for {whom} in {what} on {comm.name} "
            f"(call {comm.calls}), at {self._line()}. The deadline is {comm.deadline_s:g} s. Missing:"
        ]
        report += [f"  rank {r}: {text}" for r, text in sorted(missing.items())]
        report += ["Set a longer deadline_s if that is expected. Ending the job."]
        print("\n".join(report), file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(STATUS)

    def _ask(self) -> dict[int, str]:
        """Every other rank's answer to where it is."""
        others = [r for r in range(self.size) if r != self.rank]
        for r in others:
            self._mpi.Isend(bytearray(1), r, QUERY).Free()
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
