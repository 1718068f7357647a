"""Remember how long workers take for a portion, and say when they should have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import fmean

RECENT = 20  # portions, of all workers: how regular they are
ROUNDING = 1e-6  # of a portion's time: so much later than the others is not late


class Pace:
    """Remember how long each worker takes for a portion: from when it is given it until its result is there.

    Holds no clock of its own.
    """

    def __init__(self) -> None:
        self._mean_s: dict[int, float] = {}  # of each worker's last portions
        self._since: dict[int, float] = {}  # when each worker was given what it computes now
        self._ratios: deque[float] = deque(maxlen=RECENT)  # of a portion's time to the mean before it
        self._slack = 1 + ROUNDING

    def begin(self, worker: int, now: float) -> None:
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
        self._mean_s[worker] = seconds + 0.75 * (self._mean_s.get(worker, seconds) - seconds)

    def forget(self, workers: Iterable[int]) -> None:
        """Forget workers that have died."""
        for worker in workers:
            self._since.pop(worker, None)
            self._mean_s.pop(worker, None)

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
