"""Average buckets of gradients over the ranks, by hpcdist or another library, after or during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, cast

from pydantic import ConfigDict
from torch import Tensor

from hpcdist.collectives.calls import Collectives, Work
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.external.base import OtherLibrary
from hpcdist.config.settings import Field, Named, joint_rule
from hpcdist.errors import ConfigError
from hpcdist.model.buckets import Bucket
from hpcdist.model.flat import FlatModel


class ProviderConfig(Named):
    """The choice of a library that sums gradients, and its options."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["hpcdist", "horovod", "nccl", "gloo"] = Field(
        "hpcdist", "library that sums gradients: hpcdist by MPI, horovod, or torch.distributed's others"
    )
    op: Literal["average", "sum", "adasum"] = Field(
        "average", "horovod: combine gradients by their mean, their sum, or Adasum"
    )
    compression: Literal["none", "fp16"] = Field("none", "horovod: send gradients in half precision")
    fusion_mb: int | None = Field(None, "horovod: size in MiB up to which tensors are sent together", ge=0)
    cycle_time_ms: float | None = Field(None, "horovod: milliseconds between two rounds of sending", gt=0)
    interface: str | None = Field(
        None, "nccl, gloo: network interface or network on which ranks find each other, such as ib0"
    )

    @joint_rule
    def _has_its_options(self) -> None:
        horovods, torchs = {"op", "compression", "fusion_mb", "cycle_time_ms"}, {"interface"}
        supported = {"horovod": horovods, "nccl": torchs, "gloo": torchs}.get(self.name, set())
        unsupported = sorted(self.model_fields_set - {"name"} - supported)
        if unsupported:
            raise ValueError(
                f"strategy.provider.{unsupported[0]} must be omitted with {self.name}, which has no such option; got "
                f"{getattr(self, unsupported[0])}. `hpcdist strategies` says which library has it."
            )

    def __bool__(self) -> bool:
        """Whether another library than hpcdist is chosen."""
        return self.name != "hpcdist"

    @property
    def exact(self) -> bool:
        """Whether the result is the mean, to rounding in the gradients' dtype."""
        return self.op == "average" and self.compression == "none"

    def create(self, comm: Communicator, grads: Sequence[Tensor]) -> OtherLibrary:
        """Collective. Create the library's all-reduce over the ranks of `comm`.

        Args:
            grads: the tensors to reduce later, to check now that the library supports them.

        Raises:
            ConfigError: the library is not installed, or does not support these ranks or tensors.
        """
        if comm.mpi is None:
            raise ConfigError(
                f"strategy.provider must be hpcdist on virtual ranks, which no other library knows; got {self.name}. "
                "Leave it out, or launch real ranks with mpirun."
            )
        real = cast(Any, comm)
        if self.name == "horovod":
            from hpcdist.comm.external.horovod import Horovod

            reduce: OtherLibrary = Horovod(
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


class Averaging:
    """Replaces the gradients of buckets by their means over the ranks: blocking, or overlapped with computation.

    For the latter hpcdist's algorithms run in the thread of `calls`. Another library uses another thread or device; it
    gets all buckets before the first wait, and may fuse them. Adasum combines each parameter's gradient separately, as
    in the paper.

    Args:
        calls: collective calls of the ranks.
        algorithm: all-reduce algorithm, if no other library is chosen.
        provider: the choice of the library.
        prepare: called with each bucket before its gradients are averaged.

    Attributes:
        overlaps: `start` can overlap with computation.
        repeats: averaging equal gradients again does not change them.
    """

    def __init__(
        self, calls: Collectives, algorithm: str, provider: ProviderConfig, model: FlatModel,
        prepare: Callable[[Bucket], None],
    ):  # fmt: skip
        comm = calls.comm
        self._comm, self._queue, self._prepare = comm, calls.queue, prepare
        self._library = provider.create(comm, model.grads) if provider else None
        self.overlaps = comm.size > 1 and comm.platform.concurrent if self._library is None else True
        self.repeats = provider.op == "average"
        self._divisor = comm.size if self.repeats else 1
        self._parts: dict[str, Tensor] = {}  # gradients by parameter, for Adasum
        if provider.op == "adasum":
            self._parts = {s.name: model.grads[s.group][s.start : s.stop] for s in model.slots}
        self._works: list[Work] = []
        if self._library is None:
            self._mean = calls.algorithm(algorithm).mean

    def now(self, buckets: Iterable[Bucket]) -> None:
        """Collective. Prepare and average the buckets."""
        for bucket in buckets:  # by buckets, so that sums do not depend on `overlap`
            self._average(bucket)
        if self._library is not None:
            start = self._comm.now()
            self.wait()
            self._comm.trace.traffic.communicating_s += self._comm.now() - start

    def start(self, bucket: Bucket) -> None:
        """Collective. Start to prepare and average one bucket; `wait` completes it."""
        if self._library is None:
            self._works.append(self._queue.submit(partial(self._average, bucket)))
        else:
            self._average(bucket)

    def _average(self, bucket: Bucket) -> None:
        """Average a bucket; another library only starts to."""
        if self._library is None:
            grads = bucket.grads
            with self._comm.trace.span("average a bucket", "collective", bucket=bucket.index, bytes=grads.nbytes):
                self._prepare(bucket)
                self._mean(grads)
            return
        self._prepare(bucket)
        for i, part in enumerate([self._parts[name] for name in bucket.params] if self._parts else [bucket.grads]):
            name = f"bucket {bucket.index}.{i}"
            work = self._library.all_reduce(part, name, divisor=self._divisor, async_op=True)
            self._works.append(cast(Work, work))

    def wait(self) -> None:
        """Block until all started buckets are averaged; raise the first error."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def close(self) -> None:
        """Collective. Wait for buckets in flight, and release the library's resources."""
        self._queue.close()
        if self._library is not None:
            self._library.close()
