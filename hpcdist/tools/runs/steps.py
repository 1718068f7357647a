"""The steps of all ranks of a run as one frame, read from their records, also while these are written."""

from __future__ import annotations

import math
import operator
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdist.records import RecordTail, StepRecord, record_files
from hpcdist.records.summary import is_skipped

if TYPE_CHECKING:
    from pandas import DataFrame

BLOCKS = 512  # maximal rows of a rank, if followed; beyond, each row covers twice as many steps
RECENT = 100  # newest steps of each rank, for the current speed
_COPIED = (
    "clock", "samples", "bytes_sent", "messages_sent", "bytes_fetched", "messages_fetched", "computing_s",
    "communicating_s", "waiting_s", "stage_bytes", "stage_s", "dropped",
)  # fmt: skip
_copied = operator.attrgetter(*_COPIED)
COLUMNS = ("rank", "step", *_COPIED, "records", "loss", "losses", "gradients", "staleness", "skipped")
# In a record's event.
_LOST_EVENT, _BACK_EVENT = re.compile(r"goes on without rank (\d+)"), re.compile(r"rank (\d+) is back")


class Steps:
    """The recorded steps of a run's ranks. `read` adds new ones and drops steps that a restart repeats.

    Columns of the frames, summed over a row's steps: those of `StepRecord`, `records` (1), `loss` and `losses` (1; 0
    for a NaN or infinite loss), `gradients` applied, their `staleness`, `skipped` steps. `clock` is the maximum.

    Args:
        follow: for a run that may still write: limit each rank to BLOCKS rows of 2, 4, 8... steps, whose `step` is the
            last one, and skip invalid lines. Otherwise an invalid line raises DataError.

    Attributes:
        frame: a row per step and rank, or per block of steps.
        recent: the newest steps of each rank.
        losses: each rank's newest loss, NaN included; not the frames' column, which counts losses.
        lost_ranks: ranks that died or fell silent, by the newest records.
        widths: steps per row of each rank.
        grew_s: by rank, when its file last grew, by this process's monotonic clock.
    """

    def __init__(self, folder: Path, *, follow: bool = False):
        from pandas import DataFrame

        self._folder, self._follow = folder, follow
        self.frame: DataFrame = DataFrame(columns=list(COLUMNS), dtype=float)
        self.recent: DataFrame = self.frame
        self.losses: dict[int, float] = {}
        self.grew_s: dict[int, float] = {}
        self._tails: dict[int, RecordTail] = {}
        self.widths: dict[int, int] = {}
        self._lost: dict[int, set[int]] = {}  # by reporting rank

    @property
    def lost_ranks(self) -> list[int]:
        return sorted(set().union(*self._lost.values()))

    def read(self) -> None:
        """Read the records that ranks have written since the last call."""
        for rank, path in record_files(self._folder).items():
            if rank not in self._tails:
                self._tails[rank] = RecordTail(path, strict=not self._follow)
                self.widths[rank], self._lost[rank] = 1, set()
        rows: list[tuple[float, ...]] = []
        for rank, tail in self._tails.items():
            while items := tail():
                self.grew_s[rank] = time.monotonic()
                new: list[tuple[float, ...]] = []
                for item in items:
                    if isinstance(item, StepRecord):
                        new.append(_row(rank, item))
                        self._record_events(rank, item)
                    else:  # the first step that a restarted run repeats
                        new = [row for row in new if row[1] < item]
                        rows = [row for row in rows if row[0] != rank or row[1] < item]
                        self._drop_from(rank, item)
                rows += new
                if self._follow and len(rows) > BLOCKS * len(self._tails):
                    self._add(rows)
                    rows = []
        self._add(rows)

    def _record_events(self, rank: int, record: StepRecord) -> None:
        """Update the newest loss of a rank, and the ranks that it reports as lost."""
        if record.loss is not None:
            self.losses[rank] = record.loss
        if record.event is not None:
            self._lost[rank] |= set(map(int, _LOST_EVENT.findall(record.event)))
            self._lost[rank] -= set(map(int, _BACK_EVENT.findall(record.event)))

    def _add(self, rows: list[tuple[float, ...]]) -> None:
        """Add rows to the frames; if followed, double a rank's width until it has BLOCKS rows or fewer."""
        import numpy as np
        from pandas import DataFrame, concat

        if not rows:
            return
        new = DataFrame({name: np.array(column) for name, column in zip(COLUMNS, zip(*rows), strict=True)})
        self.recent = concat([self.recent, new] if len(self.recent) else [new]).groupby("rank").tail(RECENT)
        self.frame = concat([self.frame, new] if len(self.frame) else [new], ignore_index=True)
        while self._follow:
            self.frame = self._merged(self.frame)
            counts = self.frame["rank"].value_counts()
            full = counts.index[counts > BLOCKS]
            if full.empty:
                return
            for rank in full:
                self.widths[rank] *= 2

    def _merged(self, frame: DataFrame) -> DataFrame:
        """Return the frame with one row per block of `widths` steps."""
        width = frame["rank"].map(self.widths)
        blocks = frame.assign(loss=frame["loss"].where(frame["losses"] > 0), step=-(-frame["step"] // width) * width)
        rules = {name: "max" if name == "clock" else "sum" for name in COLUMNS[2:]}
        return blocks.groupby(["rank", "step"], as_index=False).agg(rules)

    def _drop_from(self, rank: int, first_step: int) -> None:
        """Drop a rank's steps from `first_step` on; of a block that is divided keep a proportional part of the sums."""
        self._lost[rank].clear()
        frame, width = self.frame, self.widths[rank]
        last_kept = max(first_step, 1) - 1
        block_end = -(-last_kept // width) * width  # last step of the block that `last_kept` is in
        self.recent = self.recent[(self.recent["rank"] != rank) | (self.recent["step"] < first_step)]
        frame = frame[(frame["rank"] != rank) | (frame["step"] <= block_end)]
        if last_kept < block_end:
            divided = (frame["rank"] == rank) & (frame["step"] == block_end)
            share = ((last_kept - block_end + width) / frame["records"]).clip(upper=1.0).where(divided, 1.0)
            sums = [name for name in COLUMNS[2:] if name != "clock"]
            frame = frame.assign(**{name: frame[name] * share for name in sums})
        self.frame = frame


def _row(rank: int, record: StepRecord) -> tuple[Any, ...]:  # in the order of COLUMNS
    loss = math.nan if record.loss is None else record.loss
    stale, finite = record.staleness, int(math.isfinite(loss))
    return rank, record.step, *_copied(record), 1, loss, finite, len(stale), sum(stale), int(is_skipped(record))
