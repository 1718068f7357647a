"""Collective calls matched by name: a call runs when all ranks have submitted it, in any order.

In a round, ranks with pending requests exchange numbers that identify them; then all run the calls that every rank has
submitted, in the order of the first rank. A rank without pending requests does not take part: no call could start.
Ranks that have joined (called `hvd.join`) take part in all calls, with zeros.
Reference: Alexander Sergeev, Mike Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, cast

import torch

from hpcdist.collectives.calls import Collectives
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.waiting import wait_until
from hpcdist.comm.work import CallQueue, Work
from hpcdist.errors import CommunicationError, DeadlineError, MismatchError
from hpcdist.hvd.exceptions import HorovodInternalError
from hpcdist.hvd.named_calls import KIND_BITS, STANDINS, FusionBuffer, Join, NamedCall, name_digest
from hpcdist.hvd.timeline import CallTimeline

MAX_REQUESTS, LIMIT_REQUESTS = 32, 1024  # requests in an exchange: at first, and after ranks have had more
SHORTEST_S, LONGEST_S = 50e-6, 1e-3  # pauses of ranks that wait for each other's next request
FAILURE_REPORT_S = 2.0  # maximum delay between a failed call and MPI's report of the rank failure that caused it
IDLE_ROUNDS = 100  # number of times that the queue's thread finds no request before it waits for its next call
FIELDS = 2  # of a request: digest of name and kind, digest of its properties
HEADER = 3  # fields before the requests: their number, when the rank joined, and whether one is past the deadline
MAX_NAMED = 8  # requests of a rank that a message names


class Matcher:
    """Makes the named calls of a communicator's ranks: on a thread that waits for a result, or on a queue's thread.

    Args:
        comm: closed at the end.
        cycle_s: cycle time: requests that nobody waits for are collected for this time, and run jointly.
    """

    def __init__(self, comm: Communicator, cycle_s: float):
        self.comm, self.calls, self._buffer = comm, Collectives(comm), FusionBuffer()
        self._pending: dict[tuple[str, str], NamedCall] = {}
        self._first_submitted_s = 0.0  # when the first of them was submitted
        self._lock = threading.Lock()
        self._request_ended = threading.Condition(self._lock)  # for threads that wait for a result
        self._thread_wakes = threading.Condition(self._lock)
        # The thread alternates with a waiting one, and is needed at any thread level of MPI.
        self._queue, self._work = CallQueue(threaded=True), Work()  # the one of `_run`
        self._thread_runs = False
        self._in_round = self._closing = False
        self._n_waiting, self._cycle_s = 0, max(cycle_s, SHORTEST_S)
        self._error: BaseException | None = None  # of a failed exchange
        self._failed_ranks = ""
        self._allocate(MAX_REQUESTS)
        self.timeline: CallTimeline | None = None

    def submit(self, request: NamedCall) -> NamedCall:
        """Submit a request; raise ValueError if a request with that name is pending.

        Once an exchange has failed, requests end with its error.
        """
        key = request.kind, request.name
        with self._lock:
            if self._error is not None:
                return self._end_failed(request)
            if key in self._pending:
                raise ValueError(
                    f"the name of a tensor must not be that of another one in flight; got {request.name!r} for "
                    f"{request.kind} twice. Use different names, or wait for the first one."
                )
            if not self._pending:
                self._first_submitted_s = time.perf_counter()
            self._pending[key] = request
            if self.timeline is not None:
                self.timeline.submitted(*key)
            if not self._thread_runs:
                self._thread_runs, self._work = True, self._queue.submit(self._run)
            self._work.waited = self._n_waiting > 0
        return request

    def wait(self, request: NamedCall) -> Any:
        """Wait for a request's result; meanwhile this thread runs rounds, unless another thread is in one."""
        pause_s = SHORTEST_S
        with self._lock:
            self._n_waiting, self._work.waited = self._n_waiting + 1, True
            try:
                while not request.done:
                    if self._in_round:
                        self._request_ended.wait()
                    elif self._run_round():
                        pause_s = SHORTEST_S
                    else:
                        self._request_ended.wait(pause_s)
                        pause_s = min(2 * pause_s, LONGEST_S)
            finally:
                self._n_waiting -= 1
                self._work.waited = self._n_waiting > 0 or not self._pending
        if request.error is not None:
            raise request.error
        return request.result

    def close(self) -> None:
        """End the thread, when all requests are done. Collective, unless an exchange has failed."""
        with self._lock:
            self._closing = True
            self._thread_wakes.notify()
        self._queue.close()
        self.calls.close()
        self.comm.close()

    # --- rounds -------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        """The queue's thread: run rounds for the requests that no thread waits for, one per cycle."""
        pause_s, idle_rounds = SHORTEST_S, 0
        with self._lock:
            while self._error is None and (self._pending or (not self._closing and idle_rounds < IDLE_ROUNDS)):
                remaining_s = 0.0 if self._closing else self._first_submitted_s + self._cycle_s - time.perf_counter()
                if not self._pending:
                    idle_rounds, self._work.waited = idle_rounds + 1, True  # so that the queue does not count as busy
                    self._thread_wakes.wait(self._cycle_s)
                    continue
                idle_rounds = 0
                if self._n_waiting or self._in_round or remaining_s > 0:
                    self._thread_wakes.wait(max(remaining_s, self._cycle_s))
                elif self._run_round():
                    pause_s = SHORTEST_S
                else:
                    self._thread_wakes.wait(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_S)
            self._thread_runs = False

    def _run_round(self) -> bool:
        """Collective. Make the calls that all ranks have submitted; return whether a request may have ended.

        The lock is held on entry and on return, but released in between.
        """
        requests, self._in_round = list(self._pending.values()), True
        self._lock.release()
        progress, failure = True, None
        try:
            progress = self._exchange_and_run(requests)
        except BaseException as error:  # of the exchange itself: no further call is possible
            failure = error
            with suppress(Exception):  # requests must end in any case
                self._abandon()
        self._lock.acquire()
        self._in_round = False
        if failure is not None:
            self._error = failure
            for request in (*requests, *self._pending.values()):
                if not request.done:
                    self._end_failed(request)
            self._pending.clear()
        self._request_ended.notify_all()
        if failure is not None and not isinstance(failure, Exception):  # such as KeyboardInterrupt
            raise failure
        return progress

    def _abandon(self) -> None:
        """Let other ranks' calls fail too, and set `_failed_ranks` for messages, if ranks survive failures."""
        failures = self.comm.failures
        for comm in (self.comm, self.calls.comm) if failures.tolerant else ():
            cast(Any, comm.failures).abandon()
        with suppress(DeadlineError):
            wait_until(lambda: bool(failures.failed()), FAILURE_REPORT_S if failures.tolerant else 0.0, str)
        self._failed_ranks = "".join(f" Rank {rank} has failed." for rank in failures.failed())

    def _end_failed(self, request: NamedCall) -> NamedCall:
        request.error = HorovodInternalError(f"{self._error}{self._failed_ranks}")
        request.error.__cause__ = self._error
        request.done = True
        return request

    def _allocate(self, count: int) -> None:
        """Allocate the tensors to exchange up to `count` requests of each rank."""
        self._local = torch.zeros(HEADER + FIELDS * count, dtype=torch.int64)
        self._all = torch.zeros(self.comm.size, HEADER + FIELDS * count, dtype=torch.int64)

    def _exchange_and_run(self, pending: Sequence[NamedCall]) -> bool:
        """Collective. Exchange requests once, and run the calls that all ranks have submitted; see `_run_round`.

        Names and properties are represented by digests, so that ranks exchange tensors of int64. `joined_ns` has for
        each rank the time of its `join`, 0 if it has not called it; `properties_of` has by rank the properties by name.
        Branches must depend only on exchanged values, so that all ranks take the same one: they contain collectives.
        """
        join_request = next((request for request in pending if isinstance(request, Join)), None)
        requests = [request for request in pending if request is not join_request]
        keys = [request.key for request in requests]
        now_s = time.perf_counter()
        for request in requests:
            request.first_exchanged_s = request.first_exchanged_s or now_s
        overdue = any(now_s - each.first_exchanged_s > self.comm.failures.deadline_s for each in requests)
        fields_by_rank, joined_ns, any_overdue = self._exchange(
            [*itertools.chain(*keys)], 0 if join_request is None else join_request.since_ns, overdue
        )
        if self.timeline is not None:
            self.timeline.exchanged()
        unjoined = [rank for rank, time_ns in enumerate(joined_ns) if not time_ns]
        if not unjoined:  # all have joined: the result is the last rank to do so
            if join_request is not None:
                join_request.result = max(range(len(joined_ns)), key=lambda rank: (joined_ns[rank], rank))
                self._end([join_request])
            return True
        if len(unjoined) == len(fields_by_rank) and all(row == fields_by_rank[0] for row in fields_by_rank):
            self._run_calls(requests)
            return True
        properties_of = [dict(zip(row[::FIELDS], row[1::FIELDS])) for row in fields_by_rank]
        common = [name for name in properties_of[unjoined[0]] if all(name in properties_of[rank] for rank in unjoined)]
        if not common:
            if any_overdue:
                self._raise_deadline(requests)
            return self._refuse_different_kinds(requests, [properties_of[rank] for rank in unjoined])
        by_name = {key[0]: request for key, request in zip(keys, requests)}
        if len(unjoined) < len(fields_by_rank):
            by_name = self._create_standins(unjoined, by_name, common)
        mismatched = {name for name in common if len({properties_of[rank][name] for rank in unjoined}) > 1}
        for name in common:
            if name in mismatched:
                self._refuse_different_properties(by_name[name])
        self._run_calls([by_name[name] for name in common if name not in mismatched])
        return True

    def _raise_deadline(self, requests: Sequence[NamedCall]) -> None:
        """Collective. Raise DeadlineError, with the requests that each rank waits for."""
        names = [f"{each.kind} of {each.name!r}" for each in requests[:MAX_NAMED]]
        names += [f"{len(requests) - MAX_NAMED} more"] * (len(requests) > MAX_NAMED)
        by_rank = self.comm.gather(", ".join(names))
        texts = [f"rank {rank} waits for {calls}" for rank, calls in enumerate(by_rank) if calls]
        raise DeadlineError(
            f"a call must be submitted by all ranks, with one name, within {self.comm.failures.deadline_s:g} s; got "
            f"{'; '.join(texts)}. Use the same name on all ranks, and submit it on each of them."
        )

    def _refuse_different_kinds(self, requests: Sequence[NamedCall], fields: Sequence[Collection[int]]) -> bool:
        """Collective. End requests whose name belongs to different kinds of call; return whether there are any.

        `fields` has for each unjoined rank the first fields of its requests, see `name_digest`.
        """
        names = set.intersection(*({field & ~KIND_BITS for field in of_rank} for of_rank in fields))
        for name in sorted(names):
            local = [each for each in requests if each.key[0] & ~KIND_BITS == name]
            by_rank = self.comm.gather([each.kind for each in local])
            texts = [f"{' and '.join(kinds)} on rank {rank}" for rank, kinds in enumerate(by_rank) if kinds]
            for request in local:
                request.error = HorovodInternalError(
                    f"Mismatched calls of {request.name!r}: all ranks must make the same call under one name; got "
                    f"{'; '.join(texts)}. Give each call a different name."
                )
            self._end(local)
        return bool(names)

    def _exchange(self, fields: Sequence[int], since_ns: int, overdue: bool) -> tuple[list[list[int]], list[int], bool]:
        """Collective. Return by rank its fields and when it joined (0: not yet), and whether any request is overdue."""
        local, of_all = self._local.numpy(), self._all.numpy()
        local[:HEADER], capacity = (len(fields), since_ns, overdue), len(local) - HEADER
        local[HEADER : HEADER + len(fields)] = fields[:capacity]
        self.calls.all_gather(self._all, self._local)
        counts, joined_ns = of_all[:, 0].tolist(), of_all[:, 1].tolist()
        longest_count = max(counts)
        if longest_count > capacity:  # a rank's fields were cut off: exchange them again, in longer tensors
            self._allocate(longest_count // FIELDS)
            exchanged = self._exchange(fields, since_ns, overdue)
            self._allocate(min(2 * longest_count // FIELDS, LIMIT_REQUESTS))
            return exchanged
        fields_by_rank = [numbers[HEADER : HEADER + count].tolist() for numbers, count in zip(of_all, counts)]
        return fields_by_rank, joined_ns, bool(of_all[:, 2].any())

    def _create_standins(
        self, present: Sequence[int], local: dict[int, NamedCall], common: Sequence[int]
    ) -> dict[int, NamedCall]:
        """Collective. Return a request for each call of `common`, by name digest; joined ranks create stand-ins.

        The first of the ranks that are `present`, because they have not joined, sends names and properties.
        """
        calls = [each.to_json() for name, each in local.items() if name in common]
        by_rank = self.comm.gather(calls)
        requests = {}
        for kind, name, properties in by_rank[present[0]]:
            digest = name_digest(kind, name)
            request = local.get(digest) or STANDINS.get(kind, NamedCall)(name, properties)
            if kind not in STANDINS:
                request.error = HorovodInternalError(f"{kind} must not be called once a rank has joined; got {name!r}.")
            requests[digest] = request
        return requests

    def _refuse_different_properties(self, request: NamedCall) -> None:
        """Collective. End a request with an error that names each rank's properties."""
        by_rank = self.comm.gather(request.describe())
        rows = {rank: row for rank, row in enumerate(by_rank) if row is not None}  # None: the rank died
        differing = [name for name in next(iter(rows.values())) if len({row.get(name) for row in rows.values()}) > 1]
        texts = [
            f"{', '.join(f'{name} {row.get(name)}' for name in differing)} on rank {rank}" for rank, row in rows.items()
        ]
        request.error = HorovodInternalError(
            f"Mismatched {request.kind} of {request.name!r}: all ranks must have the same {' and '.join(differing)}; "
            f"got {'; '.join(texts)}. Make them equal."
        )
        self._end([request])

    def _run_calls(self, requests: Sequence[NamedCall]) -> None:
        """Collective. Run calls in this order, fused where possible; an error ends only its own requests."""
        groups: dict[Any, list[NamedCall]] = {}
        for request in requests:
            groups.setdefault(request.fusion_key or id(request), []).append(request)
        for group in groups.values():
            first = group[0]
            if self.timeline is not None:
                for each in group:
                    self.timeline.started(each.kind, each.name)
            try:
                if first.error is None:
                    first.run_fused(self.calls, group, self._buffer)
            except CommunicationError:
                raise
            except (RuntimeError, ValueError) as error:
                kind = HorovodInternalError if isinstance(error, MismatchError) else type(error)
                for each in group:
                    each.error = kind(str(error))
            self._end(group)

    def _end(self, requests: Sequence[NamedCall]) -> None:
        """Mark requests as done, once their names are free again; their results or errors are already set."""
        with self._lock:
            for request in requests:
                self._pending.pop((request.kind, request.name), None)
        for request in requests:
            if self.timeline is not None:
                self.timeline.ended(request.kind, request.name)
            request.done = True
