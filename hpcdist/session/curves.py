"""A run's metrics for loggers, which write them on a thread, so that steps don't wait."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from hpcdist.comm.communicator import Communicator
from hpcdist.records import RecordTail, StepRecord, record_path
from hpcdist.registry import label
from hpcdist.session import loggers

MAX_WAITING = 1000  # entries in the queue; more are dropped
PATIENCE_S = 30.0  # maximum wait for loggers, at the start and at the end
_logger = logging.getLogger(__name__)


def first_alive(comm: Communicator, workers: tuple[int, ...]) -> int | None:
    """Return the first surviving worker, which prints and logs for all workers."""
    return next((rank for rank in workers if rank in comm.failures.alive), None)


class Curves:
    """Passes a run's metrics to loggers, on the first surviving worker.

    A report has the means of this worker's records since the last one; its staleness includes the servers' records.

    Args:
        names: of the loggers.
        settings: of the run; loggers get them by dotted key.
        workers: ranks that compute gradients.
        folder: of the run.
        metrics: names of the job's metrics.
    """

    def __init__(
        self, names: tuple[str, ...], settings: Mapping[str, Any], comm: Communicator, workers: tuple[int, ...],
        optimizer: Optimizer, folder: Path, metrics: tuple[str, ...],
    ):  # fmt: skip
        self._names, self._settings, self._comm, self._workers = names, settings, comm, workers
        self._optimizer, self._folder, self._metrics = optimizer, folder, metrics
        self._first_step = 1
        self._records: list[StepRecord] = []  # since the last report
        self._thread: _Loggers | None = None

    def open(self, first_step: int) -> None:
        """Create the loggers; the first step they get is `first_step`."""
        self._first_step = first_step
        if self._writes and self._names:
            self._start().ready.wait(PATIENCE_S)  # else imports would slow down the first steps

    @property
    def _writes(self) -> bool:
        return self._comm.rank == first_alive(self._comm, self._workers)

    def _start(self) -> _Loggers:
        """Create the thread, and the loggers on it."""
        settings = dict(_flat(self._settings))
        names = tuple(f"test/{name}" for name in (*self._metrics, "loss"))

        def create(name: str) -> loggers.Logger:
            folder = self._folder / label(name)
            run = loggers.LoggedRun(self._folder.resolve().name, folder, self._first_step, settings, names)
            return loggers.load(name)(run)

        servers = [rank for rank in range(self._comm.size) if rank not in self._workers]
        tails = [RecordTail(record_path(self._folder, rank), from_end=True) for rank in servers]
        self._thread = _Loggers(self._names, create, tails)
        return self._thread

    # --- metrics --------------------------------------------------------------------------------------------------
    def add(self, record: StepRecord) -> None:
        if self._names and self._comm.rank in self._workers:
            self._records.append(record)

    def report(self) -> None:
        records, self._records = self._records, []
        if records:
            self._put(records[-1].step, self._means(records), [s for r in records for s in r.staleness])

    def evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put(step, {f"test/{name}": value for name, value in metrics.items()})

    def _means(self, records: list[StepRecord]) -> dict[str, float]:
        """Return metrics for loggers: the learning rate, and means over `records`, by names such as `train/loss`."""
        losses = [record.loss for record in records if record.loss is not None]
        waiting_s = sum(record.waiting_s for record in records)
        seconds = sum(record.seconds for record in records)
        alive = len(set(self._workers) & set(self._comm.failures.alive))
        values = {
            "train/learning_rate": float(self._optimizer.param_groups[0]["lr"]),
            "train/bytes_per_step": sum(r.bytes_sent + r.bytes_fetched for r in records) / len(records),
        }
        if losses:
            values["train/loss"] = sum(losses) / len(losses)
        if seconds > 0:
            values["train/samples_per_second"] = alive * sum(record.samples for record in records) / seconds
            values["train/waiting_share"] = waiting_s / seconds
        return values

    def _put(self, step: int, values: dict[str, float], staleness: list[int] | None = None) -> None:
        if self._names and self._writes:
            (self._thread or self._start()).put(step, values, staleness)  # starts here if the first worker has failed

    def close(self) -> None:
        """Wait until the loggers have written all metrics, at most PATIENCE_S."""
        if self._thread is not None:
            self._thread.close()


class _Loggers:
    """The thread that creates, calls and closes the loggers. A logger that fails is dropped, with a warning."""

    def __init__(self, names: tuple[str, ...], create: Callable[[str], loggers.Logger], tails: list[RecordTail]):
        self._names, self._create, self._tails = names, create, tails
        self._loggers: dict[str, loggers.Logger] = {}
        self._waiting: queue.Queue[tuple[int, dict[str, float], list[int] | None] | None] = queue.Queue(MAX_WAITING)
        self._lost = 0
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcdist-loggers", daemon=True)
        self._thread.start()

    def put(self, step: int, values: dict[str, float], staleness: list[int] | None) -> None:
        try:
            self._waiting.put_nowait((step, values, staleness))
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Wait until the thread has written the queued metrics and closed the loggers, or warn if it takes too long."""
        try:
            self._waiting.put(None, timeout=PATIENCE_S)
            self._thread.join(PATIENCE_S)
        except queue.Full:
            pass  # the thread is alive
        if self._thread.is_alive():
            _logger.warning(f"log is not written {PATIENCE_S:.0f} s after the run: its last metrics may be lost")
        elif self._lost:
            _logger.warning(f"log lacks {self._lost} sets of metrics, which came faster than they could be written")

    def _run(self) -> None:
        """Write queued metrics until `close` (the thread's function)."""
        for name in self._names:
            self._guarded(name, lambda: self._loggers.update({name: self._create(name)}))
        self.ready.set()
        while (item := self._waiting.get()) is not None:
            step, values, staleness = item
            if staleness is not None:
                records = [record for tail in self._tails for record in tail() if isinstance(record, StepRecord)]
                staleness += [value for record in records for value in record.staleness]  # of servers, since then
            if staleness:
                values["train/staleness"] = sum(staleness) / len(staleness)
            for name, logger in list(self._loggers.items()):
                self._guarded(name, lambda: logger.write(step, values))
        for name, logger in list(self._loggers.items()):
            self._guarded(name, logger.close)

    def _guarded(self, name: str, action: Callable[[], object]) -> None:
        """Call a logger; drop it, with a warning, if it fails."""
        try:
            action()
        except (Exception, SystemExit) as error:
            _logger.warning(f"log continues without {name}: {type(error).__name__}: {error}")
            if failed := self._loggers.pop(name, None):
                with suppress(Exception):
                    failed.close()


def _flat(settings: Any, key: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield all settings by dotted key; non-scalar values as JSON."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, settings if isinstance(settings, (bool, int, float, str)) else json.dumps(settings, default=str)
