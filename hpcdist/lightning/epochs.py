"""Give a Trainer's loop the batches of hpcdist.shard: begin an epoch when it asks, end it when it has done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcdist.session.loader.sharded import ShardedLoader


class Epochs:
    """A sharded loader for training, as a Trainer's loop uses it.

    The loop doesn't ask for more than the last batch, so nobody but the strategy knows when an epoch ends: it calls
    `close`, also before a validation or a checkpoint in which ranks that serve take part. Then the epoch goes on with
    the next batch.

    A rank that serves gets as many batches as the workers have had, each None, once they have had them: for None
    Lightning runs no training step, but all else that follows one (schedules, callbacks, validation).

    Of several loaders the longest begins first, wherever it stands: the first says when steps are taken, see
    `hpcdist.shard`, and a shorter one may end, or begin again, before it.

    Args:
        strategy: an HpcdistStrategy.

    Attributes:
        ended: has no batch left, while a longer loader has.
    """

    def __init__(self, loader: ShardedLoader, strategy: Any):
        self._loader, self._strategy = loader, strategy
        self._length = len(loader)  # also when training has ended, and the loader knows no workers any more
        self._batches: Iterator[Any] | None = None
        self._drawn = 0  # in this epoch
        self._ahead: list[Any] = []  # the longest loader's first batch, if it is drawn before its turn
        self.ended = False
        self._position: dict[str, int] | None = None  # where an epoch was left that goes on
        self._resumes: int | None = None  # the epoch of a checkpoint, which goes on inside it
        self.sampler = self  # for Lightning, which calls its set_epoch

    def __getattr__(self, name: str) -> Any:
        """Return what the plain loader has by this name."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next batch, unless a checkpoint has done so."""
        resumes, self._resumes = self._resumes == epoch, None
        if not resumes:
            self._loader.set_epoch(epoch)
            self._drawn, self._position = 0, None

    def __iter__(self) -> Iterator[Any]:
        if self.ended:  # before a longer one: a CombinedLoader goes through it once more
            self._batches, self._drawn, self.ended = iter(self._loader), 0, False
        return self

    def __next__(self) -> Any:
        longest = self._strategy.start(self)
        if self._strategy.serves:
            return self._strategy.follow(self)
        if longest is not self and longest._batches is None:
            longest._ahead.append(longest._draw())
        return self._ahead.pop() if self._ahead else self._draw()

    def _draw(self) -> Any:
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
        """Serve until the workers have paused."""
        for _ in self._loader:
            pass

    def close(self) -> None:
        """End the epoch, or leave it so that the next batch goes on in it."""
        batches, self._batches, self.ended = self._batches, None, False
        if self._drawn == len(self) and next(batches, None) is None:  # type: ignore[arg-type]
            return  # it has ended by itself, and checked that all is well
        self._position = self._loader.state_dict()
        batches.close()  # type: ignore[union-attr]
        self._loader.load_state_dict(self._position)

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch."""
        return {**(self._position or self._loader.state_dict()), "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from this position."""
        self._loader.load_state_dict(state)
        self._resumes, self._drawn = state["epoch"], state["drawn"]
