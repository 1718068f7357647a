"""How far a run is, from the records that it writes, without torch; and how far it has to go."""

from __future__ import annotations

import bisect
import json
from pathlib import Path
from typing import NamedTuple

from hpcdist.slurm.spec import JobSpec


class Progress(NamedTuple):
    """What a run's ranks have recorded so far."""

    step: int  # the furthest rank's
    samples: int  # of all ranks together
    loss: float | None  # the mean of the ranks' newest


class Follower:
    """Reads records while ranks write them. Each call reads what has been added, and drops what was superseded."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._ranks: dict[Path, _Rank] = {}

    def __call__(self) -> Progress:
        for path in self._folder.glob("records-rank*.jsonl"):
            self._ranks.setdefault(path, _Rank()).read(path)
        ranks = self._ranks.values()
        losses = [rank.loss for rank in ranks if rank.loss is not None]
        return Progress(
            step=max((rank.steps[-1] for rank in ranks if rank.steps), default=0),
            samples=sum(rank.samples[-1] for rank in ranks if rank.samples),
            loss=sum(losses) / len(losses) if losses else None,
        )


class _Rank:
    """One rank's file: how far it has been read, the numbers of the steps, and the samples up to each of them."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.samples: list[int] = []
        self.loss: float | None = None
        self._offset = 0

    def read(self, path: Path) -> None:
        with open(path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the last line may not be complete yet
        self._offset += len(whole)
        for line in whole.splitlines():
            record = json.loads(line)
            if "first_step" in record:  # a run that went on from a checkpoint repeats the steps since then
                kept = bisect.bisect_left(self.steps, record["first_step"])
                del self.steps[kept:], self.samples[kept:]
                continue
            self.steps.append(record["step"])
            self.samples.append((self.samples[-1] if self.samples else 0) + record["samples"])
            self.loss = record["loss"] if record["loss"] is not None else self.loss


def total_samples(spec: JobSpec) -> int | None:
    """How many samples a job's run will have seen at its end; None if that can't be known (yet).

    Loads the job's file, and with it torch.
    """
    if spec.job is None:
        return None
    from hpcdist.data.hdf5 import HDF5Dataset
    from hpcdist.train.runs import specify

    _, config = specify(Path(spec.job), None if spec.config is None else Path(spec.config), spec.run_settings)
    path = Path(config.data.path)
    if not path.exists():  # the run's first rank makes it
        return None
    data = HDF5Dataset(path, "train")
    try:
        return config.epochs * len(data)
    finally:
        data.close()
