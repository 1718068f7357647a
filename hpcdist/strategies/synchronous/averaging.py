"""Average buckets of gradients over the ranks, by hpcdist or another library: at once, or during the backward pass."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal, cast

import torch
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from hpcdist import collectives
from hpcdist.comm.background import Background
from hpcdist.comm.communicator import Communicator, concurrent
from hpcdist.comm.external.base import OutsideSum, Pending
from hpcdist.config import Named
from hpcdist.errors import ConfigError
from hpcdist.model.buckets import Bucket
from hpcdist.model.flat import FlatModel

WARM_UP, MEASURED = 3, 7  # steps of each way that are left out and that count
WORTH = 0.95  # the second way must take less than this part of the first one's time: the rest is noise


class ProviderConfig(Named):
    """The choice of a library that sums gradients, and its options."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["hpcdist", "horovod", "nccl", "gloo"] = Field(
        "hpcdist", description="library that sums gradients: hpcdist by MPI, horovod, or torch.distributed's others"
    )
    op: Literal["average", "sum", "adasum"] = Field(
        "average", description="horovod: combine gradients by their mean, their sum, or Adasum"
    )
    compression: Literal["none", "fp16"] = Field("none", description="horovod: send gradients in half precision")
    fusion_mb: int | None = Field(None, ge=0, description="horovod: size in MiB up to which tensors are sent together")
    cycle_time_ms: float | None = Field(None, gt=0, description="horovod: milliseconds between two rounds of sending")
    interface: str | None = Field(
        None, description="nccl, gloo: network interface or network on which ranks find each other, such as ib0"
    )

    @model_validator(mode="after")
    def _has_its_options(self) -> ProviderConfig:
        horovods, torchs = {"op", "compression", "fusion_mb", "cycle_time_ms"}, {"interface"}
        own = {"horovod": horovods, "nccl": torchs, "gloo": torchs}.get(self.name, set())
        others = sorted(self.model_fields_set - {"name"} - own)
        if others:
            raise ValueError(
                f"strategy.provider.{others[0]} must be left out with {self.name}, which has no such option; got "
                f"{getattr(self, others[0])}. `hpcdist strategies` says which library has it."
            )
        return self

    def __bool__(self) -> bool:
        """Tell whether another library than hpcdist itself is chosen."""
        return self.name != "hpcdist"

    @property
    def exact(self) -> bool:
        """Tell whether the result is the mean, to rounding in the gradients' own type."""
        return self.op == "average" and self.compression == "none"

    def make(self, comm: Communicator, grads: Sequence[Tensor]) -> OutsideSum:
        """Collective. Make the library's sum over the ranks of `comm`, or its other reduction as `op` says.

        Args:
            grads: tensors like those to be summed later; refused now if the library can't sum them.

        Raises:
            ConfigError: the library is not there, or can't do it on these ranks or with these tensors.
        """
        if comm.mpi is None:
            raise ConfigError(
                f"strategy.provider must be hpcdist on virtual ranks, which no other library knows; got {self.name}. "
                "Leave it out, or launch real ranks with mpirun."
            )
        real = cast(Any, comm)
        if self.name == "horovod":
            from hpcdist.comm.external.horovod import Horovod

            reduce: OutsideSum = Horovod(
                real,
                op="adasum" if self.op == "adasum" else "sum",  # the mean's division is done where ours is
                compression=self.compression,
                fusion_bytes=None if self.fusion_mb is None else self.fusion_mb << 20,
                cycle_time_ms=self.cycle_time_ms,
            )
        else:
            from hpcdist.comm.external.torch_distributed import ProcessGroup

            reduce = ProcessGroup(real, self.name, self.interface or "")
        for flat in grads:
            reduce.check(flat)
        return reduce


