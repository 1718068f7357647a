"""Buckets of flat gradients: each is sent in one message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpcdist.errors import ConfigError
from hpcdist.model.slots import Slot


@dataclass(eq=False)
class Bucket:
    """One message: the gradients of parameters that are adjacent in flat memory."""

    index: int  # position in the order of announcement, the same on every rank
    grads: Tensor  # a flat view
    params: tuple[str, ...]  # names of the parameters inside, last one first


def check_caps(bucket_bytes: int, first_bucket_bytes: int) -> None:
    """Raise ConfigError unless both caps are positive integers."""
    for setting, value in (("bucket_bytes", bucket_bytes), ("first_bucket_bytes", first_bucket_bytes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{setting} must be an integer of at least 1; got {value!r}. 25 MiB is {25 << 20}.")


def make_buckets(
    slots: Sequence[Slot], grads: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Cut the groups' gradients into buckets, from the last parameter to the first.

    A tensor larger than the cap is a separate bucket; no other bucket exceeds its cap. The first bucket of a group
    has the smaller of the two caps, so that sending starts early in the backward pass. Buckets of all groups are sorted
    in the order in which a backward pass from the last to the first parameter completes them.
    """
    runs: list[list[int]] = []  # positions of the parameters of each bucket, last first
    for group, flat in enumerate(grads):
        sizes = [
            (position, (slot.stop - slot.start) * flat.element_size())
            for position, slot in enumerate(slots)
            if slot.group == group
        ]
        runs += _cut(reversed(sizes), min(first_bucket_bytes, bucket_bytes), bucket_bytes)
    runs.sort(key=lambda run: -run[-1])
    buckets = []
    for index, run in enumerate(runs):
        last, first = slots[run[0]], slots[run[-1]]
        names = tuple(slots[position].name for position in run)
        buckets.append(Bucket(index, grads[last.group][first.start : last.stop], names))
    return tuple(buckets)


def _cut(sizes: Iterable[tuple[int, int]], first_bytes: int, then_bytes: int) -> Iterator[list[int]]:
    """Group positions, in this order, into runs of at most `first_bytes`, then `then_bytes`."""
    run: list[int] = []
    total, cap = 0, first_bytes
    for position, n_bytes in sizes:
        if run and total + n_bytes > cap:
            yield run
            run, total, cap = [], 0, then_bytes
        run.append(position)
        total += n_bytes
    if run:
        yield run
