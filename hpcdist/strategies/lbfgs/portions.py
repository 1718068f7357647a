"""Cut a batch into portions much smaller than a worker's share, and hand them out as workers fall idle."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

RECENT = 20  # portions, of all workers: how regular they are
ROUNDING = 1e-6  # of a portion's time: so much later than the others is not late
REST = 10  # times its last portion's time: so long a worker that was too slow has none, and is then tried again


class Pace:
    """Remember how long each worker takes for a portion: from when it is given it until its result is there.

    Holds no clock of its own.
    """

    def __init__(self) -> None:
        self._mean_s: dict[int, float] = {}  # of each worker's last portions
        self._since: dict[int, float] = {}  # when each worker was given what it computes now
        self._ended: dict[int, float] = {}  # when each worker's last result was there
        self._ratios: deque[float] = deque(maxlen=RECENT)  # of a portion's time to the mean before it
        self._slack = 1 + ROUNDING

    def start(self, worker: int, now: float) -> None:
        """Note that a worker is given a portion."""
        self._since[worker] = now

    def end(self, worker: int, now: float) -> None:
        """Note that the result of what a worker was given is there, if it was given something."""
        since = self._since.pop(worker, None)
        if since is None:
            return
        seconds, before = now - since, self.mean_s(worker)
        if before:
            self._ratios.append(seconds / before)
            most = sorted(self._ratios)[4 * (len(self._ratios) - 1) // 5]
            self._slack = max(1.0, most) * (1 + ROUNDING)
        self._ended[worker] = now
        self._mean_s[worker] = seconds + 0.75 * (self._mean_s.get(worker, seconds) - seconds)

    def forget(self, workers: Iterable[int]) -> None:
        """Forget workers that have died."""
        for worker in workers:
            self._since.pop(worker, None)
            self._mean_s.pop(worker, None)
            self._ended.pop(worker, None)

    def is_known(self, worker: int, now: float) -> bool:
        """Tell whether a worker has computed a portion, and not too long ago."""
        return worker in self._ended and now - self._ended[worker] < REST * self.mean_s(worker)

    def mean_s(self, worker: int) -> float:
        """Return how long a portion takes this worker; before its first one the others' mean, at first 0."""
        return self._mean_s.get(worker) or fmean(self._mean_s.values() or [0.0])

    def most_s(self, worker: int) -> float:
        """Return how long a portion takes this worker at most, if it is as regular as four of the last five were."""
        return self._slack * self.mean_s(worker)

    def end_of(self, worker: int) -> float:
        """Return when a worker that computes is expected to end."""
        return self._since[worker] + self.mean_s(worker)

    def due(self, now: float) -> dict[int, float]:
        """Return until when each of the workers that compute will have ended; of those that are not late."""
        due = {worker: since + self.most_s(worker) for worker, since in self._since.items()}
        return {worker: until for worker, until in due.items() if until > now}

    def free(self, now: float) -> dict[int, float]:
        """Return when each of the workers that are not late can begin a portion; those that idle, or soon come, now."""
        return dict.fromkeys(self._mean_s.keys() - self._since.keys(), now) | self.due(now)


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
    bounds, chunks = [0], []
    for end in ends:
        start = bounds[-1]
        length = end - start
        most = min(length, max(1, length // LEAST))
        chunks.append(min(most, max(1, round(count * length / batch.samples))))
        bounds += [start + length * (i + 1) // chunks[-1] for i in range(chunks[-1])]
    return Division(tuple(bounds), heads=chunks[0], tails=chunks[2])


class Portions:
    """Hand out portions, so that the last result is there soon. The first result of a portion counts.

    A worker has one unless the others will complete all that wait before it would complete one: a slow worker has none
    of the last ones, and a very slow one none at all, for at an epoch's end all wait for what it computes. A worker
    whose pace is not known, or not any more, has one. A worker repeats one that another worker has where that is late,
    or slower: so the others take no longer than they would without a slow worker, and where one is slow that has not
    been so, its portion's time longer.

    Args:
        pace: of the workers, which all evaluations share.
    """

    def __init__(self, count: int, pace: Pace):
        self._waiting = deque(range(count))
        self._held: dict[int, list[int]] = {}  # by portion, the one that is out for longest first: the workers
        self._served: set[int] = set()
        self._missing, self._pace = count, pace

    @property
    def is_complete(self) -> bool:
        return self._missing == 0

    def give(self, worker: int, now: float) -> int | None:
        """Return the portion that an idle worker computes next; None where there is none for it now."""
        known = worker in self._served or self._pace.is_known(worker, now)
        if self._waiting and not (known and self._others_suffice(worker, now)):
            portion = self._waiting.popleft()
        else:
            repeated = self._to_repeat(worker, now)
            if repeated is None:
                return None
            portion = repeated
        self._held.setdefault(portion, []).append(worker)
        self._served.add(worker)
        self._pace.start(worker, now)
        return portion

    def take(self, portion: int) -> bool:
        """Take a result; return whether it is the first of its portion."""
        if self._held.pop(portion, None) is None:
            return False
        self._missing -= 1
        return True

    def forget(self, workers: Iterable[int]) -> None:
        """Hand out again what only these workers have: they have died."""
        for portion, held in list(self._held.items()):
            held[:] = [worker for worker in held if worker not in set(workers)]
            if not held:
                del self._held[portion]
                self._waiting.append(portion)

    def _others_suffice(self, worker: int, now: float) -> bool:
        """Return whether the others will complete all that wait before this worker would complete one."""
        end, pace = now + self._pace.mean_s(worker), self._pace
        left_s = {other: end - start for other, start in pace.free(now).items() if start < end and other != worker}
        return sum(int(left_s[other] / pace.most_s(other)) for other in left_s) >= len(self._waiting)

    def _to_repeat(self, worker: int, now: float) -> int | None:
        """Return the portion that is expected last, where this worker will be sooner.

        One that two workers are late with is left to them: nobody knows why.
        """
        on_time, ends = self._pace.due(now), {}
        for portion, held in self._held.items():
            expected = [self._pace.end_of(other) for other in held if other in on_time]
            if worker not in held and (expected or len(held) == 1):
                ends[portion] = min(expected, default=math.inf)
        last = max(ends, key=ends.__getitem__, default=None)
        return None if last is None or ends[last] <= now + self._pace.most_s(worker) else last
