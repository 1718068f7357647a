"""`summary.json`: the strategy, the metrics and the cost of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hpcdist.errors import DataError
from hpcdist.records.energy import Energy
from hpcdist.records.files import Count, checked, read_checked, replace_durably
from hpcdist.records.step import StepRecord

FILE_NAME = "summary.json"
Positive = Annotated[Count, Field(ge=1)]
RULE = "hold the fields of a run's summary"


class Staleness(BaseModel):
    """The staleness of all gradients applied in the run."""

    model_config = ConfigDict(extra="forbid")

    mean: float = Field(ge=0)
    max: Count
    histogram: dict[Count, Count] = Field(description="number of gradients per staleness; each server counts")


class Seconds(BaseModel):
    """The seconds of an average worker's rank, over the run."""

    model_config = ConfigDict(extra="forbid")

    computing: float
    communicating: float
    waiting: float


class Best(BaseModel):
    """The best evaluation of the run."""

    model_config = ConfigDict(extra="forbid")

    metric: str
    value: float
    step: Count
    checkpoint: str | None = Field(description="the best that is there, which may be of a step that was less good")


class Summary(BaseModel):
    """The summary of one run. Further keys are preserved."""

    # A metric may be NaN or infinite, and must be read back as such.
    model_config = ConfigDict(extra="allow", ser_json_inf_nan="constants")

    strategy: str
    ranks: Positive
    stages: Positive = Field(1, description="ranks that hold one whole model together, a worker")
    cut: list[Count] = Field(default_factory=list, description="numbers of layers of the stages")
    workers: Positive = Field(description="ranks, or with stages groups of as many, that compute gradients")
    seed: Count
    samples: Count = Field(description="whose gradients were computed, all ranks together")
    wall_s: float = Field(ge=0)
    metrics: dict[str, float] = Field(description="evaluated at the end on the mean of the ranks' parameters")
    test_samples: Positive | None = Field(None, description="of which the metrics are; none in older versions")
    best: Best | None = Field(None, description="none where no evaluation had a finite metric, and in older versions")
    stopped_early: str | None = Field(None, description="why the run ended before its epochs and its budget")
    staleness: Staleness
    dropped: Count = Field(0, description="gradients that were too stale to be applied; each server counts")
    skipped: Count = Field(0, description="steps of workers, left out for a NaN or infinite gradient")
    pending: Count = Field(0, description="gradients without an update when the run ended; each server counts")
    lost_ranks: list[Count] = Field(default_factory=list, description="ranks that died, and the run went on without")
    waited_for_s: dict[int, dict[int, float]] = Field(
        default_factory=dict, description="by worker: seconds that a server held it up, by the rank it waited for"
    )
    bytes_per_step: float = Field(ge=0, description="sent and fetched by all ranks, per step of a worker")
    messages_per_step: float = Field(ge=0, description="sent and fetched by all ranks, per step of a worker")
    seconds: Seconds
    bubbles: list[float] = Field(
        default_factory=list, description="by stage: part of a step in which its ranks wait for other stages"
    )
    energy: Energy = Field(
        default_factory=lambda: Energy(joules=None, not_measured="an older version of hpcdist made the run")
    )
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="of the final mean of the ranks' parameters")

    @property
    def joules_per_sample(self) -> float | None:
        """Return the energy for each sample whose gradient was computed; None where it was not measured."""
        return None if self.energy.joules is None or not self.samples else self.energy.joules / self.samples


