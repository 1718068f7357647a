"""Consistent one-sided reads: a rank publishes tensors with a clock, others read all of one publication or retry.

Each publishing rank keeps two copies in windows and writes them in turn, so that the last publication stays whole
while the next one is written. Four words tell where it is: publications begun, publications done, and the clock of
each copy. A reader takes copy `done % 2` and then looks at `begun`: the copy was whole unless two further
publications have begun meanwhile (the second of them overwrites it), in which case the reader tries again. Writers
never wait; a reader waits only for writers that are faster than a read.

Reference: Leslie Lamport, "Concurrent Reading and Writing", 1977, for reading between two counters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import DeadlineError

_BEGUN, _DONE, _CLOCK = 0, 1, 2
_WORDS = 4


class Publication:
    """Collective. Tensors that some ranks publish and all may read.

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
        """Makes `tensors` and `clock` what others read from now on. One local copy; never waits."""
        self._count += 1
        half, rank = self._count % 2, self._comm.rank
        self._words.put(torch.tensor([self._count]), rank, _BEGUN)
        for window, tensor in zip(self._copies, tensors, strict=True):
            window.put(tensor, rank, half * tensor.numel())
        self._words.put(torch.tensor([clock]), rank, _CLOCK + half)
        self._words.put(torch.tensor([self._count]), rank, _DONE)

    def read(self, out: Sequence[Tensor], rank: int) -> int:
        """Copies `rank`'s last publication into `out` (overwritten), whole; returns its clock.

        Raises DeadlineError if writers overtake every attempt until the communicator's deadline.
        """
        until, begun = self._comm.now() + self._comm.deadline_s, torch.empty(1, dtype=torch.int64)
        while True:
            words = self.read_torn(out, rank)
            done = int(words[_DONE])
            self._words.get(begun, rank, _BEGUN)
            if done > 0 and int(begun) <= done + 1:
                return int(words[_CLOCK + done % 2])  # read before `begun`, so it is this publication's too
            if done == 0:
                self._words.wait(lambda w: w[_DONE] > 0, rank=rank, what=f"the first publication of rank {rank}")
            self.retries += 1
            if self._comm.now() > until:
                raise DeadlineError(
                    f"rank {self._comm.rank}: a whole read of rank {rank}'s publication did not happen within "
                    f"{self._comm.deadline_s:g} s and {self.retries} attempts. Publish less often, or read torn."
                )

    def read_torn(self, out: Sequence[Tensor], rank: int) -> Tensor:
        """Copies the last publication without a check: elements of a later one may be among them.

        Returns the words that were read before the copy: begun, done, and the clocks of both copies.
        """
        words = torch.empty(_WORDS, dtype=torch.int64)
        self._words.get(words, rank)
        half = int(words[_DONE]) % 2
        for window, tensor in zip(self._copies, out, strict=True):
            window.get(tensor, rank, half * tensor.numel())
        return words

    def close(self) -> None:
        """Collective."""
        for window in (*self._copies, self._words):
            window.close()
