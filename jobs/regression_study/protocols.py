"""What the study runs: the serial run, three distributed cases, controls; and how many updates each has by a budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcdist.study import Interval, Run, interval

BATCH = 200  # of the serial run
SAMPLES = 1000  # of the training set
RATE = 0.01  # of plain SGD, constant
WORKERS = 2  # λ of the cases


@dataclass(frozen=True)
class Protocol:
    """One way to train. The parameters of all of them begin the same."""

    name: str
    batch: int = BATCH  # of each worker
    workers: int = 1  # more than one: with a server, asynchronous
    own: int = SAMPLES  # samples that each worker has
    rate: float = RATE
    averaged: bool = False  # judged by the mean of the iterates of the second half
    longer: int = 1  # times as many updates as one process makes by its budget of steps


SERIAL = Protocol("serial run")
CASES = (
    Protocol(f"case 1: {WORKERS} workers, 1,000 samples and batch 200 each", workers=WORKERS),
    Protocol(f"case 2: {WORKERS} workers, 500 samples and batch 200 each", workers=WORKERS, own=500),
    Protocol(f"case 3: {WORKERS} workers, 500 samples and batch 100 each", workers=WORKERS, own=500, batch=100),
)
CONTROLS = (
    Protocol("control: batch μλ = 400", batch=WORKERS * BATCH),
    Protocol("control: batch μλ = 400, twice the rate", batch=WORKERS * BATCH, rate=WORKERS * RATE),
    Protocol("control: average of the iterates", averaged=True),
    Protocol("control: twice the updates", longer=WORKERS),
)
PROTOCOLS = (SERIAL, *CASES, *CONTROLS)


@dataclass(frozen=True)
class Budget:
    """What is the same for all that are compared: `updates`, `samples`, or the `steps` of each worker."""

    unit: str
    steps: int  # of the serial run

    @property
    def name(self) -> str:
        if self.unit == "samples":
            return f"{self.steps * BATCH:,} samples"
        return f"{self.steps:,} " + ("updates" if self.unit == "updates" else "steps of each worker")

    def updates(self, protocol: Protocol) -> int | None:
        """How many updates the protocol makes; None: it is not compared under this budget."""
        if protocol.longer > 1:
            return self.steps * protocol.longer if self.unit == "steps" else None
        if self.unit == "samples":
            return self.steps * BATCH // protocol.batch
        return self.steps * (protocol.workers if self.unit == "steps" else 1)


def budgets(steps: int) -> tuple[Budget, ...]:
    return tuple(Budget(unit, steps) for unit in ("updates", "samples", "steps"))


@dataclass
class Results:
    """The runs of each protocol by (protocol, updates), in the order of their seeds."""

    steps: int  # of the serial run
    seeds: int
    runs: dict[tuple[Protocol, int], list[Run]] = field(default_factory=dict)

    def wanted(self) -> list[tuple[Protocol, int]]:
        """All runs but for the seed, each once: the rate is constant, so that a short run is a long one's beginning."""
        found = {}
        for protocol in PROTOCOLS:
            counts = {budget.updates(protocol) for budget in budgets(self.steps)} - {None}
            found[protocol] = sorted(counts)
        return [(protocol, count) for protocol, counts in found.items() for count in counts]
