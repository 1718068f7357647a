"""Cut a batch into portions much smaller than a worker's share, and hand them out as workers fall idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

LEAST = 2  # samples of a portion, where there are as many: batch normalisation can't do with one


@dataclass(frozen=True)
class JointBatch:
    """The batch of one step, of all workers together.

    Args:
        samples: how many there are, 0 to samples − 1 in the loop's order.
        share: how many of them this rank's share would be, for records.
        head: the first so many were in the batch before, too.
        tail: the last so many will be in the next one, too.
        whole: it is the whole data set, the same in every step.
    """

    samples: int
    share: int = 1
    head: int = 0
    tail: int = 0
    whole: bool = False


@dataclass(frozen=True)
class Division:
    """The portions of a batch: portion i is samples [bounds[i], bounds[i + 1]).

    The first `heads` portions are the batch's head, and the last `tails` its tail.
    """

    bounds: tuple[int, ...]
    heads: int
    tails: int

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def portion(self, index: int) -> slice:
        return slice(*self.bounds[index : index + 2])

    def weight(self, index: int) -> float:
        """Return the portion's share of the batch's samples."""
        return (self.bounds[index + 1] - self.bounds[index]) / self.bounds[-1]


def divide(batch: JointBatch, count: int) -> Division:
    """Cut a batch into about `count` portions of about equal size; none is empty, or crosses an end of head or tail."""
    ends = [batch.head, batch.samples - batch.tail, batch.samples]
    bounds, pieces = [0], []
    for end in ends:
        begin = bounds[-1]
        length = end - begin
        most = min(length, max(1, length // LEAST))
        pieces.append(min(most, max(1, round(count * length / batch.samples))))
        bounds += [begin + length * (i + 1) // pieces[-1] for i in range(pieces[-1])]
    return Division(tuple(bounds), heads=pieces[0], tails=pieces[2])


class Pace:
    """Remember how long portions take: their mean time, with the last ten or so counting most."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        self._count = min(self._count + 1, 10)
        self.mean_s += (seconds - self.mean_s) / self._count


LATE = 1.1  # times the mean: so much later a portion is given out a second time


class Portions:
    """Hand out portions, each once; towards the end those that are late a second time. The first result counts.

    Holds no clock of its own.

    Args:
        pace: of the portions before.
    """

    def __init__(self, count: int, pace: Pace):
        self._waiting = deque(range(count))
        self._held: dict[int, list[int]] = {}  # by portion, the one that is out for longest first: the workers
        self._since: dict[int, float] = {}
        self._missing, self._pace = count, pace

    @property
    def is_complete(self) -> bool:
        return self._missing == 0

    def give(self, worker: int, now: float) -> int | None:
        """Return the portion that an idle worker computes next; None where there is none for it now."""
        if self._waiting:
            portion = self._waiting.popleft()
            self._since[portion] = now
        else:
            late = (p for p in self._once() if worker not in self._held[p] and self._due(p) <= now)
            found = next(late, None)
            if found is None:
                return None
            portion = found
        self._held.setdefault(portion, []).append(worker)
        return portion

    def take(self, portion: int, now: float) -> bool:
        """Take a result; return whether it is the first of its portion."""
        held = self._held.pop(portion, None)
        if held is None:
            return False
        if len(held) == 1:
            self._pace.add(now - self._since[portion])
        self._missing -= 1
        return True

    def patience_s(self, now: float) -> float | None:
        """Return the seconds until a portion is late; None where none is out once."""
        due = min(map(self._due, self._once()), default=None)
        return None if due is None else max(0.0, due - now)

    def forget(self, workers: Iterable[int]) -> None:
        """Hand out again what only these workers have: they have died."""
        for portion, held in list(self._held.items()):
            held[:] = [worker for worker in held if worker not in set(workers)]
            if not held:
                del self._held[portion]
                self._waiting.append(portion)

    def _once(self) -> list[int]:
        return [] if self._waiting else [portion for portion, held in self._held.items() if len(held) == 1]

    def _due(self, portion: int) -> float:
        return self._since[portion] + LATE * self._pace.mean_s
