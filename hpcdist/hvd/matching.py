"""Collective calls that are matched by name: each is made once all ranks have asked for it, in whatever order they did.

A rank that has been asked for something tells the others what by numbers; all make those calls that every rank has been
asked for, in the order of the first rank. A rank without any such request does not take part: nothing that needs it
could be made before. Ranks that have joined take part in all calls, with zeros.

Reference: Alexander Sergeev, Mike Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
"""

from __future__ import annotations

import abc
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hpcdist.collectives.calls import Collectives
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError, MismatchError

MOST = 64  # requests that a rank tells the others of at once; of more it tells them apart
SHORTEST_S, LONGEST_S = 50e-6, 1e-3  # pauses of ranks that wait for each other's next request
WORDS = 2  # of a request: its name, and what must be the same on all ranks
HEAD = 2  # words before them: how many there are, and when the rank joined


class HorovodInternalError(RuntimeError):
    """A collective call has failed, on all ranks alike."""


class NamedCall(abc.ABC):
    """A call that a rank has been asked for, and later its result.

    Args:
        kind: of call: allreduce, allgather...
        name: by which ranks find each other's.
        like: what must be the same on all ranks: a name of each property, and its value.

    Attributes:
        found: the result.
    """

    def __init__(self, kind: str, name: str, like: dict[str, Any]):
        self.kind, self.name, self.like = kind, name, like
        self.found: Any = None
        self.error: BaseException | None = None
        self._over = threading.Event()

    @property
    def key(self) -> tuple[int, int]:
        """Return numbers for the name, and for what must be the same on all ranks."""
        return _number(f"{self.kind}.{self.name}"), _number(repr(sorted(self.like.items())))

    together: Any = None  # requests of equal values, other than None, are made by one call

    @abc.abstractmethod
    def make(self, calls: Collectives, others: Sequence[Any] = ()) -> None:
        """Collective. Make the call, and those of others that go together with it; leave the results in `found`."""

    def end(self, found: Any = None, error: BaseException | None = None) -> None:
        self.found, self.error = found, error
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> Any:
        """Wait for the result."""
        self._over.wait()
        if self.error is not None:
            raise self.error
        return self.found


class Join(NamedCall):
    """A rank has no more requests of its own; its result is the last rank to say so."""

    def __init__(self) -> None:
        super().__init__("join", "", {})
        self.since_ns = time.time_ns()

    def make(self, calls: Collectives, others: Sequence[Any] = ()) -> None:
        raise NotImplementedError  # it is met otherwise


class Refused(NamedCall):
    """What a rank that has joined has of a call that it can't take part in."""

    def __init__(self, name: str, like: dict[str, Any]):
        super().__init__("", name, like)

    def make(self, calls: Collectives, others: Sequence[Any] = ()) -> None:
        raise NotImplementedError  # it is ended with an error


# By kind of call: what makes a rank's part in it, of its name and of what it must be like, once that rank has joined.
# Calls of other kinds are refused then.
STANDINS: dict[str, Callable[[str, dict[str, Any]], NamedCall]] = {}


class Watcher(abc.ABC):
    """Is told what a matcher does."""

    @abc.abstractmethod
    def submitted(self, request: NamedCall) -> None:
        """A request has been taken."""

    @abc.abstractmethod
    def begun(self, request: NamedCall) -> None:
        """All ranks have been asked for it, and it is made."""

    @abc.abstractmethod
    def ended(self, request: NamedCall) -> None:
        """It is over."""

    @abc.abstractmethod
    def met(self) -> None:
        """Ranks have told each other of their requests."""


