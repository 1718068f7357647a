"""Communication hooks of DistributedDataParallel: gradients are summed compressed, by any of hpcdist's compressors."""

# Annotations are objects here, and no strings: DistributedDataParallel looks at those of a hook.
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
    """Collective. The state of `compressed`, one for each model.

    The first step sends gradients uncompressed: DistributedDataParallel puts its buckets together anew after it. Each
    rank keeps the errors of its messages, and sends them with later ones; they are not part of a checkpoint.

    Args:
        compression: the compressor's name, or a mapping of `name` and its options, as in `hpcdist compressors`.
        group: by default the default group; on the backend hpcdist.

    Raises:
        ConfigError: the group is on another backend, or options break a rule.
    """

    def __init__(self, compression: str | Mapping[str, Any], group: dist.ProcessGroup | None = None):
        ranks = group or dist.group.WORLD
        if not isinstance(ranks, MpiGroup):
            raise ConfigError(
                "the group of a compressed sum must be on the backend hpcdist; got one on "
                f"{dist.get_backend(ranks)}. Make it by init_process_group('hpcdist')."
            )
        given = {"name": compression} if isinstance(compression, str) else compression
        self.config = JointCompression.from_mapping(given, "compression")
        self._comm = ranks.comm.split(0, traffic=ranks.comm.trace.traffic)
        self._queue, self._mean = self._comm.queue(), Native(self._comm).mean
        self._sums: dict[int, Reduction] = {}  # by the numbers of buckets
        self._seen: set[int] = set()

    def start(self, bucket: GradBucket) -> Work:
        """Begin to replace a bucket by its mean over the ranks."""
        number, gradients = bucket.index(), bucket.buffer()
        first, spans = number not in self._seen, _spans(bucket)
        self._seen.add(number)

        def average() -> None:
            if first or not self.config:
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
    return state.start(bucket).get_future().then(_first)


def _first(done: Future[list[Tensor]]) -> Tensor:
    return done.value()[0]


def _spans(bucket: GradBucket) -> list[Span]:
    """Return where the parameters of a bucket lie in it."""
    start, found = bucket.buffer().storage_offset(), []
    for gradient in bucket.gradients():
        at = gradient.storage_offset() - start
        found.append(Span(int(at), int(at) + gradient.numel(), tuple(gradient.shape)))
    return sorted(found, key=lambda span: span.start)
