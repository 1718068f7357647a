"""Training loops of a study's own, where a job's own training does not do what the study asks.

A loop is a function `loop(settings, folder)`, of a run's settings as one table, which returns a function of a rank's
communicator, collective. That one trains, and leaves in the folder what `hpcdist train` would: evaluations and a
summary, by an `OwnRun`. On virtual ranks the former is called once, so that ranks may share what it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcdist.comm.communicator import Communicator
from hpcdist.records import (
    Evaluation,
    RecordWriter,
    StepRecord,
    append_evaluation,
    digest,
    read_records,
    record_path,
    summarise,
    write_summary,
)
from hpcdist.records.energy import Energy
from hpcdist.registry import label
from hpcdist.strategies import Strategy

Loop = Callable[[dict[str, Any], Path], Callable[[Communicator], None]]


class OwnRun:
    """Write the files of a run that trains by a loop of its own.

    Args:
        keeps: leave the records of all steps, too.
    """

    def __init__(self, comm: Communicator, settings: Mapping[str, Any], folder: Path, keeps: bool = False):
        self._comm, self._settings, self._folder, self._keeps = comm, settings, folder, keeps
        self._records = RecordWriter(record_path(folder, comm.rank))

    def write(self, record: StepRecord) -> None:
        """Write the record of a step of this rank."""
        self._records.write(record)

    def evaluate(self, step: int, samples: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Write an evaluation. One rank does."""
        append_evaluation(self._folder, Evaluation(step, 0, samples, seconds, dict(metrics)))

    def end(self, strategy: Strategy, seconds: float, metrics: Mapping[str, float], **further: Any) -> None:
        """Collective. Write the summary, and close the strategy.

        Args:
            seconds: of training.
            further: keys of the summary.
        """
        self._records.close()
        params, _ = strategy.consensus()
        self._comm.barrier()  # all records are in the files
        if self._comm.rank == 0:
            given = {"ranks": self._comm.size, "seed": self._settings["seed"], "wall_s": seconds, "metrics": metrics}
            given["strategy"] = label(self._settings["strategy"]["name"])
            given["energy"] = Energy(not_measured="the run has a loop of its own")
            records = read_records(self._folder)
            write_summary(self._folder, summarise(records, **given, sha256=digest(params), **further))
        self._comm.barrier()
        if not self._keeps:
            record_path(self._folder, self._comm.rank).unlink()
        strategy.close()
        strategy.model.close()