def summarise(
    records: Mapping[int, Sequence[StepRecord]], *, stages: int = 1, workers: int = 0, **given: Any
) -> Summary:
    """Summarise a run's records, with values that the records don't have.

    A worker is a rank that computed gradients (its records count samples), or with stages a group of `stages` ranks;
    traffic is that of all ranks, servers included, divided by the workers' steps; seconds are those of an average rank
    of a worker.

    Args:
        records: each rank's, as `read_records` returns them.
        stages: ranks of a worker, one after the other, of which one has counted the samples.
        workers: their number at the end; fewer have computed gradients where a worker had no samples.
        given: `strategy`, `ranks`, `seed`, `wall_s`, `metrics`, `sha256`, and any further keys of the summary.

    Raises:
        DataError: a field is missing or breaks its rule.
    """
    all_records = [record for of_rank in records.values() for record in of_rank]
    least = int(any(record.samples for record in all_records))  # 0 without hd.shard: then all ranks train
    workers_seen = {rank // stages for rank, of_rank in records.items() if any(r.samples >= least for r in of_rank)}
    of_workers = {rank: of_rank for rank, of_rank in records.items() if rank // stages in workers_seen}
    # A step of a worker without samples counts if the worker exchanged data, as others did.
    worker_records = [record for of_rank in of_workers.values() for record in of_rank]
    counted = [r for r in worker_records if r.samples >= least or r.bytes_sent or r.bytes_fetched]
    steps = max(1.0, len(counted) / stages)

    def per_rank(name: str) -> float:
        return sum(getattr(record, name) for record in worker_records) / max(1, len(of_workers))

    measured = {
        "stages": stages,
        "workers": min(len(workers_seen) or workers, workers or len(workers_seen)),
        "samples": sum(record.samples for record in all_records),
        "staleness": _staleness(all_records),
        "dropped": sum(record.dropped for record in all_records),
        "skipped": sum(is_skipped(r) for r in all_records if r.samples >= least) // (1 if least else stages),
        "waited_for_s": {rank: seconds_of for rank, of_rank in records.items() if (seconds_of := _waited_for(of_rank))},
        "bytes_per_step": sum(r.bytes_sent + r.bytes_fetched for r in all_records) / steps,
        "messages_per_step": sum(r.messages_sent + r.messages_fetched for r in all_records) / steps,
        "seconds": {part: per_rank(f"{part}_s") for part in Seconds.model_fields},
        "bubbles": _bubbles(of_workers, stages) if stages > 1 else [],
    }
    return checked(measured | given, Summary, "summary", RULE)


def _staleness(records: Iterable[StepRecord]) -> dict[str, Any]:
    """Count the applied gradients by staleness: the clock at their application, minus the clock of their weights.

    Reference: S. Gupta, W. Zhang, F. Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
    systematic study", 2016.
    """
    counts = Counter(value for record in records for value in record.staleness)
    mean = sum(value * count for value, count in counts.items()) / max(1, counts.total())
    return {"mean": mean, "max": max(counts, default=0), "histogram": dict(sorted(counts.items()))}


def _bubbles(records: Mapping[int, Sequence[StepRecord]], stages: int) -> list[float]:
    """Return for each stage the fraction of its ranks' seconds in which they waited for other stages."""
    shares = []
    for stage in range(stages):
        local = [record for rank, of_rank in records.items() if rank % stages == stage for record in of_rank]
        seconds = sum(r.seconds for r in local)
        shares.append(sum(r.stage_s for r in local) / seconds if seconds > 0 else 0.0)
    return shares


def is_skipped(record: StepRecord) -> bool:
    """Return whether the step was skipped because of a NaN or infinite gradient."""
    return (record.event or "").startswith("skipped")


def _waited_for(records: Iterable[StepRecord]) -> dict[int, float]:
    """Sum up the seconds that a server waited, by the rank it waited for."""
    seconds_of: Counter[int] = Counter()
    for record in records:
        seconds_of.update(record.waited_for)
    return dict(seconds_of)


def write_summary(folder: str | Path, summary: Summary | Mapping[str, Any]) -> Path:
    """Write `summary.json` into the folder atomically, and return its path; raise DataError if a field is wrong."""
    whole = checked(summary, Summary, "summary", RULE)
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, (whole.model_dump_json(indent=2) + "\n").encode())
    return path


def load_summary(path: str | Path) -> Summary:
    """Read `summary.json`; `path` is the file or its folder. Raise DataError if it is missing, or not a summary."""
    file = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
    summary = read_checked(file, Summary, RULE, "Write it again from the records.")
    if summary is None:
        raise DataError(f"{file} must exist; got nothing there. Has the run ended?")
    return summary
