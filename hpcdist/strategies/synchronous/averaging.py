"""Average buckets of gradients over the ranks: at once, or while the backward pass computes the rest."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from hpcdist import collectives
from hpcdist.collectives.tuning.background import Background
from hpcdist.comm.communicator import Communicator, concurrent
from hpcdist.comm.external.base import Pending
from hpcdist.model.flat import Bucket, FlatModel
from hpcdist.strategies.synchronous.provider import ProviderConfig

Prepare = Callable[[Bucket], None]  # called with a bucket before its gradients are averaged


class Averaging(abc.ABC):
    """Replace the gradients of buckets by their means over the ranks of a communicator."""

    beside: bool  # `begin` can do so while this rank computes
    repeats = True  # what is the same on all ranks stays so, and may be averaged again

    @abc.abstractmethod
    def now(self, buckets: Iterable[Bucket], prepare: Prepare) -> None:
        """Collective. Prepare and average the buckets."""

    @abc.abstractmethod
    def begin(self, bucket: Bucket, prepare: Prepare) -> None:
        """Collective. Start to prepare and average one bucket; `wait` waits for it."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until all buckets that were begun are averaged; raise the first error, if any has failed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Release threads and working memory."""


class OwnAveraging(Averaging):
    """Average by one of hpcdist's all-reduce algorithms; beside the computation on a thread, which then owns `comm`."""

    def __init__(self, comm: Communicator, algorithm: str):
        self.beside = comm.size > 1 and concurrent(comm)
        self._all_reduce = collectives.load(algorithm)(comm)
        self._average = comm.trace.noted("average a bucket", "collective", self._average, _described)
        self._thread: Background | None = None

    def now(self, buckets: Iterable[Bucket], prepare: Prepare) -> None:
        for bucket in buckets:  # not the whole at once: sums must not depend on `overlap`
            self._average(bucket, prepare)

    def begin(self, bucket: Bucket, prepare: Prepare) -> None:
        if self._thread is None:
            self._thread = Background()
        self._thread.submit(partial(self._average, bucket, prepare))

    def _average(self, bucket: Bucket, prepare: Prepare) -> None:
        prepare(bucket)
        self._all_reduce.mean(bucket.grads)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        self._all_reduce.close()


def _described(bucket: Bucket, prepare: Prepare) -> dict[str, int]:
    return {"bucket": bucket.index, "bytes": bucket.grads.nbytes}


class OutsideAveraging(Averaging):
    """Average by another library, which has its own thread or device to communicate beside the computation.

    All buckets are handed to it before any is waited for, so that it may send several as one. Adasum is taken of each
    parameter's gradient on its own, as its authors do.
    """

    beside = True

    def __init__(self, comm: Communicator, config: ProviderConfig, model: FlatModel):
        self._comm, self._sum = comm, config.make(comm, model.grads)
        self._divisor = comm.size if config.op == "average" else 1
        self.repeats = config.op == "average"
        self._slices = list(model.named_slices()) if config.op == "adasum" else None
        self._under_way: list[tuple[Bucket, list[Pending]]] = []

    def now(self, buckets: Iterable[Bucket], prepare: Prepare) -> None:
        for bucket in buckets:
            self.begin(bucket, prepare)
        start = self._comm.now()
        self.wait()
        self._comm.trace.traffic.communicating_s += self._comm.now() - start

    def begin(self, bucket: Bucket, prepare: Prepare) -> None:
        prepare(bucket)
        parts = enumerate(self._parts(bucket))
        self._under_way.append((bucket, [self._sum.start(t, f"bucket {bucket.index}.{i}") for i, t in parts]))

    def _parts(self, bucket: Bucket) -> list[Tensor]:
        if self._slices is None:
            return [bucket.grads]
        within = (s for s in self._slices if s[1] == bucket.group and bucket.start <= s[2] < bucket.stop)
        return [bucket.grads[start - bucket.start : stop - bucket.start] for _, _, start, stop, _ in within]

    def wait(self) -> None:
        under_way, self._under_way = self._under_way, []
        for bucket, parts in under_way:
            for part in parts:
                self._sum.finish(part)
            if self._divisor > 1:
                bucket.grads.div_(self._divisor)

    def close(self) -> None:
        self._sum.close()
