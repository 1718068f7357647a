"""Evict workers that have died or are silent for too long."""

from __future__ import annotations

from collections.abc import Iterable

from hpcdist.strategies.server.channel import CHECK_S


class Liveness:
    """Remember since when each worker owes a request, and who is evicted because of that. Holds no clock of its own.

    Args:
        deadline_s: how long a worker may be silent; None: for ever.
    """

    def __init__(self, workers: Iterable[int], deadline_s: float | None):
        self.deadline_s = deadline_s
        self.evicted: set[int] = set()
        self._since: dict[int, float] = dict.fromkeys(workers, 0.0)
        self._heard: set[int] = set()  # whose request waits for its reply

    def expect(self, workers: Iterable[int], now: float) -> None:
        """Expect a request of each of these workers, from `now` on."""
        self._since.update(dict.fromkeys(workers, now))

    def heard(self, worker: int) -> bool:
        """Remember that a request has come; return whether the worker had been evicted, which it no longer is."""
        self._heard.add(worker)
        if worker not in self.evicted:
            return False
        self.evicted.remove(worker)
        return True

    def replied(self, worker: int, now: float) -> None:
        """Remember that the worker has its reply, so that it owes the next request."""
        self._heard.discard(worker)
        self._since[worker] = now

    def patience_s(self, active: Iterable[int], now: float, watches: bool) -> float | None:
        """Return the seconds after which to `evict` again; None: no request is ever too late.

        Args:
            watches: whether a rank's death would be survived, so that it is worth looking for.
        """
        owed = [self._since[worker] for worker in active if worker not in self._heard]
        if self.deadline_s is None or not owed:
            return CHECK_S if watches else None
        left_s = max(0.0, min(owed) + self.deadline_s - now)
        return min(CHECK_S, left_s) if watches else left_s

    def evict(self, active: Iterable[int], dead: Iterable[int], now: float) -> dict[int, str]:
        """Evict those of the active workers that are dead or silent for too long; return why."""
        found = {}
        for worker in active:
            silent_s = 0.0 if worker in self._heard else now - self._since[worker]
            if worker in dead:
                found[worker] = "it has died"
            elif self.deadline_s is not None and silent_s >= self.deadline_s * (1 - 1e-9):  # clocks round
                found[worker] = f"it was silent for {silent_s:.3g} s (learner_deadline_s is {self.deadline_s:g})"
        self.evicted.update(found)
        return found
