"""Send a few numbers from rank to rank, so that nobody waits for a rank that has died."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.errors import DeadlineError, RankFailedError
from hpcdist.strategies.server.channel import CHECK_S

COUNT, LENGTH, VALUES = 0, 1, 2  # of a place


class Mail:
    """Collective. Open a window with a place for every rank, where its newest message lies.

    A sender waits for a reply before it sends to the same rank again.

    Args:
        width: the most numbers of a message.
        needed: ranks without which the others can't go on.

    Attributes:
        sent: how many numbers have gone to each rank.
    """

    def __init__(self, comm: Communicator, width: int, needed: Sequence[int]):
        self._comm, self._place, self._needed = comm, width + VALUES, set(needed)
        self._window = comm.window(comm.size * self._place, torch.float64)
        self._words = self._window.local.numpy().reshape(comm.size, self._place)  # the same memory
        self._counts = [0] * comm.size  # messages sent to each rank
        self._taken = [0] * comm.size  # messages taken from each rank
        self._waited_s = 0.0
        self.sent = [0] * comm.size

    def puts(self, dest: int, values: Sequence[float]) -> list[Put]:
        """Return the puts that bring a message to `dest`: the word that announces it comes last."""
        self._counts[dest] += 1
        self.sent[dest] += len(values)
        at = self._comm.rank * self._place
        message = torch.tensor([float(len(values)), *values], dtype=torch.float64)
        count = torch.tensor([float(self._counts[dest])], dtype=torch.float64)
        return [Put(self._window, message, dest, at + LENGTH), Put(self._window, count, dest, at + COUNT)]

    def send(self, messages: Iterable[tuple[int, Sequence[float]]]) -> None:
        """Send messages, each with its destination."""
        self._comm.put_all([put for dest, values in messages for put in self.puts(dest, values)])

    def take(
        self, sources: Sequence[int], what: str, patience_s: float | None = None
    ) -> tuple[int, list[float]] | None:
        """Block until one of these ranks has sent a message; return the rank, and the message.

        None after `patience_s`, and after a while, where ranks may have died meanwhile.

        Raises:
            DeadlineError: nobody has sent one for too long.
        """
        source = self._first(sources)
        if source is None:
            limit_s = CHECK_S if self._comm.tolerant else self._comm.deadline_s
            limit_s = limit_s if patience_s is None else min(limit_s, patience_s)
            try:
                self._window.wait(lambda _: self._first(sources) is not None, what=what, deadline_s=limit_s)
            except DeadlineError:
                self._waited_s += limit_s
                if self._waited_s >= self._comm.deadline_s:
                    raise
                return None
            source = self._first(sources)
        self._waited_s = 0.0
        self._taken[source] = int(self._words[source, COUNT])
        length = int(self._words[source, LENGTH])
        return source, self._words[source, VALUES : VALUES + length].tolist()

    def expect(self, source: int, what: str) -> list[float]:
        """Block until this rank has sent a message, and return it.

        Raises:
            RankFailedError: a rank that is needed has died.
        """
        while True:
            found = self.take([source], what)
            if found is not None:
                return found[1]
            self.require_needed()

    def require_needed(self) -> None:
        """Check that no rank has died that is needed; raise RankFailedError otherwise."""
        for rank in self._needed.intersection(self._comm.failed()):
            raise RankFailedError(
                f"rank {rank} has died, and its part of L-BFGS's state with it. Resume from the last checkpoint."
            )

    def _first(self, sources: Sequence[int]) -> int | None:
        return next((source for source in sources if self._words[source, COUNT] > self._taken[source]), None)

    def close(self) -> None:
        """Collective. Close the window."""
        self._words = None  # its memory goes
        self._window.close()
