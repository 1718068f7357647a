"""The watchdog: ends a job that hangs, and says which rank is missing, in which call, at which line.

A thread of every rank looks twice a second at what its communicators are blocked in. Past the deadline it asks every
other rank's watchdog where that rank is. These answer from their own thread, so a rank that computes for ever, sleeps
or reads a slow disk is named with the line it is at; one that does not answer has ended or can't be reached.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpcdist import log
from hpcdist.comm.lines import line_of
from hpcdist.comm.mpi.calls import Call, Calls, Place
from hpcdist.comm.mpi.library import end

POLL_S = 0.5
ANSWER_S = 5.0  # how long to wait for the other ranks' answers
QUERY, ANSWER = 1, 2
STATUS = 87  # exit status of a job that the watchdog ended


class Watchdog:
    """Watch the thread that makes it, from `start` to `stop`.

    Args:
        mpi: all ranks; the watchdog alone sends messages on it.
        pids: processes of the ranks of this node.
        in_use: gives the calls of the communicators in use.
        tolerant: the library survives a rank that dies.
    """

    def __init__(
        self,
        mpi: MPI.Intracomm,
        pids: Mapping[int, int],
        in_use: Callable[[], Sequence[Calls]],
        *,
        tolerant: bool,
    ):
        self._mpi, self._pids, self._in_use, self._tolerant = mpi, pids, in_use, tolerant
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        self._watched = threading.get_ident()
        self._stopped, self._wanted, self._complete = threading.Event(), threading.Event(), threading.Event()
        self._places: dict[int, Place] = {}
        self._sent: list[tuple[MPI.Request, object]] = []  # a buffer must live until it has left
        self._thread = threading.Thread(target=self._run, name="hpcdist-watchdog", daemon=True)

    def start(self) -> bool:
        """Begin to watch; return False, where it can't be done or there is one rank only."""
        if self.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread.start()
            return True
        if self.size > 1 and self.rank == 0:
            warnings.warn(
                "MPI runs without MPI_THREAD_MULTIPLE, so no rank can be watched: one that is missing will make the "
                "others wait for ever. Let mpi4py start MPI, or use an MPI built with threads.",
                stacklevel=5,
            )
        return False

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                self._answer()
                self._sent = [(request, text) for request, text in self._sent if not request.Test()]
            except MPI.Exception:
                if not self._tolerant:
                    raise
                self._mpi.Ack_failed(self._mpi.Get_failed().size)  # a rank has died: so much is known now
            if self._wanted.is_set():
                self._wanted.clear()
                self._places = self._ask()
                self._complete.set()
            late = self._late()
            if late is not None:
                self._end(*late)

    def _late(self) -> tuple[Calls, Call] | None:
        for calls in self._in_use():
            call = calls.current
            if call is not None and time.perf_counter() - call.since > call.deadline_s:
                return calls, call
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
        line = line_of(self._watched)
        for calls in self._in_use():
            call = calls.current
            if call is not None:
                whom = f" with {calls.peer_name(call.peer)}" if call.peer >= 0 and call.peer != calls.rank else ""
                waited_s = time.perf_counter() - call.since
                return f"{calls.place(call)}{whom} for {waited_s:.1f} s, at {line}"
        return f"not in a call of hpcdist; at {line}"

    def find_all(self) -> dict[int, Place]:
        """Return where each rank of the job is. Any thread but the watchdog's own may ask."""
        self._complete.clear()
        self._wanted.set()
        self._complete.wait(2 * (POLL_S + ANSWER_S))  # it may be asking already, to end the job
        places = dict(self._places)
        places[self.rank] = Place(f"at {line_of(self._watched)}", True)
        return {rank: places.get(rank, Place("nobody could ask it", False)) for rank in range(self.size)}

    # --- ending the job -------------------------------------------------------------------------------------------
    def _end(self, calls: Calls, call: Call) -> None:
        answers = self._ask()
        if call.peer >= 0:
            missing = {calls.world_ranks[call.peer]}
        else:  # all that are not in this very call
            place = calls.place(call)
            missing = {r for r in calls.world_ranks if r in answers and not answers[r].text.startswith(place)}
            if any(r < self.rank for r in calls.world_ranks if r not in missing):
                time.sleep(POLL_S + ANSWER_S)  # the lowest waiting rank speaks for all; speak if it doesn't
        waited_s = time.perf_counter() - call.since
        report = [
            f"rank {self.rank} waited {waited_s:.1f} s for {calls.peer_name(call.peer)} {calls.place(call)}, "
            f"at {line_of(self._watched)}. The deadline is {call.deadline_s:g} s. Missing:"
        ]
        report += [f"  rank {r}: {answers[r].text if r in answers else 'this rank itself'}" for r in sorted(missing)]
        report += ["Set a longer deadline_s if that is expected. Ending the job."]
        log.before_end("\n".join(report))
        end(STATUS)

    def _ask(self) -> dict[int, Place]:
        """Return every other rank's answer to where it is."""
        others = [r for r in range(self.size) if r != self.rank]
        for r in others:
            with suppress(MPI.Exception):  # it has died
                self._send(b"?", r, QUERY)
        stopped = {r: pid for r in others if (pid := self._stopped_process(r))}
        why = "it is stopped, by SIGSTOP or a debugger (process {} of this node)"
        unknown = "it has ended, is stopped, or can't be reached"
        places = {
            r: Place(f"does not answer: {why.format(stopped[r]) if r in stopped else unknown}", False) for r in others
        }
        until, waiting, status = time.perf_counter() + ANSWER_S, set(others) - set(stopped), MPI.Status()
        while waiting and time.perf_counter() < until:
            with suppress(MPI.Exception):  # another one has died
                self._answer()  # others may be asking too
                if self._mpi.Iprobe(MPI.ANY_SOURCE, ANSWER, status):
                    text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                    self._mpi.Recv(text, status.Get_source(), ANSWER)
                    places[status.Get_source()] = Place(text.tobytes().decode(), True)
                    waiting.discard(status.Get_source())
                    continue
            time.sleep(0.01)
        return places

    def _stopped_process(self, rank: int) -> int | None:
        """Return the process of a rank that is stopped, which the kernel tells of this node's; None otherwise."""
        pid = self._pids.get(rank)
        if pid is not None:
            with suppress(OSError, IndexError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                    return pid
        return None