# --- which of two ways is faster --------------------------------------------------------------------------------------
class Trial:
    """Measure which of two ways makes steps shorter: `way` False, then True; the ranks agree on the faster one.

    Each way is used for WARM_UP + MEASURED steps; the medians of the slowest rank decide.
    """

    def __init__(self, comm: Communicator):
        self._comm, self._last = comm, comm.now()
        self._taken_s: dict[bool, list[float]] = {False: [], True: []}
        self.way = False
        self.decided = False

    def step(self) -> None:
        """End a step, and set `way` for the next one. Collective at the step that decides."""
        now = self._comm.now()
        self._taken_s[self.way].append(now - self._last)
        self._last = now
        if len(self._taken_s[self.way]) < WARM_UP + MEASURED:
            return
        if not self.way:
            self.way = True
            return
        medians = [median(self._taken_s[way][WARM_UP:]) for way in (False, True)]
        apart_s, beside_s = (max(of_ranks) for of_ranks in zip(*self._comm.gather(medians), strict=True))
        self.way, self.decided = beside_s < WORTH * apart_s, True


# --- averaging --------------------------------------------------------------------------------------------------------
class Averaging(abc.ABC):
    """Replace the gradients of buckets by their means over the ranks of a communicator.

    Args of subclasses:
        prepare: called with each bucket before its gradients are averaged.
    """

    beside: bool  # `begin` can do so while this rank computes
    repeats = True  # what is the same on all ranks stays so, and may be averaged again

    @abc.abstractmethod
    def now(self, buckets: Iterable[Bucket]) -> None:
        """Collective. Prepare and average the buckets."""

    @abc.abstractmethod
    def begin(self, bucket: Bucket) -> None:
        """Collective. Start to prepare and average one bucket; `wait` waits for it."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until all buckets that were begun are averaged; raise the first error, if any has failed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Release threads and working memory."""


class OwnAveraging(Averaging):
    """Average by one of hpcdist's all-reduce algorithms; beside the computation on a thread, which then owns `comm`."""

    def __init__(self, comm: Communicator, algorithm: str, prepare: Callable[[Bucket], None]):
        self.beside, self._comm = comm.size > 1 and concurrent(comm), comm
        self._prepare, self._all_reduce = prepare, collectives.load(algorithm)(comm)
        self._thread: Background | None = None

    def _average(self, bucket: Bucket) -> None:
        grads = bucket.grads
        with self._comm.trace.span("average a bucket", "collective", bucket=bucket.index, bytes=grads.nbytes):
            self._prepare(bucket)
            self._all_reduce.mean(grads)

    def now(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:  # not the whole at once: sums must not depend on `overlap`
            self._average(bucket)

    def begin(self, bucket: Bucket) -> None:
        if self._thread is None:
            self._thread = Background(self._comm.failures)
        self._thread.submit(partial(self._average, bucket))

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        self._all_reduce.close()


class OutsideAveraging(Averaging):
    """Average by another library, which has its own thread or device to communicate beside the computation.

    All buckets are handed to it before any is waited for, so that it may send several as one. Adasum is taken of each
    parameter's gradient on its own, as its authors do.
    """

    beside = True

    def __init__(self, comm: Communicator, config: ProviderConfig, model: FlatModel, prepare: Callable[[Bucket], None]):
        self._comm, self._prepare, self._sum = comm, prepare, config.make(comm, model.grads)
        self._divisor = comm.size if config.op == "average" else 1
        self.repeats = config.op == "average"
        self._slices = list(model.named_slices()) if config.op == "adasum" else None
        self._under_way: list[tuple[Bucket, list[Pending]]] = []

    def now(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self.begin(bucket)
        start = self._comm.now()
        self.wait()
        self._comm.trace.traffic.communicating_s += self._comm.now() - start

    def begin(self, bucket: Bucket) -> None:
        self._prepare(bucket)
        if bucket.grads.dtype is torch.float16:
            bucket.grads.div_(self._divisor)  # before, as DistributedDataParallel does: the library sums in float16
        parts = [bucket.grads]
        if self._slices is not None:
            within = [s for s in self._slices if s[1] == bucket.group and bucket.start <= s[2] < bucket.stop]
            parts = [bucket.grads[start - bucket.start : stop - bucket.start] for _, _, start, stop, _ in within]
        started = [self._sum.start(part, f"bucket {bucket.index}.{i}") for i, part in enumerate(parts)]
        self._under_way.append((bucket, started))

    def wait(self) -> None:
        under_way, self._under_way = self._under_way, []
        for bucket, parts in under_way:
            for part in parts:
                self._sum.finish(part)
            if self._divisor > 1 and bucket.grads.dtype is not torch.float16:
                bucket.grads.div_(self._divisor)

    def close(self) -> None:
        self._sum.close()
