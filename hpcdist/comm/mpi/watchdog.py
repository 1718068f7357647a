"""The watchdog: ends a job that hangs, and says which rank is missing, in which call, at which line.

A thread of every rank looks now and then at what its communicators are blocked in. Past the deadline it asks every
other rank's watchdog where that rank is. These answer from their own thread, so a rank that computes for ever, sleeps
or reads a slow disk is named with the line it is at; one that does not answer has ended or can't be reached.

A rank that is blocked for a moment, or whose script has ended, tells rank 0's watchdog its state. Where this shows that
ranks wait for one that will never come (`comm/mpi/stuck.py`), rank 0 asks them again, and ends the job at once.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from mpi4py import MPI

from hpcdist import log
from hpcdist.comm.lines import line_of
from hpcdist.comm.mpi.calls import EXIT, Call, Calls, Place
from hpcdist.comm.mpi.library import end
from hpcdist.comm.mpi.start import is_stopped
from hpcdist.comm.mpi.stuck import RankState, behind, nearest, stuck
from hpcdist.comm.work import CallQueue
from hpcdist.errors import HpcdistError

POLL_S, BLOCKED_S = 0.25, 0.05  # pause between two looks, and while this rank is blocked
PATIENCE_S = 0.2  # a rank that is blocked for so long says so
REPORT_S = (
    0.01  # times the number of ranks: the least time between two reports of one; rank 0 gets 100 a second at most
)
RARELY = 5  # times as long as asking ranks in vain has taken: the least time until rank 0 asks again
ANSWER_S = 5.0  # how long to wait for the other ranks' answers
QUERY, ANSWER, REPORT = 1, 2, 3
STATUS = 87  # exit status of a job that the watchdog ended


class Watchdog:
    """Watch the thread that makes it, from `start` to `stop`.

    Args:
        mpi: all ranks; the watchdog alone sends messages on it.
        pids: processes of the ranks of this node.
        in_use: gives the calls of the communicators in use.
        role: tells what is special about this rank, for messages; raises what the job must end for.
        tolerant: the library survives a rank that dies.
    """

    def __init__(
        self,
        mpi: MPI.Intracomm,
        pids: Mapping[int, int],
        in_use: Callable[[], Sequence[Calls]],
        role: Callable[[], str],
        *,
        tolerant: bool,
    ):
        self._mpi, self._pids, self._in_use, self._tolerant = mpi, pids, in_use, tolerant
        self._role = role
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        self._watched = threading.get_ident()
        self._stopped, self._wanted, self._complete = threading.Event(), threading.Event(), threading.Event()
        self._places: dict[int, Place] = {}
        self._sent: list[tuple[MPI.Request, object]] = []  # a buffer must live until it has left
        self._reported: list[str] = []  # what this rank has told rank 0 last, and when
        self._reported_s = 0.0
        self._states: dict[int, RankState] = {}  # what ranks have told rank 0
        self._unclear, self._ask_from_s = False, 0.0  # they have told something new; when rank 0 asks them again
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
            with suppress(MPI.Exception):  # a rank has died
                self._collect()

    def _run(self) -> None:
        while not self._stopped.wait(BLOCKED_S if self._oldest_s() > PATIENCE_S else POLL_S):
            try:
                self._role()
                self._answer()
                self._report()
                if self.rank == 0:
                    self._unclear |= self._collect()
                    if self._unclear and time.perf_counter() > self._ask_from_s:
                        self._unclear = False
                        self._end_if_stuck()
                self._sent = [(request, text) for request, text in self._sent if not request.Test()]
            except HpcdistError as error:
                log.before_end(f"rank {self.rank} is at {line_of(self._watched)}\n{error} Ending the job.")
                end(STATUS)
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

    def _oldest_s(self) -> float:
        """Return for how long this rank has been blocked."""
        now_s = time.perf_counter()
        return max((now_s - call.since for calls in self._in_use() if (call := calls.current)), default=0.0)

    def _late(self) -> tuple[Calls, Call] | None:
        for calls in self._in_use():
            call = calls.current
            if call is not None and time.perf_counter() - call.since > call.deadline_s:
                return calls, call
        return None

    # --- saying where this rank is --------------------------------------------------------------------------------
    def _answer(self) -> None:
        while (source := self._received(QUERY)) is not None:
            self._send(self._state().encode(), source[0], ANSWER)

    def _received(self, tag: int) -> tuple[int, bytes] | None:
        """Receive a message that has arrived; return its source and what it says, or None where there is none."""
        status = MPI.Status()
        if not self._mpi.Iprobe(MPI.ANY_SOURCE, tag, status):
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        self._mpi.Recv(data, status.Get_source(), tag)
        return status.Get_source(), bytes(data)

    def _send(self, data: bytes, rank: int, tag: int) -> None:
        self._sent.append((self._mpi.Isend(data, rank, tag), data))

    def _state(self) -> RankState:
        in_use = self._in_use()
        waits = [wait for calls in in_use if (wait := calls.waits(PATIENCE_S))]
        busy = sum(queue.busy for queue in tuple(CallQueue.running))
        if len(waits) <= busy:  # a thread works, and may do what the others wait for
            waits = []
        ended = not busy and any(call.what == EXIT for calls in in_use if (call := calls.current))
        counts = {calls.name: calls.count for calls in in_use}
        return RankState(self._where(), self._line(), ended, counts, sum(c.sending for c in in_use), waits)

    def _line(self) -> str:
        role = self._role()
        return line_of(self._watched) + (f" ({role})" if role else "")

    def _where(self) -> str:
        line = self._line()
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

    # --- ranks that wait for ever ---------------------------------------------------------------------------------
    def _report(self) -> None:
        """Tell rank 0 the state of this rank, where it is newly blocked, goes on again, or its script has ended."""
        now_s = time.perf_counter()
        blocked = self._oldest_s() >= PATIENCE_S
        if now_s - self._reported_s < REPORT_S * self.size or not (blocked or self._reported):
            return
        state = self._state() if blocked else RankState("")
        told = [wait.key for wait in state.waits] + [EXIT] * state.ended
        if told != self._reported:
            self._reported, self._reported_s = told, now_s
            self._send(state.encode(), 0, REPORT)

    def _collect(self) -> bool:
        """Take the ranks' reports; tell whether there are new ones. On rank 0."""
        new = False
        while (report := self._received(REPORT)) is not None:
            self._states[report[0]], new = RankState.decode(report[1]), True
        return new

    def _end_if_stuck(self) -> None:
        """End the job, and say why, where ranks wait for ever: by their reports, and by what they say when asked."""
        found = stuck(self._states, tolerant=self._tolerant)
        if not found:
            return
        start = time.perf_counter()
        places = self._ask({*found, *(rank for missing in found.values() for rank in missing)} - {self.rank})
        states = {rank: place.state for rank, place in places.items() if place.state} | {self.rank: self._state()}
        # Waits that were there before all answers, and still are after, have all been there at one moment.
        states = {rank: state.since(self._states[rank]) for rank, state in states.items() if rank in self._states}
        found = stuck(states, tolerant=self._tolerant)
        if not found:
            now_s = time.perf_counter()
            self._unclear, self._ask_from_s = True, now_s + RARELY * (now_s - start)
            return
        rank = nearest(found)
        wait = next(iter(states[rank].waits))
        report = [
            f"rank {rank} waited {wait.waited_s:.1f} s {wait.text}, at {states[rank].line}. It would wait for ever. "
            "Missing:"
        ]
        report += [f"  rank {r}: {states[r].place}" for r in found[rank]]
        report += [
            "Ranks must go through the loop alike: decide for all of them together when to stop, to leave out a step "
            "or to evaluate, by hpcdist.metric, or what hpcdist.broadcast sends. Ending the job."
        ]
        log.before_end("\n".join(report))
        end(STATUS)

    # --- ending the job -------------------------------------------------------------------------------------------
    def _end(self, calls: Calls, call: Call) -> None:
        answers = self._ask()
        if call.peer >= 0:
            missing = {calls.world_ranks[call.peer]}
        else:  # all that are not in this very call
            place = calls.place(call)
            ranks = [calls.world_ranks[r] for r in call.by] or calls.world_ranks
            missing = {r for r in ranks if r in answers and not answers[r].text.startswith(place)}
            if any(r < self.rank for r in ranks if r not in missing):
                time.sleep(POLL_S + ANSWER_S)  # the lowest waiting rank speaks for all; speak if it doesn't
        states = {rank: place.state for rank, place in answers.items() if place.state}
        missing = behind(missing, states) - {self.rank} or missing
        waited_s = time.perf_counter() - call.since
        report = [
            f"rank {self.rank} waited {waited_s:.1f} s for {calls.peer_name(call.peer)} {calls.place(call)}, "
            f"at {line_of(self._watched)}. The deadline is {call.deadline_s:g} s. Missing:"
        ]
        report += [f"  rank {r}: {answers[r].text if r in answers else 'this rank itself'}" for r in sorted(missing)]
        report += ["Set a longer deadline_s if that is expected. Ending the job."]
        log.before_end("\n".join(report))
        end(STATUS)

    def _ask(self, others: Collection[int] | None = None) -> dict[int, Place]:
        """Return the answers of other ranks, by default of all, to where they are."""
        others = [r for r in range(self.size) if r != self.rank] if others is None else others
        with suppress(MPI.Exception):
            while self._received(ANSWER) is not None:
                pass  # it came too late for an earlier question
        for r in others:
            with suppress(MPI.Exception):  # it has died
                self._send(b"?", r, QUERY)
        stopped = {r: pid for r in others if (pid := self._stopped_process(r))}
        why = "it is stopped, by SIGSTOP or a debugger (process {} of this node)"
        unknown = "it has ended, is stopped, or can't be reached"
        places = {
            r: Place(f"does not answer: {why.format(stopped[r]) if r in stopped else unknown}", False) for r in others
        }
        until, waiting = time.perf_counter() + ANSWER_S, set(others) - set(stopped)
        while waiting and time.perf_counter() < until:
            with suppress(MPI.Exception):  # another one has died
                self._answer()  # others may be asking too
                if (answer := self._received(ANSWER)) is not None:
                    state = RankState.decode(answer[1])
                    places[answer[0]] = Place(state.place, True, state)
                    waiting.discard(answer[0])
                    continue
            time.sleep(0.01)
        return places

    def _stopped_process(self, rank: int) -> int | None:
        """Return the process of a rank that is stopped, which the kernel tells of this node's; None otherwise."""
        pid = self._pids.get(rank)
        if pid is not None:
            with suppress(OSError, IndexError):
                if is_stopped(pid):
                    return pid
        return None
