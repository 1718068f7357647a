"""Consistent one-sided reads: a rank publishes tensors with a clock, others read all of one publication or retry.

Each publishing rank keeps two copies in windows and writes them in turn, so that the last publication stays whole
while the next one is written. Four words tell where it is: publications begun, publications done, and the clock of
each copy. A reader takes copy `done % 2` and then looks at `started`: the copy was whole unless two further
publications have begun meanwhile (the second of them overwrites it), in which case the reader tries again. Writers
never wait; a reader waits only for writers that are faster than a read.

Reference: Leslie Lamport, "Concurrent Reading and Writing", 1977, for reading between two counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import CommunicationError, DeadlineError

_BEGUN, _DONE, _CLOCK = 0, 1, 2
_WORDS = 4


class Publication:
    """Collective. Tensors that some ranks publish, and all ranks can read whole.

    Args:
        like: the tensors of one publication, flat; only lengths and dtypes are used, which agree on all ranks.
        publishes: whether this rank will publish; others expose no memory.
    """

    def __init__(self, comm: Communicator, like: Sequence[Tensor], *, publishes: bool):
        self._comm = comm
        self._copies = [comm.window(2 * t.numel() if publishes else 0, t.dtype) for t in like]
        self._words = comm.window(_WORDS if publishes else 0, torch.int64)
        self._count = 0  # publications of this rank
        self.retries = 0  # reads that a writer overtook

    def publish(self, tensors: Sequence[Tensor], clock: int) -> None:
        """Publish `tensors` and `clock`, for others to read from now on. One local copy; never waits."""
        self._count += 1
        half, rank = self._count % 2, self._comm.rank
        self._words.put(torch.tensor([self._count]), rank, _BEGUN)
        for window, tensor in zip(self._copies, tensors, strict=True):
            window.put(tensor, rank, half * tensor.numel())
        self._words.put(torch.tensor([clock]), rank, _CLOCK + half)
        self._words.put(torch.tensor([self._count]), rank, _DONE)

    def read(self, out: Sequence[Tensor], rank: int) -> int:
        """Copy `rank`'s last publication into `out` (overwritten), whole; return its clock. See `use`."""

        def copy(tensors: Sequence[Tensor]) -> None:
            for own, theirs in zip(out, tensors, strict=True):
                own.copy_(theirs)

        return self.use(copy, out, rank, lambda: None)

    def use(
        self, function: Callable[[Sequence[Tensor]], object], out: Sequence[Tensor], rank: int, undo: Callable[[], None]
    ) -> int:
        """Let `function` read `rank`'s last publication, whole, where it lies; return its clock.

        Elements that are not mapped here are copied into `out` first. `undo` is called after a reading that a writer
        has overtaken, or that has failed, and `function` again after the former.

        Raises DeadlineError if writers overtake every attempt until the communicator's deadline.
        """
        limit_s = self._comm.failures.deadline_s
        until = self._comm.now() + limit_s
        while True:
            try:
                done = self.use_torn(function, out, rank)
                clock = self._word(rank, _CLOCK + done % 2)
                # Read last, and each word by a call of its own: elements of one call may be of different moments.
                overtaken = self._word(rank, _BEGUN) > done + 1
            except CommunicationError:
                undo()
                raise
            if not overtaken and done > 0:
                return clock
            undo()
            if done == 0:
                what = f"the first publication of rank {rank}"
                self._words.wait(lambda w: bool(w[0] > 0), rank=rank, offset=_DONE, count=1, what=what, by=(rank,))
            self.retries += 1
            if self._comm.now() > until:
                raise DeadlineError(
                    f"rank {self._comm.rank}: a whole read of rank {rank}'s publication did not happen within "
                    f"{limit_s:g} s and {self.retries} attempts. Publish less often, or read torn."
                )

    def use_torn(self, function: Callable[[Sequence[Tensor]], object], out: Sequence[Tensor], rank: int) -> int:
        """Let `function` read the last publication where it lies, without a check: it may hold elements of later ones.

        Elements that are not mapped here are copied into `out` first. Returns the number of the publication (1 for the
        first) that was the last when the reading began; 0 if none was.
        """
        done = self._word(rank, _DONE)
        function([w.read(rank, done % 2 * t.numel(), t.numel(), t) for w, t in zip(self._copies, out, strict=True)])
        return done

    def own(self) -> list[Tensor]:
        """Return what this rank has published last; a view, not to be written."""
        half = self._count % 2
        return [w.local[half * w.local.numel() // 2 :][: w.local.numel() // 2] for w in self._copies]

    def _word(self, rank: int, index: int) -> int:
        word = torch.empty(1, dtype=torch.int64)
        self._words.get(word, rank, index)
        return int(word)

    def close(self) -> None:
        """Collective. Release the windows."""
        for window in (*self._copies, self._words):
            window.close()
