"""Consistent one-sided reads: a rank publishes tensors with a clock, others read one complete publication or retry.

Each publishing rank keeps two copies in windows and writes them in turn, so that the last publication stays complete
while the next one is written. A header of four integers counts publications started and publications done, and holds
the clock of each copy. A reader reads copy `done % 2` and then checks `started`: the copy was complete unless two
further publications have started by then (the second overwrites it); then the reader tries again. Writers never wait; a
reader waits only for writers that are faster than a read.

Reference: Leslie Lamport, "Concurrent Reading and Writing", 1977, for reading between two counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import CommunicationError, DeadlineError

_STARTED, _DONE, _CLOCK = 0, 1, 2  # positions in the header
_HEADER_LENGTH = 4


class Publication:
    """Collective. Tensors that some ranks publish, and all ranks can read consistently.

    Args:
        template: flat tensors with the lengths and dtypes of a publication, the same on all ranks.
        publishes: whether this rank will publish; other ranks expose no memory.

    Example:
        >>> from hpcdist.comm.snapshot import Publication
        >>> published = Publication(comm, [torch.empty(3)], publishes=comm.rank == 0)
        >>> if comm.rank == 0: published.publish([torch.ones(3)], clock=7)
        >>> published.read([torch.empty(3)], rank=0)
        7
    """

    def __init__(self, comm: Communicator, template: Sequence[Tensor], *, publishes: bool):
        self._comm = comm
        self._copies = [comm.window(2 * t.numel() if publishes else 0, t.dtype) for t in template]
        self._header = comm.window(_HEADER_LENGTH if publishes else 0, torch.int64)
        self._count = 0  # publications of this rank
        self.retries = 0  # reads that a writer overtook

    def publish(self, tensors: Sequence[Tensor], clock: int) -> None:
        """Copy `tensors` and `clock` into this rank's windows, for other ranks to read; never waits.

        Readers rely on the order of the writes: `_STARTED` first, `_DONE` last.
        """
        self._count += 1
        half, rank = self._count % 2, self._comm.rank
        self._header.put(torch.tensor([self._count]), rank, _STARTED)
        for window, tensor in zip(self._copies, tensors, strict=True):
            window.put(tensor, rank, half * tensor.numel())
        self._header.put(torch.tensor([clock]), rank, _CLOCK + half)
        self._header.put(torch.tensor([self._count]), rank, _DONE)

    def read(self, out: Sequence[Tensor], rank: int) -> int:
        """Copy `rank`'s last complete publication into `out` (overwritten); return its clock. See `use`."""

        def copy(tensors: Sequence[Tensor]) -> None:
            for local, remote in zip(out, tensors, strict=True):
                local.copy_(remote)

        return self.use(copy, out, rank, lambda: None)

    def use(
        self, function: Callable[[Sequence[Tensor]], object], out: Sequence[Tensor], rank: int, undo: Callable[[], None]
    ) -> int:
        """Call `function(tensors)` on `rank`'s last complete publication, without a copy if possible; return its clock.

        Args:
            function: reads the tensors; called again if a writer overwrote them during the call.
            out: memory for copies of tensors that this process does not map.
            rank: whose publication is read.
            undo: called after a call of `function` that a writer has overtaken, or during which a transfer failed.

        Raises:
            DeadlineError: writers overtook every attempt until the communicator's deadline.
        """
        limit_s = self._comm.failures.deadline_s
        until = self._comm.now() + limit_s
        while True:
            try:
                done = self.use_torn(function, out, rank)
                clock = self._read_header(rank, _CLOCK + done % 2)
                # Read last, and in a separate call: elements of one call may be of different moments.
                overtaken = self._read_header(rank, _STARTED) > done + 1
            except CommunicationError:
                undo()
                raise
            if not overtaken and done > 0:
                return clock
            undo()
            if done == 0:
                what = f"the first publication of rank {rank}"
                self._header.wait(lambda w: bool(w[0] > 0), rank=rank, offset=_DONE, count=1, what=what, by=(rank,))
            self.retries += 1
            if self._comm.now() > until:
                raise DeadlineError(
                    f"rank {self._comm.rank}: a consistent read of rank {rank}'s publication did not happen within "
                    f"{limit_s:g} s and {self.retries} attempts. Publish less often, or read torn."
                )

    def use_torn(self, function: Callable[[Sequence[Tensor]], object], out: Sequence[Tensor], rank: int) -> int:
        """Call `function(tensors)` on the last publication without a check: it may mix elements of later publications.

        `out` is as for `use`. Returns the number of the publication that was the last at the start of the read: 1 for
        the first, 0 if there was none.
        """
        done = self._read_header(rank, _DONE)
        function([w.read(rank, done % 2 * t.numel(), t.numel(), t) for w, t in zip(self._copies, out, strict=True)])
        return done

    def local(self) -> list[Tensor]:
        """Return this rank's last publication as views; do not write to them."""
        half = self._count % 2
        return [w.local[half * w.local.numel() // 2 :][: w.local.numel() // 2] for w in self._copies]

    def _read_header(self, rank: int, index: int) -> int:
        value = torch.empty(1, dtype=torch.int64)
        self._header.get(value, rank, index)
        return int(value)

    def close(self) -> None:
        """Collective. Release the windows."""
        for window in (*self._copies, self._header):
            window.close()