class Matcher:
    """Makes the calls of the ranks of a communicator on a thread, which begins with the first of them.

    Args:
        comm: closed at the end.
        gather_s: for so long requests for whose end nobody waits are gathered, to be made together.
    """

    def __init__(self, comm: Communicator, gather_s: float):
        self.comm, self.calls = comm, Collectives(comm)
        self._pending: dict[tuple[str, str], NamedCall] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing, self._waiting, self._gather_s = False, 0, gather_s
        self._own = torch.zeros(HEAD + WORDS * MOST, dtype=torch.int64)
        self._all = torch.zeros(comm.size, HEAD + WORDS * MOST, dtype=torch.int64)
        self.watcher: Watcher | None = None
        comm.failures.threads.append(self)

    @property
    def busy(self) -> bool:
        """Tell whether there are requests for whose end nobody waits."""
        return bool(self._pending) and not self._waiting

    def submit(self, request: NamedCall) -> NamedCall:
        """Take a request; raise ValueError where one of that name has not been met yet."""
        place = request.kind, request.name
        with self._changed:
            if place in self._pending:
                raise ValueError(
                    f"the name of a tensor must not be that of another one under way; got {request.name!r} for "
                    f"{request.kind} twice. Give each its own name, or wait for the first one."
                )
            self._pending[place] = request
            if self.watcher is not None:
                self.watcher.submitted(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hpcdist-hvd", daemon=True)
                self._thread.start()
            self._changed.notify()
        return request

    def wait(self, request: NamedCall) -> Any:
        """Wait for a request's result."""
        with self._changed:
            self._waiting += 1
            self._changed.notify()
        try:
            return request.wait()
        finally:
            with self._changed:
                self._waiting -= 1

    def close(self) -> None:
        """Collective. End the thread, once all requests have been met."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self.comm.failures.threads.remove(self)
        self.calls.close()
        self.comm.close()

    # --- the thread ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        pause_s = SHORTEST_S
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait()
                if not self._pending:
                    return
                self._changed.wait_for(lambda: self._waiting or self._closing, self._gather_s)
                told = list(self._pending.values())
            try:
                some = self._round(told)
            except BaseException as error:  # of the exchange itself: no call can be made any more
                self._fail(error)
                return
            if some:
                pause_s = SHORTEST_S
                continue
            with self._changed:
                if list(self._pending.values()) == told:
                    self._changed.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            for request in self._pending.values():
                request.end(error=HorovodInternalError(str(error)))
            self._pending.clear()

    def _round(self, told: Sequence[NamedCall]) -> bool:
        """Collective. Make the calls that all ranks have been asked for; tell whether there are any."""
        joined = next((request for request in told if isinstance(request, Join)), None)
        own = [request for request in told if request is not joined]
        keys = [request.key for request in own]
        words = [len(own), 0 if joined is None else joined.since_ns, *(word for key in keys[:MOST] for word in key)]
        self._own[: len(words)] = torch.tensor(words, dtype=torch.int64)
        self.calls.all_gather(self._all, self._own)
        if self.watcher is not None:
            self.watcher.met()
        rows = self._all.tolist()
        if max(row[0] for row in rows) > MOST:
            asked = [dict(map(tuple, of_rank)) for of_rank in self.comm.gather(keys)]
        else:
            asked = [dict(zip(row[HEAD : HEAD + WORDS * row[0] : 2], row[HEAD + 1 :: 2])) for row in rows]
        present = [rank for rank, row in enumerate(rows) if not row[1]]
        if not present:
            if joined is not None:
                self._end(joined, max(range(len(rows)), key=lambda rank: (rows[rank][1], rank)))
            return True
        common = [name for name in asked[present[0]] if all(name in asked[rank] for rank in present)]
        if not common:
            return False
        by_name = {key[0]: request for key, request in zip(keys, own)}
        if len(present) < len(rows):
            by_name = self._stand_in(present, by_name, common)
        differ = {name for name in common if len({asked[rank][name] for rank in present}) > 1}
        for name in common:
            if name in differ:
                self._refuse(by_name[name])
        self._make([by_name[name] for name in common if name not in differ])
        return True

    def _stand_in(
        self, present: Sequence[int], own: dict[int, NamedCall], common: Sequence[int]
    ) -> dict[int, NamedCall]:
        """Collective. Let ranks that have joined know what the calls are; return all ranks' requests."""
        described = self.comm.gather([[one.kind, one.name, one.like] for name, one in own.items() if name in common])
        found = {}
        for kind, name, like in described[present[0]]:
            number = _number(f"{kind}.{name}")
            request = own.get(number) or STANDINS.get(kind, Refused)(name, like)
            if kind not in STANDINS:
                request.error = HorovodInternalError(f"{kind} must not be called once a rank has joined; got {name!r}.")
            found[number] = request
        return found

    def _refuse(self, request: NamedCall) -> None:
        """Collective. End a request with what each rank has asked for."""
        found = self.comm.gather([request.like])
        rows = [of_rank[0] for of_rank in found if of_rank]
        wrong = [name for name in rows[0] if len({repr(row.get(name)) for row in rows}) > 1]
        texts = [
            f"{', '.join(f'{name} {row.get(name)}' for name in wrong)} on rank {at}" for at, row in enumerate(rows)
        ]
        self._end(
            request,
            error=HorovodInternalError(
                f"Mismatched {request.kind} of {request.name!r}: all ranks must bring the same {' and '.join(wrong)}; "
                f"got {'; '.join(texts)}. Make them alike."
            ),
        )

    def _make(self, requests: Sequence[NamedCall]) -> None:
        for several in _together(requests):
            first, *others = several
            if self.watcher is not None:
                for one in several:
                    self.watcher.begun(one)
            try:
                if first.error is None:
                    first.make(self.calls, others)
            except (HpcdistError, RuntimeError, ValueError) as error:
                kind = HorovodInternalError if isinstance(error, MismatchError) else type(error)
                for one in several:
                    one.error = kind(str(error))
            for one in several:
                self._end(one, one.found, one.error)

    def _end(self, request: NamedCall, found: Any = None, error: BaseException | None = None) -> None:
        with self._changed:
            self._pending.pop((request.kind, request.name), None)
        if self.watcher is not None:
            self.watcher.ended(request)
        request.end(found, error)


def _together(requests: Sequence[NamedCall]) -> Iterator[list[NamedCall]]:
    """Yield requests, several at a time where these go together."""
    groups: dict[Any, list[NamedCall]] = {}
    for request in requests:
        groups.setdefault(id(request) if request.together is None else request.together, []).append(request)
    yield from groups.values()


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
