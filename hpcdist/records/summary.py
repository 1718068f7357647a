"""`summary.json`: what a run was, what it reached, and what it cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpcdist.errors import DataError
from hpcdist.records.durable import replace_durably
from hpcdist.records.staleness import StalenessLedger
from hpcdist.records.step import StepRecord

FILE_NAME = "summary.json"


class Staleness(BaseModel):
    """Of all gradients applied in the run."""

    model_config = ConfigDict(extra="forbid")

    mean: float = Field(ge=0)
    max: int = Field(ge=0)
    histogram: dict[int, int] = Field(description="number of gradients per staleness")


class Seconds(BaseModel):
    """Of an average worker, over the run."""

    model_config = ConfigDict(extra="forbid")

    computing: float
    communicating: float
    waiting: float


class Summary(BaseModel):
    """One run. Further keys are kept as they are."""

    # A metric may be NaN or infinite, and must be read back as such.
    model_config = ConfigDict(extra="allow", ser_json_inf_nan="constants")

    strategy: str
    ranks: int = Field(ge=1)
    workers: int = Field(ge=1, description="ranks that compute gradients")
    seed: int
    samples: int = Field(ge=0, description="whose gradients were computed, all ranks together")
    wall_s: float = Field(ge=0)
    metrics: dict[str, float] = Field(description="evaluated at the end on the mean of the ranks' parameters")
    staleness: Staleness
    dropped: int = Field(0, ge=0, description="gradients that were too stale to be applied")
    pending: int = Field(0, ge=0, description="gradients that no update had applied when the run ended")
    lost_ranks: list[int] = Field(default_factory=list, description="ranks that died, and the run went on without")
    waited_for_s: dict[int, dict[int, float]] = Field(
        default_factory=dict, description="by worker: seconds that a server held it up, by the rank it waited for"
    )
    bytes_per_step: float = Field(ge=0, description="sent and fetched by all ranks, per step of a worker")
    messages_per_step: float = Field(ge=0, description="sent and fetched by all ranks, per step of a worker")
    seconds: Seconds
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="of the final mean of the ranks' parameters")


def summarise(records: Mapping[int, Sequence[StepRecord]], **given: Any) -> Summary:
    """What the records say of a run, together with what they can't know.

    A worker is a rank that computed gradients (its records count samples); traffic is that of all ranks, servers
    included, divided by the workers' steps; seconds are those of an average worker.

    Args:
        records: each rank's, as `read_records` returns them.
        given: `strategy`, `ranks`, `seed`, `wall_s`, `metrics`, `sha256`, and whatever else the summary shall hold.

    Raises:
        DataError: a field is missing or breaks its rule.
    """
    ledger = StalenessLedger()
    everything = [record for of_rank in records.values() for record in of_rank]
    for record in everything:
        ledger.extend(record.staleness)
    workers = [of_rank for of_rank in records.values() if any(record.samples for record in of_rank)]
    work = [record for of_rank in workers for record in of_rank if record.samples]
    steps = max(1, len(work))

    def per_worker(seconds: Iterable[float]) -> float:
        return sum(seconds) / max(1, len(workers))

    measured = {
        "workers": len(workers),
        "samples": sum(record.samples for record in work),
        "staleness": {"mean": ledger.mean, "max": ledger.max, "histogram": ledger.histogram},
        "dropped": sum(record.dropped for record in everything),
        "waited_for_s": {rank: held for rank, of_rank in records.items() if (held := _waited_for(of_rank))},
        "bytes_per_step": sum(r.bytes_sent + r.bytes_fetched for r in everything) / steps,
        "messages_per_step": sum(r.messages_sent + r.messages_fetched for r in everything) / steps,
        "seconds": {
            "computing": per_worker(r.computing_s for of_rank in workers for r in of_rank),
            "communicating": per_worker(r.communicating_s for of_rank in workers for r in of_rank),
            "waiting": per_worker(r.waiting_s for of_rank in workers for r in of_rank),
        },
    }
    return _checked(measured | given, "summary")


def _waited_for(records: Iterable[StepRecord]) -> dict[int, float]:
    held: Counter[int] = Counter()
    for record in records:
        held.update(record.waited_for)
    return dict(held)


def write_summary(folder: str | Path, summary: Summary | Mapping[str, Any]) -> Path:
    """Writes `summary.json` into the folder, whole or not at all, and returns its path.

    Raises:
        DataError: a field is missing or breaks its rule.
    """
    checked = summary if isinstance(summary, Summary) else _checked(summary, "summary")
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, (checked.model_dump_json(indent=2) + "\n").encode())
    return path


def load_summary(path: str | Path) -> Summary:
    """Reads `summary.json`, given as the file or as its folder.

    Raises:
        DataError: it is missing, no JSON, or not a summary.
    """
    file = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{file} must exist; got nothing there. Has the run ended?") from None
    except ValueError as error:
        raise DataError(f"{file} must be JSON; got {error}. Write it again from the records.") from None
    return _checked(content, str(file))


def _checked(content: Any, where: str) -> Summary:
    try:
        return Summary.model_validate(content)
    except ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(map(str, reason['loc'])) or 'it'}: {reason['msg']}, got {reason['input']!r:.60}"
            for reason in error.errors(include_url=False)
        )
        raise DataError(f"{where} must hold the fields of a run's summary; {reasons}.") from None
