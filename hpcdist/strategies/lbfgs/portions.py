"""Split a batch into small portions, and assign them to idle workers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

RECENT = 20  # recent portions of all workers from which the variation of times is estimated
ROUNDING = 1e-6  # tolerance, as a part of a portion's time
REST = 10  # a worker that was too slow is tried again after this multiple of its time per portion


class Pace:
    """Measures each worker's time per portion, from assignment to result; times are passed as arguments."""

    def __init__(self) -> None:
        self._mean_s: dict[int, float] = {}  # of each worker's last portions
        self._since: dict[int, float] = {}  # start of each worker's current portion
        self._ended: dict[int, float] = {}  # time of each worker's last result
        self._ratios: deque[float] = deque(maxlen=RECENT)  # of a portion's time to the mean before it
        self._slack = 1 + ROUNDING

    def start(self, worker: int, now: float) -> None:
        """Record that a worker starts a portion."""
        self._since[worker] = now

    def end(self, worker: int, now: float) -> None:
        """Record that a worker's result has arrived, if it had a portion."""
        since = self._since.pop(worker, None)
        if since is None:
            return
        seconds, expected_s = now - since, self.mean_s(worker)
        if expected_s:
            self._ratios.append(seconds / expected_s)
            quantile = sorted(self._ratios)[4 * (len(self._ratios) - 1) // 5]
            self._slack = max(1.0, quantile) * (1 + ROUNDING)
        self._ended[worker] = now
        self._mean_s[worker] = seconds + 0.75 * (self._mean_s.get(worker, seconds) - seconds)

    def forget(self, workers: Iterable[int]) -> None:
        """Remove workers that have failed."""
        for worker in workers:
            self._since.pop(worker, None)
            self._mean_s.pop(worker, None)
            self._ended.pop(worker, None)

    def is_known(self, worker: int, now: float) -> bool:
        """Return whether a worker has computed a portion recently."""
        return worker in self._ended and now - self._ended[worker] < REST * self.mean_s(worker)

    def mean_s(self, worker: int) -> float:
        """Return a worker's mean seconds per portion; before its first result the other workers' mean, or 0."""
        return self._mean_s.get(worker) or fmean(self._mean_s.values() or [0.0])

    def most_s(self, worker: int) -> float:
        """Return an upper estimate of a worker's seconds per portion: 80 % of recent portions did not exceed it."""
        return self._slack * self.mean_s(worker)

    def end_of(self, worker: int) -> float:
        """Return the expected end of a worker's current portion."""
        return self._since[worker] + self.mean_s(worker)

    def due(self, now: float) -> dict[int, float]:
        """Return by when each computing worker should have a result, see `most_s`; late workers are omitted."""
        due = {worker: since + self.most_s(worker) for worker, since in self._since.items()}
        return {worker: until for worker, until in due.items() if until > now}

    def free(self, now: float) -> dict[int, float]:
        """Return when each worker that is not late can start a portion: idle workers now."""
        return dict.fromkeys(self._mean_s.keys() - self._since.keys(), now) | self.due(now)


LEAST = 2  # smallest portion, if there are enough samples: batch normalisation needs two


@dataclass(frozen=True)
class JointBatch:
    """The joint batch of all workers in one step.

    Args:
        samples: number of samples, 0 to samples − 1 in the loop's order.
        share: number of samples per rank, for records.
        head: number of first samples that were in the last batch, too.
        tail: number of last samples that will be in the next batch, too.
        whole: the batch is the whole data set, in every step.
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
    """Split a batch into about `count` nonempty portions of about equal size, within head, middle and tail."""
    ends = [batch.head, batch.samples - batch.tail, batch.samples]
    bounds, counts = [0], []
    for end in ends:
        start = bounds[-1]
        length = end - start
        max_count = min(length, max(1, length // LEAST))
        counts.append(min(max_count, max(1, round(count * length / batch.samples))))
        bounds += [start + length * (i + 1) // counts[-1] for i in range(counts[-1])]
    return Division(tuple(bounds), heads=counts[0], tails=counts[2])


class Portions:
    """Assigns portions to workers so that the last result arrives early. The first result of a portion is used.

    An idle worker gets a waiting portion, unless the others are expected to finish all waiting portions before it would
    finish one: a slow worker gets none of the last portions, a very slow worker none at all. A worker of unknown pace
    gets one. Without such a portion a worker repeats the portion of a late or slower worker. So a known slow worker
    causes no delay, and a worker that becomes slow a delay of at most one portion.

    Args:
        pace: the workers' pace, shared by all evaluations.
    """

    def __init__(self, count: int, pace: Pace):
        self._waiting = deque(range(count))
        self._held: dict[int, list[int]] = {}  # workers by portion, in order of assignment
        self._served: set[int] = set()
        self._missing, self._pace = count, pace

    @property
    def is_complete(self) -> bool:
        return self._missing == 0

    def give(self, worker: int, now: float) -> int | None:
        """Assign a portion to an idle worker and return it; None: wait."""
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
        """Record a result; return whether it is the first of its portion."""
        if self._held.pop(portion, None) is None:
            return False
        self._missing -= 1
        return True

    def forget(self, workers: Iterable[int]) -> None:
        """Reassign the portions of workers that have failed."""
        for portion, held in list(self._held.items()):
            held[:] = [worker for worker in held if worker not in set(workers)]
            if not held:
                del self._held[portion]
                self._waiting.append(portion)

    def _others_suffice(self, worker: int, now: float) -> bool:
        """Return whether the other workers will finish all waiting portions before this worker would finish one."""
        end, pace = now + self._pace.mean_s(worker), self._pace
        left_s = {other: end - start for other, start in pace.free(now).items() if start < end and other != worker}
        return sum(int(left_s[other] / pace.most_s(other)) for other in left_s) >= len(self._waiting)

    def _to_repeat(self, worker: int, now: float) -> int | None:
        """Return the portion with the latest expected end, if this worker would finish it earlier.

        A portion that two workers are late with is not repeated.
        """
        on_time, ends = self._pace.due(now), {}
        for portion, held in self._held.items():
            expected = [self._pace.end_of(other) for other in held if other in on_time]
            if worker not in held and (expected or len(held) == 1):
                ends[portion] = min(expected, default=math.inf)
        last = max(ends, key=ends.__getitem__, default=None)
        return None if last is None or ends[last] <= now + self._pace.most_s(worker) else last
