"""Buckets of flat gradients, announced during the backward pass as soon as they are complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpcdist.errors import ConfigError
from hpcdist.model.slots import Slot


@dataclass(eq=False)
class Bucket:
    """One message: elements [start, stop) of the flat gradient of a group."""

    index: int  # position in the order of announcement, the same on every rank
    group: int
    start: int
    stop: int
    grads: Tensor  # flat view of these elements
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

    A tensor larger than the cap is a bucket by itself; no other bucket exceeds its cap. The first bucket of a group has
    the smaller of the two caps, so that sending starts early in the backward pass. Buckets of all groups are in the
    order in which a backward pass from the last to the first parameter completes them.
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
        group, start, stop = slots[run[0]].group, slots[run[-1]].start, slots[run[0]].stop
        names = tuple(slots[position].name for position in run)
        buckets.append(Bucket(index, group, start, stop, grads[group][start:stop], names))
    return tuple(buckets)


def _cut(sizes: Iterable[tuple[int, int]], first_bytes: int, then_bytes: int) -> Iterator[list[int]]:
    """Join positions, in the order given, to runs of at most `first_bytes`, then `then_bytes`."""
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


class Announcer:
    """Calls `callback` once for each bucket in a step, in the order 0, 1, 2..., when all its gradients have come.

    It runs during the backward pass, on autograd's thread, with the stream that the gradient was written on.

    A complete bucket waits for incomplete ones before it, because collectives need the same order on every rank, and
    gradients may arrive in any order. Gradients of several devices arrive on several threads: a lock is held during
    the callback, which runs on the thread whose gradient completed the bucket.

    Attributes:
        buckets: in the order in which a backward pass from the last to the first parameter completes them.
    """

    def __init__(
        self, buckets: Sequence[Bucket], names: Sequence[str], callback: Callable[[Bucket], None] | None = None
    ):
        bucket_of = {name: bucket.index for bucket in buckets for name in bucket.params}
        self.callback = callback
        self.buckets = tuple(buckets)
        self._names = names
        self._bucket_of = [bucket_of[name] for name in names]
        self._lock = threading.Lock()
        self.begin(False)

    def begin(self, announce: bool = True, passes: int = 1) -> None:
        """Begin a step of `passes` backward passes; the last one announces buckets if `announce`."""
        self.armed, self._passes = announce, passes
        self.arrived = [0] * len(self._names)  # gradients of each parameter
        self._missing = [len(bucket.params) for bucket in self.buckets]  # gradients that each bucket waits for
        self._announced = 0  # buckets [0, announced) have been announced

    def announced(self, position: int) -> bool:
        """Tell whether the bucket of the parameter at `position` has been announced in this step."""
        return self._bucket_of[position] < self._announced

    def arrive(self, position: int) -> None:
        """Note the gradient of the parameter at `position`, and announce the buckets that it completes."""
        with self._lock:
            if self.announced(position):
                raise ConfigError(
                    f"the backward pass before a step must be one, or accumulation must be set; got a gradient of "
                    f"{self._names[position]!r} after its bucket was announced, so it would be lost. Set the number "
                    "of backward passes per step, or turn overlap off."
                )
            self.arrived[position] += 1
            if self.arrived[position] == self._passes:
                self._missing[self._bucket_of[position]] -= 1
                self._advance()

    def flush(self) -> None:
        """Announce every bucket that has not been announced, complete or not."""
        with self._lock:
            self.armed = True  # from here to the next begin() a gradient comes too late
            self._missing = [0] * len(self.buckets)
            self._advance()

    def _advance(self) -> None:
        while self._announced < len(self.buckets) and not self._missing[self._announced]:
            bucket = self.buckets[self._announced]
            self._announced += 1
            if self.callback is not None:
                self.callback(bucket)
