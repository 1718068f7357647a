"""The watchdog: ends a job that hangs, and reports which rank is missing, in which call, at which line.

A thread of every rank regularly checks the calls that its communicators are blocked in. Past the deadline it queries
all other ranks' watchdogs. These reply from separate threads, so a rank that computes forever, sleeps or reads a slow
disk is reported with its current line; a rank that does not reply has ended or can't be reached.

A rank that is blocked for a moment, or whose script has ended, reports its state to rank 0's watchdog. If the reports
show a deadlock (`comm/mpi/stuck.py`), rank 0 queries the ranks again, and ends the job immediately.
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
from hpcdist.comm.mpi.calls import EXIT, Call, Calls, RankLocation
from hpcdist.comm.mpi.library import end
from hpcdist.comm.mpi.start import is_stopped
from hpcdist.comm.mpi.stuck import RankState, nearest_to_cause, stuck, transitively_awaited
from hpcdist.comm.work import CallQueue
from hpcdist.errors import HpcdistError

POLL_S, BLOCKED_S = 0.25, 0.05  # pause between two checks; shorter while this rank is blocked
PATIENCE_S = 0.2  # a rank that is blocked for so long reports it
REPORT_S = 0.01  # times the number of ranks: pause between two reports, so that rank 0 gets at most 100 per second
RARELY = 5  # after a query without a result: pause as a multiple of the query's time
ANSWER_S = 5.0  # limit for the other ranks' replies
QUERY, REPLY, REPORT = 1, 2, 3  # tags
STATUS = 87  # exit status of a job that the watchdog ended


class Watchdog:
    """Watches the thread that creates it, from `start` to `stop`.

    Args:
        mpi: a communicator of all ranks for the watchdog's exclusive use.
        pids: process ids of the ranks of this node.
        in_use: returns the calls of the communicators in use.
        role: returns a description of this rank's role, for messages; an error that it raises ends the job.
        tolerant: the job tolerates deaths.
    """

    def __init__(
        self, mpi: MPI.Intracomm, pids: Mapping[int, int], in_use: Callable[[], Sequence[Calls]],
        role: Callable[[], str], *, tolerant: bool,
    ):  # fmt: skip
        self._mpi, self._pids, self._in_use, self._tolerant = mpi, pids, in_use, tolerant
        self._role = role
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        self._watched = threading.get_ident()
        self._stopped, self._requested, self._complete = threading.Event(), threading.Event(), threading.Event()
        self._locations: dict[int, RankLocation] = {}
        self._sent: list[tuple[MPI.Request, object]] = []  # requests with their buffers, which must stay alive
        self._reported: list[str] = []  # the last report of this rank to rank 0
        self._reported_s = 0.0  # and its time
        self._states: dict[int, RankState] = {}  # on rank 0: the ranks' last reports
        self._has_new_reports, self._query_from_s = False, 0.0  # the latter: when rank 0 may query again
        self._thread = threading.Thread(target=self._run, name="hpcdist-watchdog", daemon=True)

    def start(self) -> bool:
        """Start watching; return False if that is impossible, or if there is only one rank."""
        if self.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread.start()
            return True
        if self.size > 1 and self.rank == 0:
            warnings.warn(
                "MPI runs without MPI_THREAD_MULTIPLE, so ranks can't be watched: a missing rank will make the "
                "others wait forever. Let mpi4py start MPI, or use an MPI built with threads.",
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
        """The watchdog's thread: reply to queries, report this rank's state, and check deadlines."""
        while not self._stopped.wait(BLOCKED_S if self._oldest_s() > PATIENCE_S else POLL_S):
            try:
                self._role()  # an error that it raises ends the job
                self._reply()
                self._report()
                if self.rank == 0:
                    self._has_new_reports |= self._collect()
                    if self._has_new_reports and time.perf_counter() > self._query_from_s:
                        self._has_new_reports = False
                        self._end_if_stuck()
                self._sent = [(request, text) for request, text in self._sent if not request.Test()]
            except HpcdistError as error:
                log.before_end(f"rank {self.rank} is at {line_of(self._watched)}\n{error} Ending the job.")
                end(STATUS)
            except MPI.Exception:
                if not self._tolerant:
                    raise
                self._mpi.Ack_failed(self._mpi.Get_failed().size)  # acknowledge the death
            if self._requested.is_set():
                self._requested.clear()
                self._locations = self._query()
                self._complete.set()
            for calls, call in self._blocked():
                if time.perf_counter() - call.since > call.deadline_s:
                    self._end(calls, call)

    def _blocked(self) -> list[tuple[Calls, Call]]:
        """Return the calls that this rank is blocked in."""
        return [(calls, call) for calls in self._in_use() if (call := calls.current) is not None]

    def _oldest_s(self) -> float:
        """Return the seconds for which this rank has been blocked."""
        now_s = time.perf_counter()
        return max((now_s - call.since for _, call in self._blocked()), default=0.0)

    # --- the location of this rank --------------------------------------------------------------------------------
    def _reply(self) -> None:
        while (source := self._received(QUERY)) is not None:
            self._send(self._state().encode(), source[0], REPLY)

    def _received(self, tag: int) -> tuple[int, bytes] | None:
        """Receive a message that has arrived; return its source and data, or None without a message."""
        status = MPI.Status()
        if not self._mpi.Iprobe(MPI.ANY_SOURCE, tag, status):
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        self._mpi.Recv(data, status.Get_source(), tag)
        return status.Get_source(), bytes(data)

    def _send(self, data: bytes, rank: int, tag: int) -> None:
        self._sent.append((self._mpi.Isend(data, rank, tag), data))

    def _state(self) -> RankState:
        """Return this rank's state, as rank 0 and other watchdogs get it."""
        in_use = self._in_use()
        waits = [wait for calls in in_use if (wait := calls.waits(PATIENCE_S))]
        n_active = sum(queue.busy for queue in tuple(CallQueue.running))
        if len(waits) <= n_active:  # a thread of a queue is not blocked, and may cause what the other ranks wait for
            waits = []
        ended = not n_active and any(call.what == EXIT for _, call in self._blocked())
        counts = {calls.name: calls.count for calls in in_use}
        return RankState(self._location(), self._line(), ended, counts, sum(c.sending for c in in_use), waits)

    def _line(self) -> str:
        role = self._role()
        return line_of(self._watched) + (f" ({role})" if role else "")

    def _location(self) -> str:
        """Describe the call that this rank is blocked in, and the current line of the user's code."""
        line = self._line()
        for calls, call in self._blocked():
            whom = f" with {calls.peer_name(call.peer)}" if call.peer >= 0 and call.peer != calls.rank else ""
            return f"{calls.describe(call)}{whom} for {time.perf_counter() - call.since:.1f} s, at {line}"
        return f"not in a call of hpcdist; at {line}"

    def find_all(self) -> dict[int, RankLocation]:
        """Return where each rank of the job is. Any thread but the watchdog's may call this."""
        self._complete.clear()
        self._requested.set()
        self._complete.wait(2 * (POLL_S + ANSWER_S))  # the watchdog may be in a query already, to end the job
        locations = dict(self._locations)
        locations[self.rank] = RankLocation(f"at {line_of(self._watched)}", True)
        unknown = RankLocation("no rank could query it", False)
        return {rank: locations.get(rank, unknown) for rank in range(self.size)}

    # --- deadlocks ------------------------------------------------------------------------------------------------
    def _report(self) -> None:
        """Report this rank's state to rank 0 when it is newly blocked, continues, or its script has ended."""
        now_s = time.perf_counter()
        blocked = self._oldest_s() >= PATIENCE_S
        if now_s - self._reported_s < REPORT_S * self.size or not (blocked or self._reported):
            return
        state = self._state() if blocked else RankState("")  # the latter tells rank 0 that this rank continues
        keys = [wait.key for wait in state.waits] + [EXIT] * state.ended  # only changes of these are worth a message
        if keys != self._reported:
            self._reported, self._reported_s = keys, now_s
            self._send(state.encode(), 0, REPORT)

    def _collect(self) -> bool:
        """On rank 0: receive the ranks' reports; return whether there are new ones."""
        new = False
        while (report := self._received(REPORT)) is not None:
            self._states[report[0]], new = RankState.decode(report[1]), True
        return new

    def _end_if_stuck(self) -> None:
        """End the job with a message if ranks are in a deadlock, by their reports and again when queried."""
        missing_of = stuck(self._states, tolerant=self._tolerant)
        if not missing_of:
            return
        start = time.perf_counter()
        locations = self._query({*missing_of, *(rank for ranks in missing_of.values() for rank in ranks)} - {self.rank})
        states = {rank: reply.state for rank, reply in locations.items() if reply.state} | {self.rank: self._state()}
        # Waits that existed before all replies and still exist after have all existed at the same time.
        states = {rank: state.since(self._states[rank]) for rank, state in states.items() if rank in self._states}
        missing_of = stuck(states, tolerant=self._tolerant)
        if not missing_of:
            now_s = time.perf_counter()
            self._has_new_reports, self._query_from_s = True, now_s + RARELY * (now_s - start)
            return
        rank = nearest_to_cause(missing_of)
        wait = next(iter(states[rank].waits))
        report = [
            f"rank {rank} waited {wait.waited_s:.1f} s {wait.text}, at {states[rank].line}. It would wait forever. "
            "Missing:"
        ]
        report += [f"  rank {r}: {states[r].location}" for r in missing_of[rank]]
        report += [
            "All ranks must make the same calls in the loop: decide on all of them when to stop, skip a step or "
            "evaluate, by hpcdist.metric or hpcdist.broadcast. Ending the job."
        ]
        log.before_end("\n".join(report))
        end(STATUS)

    # --- ending the job -------------------------------------------------------------------------------------------
    def _end(self, calls: Calls, call: Call) -> None:
        """Report a call past its deadline with the missing ranks, and end the job."""
        replies = self._query()
        if call.peer >= 0:
            missing = {calls.world_ranks[call.peer]}
        else:  # all ranks that are not in this call
            description = calls.describe(call)
            ranks = [calls.world_ranks[r] for r in call.by] or calls.world_ranks
            missing = {r for r in ranks if r in replies and not replies[r].text.startswith(description)}
            if any(r < self.rank for r in ranks if r not in missing):
                time.sleep(POLL_S + ANSWER_S)  # the lowest waiting rank reports; report only if it doesn't
        states = {rank: reply.state for rank, reply in replies.items() if reply.state}
        missing = transitively_awaited(missing, states) - {self.rank} or missing
        waited_s = time.perf_counter() - call.since
        report = [
            f"rank {self.rank} waited {waited_s:.1f} s for {calls.peer_name(call.peer)} {calls.describe(call)}, "
            f"at {line_of(self._watched)}. The deadline is {call.deadline_s:g} s. Missing:"
        ]
        report += [f"  rank {r}: {replies[r].text if r in replies else 'this rank itself'}" for r in sorted(missing)]
        report += ["Set a longer deadline_s if that is expected. Ending the job."]
        log.before_end("\n".join(report))
        end(STATUS)

    def _query(self, others: Collection[int] | None = None) -> dict[int, RankLocation]:
        """Query ranks (default: all except this one) for their locations; return one for each, also without a reply."""
        others = [r for r in range(self.size) if r != self.rank] if others is None else others
        with suppress(MPI.Exception):
            while self._received(REPLY) is not None:
                pass  # a late reply to an earlier query
        for r in others:
            with suppress(MPI.Exception):  # the rank has died
                self._send(b"?", r, QUERY)
        stopped = {r: pid for r in others if (pid := self._pids.get(r)) and is_stopped(pid)}
        reason = "it is stopped, by SIGSTOP or a debugger (process {} of this node)"
        unknown = "it has ended, is stopped, or can't be reached"
        replies = {
            r: RankLocation(f"does not reply: {reason.format(stopped[r]) if r in stopped else unknown}", False)
            for r in others
        }
        until, waiting = time.perf_counter() + ANSWER_S, set(others) - set(stopped)
        while waiting and time.perf_counter() < until:
            with suppress(MPI.Exception):  # another rank has died
                self._reply()  # other ranks may send queries, too
                if (reply := self._received(REPLY)) is not None:
                    state = RankState.decode(reply[1])
                    replies[reply[0]] = RankLocation(state.location, True, state)
                    waiting.discard(reply[0])
                    continue
            time.sleep(0.01)
        return replies
