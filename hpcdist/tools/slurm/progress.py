"""Follow the progress of a run by the step records that its ranks write."""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import NamedTuple

from hpcdist.records import RecordTail
from hpcdist.tools.slurm.spec import JobSpec


class JobProgress(NamedTuple):
    """The progress that a run's ranks have recorded so far."""

    step: int  # of the rank that has made the most
    samples: int  # of all ranks together
    loss: float | None  # the mean of the ranks' newest losses


class Follower:
    """A reader of records that ranks still write: each call reads new ones and drops those that a restart redoes."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._ranks: dict[Path, _Rank] = {}

    def __call__(self) -> JobProgress:
        for path in self._folder.glob("records-rank*.jsonl"):
            self._ranks.setdefault(path, _Rank(path)).read()
        ranks = self._ranks.values()
        losses = [rank.loss for rank in ranks if rank.loss is not None]
        return JobProgress(
            step=max((rank.steps[-1] for rank in ranks if rank.steps), default=0),
            samples=sum(rank.samples[-1] for rank in ranks if rank.samples),
            loss=sum(losses) / len(losses) if losses else None,
        )


class _Rank:
    """The progress of one rank: its steps, the samples up to each of them, and its newest loss."""

    def __init__(self, path: Path):
        self.steps: list[int] = []
        self.samples: list[int] = []
        self.loss: float | None = None
        self._tail = RecordTail(path)

    def read(self) -> None:
        for record in self._tail():
            if isinstance(record, int):  # a run that went on from a checkpoint repeats the steps from this one on
                position = bisect.bisect_left(self.steps, record)
                del self.steps[position:], self.samples[position:]
                continue
            self.steps.append(record.step)
            self.samples.append((self.samples[-1] if self.samples else 0) + record.samples)
            self.loss = record.loss if record.loss is not None else self.loss


def total_samples(spec: JobSpec) -> int | None:
    """Return the number of samples that a job's run trains on in all; None while that is unknown.

    Loads the job's file, and with it torch.
    """
    if spec.job is None:
        return None
    from hpcdist.data.hdf5 import HDF5Dataset
    from hpcdist.train.milestones import planned_samples
    from hpcdist.train.runs import specify

    _, config = specify(Path(spec.job), None if spec.config is None else Path(spec.config), spec.run_settings)
    path = Path(config.data.path)
    if not path.exists():  # the run's first rank makes it
        return None
    data = HDF5Dataset(path, "train")
    try:
        return planned_samples(config, len(data))
    finally:
        data.close()
