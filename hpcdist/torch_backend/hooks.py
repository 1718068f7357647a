"""Communication hook of DistributedDataParallel: average gradients compressed, by any of hpcdist's compressors."""

# No `from __future__ import annotations`: DistributedDataParallel checks the annotations of a hook.
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from hpcdist.collectives.native import Native
from hpcdist.comm.work import Work
from hpcdist.compress import Reduction
from hpcdist.compress.base import Span
from hpcdist.compress.coding.feedback import JointCompression
from hpcdist.errors import ConfigError
from hpcdist.torch_backend.group import MpiGroup


class CompressionState:
    """Collective. The state of the hook `compressed`, one per model.

    The first step sends gradients uncompressed, as DistributedDataParallel rebuilds its buckets after it. Each rank
    keeps the compression errors of its messages and adds them to later messages (error feedback); checkpoints do not
    contain them.

    Args:
        compression: the compressor's name, or a mapping of `name` and its options, as listed by `hpcdist compressors`.
        group: a process group on the backend hpcdist; by default the default group.

    Raises:
        ConfigError: the group is on another backend, or an option breaks a rule.
    """

    def __init__(self, compression: str | Mapping[str, Any], group: dist.ProcessGroup | None = None):
        ranks = group or dist.group.WORLD
        if not isinstance(ranks, MpiGroup):
            raise ConfigError(
                "group of a compressed sum must be on the backend hpcdist; got a group on "
                f"{dist.get_backend(ranks)}. Create it by init_process_group('hpcdist')."
            )
        options = {"name": compression} if isinstance(compression, str) else compression
        self.config = JointCompression.from_mapping(options, "compression")
        self._comm = ranks.comm.split(0, traffic=ranks.comm.trace.traffic)
        self._queue, self._mean = self._comm.queue(), Native(self._comm).mean
        self._sums: dict[int, Reduction] = {}  # by bucket
        self._seen: set[int] = set()  # buckets after their first, uncompressed call

    def start(self, bucket: GradBucket) -> Work:
        """Start replacing a bucket's gradients by their mean over the ranks: uncompressed in a bucket's first call."""
        number, gradients = bucket.index(), bucket.buffer()
        is_first, spans = number not in self._seen, _spans(bucket)
        self._seen.add(number)

        def average() -> None:
            if is_first or not self.config:
                self._mean(gradients)
                return
            if number not in self._sums:
                self._sums[number] = Reduction(self._comm, self.config, [gradients], [spans])
            self._sums[number].mean([gradients])

        return self._queue.submit(average, [gradients])


def compressed(state: CompressionState, bucket: GradBucket) -> Future[Tensor]:
    """Collective. Replace the gradients of a bucket by their mean over the ranks, compressed.

    For `model.register_comm_hook(CompressionState("topk"), compressed)`.
    """
    return state.start(bucket).get_future().then(lambda done: done.value()[0])


def _spans(bucket: GradBucket) -> list[Span]:
    """Return the position and shape of each parameter in a bucket."""
    start, spans = bucket.buffer().storage_offset(), []
    for gradient in bucket.gradients():
        first = int(gradient.storage_offset() - start)
        spans.append(Span(first, first + gradient.numel(), tuple(gradient.shape)))
    return sorted(spans, key=lambda span: span.start)
