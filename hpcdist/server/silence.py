"""Which workers a server goes on without: those that died, and those that have posted nothing for too long."""

from __future__ import annotations

from collections.abc import Iterable

CHECK_S = 0.5  # how often a server looks for ranks that died


class Silence:
    """Since when each worker owes a letter, and who is left out because of that. Holds no clock of its own.

    Args:
        deadline_s: how long a worker may be silent; None: for ever.
    """

    def __init__(self, workers: Iterable[int], deadline_s: float | None):
        self._deadline_s = deadline_s
        self._since: dict[int, float] = dict.fromkeys(workers, 0.0)
        self._heard: set[int] = set()  # whose letter waits for its answer
        self._out: set[int] = set()

    def __contains__(self, worker: int) -> bool:
        return worker in self._out

    def __len__(self) -> int:
        return len(self._out)

    def listen(self, workers: Iterable[int], now: float) -> None:
        """From `now` on these workers owe a letter."""
        self._since.update(dict.fromkeys(workers, now))

    def posted(self, worker: int) -> bool:
        """A letter has come; whether the worker had been left out, which it no longer is."""
        self._heard.add(worker)
        was_out = worker in self._out
        self._out.discard(worker)
        return was_out

    def answered(self, worker: int, now: float) -> None:
        """The worker has its answer, so it owes the next letter."""
        self._heard.discard(worker)
        self._since[worker] = now

    def patience_s(self, active: Iterable[int], now: float, watches: bool) -> float | None:
        """Seconds after which to `look` again; None: no letter is ever too late.

        Args:
            watches: whether a rank's death would be survived, so that it is worth looking for.
        """
        owed = [self._since[worker] for worker in active if worker not in self._heard]
        if self._deadline_s is None or not owed:
            return CHECK_S if watches else None
        left_s = max(0.0, min(owed) + self._deadline_s - now)
        return min(CHECK_S, left_s) if watches else left_s

    def look(self, active: Iterable[int], dead: Iterable[int], now: float) -> dict[int, str]:
        """Leaves out those of the active workers that are dead or silent for too long; says why."""
        found = {}
        for worker in active:
            silent_s = 0.0 if worker in self._heard else now - self._since[worker]
            if worker in dead:
                found[worker] = "it has died"
            elif self._deadline_s is not None and silent_s >= self._deadline_s * (1 - 1e-9):  # clocks round
                found[worker] = f"it was silent for {silent_s:.3g} s (learner_deadline_s is {self._deadline_s:g})"
        self._out.update(found)
        return found
