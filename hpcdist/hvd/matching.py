"""Collective calls that are matched by name: each is made once all ranks have asked for it, in whatever order they did.

A rank that has been asked for something tells the others what by numbers; all make those calls that every rank has been
asked for, in the order of the first rank. A rank without any such request does not take part: nothing that needs it
could be made before. Ranks that have joined take part in all calls, with zeros.

Reference: Alexander Sergeev, Mike Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch

from hpcdist.collectives.calls import Collectives
from hpcdist.collectives.calls.tensors import type_of
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.waiting import wait_until
from hpcdist.comm.work import CallQueue, Work
from hpcdist.errors import CommunicationError, DeadlineError, MismatchError
from hpcdist.hvd.exceptions import HorovodInternalError
from hpcdist.hvd.fusion import FusionBuffer

MOST, MOST_OF_ALL = 32, 1024  # requests that ranks tell each other of at once: at first, and once they have had more
SHORTEST_S, LONGEST_S = 50e-6, 1e-3  # pauses of ranks that wait for each other's next request
NEWS_S = 2.0  # so much later than a failure MPI may tell of the death behind it
AWAKE = 100  # times that the queue's thread looks for requests in vain before it waits for its next call
KNOWN = 1 << 16  # names whose numbers are kept
WORDS = 2  # of a request: its name with its kind, and what must be the same on all ranks
KINDS = 255  # the bits of the first that its kind sets
HEAD = 3  # words before them: how many there are, when the rank joined, and whether one has waited past the deadline
SHOWN = 8  # requests of a rank that a message names


class NamedCall(abc.ABC):
    """A call that a rank has been asked for, and later its result.

    Args:
        name: by which ranks find each other's.
        like: values of `PROPERTIES`, which can be hashed.

    Attributes:
        kind: of call: allreduce, allgather...
        PROPERTIES: names of what must be the same on all ranks.
        found: the result.
        over: the result is there, or the error.
        told_s: when the other ranks were told of it.
    """

    kind: ClassVar[str] = ""
    PROPERTIES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str, like: tuple[Any, ...] = ()):
        self.name, self.like = name, like
        self.found: Any = None
        self.error: BaseException | None = None
        self.over, self.told_s = False, 0.0

    @property
    def fusion_key(self) -> Any:
        """What requests that are made by one call have in common; None where each is made by its own."""
        return None

    @property
    def key(self) -> tuple[int, int]:
        """Return numbers for the name, and for what must be the same on all ranks."""
        return _place(self.kind, self.name), _number(*self.like)

    @abc.abstractmethod
    def run(self, calls: Collectives) -> None:
        """Collective. Make the call; leave the result in `found`."""

    def run_fused(self, calls: Collectives, requests: Sequence[Any], buffer: FusionBuffer) -> None:
        """Collective. Make these calls, of which this is the first, by one; for kinds that have `fusion_key`."""
        raise NotImplementedError


class Join(NamedCall):
    """A rank has no more requests of its own; its result is the last rank to say so."""

    kind = "join"

    def __init__(self) -> None:
        super().__init__("")
        self.since_ns = time.time_ns()

    def run(self, calls: Collectives) -> None:
        raise NotImplementedError  # it is met otherwise


class Refused(NamedCall):
    """What a rank that has joined has of a call that it can't take part in."""

    def run(self, calls: Collectives) -> None:
        raise NotImplementedError  # it is ended with an error


# By kind of call: what makes a rank's part in it, once that rank has joined, of its name and what `_plain` has made of
# what it must be like. Calls of other kinds are refused then.
STANDINS: dict[str, Callable[[str, Any], NamedCall]] = {}


class Watcher(abc.ABC):
    """Is told what a matcher does."""

    @abc.abstractmethod
    def submitted(self, request: NamedCall) -> None:
        """A request has been taken."""

    @abc.abstractmethod
    def started(self, request: NamedCall) -> None:
        """All ranks have been asked for it, and it is made."""

    @abc.abstractmethod
    def ended(self, request: NamedCall) -> None:
        """It is over."""

    @abc.abstractmethod
    def met(self) -> None:
        """Ranks have told each other of their requests."""


