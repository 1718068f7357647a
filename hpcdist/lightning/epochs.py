"""Give a Trainer's loop the batches of hpcdist.shard: start and end epochs as the loop does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcdist.session.loader.batches import AroundLoader
from hpcdist.session.loader.sharded import ShardedLoader


class Epochs(AroundLoader):
    """A sharded loader for training, as a Trainer's loop uses it.

    The loop asks for no batch after the last one; so the strategy ends an epoch by `close`, also before a validation or
    a checkpoint, in which server ranks take part. Then the epoch continues with the next batch.

    A server rank gets as many batches as the workers have used, each None, after they have used them: for None
    Lightning runs no training step, but all that follows a step (schedules, callbacks, validation).

    Of several loaders the longest starts first, whatever its position: the first loader determines the steps, see
    `hpcdist.shard`, and a shorter one may end, or start again, before it.

    Args:
        strategy: an HpcdistStrategy.
    """

    def __init__(self, loader: ShardedLoader, strategy: Any):
        self._loader, self._strategy = loader, strategy
        self._length = len(loader)  # needed after training, when the loader knows no workers
        self._batches: Iterator[Any] | None = None
        self._drawn = 0  # number of batches in this epoch
        self._ahead: list[Any] = []  # the longest loader's first batch, if it was read before its turn
        self.ended = False  # has no batch left, while a longer loader has
        self._position: dict[str, int] | None = None  # of a paused epoch
        self._resumes: int | None = None  # the epoch of a checkpoint, to continue inside it
        self.sampler = self  # for Lightning, which calls its set_epoch

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next batch, unless a checkpoint has done so."""
        resumes, self._resumes = self._resumes == epoch, None
        if not resumes:
            self._loader.set_epoch(epoch)
            self._drawn, self._position = 0, None

    def __iter__(self) -> Iterator[Any]:
        if self.ended:  # before a longer loader: a CombinedLoader iterates it again
            self._batches, self._drawn, self.ended = iter(self._loader), 0, False
        return self

    def __next__(self) -> Any:
        """Return the next batch; on a server rank None, for each batch that the workers have used."""
        longest = self._strategy.start(self)
        if self._strategy.serves:
            return self._strategy.follow(self)
        if longest is not self and longest._batches is None:
            longest._ahead.append(longest._next_batch())
        return self._ahead.pop() if self._ahead else self._next_batch()

    def _next_batch(self) -> Any:
        """Read the next batch; start the epoch before its first one."""
        if self._batches is None:
            self._batches, self._position = iter(self._loader), None
        try:
            batch = next(self._batches)
        except StopIteration:
            self.ended = True
            raise
        self._drawn += 1
        self._strategy.start_batch(self)
        return batch

    def serve(self) -> None:
        """Serve until the workers have paused, on a server rank."""
        for _ in self._loader:
            pass

    def close(self) -> None:
        """End the epoch, or pause it until the next batch."""
        batches, self._batches, self.ended = self._batches, None, False
        if self._drawn == len(self) and next(batches, None) is None:  # type: ignore[arg-type]
            return  # it has ended regularly, after its checks
        self._position = self._loader.state_dict()
        batches.close()  # type: ignore[union-attr]
        self._loader.load_state_dict(self._position)

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch."""
        return {**(self._position or self._loader.state_dict()), "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from this position."""
        self._loader.load_state_dict(state)
        self._resumes, self._drawn = state["epoch"], state["drawn"]
