"""What the study compares: the serial run, three distributed cases and controls, each under several budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpcdist import __version__
from hpcdist.study import Interval, Run, interval

SAMPLES = 1000  # of the training set
BATCH = 200  # of the serial run
RATE = 0.01  # of plain SGD
WORKERS = 2  # λ of the cases
CLUSTER = {"step_s": 2e-3, "sample_s": 10e-6, "jitter": 0.2, "latency_s": 20e-6, "bandwidth_bytes_s": 1.25e9}


@dataclass(frozen=True)
class Protocol:
    """One way to train."""

    name: str
    batch: int = BATCH  # of each worker
    workers: int = 1  # more than one: asynchronous, with a server
    own: int = SAMPLES  # samples that each worker has
    rate: float = RATE
    averaged: bool = False  # judged by the mean of the iterates of the second half
    pace: int = 1  # updates made while each worker takes one step; of a control: of the case that it stands beside

    @property
    def training(self) -> Protocol:
        """What the run itself depends on."""
        return replace(self, name="", pace=1)

    def controls(self) -> list[Protocol]:
        """Those whose batch is the serial run's, this case's μ, or its μλ."""
        return [c for c in CONTROLS if c.batch in (BATCH, self.batch, self.batch * self.workers)]


def _case(number: int, own: int, batch: int) -> Protocol:
    name = f"case {number}: {WORKERS} × ({own:,} samples, batch {batch})"
    return Protocol(name, batch=batch, workers=WORKERS, own=own, pace=WORKERS)


SERIAL = Protocol("serial run")
CASES = (_case(1, 1000, 200), _case(2, 500, 200), _case(3, 500, 100))
CONTROLS = (
    Protocol("one process, batch μλ = 400", batch=400),
    Protocol("one process, batch μλ = 400, rate × 2", batch=400, rate=2 * RATE),
    Protocol("one process, average of its iterates", averaged=True),
    Protocol("one process, twice the updates", pace=WORKERS),  # as cases 1 and 2 make
    Protocol("one process, batch 100", batch=100, pace=WORKERS),  # as many updates as case 3
)
PROTOCOLS = (SERIAL, *CASES, *CONTROLS)


@dataclass(frozen=True)
class Budget:
    """What is the same for all that are compared: `updates`, `samples`, or `steps` of each worker."""

    unit: str
    steps: int  # of the serial run

    @property
    def name(self) -> str:
        if self.unit == "samples":
            return f"{self.steps * BATCH:,} samples"
        return f"{self.steps:,} {'updates' if self.unit == 'updates' else 'steps per worker'}"

    def updates(self, protocol: Protocol) -> int:
        """How many the protocol makes."""
        if self.unit == "samples":
            return self.steps * BATCH // protocol.batch
        return self.steps * (protocol.pace if self.unit == "steps" else 1)

    def protocols(self) -> list[Protocol]:
        """All that this budget compares: without controls that are the serial run again."""
        serial = (SERIAL.training, self.steps)
        return [p for p in PROTOCOLS if p is SERIAL or (p.training, self.updates(p)) != serial]


@dataclass
class Results:
    """The runs of each training, in the order of their seeds."""

    steps: int  # of the serial run
    seeds: int
    runs: dict[Protocol, list[Run]] = field(default_factory=dict)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return tuple(Budget(unit, self.steps) for unit in ("updates", "samples", "steps"))

    def settings(self) -> dict[Protocol, list[dict[str, Any]]]:
        """Of every run, by training. The rate is constant, so that a short run is the beginning of a long one."""
        updates: dict[Protocol, int] = {}
        for budget in self.budgets:
            for protocol in budget.protocols():
                updates[protocol.training] = max(updates.get(protocol.training, 0), budget.updates(protocol))
        longest_first = sorted(updates, key=lambda training: -updates[training] * training.workers)
        return {t: [self._settings(t, updates[t], seed) for seed in range(self.seeds)] for t in longest_first}

    def _settings(self, training: Protocol, updates: int, seed: int) -> dict[str, Any]:
        changing = {key: value for key, value in asdict(training).items() if key not in ("name", "pace")}
        every = updates if training.averaged else self.steps // 10
        return {**changing, "updates": updates, "every": every, "seed": seed, **CLUSTER, "version": __version__}

    def rmse(self, protocol: Protocol, budget: Budget) -> list[float]:
        """On the test set, of each seed."""
        return [run.measured["rmse"][str(budget.updates(protocol))] for run in self.runs[protocol.training]]

    def apart(self, protocol: Protocol, budget: Budget) -> Interval:
        """What the protocol's RMSE is above that of the serial run."""
        return difference(self.rmse(protocol, budget), self.rmse(SERIAL, budget))

    def rows(self) -> Iterator[dict[str, str]]:
        """The table: a row per protocol, a column per budget with RMSE and, in brackets, its difference."""
        for protocol in PROTOCOLS:
            row = {"": protocol.name}
            for budget in self.budgets:
                row[budget.name] = self._cell(protocol, budget) if protocol in budget.protocols() else "as serial"
            yield row

    def _cell(self, protocol: Protocol, budget: Budget) -> str:
        text = f"{interval(self.rmse(protocol, budget)):.3f}"
        if protocol is SERIAL:
            return text
        apart = self.apart(protocol, budget)
        return f"{text} ({apart.mean:+.3f} ± {apart.half:.3f}){'*' * real(apart)}"


@dataclass(frozen=True)
class Setup:
    """The job with its own defaults: Adam whose rate falls, batch 10 of each worker."""

    name: str
    strategy: str
    ranks: int
    batch: int

    def settings(self, epochs: int, seed: int) -> dict[str, Any]:
        changing = {"strategy": self.strategy, "ranks": self.ranks, "batch": self.batch, "epochs": epochs, "seed": seed}
        return {**changing, **CLUSTER, "version": __version__}


JOB_REFERENCE = Setup("allreduce on 4 ranks", "allreduce", 4, 10)
JOB_CASE = Setup("parameter_server on 4 ranks", "parameter_server", 4, 10)
JOB_CONTROLS = (Setup("one process, batch 40", "allreduce", 1, 40), Setup("one process, batch 10", "allreduce", 1, 10))
JOB_SETUPS = (JOB_REFERENCE, JOB_CASE, *JOB_CONTROLS)


def difference(values: list[float], others: list[float]) -> Interval:
    """Between runs of the same seed."""
    return interval([a - b for a, b in zip(values, others, strict=True)])


def real(found: Interval) -> bool:
    """Whether the interval excludes 0."""
    return found.low > 0 or found.high < 0
