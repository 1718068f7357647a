"""Hold a rank's records as sums over blocks of steps, in bounded memory however long the run is."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Iterable

from hpcdist.records import StepRecord

BLOCKS = 512  # at most; then each covers twice as many steps
RECENT = 100  # steps from which the present speed is told
# In a record's event.
_WITHOUT, _BACK = re.compile(r"goes on without rank (\d+)"), re.compile(r"rank (\d+) is back")


class RankSeries:
    """The records of one rank: sums over blocks of `width` steps each, and the newest records themselves.

    A block is a Counter of samples, losses, seconds and so on, by the names that `_sums` gives them; block `k` covers
    the steps from `k * width + 1` to `(k + 1) * width`.
    """

    def __init__(self) -> None:
        self.width = 1
        self.blocks: dict[int, Counter[str]] = {}
        self.total: Counter[str] = Counter()  # of all blocks
        self.recent: deque[StepRecord] = deque(maxlen=RECENT)
        self.loss: float | None = None  # the newest, NaN included
        self.without: set[int] = set()  # ranks that died or fell silent, as the newest records have it

    @property
    def step(self) -> int:
        """Return the newest record's step."""
        return self.recent[-1].step if self.recent else 0

    @property
    def now(self) -> Counter[str]:
        """Return the sums over the newest steps."""
        return added(map(_sums, self.recent))

    def add(self, record: StepRecord) -> None:
        """Add the record of the next step."""
        self.recent.append(record)
        self.loss = self.loss if record.loss is None else record.loss
        if record.event is not None:
            self.without |= set(map(int, _WITHOUT.findall(record.event)))
            self.without -= set(map(int, _BACK.findall(record.event)))
        sums = _sums(record)
        self.total.update(sums)
        self.blocks.setdefault((record.step - 1) // self.width, Counter()).update(sums)
        if len(self.blocks) > BLOCKS:
            self.blocks, self.width = self.coarse(2 * self.width), 2 * self.width

    def coarse(self, width: int) -> dict[int, Counter[str]]:
        """Return the blocks merged to so many steps each, a multiple of their own."""
        merged: dict[int, Counter[str]] = {}
        for key, sums in self.blocks.items():
            merged.setdefault(key * self.width // width, Counter()).update(sums)
        return merged

    def restart(self, first_step: int) -> None:
        """Drop the steps from `first_step` on, which the run takes again; of a block that it divides, the share."""
        self.without.clear()
        last, kept = divmod(max(first_step, 1) - 1, self.width)
        while self.recent and self.recent[-1].step >= first_step:
            self.recent.pop()
        divided = self.blocks.get(last)
        self.blocks = {key: sums for key, sums in self.blocks.items() if key < last}
        if divided and kept:
            share = min(1.0, kept / divided["records"])
            self.blocks[last] = Counter({key: value * share for key, value in divided.items()})
        self.total = added(self.blocks.values())


def _sums(record: StepRecord) -> Counter[str]:
    sums: Counter[str] = Counter(
        records=1,
        samples=record.samples,
        computing=record.computing_s,
        communicating=record.communicating_s,
        waiting=record.waiting_s,
        bytes=record.bytes_sent + record.bytes_fetched,
        staleness=sum(record.staleness),
        gradients=len(record.staleness),
        skipped=int((record.event or "").startswith("skipped")),
    )
    if record.loss is not None and math.isfinite(record.loss):
        sums.update(loss=record.loss, losses=1)
    for rank, seconds in record.waited_for.items():
        sums[f"for {rank}"] += seconds
    return sums


def added(several: Iterable[Counter[str]]) -> Counter[str]:
    """Add sums up. Not by Counter's own +, which drops what is negative."""
    total: Counter[str] = Counter()
    for sums in several:
        total.update(sums)
    return total


def seconds(sums: Counter[str]) -> float:
    """Return the seconds of some steps."""
    return sums["computing"] + sums["communicating"] + sums["waiting"]