class Matcher:
    """Makes the calls of the ranks of a communicator: on the thread that waits for one, or else on that of a queue.

    Args:
        comm: closed at the end.
        gather_s: for so long requests for whose end nobody waits are gathered, to be made together.
    """

    def __init__(self, comm: Communicator, gather_s: float):
        self.comm, self.calls, self._buffer = comm, Collectives(comm), FusionBuffer()
        self._pending: dict[tuple[str, str], NamedCall] = {}
        self._since_s = 0.0  # when the first of them came
        self._lock = threading.Lock()
        self._changed, self._wake = (threading.Condition(self._lock) for _ in range(2))  # for who waits, for the thread
        # Its thread takes turns with the one that waits, and is needed whatever MPI allows.
        self._queue, self._work = CallQueue(threaded=True), Work()  # the one of `_run`
        self._queued = False
        self._at_work = self._closing = False
        self._waiting, self._gather_s = 0, max(gather_s, SHORTEST_S)
        self._error: BaseException | None = None  # with which an exchange has failed
        self._died = ""  # who
        self._make_room(MOST)
        self.watcher: Watcher | None = None

    def submit(self, request: NamedCall) -> NamedCall:
        """Take a request; raise ValueError where one of that name has not been met yet.

        Once an exchange has failed, requests end with its error.
        """
        place = request.kind, request.name
        with self._lock:
            if self._error is not None:
                return self._end_failed(request)
            if place in self._pending:
                raise ValueError(
                    f"the name of a tensor must not be that of another one under way; got {request.name!r} for "
                    f"{request.kind} twice. Give each its own name, or wait for the first one."
                )
            if not self._pending:
                self._since_s = time.perf_counter()
            self._pending[place] = request
            if self.watcher is not None:
                self.watcher.submitted(request)
            if not self._queued:
                self._queued, self._work = True, self._queue.submit(self._run)
            self._work.waited = self._waiting > 0
        return request

    def wait(self, request: NamedCall) -> Any:
        """Wait for a request's result, and make calls meanwhile."""
        pause_s = SHORTEST_S
        with self._lock:
            self._waiting, self._work.waited = self._waiting + 1, True
            try:
                while not request.over:
                    if self._at_work:
                        self._changed.wait()
                    elif self._advance():
                        pause_s = SHORTEST_S
                    else:
                        self._changed.wait(pause_s)
                        pause_s = min(2 * pause_s, LONGEST_S)
            finally:
                self._waiting -= 1
                self._work.waited = self._waiting > 0 or not self._pending
        if request.error is not None:
            raise request.error
        return request.found

    def close(self) -> None:
        """Collective, unless an exchange has failed. End the thread, once all requests have been met."""
        with self._lock:
            self._closing = True
            self._wake.notify()
        self._queue.close()
        self.calls.close()
        self.comm.close()

    # --- rounds -------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        """Make the calls for whose end nobody waits."""
        pause_s, in_vain = SHORTEST_S, 0
        with self._lock:
            while self._error is None and (self._pending or (not self._closing and in_vain < AWAKE)):
                early_s = 0.0 if self._closing else self._since_s + self._gather_s - time.perf_counter()
                if not self._pending:
                    in_vain, self._work.waited = in_vain + 1, True  # nothing is left to do
                    self._wake.wait(self._gather_s)
                    continue
                in_vain = 0
                if self._waiting or self._at_work or early_s > 0:
                    self._wake.wait(max(early_s, self._gather_s))
                elif self._advance():
                    pause_s = SHORTEST_S
                else:
                    self._wake.wait(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_S)
            self._queued = False

    def _advance(self) -> bool:
        """Collective. Make the calls that all ranks have been asked for; tell whether there are any.

        Holds the lock at the beginning and at the end, but not meanwhile.
        """
        told, self._at_work = list(self._pending.values()), True
        self._lock.release()
        some, broken = True, None
        try:
            some = self._round(told)
        except BaseException as error:  # of the exchange itself: no call can be made any more
            broken = error
            with suppress(Exception):  # whatever comes of it, requests end
                self._abandon()
        self._lock.acquire()
        self._at_work = False
        if broken is not None:
            self._error = broken
            for request in (*told, *self._pending.values()):
                if not request.over:
                    self._end_failed(request)
            self._pending.clear()
        self._changed.notify_all()
        if broken is not None and not isinstance(broken, Exception):  # such as KeyboardInterrupt
            raise broken
        return some

    def _abandon(self) -> None:
        """Let other ranks' calls fail, too, and find out who has died, if ranks outlive others."""
        failures = self.comm.failures
        for comm in (self.comm, self.calls.comm) if failures.tolerant else ():
            cast(Any, comm.failures).abandon()
        with suppress(DeadlineError):
            wait_until(lambda: bool(failures.failed()), NEWS_S if failures.tolerant else 0.0, str)
        self._died = "".join(f" Rank {rank} has died." for rank in failures.failed())

    def _end_failed(self, request: NamedCall) -> NamedCall:
        request.error = HorovodInternalError(f"{self._error}{self._died}")
        request.error.__cause__ = self._error
        request.over = True
        return request

    def _make_room(self, most: int) -> None:
        """Let ranks tell each other of so many requests at once."""
        self._own = torch.zeros(HEAD + WORDS * most, dtype=torch.int64)
        self._all = torch.zeros(self.comm.size, HEAD + WORDS * most, dtype=torch.int64)

    def _round(self, told: Sequence[NamedCall]) -> bool:
        joined = next((request for request in told if isinstance(request, Join)), None)
        own = [request for request in told if request is not joined]
        keys = [request.key for request in own]
        late = self._is_late(own)
        asked, since_ns, any_late = self._tell_all(
            [*itertools.chain(*keys)], 0 if joined is None else joined.since_ns, late
        )
        if self.watcher is not None:
            self.watcher.met()
        present = [rank for rank, moment in enumerate(since_ns) if not moment]
        if not present:
            if joined is not None:
                joined.found = max(range(len(since_ns)), key=lambda rank: (since_ns[rank], rank))
                self._end([joined])
            return True
        if len(present) == len(asked) and all(row == asked[0] for row in asked):
            self._run_calls(own)
            return True
        by_rank = [dict(zip(row[::WORDS], row[1::WORDS])) for row in asked]
        common = [name for name in by_rank[present[0]] if all(name in by_rank[rank] for rank in present)]
        if not common:
            if any_late:
                self._end_late(own)
            return self._refuse_kinds(own, [by_rank[rank] for rank in present])
        by_name = {key[0]: request for key, request in zip(keys, own)}
        if len(present) < len(asked):
            by_name = self._stand_in(present, by_name, common)
        differ = {name for name in common if len({by_rank[rank][name] for rank in present}) > 1}
        for name in common:
            if name in differ:
                self._refuse(by_name[name])
        self._run_calls([by_name[name] for name in common if name not in differ])
        return True

    def _is_late(self, requests: Sequence[NamedCall]) -> bool:
        """Tell whether one has waited for other ranks' for longer than the deadline, since it was told of first."""
        now_s, late = time.perf_counter(), False
        for request in requests:
            request.told_s = request.told_s or now_s
            late |= now_s - request.told_s > self.comm.failures.deadline_s
        return late

    def _end_late(self, requests: Sequence[NamedCall]) -> None:
        """Collective. Raise DeadlineError, which says what each rank waits for."""
        names = [f"{one.kind} of {one.name!r}" for one in requests[:SHOWN]]
        names += [f"{len(requests) - SHOWN} more"] * (len(requests) > SHOWN)
        found = self.comm.gather(", ".join(names))
        texts = [f"rank {rank} waits for {calls}" for rank, calls in enumerate(found) if calls]
        raise DeadlineError(
            f"a call must be asked for by all ranks, under one name, within {self.comm.failures.deadline_s:g} s; got "
            f"{'; '.join(texts)}. Give it the same name on all ranks, and have each of them ask for it."
        )

    def _refuse_kinds(self, requests: Sequence[NamedCall], told: Sequence[Collection[int]]) -> bool:
        """Collective. End requests whose name two ranks have for different kinds of call; tell whether there are any.

        Args:
            told: by rank, of those that have not joined, the first words of its requests.
        """
        names = set.intersection(*({word & ~KINDS for word in words} for words in told))
        for name in sorted(names):
            here = [one for one in requests if one.key[0] & ~KINDS == name]
            found = self.comm.gather([one.kind for one in here])
            texts = [f"{' and '.join(kinds)} on rank {rank}" for rank, kinds in enumerate(found) if kinds]
            for request in here:
                request.error = HorovodInternalError(
                    f"Mismatched calls of {request.name!r}: all ranks must make the same call under one name; got "
                    f"{'; '.join(texts)}. Give each call a name of its own."
                )
            self._end(here)
        return bool(names)

    def _tell_all(self, words: Sequence[int], since_ns: int, late: bool) -> tuple[list[list[int]], list[int], bool]:
        """Collective. Return all ranks' words, when each has joined (0 where it has not), and whether one is late."""
        own, everyone = self._own.numpy(), self._all.numpy()
        own[:HEAD], told = (len(words), since_ns, late), len(own) - HEAD
        own[HEAD : HEAD + len(words)] = words[:told]
        self.calls.all_gather(self._all, self._own)
        counts, moments = everyone[:, 0].tolist(), everyone[:, 1].tolist()
        most = max(counts)
        if most > told:  # the first time
            longer = torch.zeros(most, dtype=torch.int64)
            longer.numpy()[: len(words)] = words
            all_longer = torch.empty(len(counts), most, dtype=torch.int64)
            self.calls.all_gather(all_longer, longer)
            rows = all_longer.numpy()
            if told < WORDS * MOST_OF_ALL:
                self._make_room(min(2 * most // WORDS, MOST_OF_ALL))
        else:
            rows = everyone[:, HEAD:]
        return [row[:count].tolist() for row, count in zip(rows, counts)], moments, bool(everyone[:, 2].any())

    def _stand_in(
        self, present: Sequence[int], own: dict[int, NamedCall], common: Sequence[int]
    ) -> dict[int, NamedCall]:
        """Collective. Let ranks that have joined know what the calls are; return all ranks' requests."""
        told = [[one.kind, one.name, _plain(one.like)] for name, one in own.items() if name in common]
        described = self.comm.gather(told)
        found = {}
        for kind, name, like in described[present[0]]:
            number = _place(kind, name)
            request = own.get(number) or STANDINS.get(kind, Refused)(name, like)
            if kind not in STANDINS:
                request.error = HorovodInternalError(f"{kind} must not be called once a rank has joined; got {name!r}.")
            found[number] = request
        return found

    def _refuse(self, request: NamedCall) -> None:
        """Collective. End a request with what each rank has asked for."""
        found = self.comm.gather(dict(zip(request.PROPERTIES, map(_shown, request.like))))
        rows = [row for row in found if row is not None]
        wrong = [name for name in rows[0] if len({row.get(name) for row in rows}) > 1]
        texts = [
            f"{', '.join(f'{name} {row.get(name)}' for name in wrong)} on rank {at}" for at, row in enumerate(rows)
        ]
        request.error = HorovodInternalError(
            f"Mismatched {request.kind} of {request.name!r}: all ranks must bring the same {' and '.join(wrong)}; "
            f"got {'; '.join(texts)}. Make them alike."
        )
        self._end([request])

    def _run_calls(self, requests: Sequence[NamedCall]) -> None:
        for goes_with, several in _grouped_by_fusion(requests):
            first = several[0]
            if self.watcher is not None:
                for one in several:
                    self.watcher.started(one)
            try:
                if first.error is None:
                    if goes_with is None:
                        first.run(self.calls)
                    else:
                        first.run_fused(self.calls, several, self._buffer)
            except CommunicationError:
                raise
            except (RuntimeError, ValueError) as error:
                kind = HorovodInternalError if isinstance(error, MismatchError) else type(error)
                for one in several:
                    one.error = kind(str(error))
            self._end(several)

    def _end(self, requests: Sequence[NamedCall]) -> None:
        """Let requests, whose results or errors are there, be over."""
        with self._lock:
            for request in requests:
                self._pending.pop((request.kind, request.name), None)
        for request in requests:
            if self.watcher is not None:
                self.watcher.ended(request)
            request.over = True


def _grouped_by_fusion(requests: Sequence[NamedCall]) -> Iterator[tuple[Any, list[NamedCall]]]:
    """Yield requests, several at a time where these go together, with what they have in common."""
    groups: dict[Any, list[NamedCall]] = {}
    for request in requests:
        goes_with = request.fusion_key
        if goes_with is None:
            yield None, [request]
        else:
            groups.setdefault(goes_with, []).append(request)
    yield from groups.items()


@lru_cache(maxsize=KNOWN, typed=True)
def _number(*values: Any) -> int:
    """Return a number for values that is the same on all ranks."""
    text = repr(list(map(_shown, values))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


@lru_cache(maxsize=KNOWN)
def _place(kind: str, name: str) -> int:
    """Return the number of a name, with that of its kind in the last bits."""
    return (_number(name) & ~KINDS) | (_number(kind) & KINDS)


def _shown(value: Any) -> str:
    """Write a property: without torch's names."""
    if not isinstance(value, tuple):
        return type_of(value) if isinstance(value, torch.dtype) else str(value)
    return ", ".join(str(list(one)) if isinstance(one, torch.Size) else _shown(one) for one in value)


def _plain(value: Any) -> Any:
    """Write a property so that it can travel: dtypes by their names."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return type_of(value) if isinstance(value, torch.dtype) else value
