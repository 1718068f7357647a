"""A small network fits a noisy function of ten variables; judged by its root-mean-square error, of which 1 is noise.

    mpirun -n 4 hpcdist train jobs/studies/regression.py --set strategy=parameter_server
    python jobs/studies/regression.py    # is distributed training more accurate? 6 minutes on 2 cores; --quick: 15 s

The study trains on virtual ranks: real arithmetic, and step times that vary by 20 %. Chosen before anything was run,
and kept: plain SGD at the constant rate 0.01, 10,000 steps of the serial run, five seeds. The split of the data is
fixed; initialisation and order vary with the seed, and runs of one seed begin with the same parameters, so that
differences are taken seed by seed. The folder holds the runs as `hpcdist simulate` leaves them. A run that is there is
not made again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from hpcdist.tools.compare.plan import ComparedGroup
from hpcdist.tools.statistics import Interval, interval
from kit.groups import EndedRun, GroupRuns, declare_group
from kit.output import Study, markdown, start, wrap
from kit.pairs import difference, excludes
from regression_job import SAMPLES, job

JOB = Path(__file__).with_name("regression_job.py")

# --- what is run ------------------------------------------------------------------------------------------------------
BATCH = 200  # of the serial run
RATE = 0.01  # of plain SGD
WORKERS = 2  # λ of the cases
NETWORK = "20us,10Gbit/s"


def cluster(batch: int) -> dict[str, str]:
    """Describe step times: 2 ms, and 10 µs for each sample."""
    return {"compute": f"jitter:{2 + 0.01 * batch:g}ms,0.2"}


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
        """Give what the run itself depends on."""
        return replace(self, name="", pace=1)

    def controls(self) -> list[Protocol]:
        """List those whose batch is the serial run's, this case's μ, or its μλ."""
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
    """The quantity that is the same for all that are compared: `updates`, `samples`, or `steps` of each worker."""

    unit: str
    steps: int  # of the serial run

    @property
    def name(self) -> str:
        if self.unit == "samples":
            return f"{self.steps * BATCH:,} samples"
        return f"{self.steps:,} {'updates' if self.unit == 'updates' else 'steps per worker'}"

    def updates(self, protocol: Protocol) -> int:
        """Count the updates that the protocol makes."""
        if self.unit == "samples":
            return self.steps * BATCH // protocol.batch
        return self.steps * (protocol.pace if self.unit == "steps" else 1)

    def protocols(self) -> list[Protocol]:
        """List all that this budget compares: without controls that are the serial run again."""
        serial = (SERIAL.training, self.steps)
        return [p for p in PROTOCOLS if p is SERIAL or (p.training, self.updates(p)) != serial]


@dataclass(frozen=True)
class Setup:
    """The job with its own defaults: Adam whose rate falls, batch 10 of each worker."""

    name: str
    strategy: str
    ranks: int
    batch: int

    def declare(self, epochs: int) -> ComparedGroup:
        settings = {"strategy": self.strategy, "batch_size": self.batch, "epochs": epochs, "eval_every": epochs}
        return declare_group(self.name, self.ranks, settings, cluster(self.batch))


JOB_REFERENCE = Setup("allreduce on 4 ranks", "allreduce", 4, 10)
JOB_CASE = Setup("parameter_server on 4 ranks", "parameter_server", 4, 10)
JOB_CONTROLS = (Setup("one process, batch 40", "allreduce", 1, 40), Setup("one process, batch 10", "allreduce", 1, 10))
JOB_SETUPS = (JOB_REFERENCE, JOB_CASE, *JOB_CONTROLS)


# --- the runs and their results ---------------------------------------------------------------------------------------
@dataclass
class Results:
    """The runs of each training, in the order of their seeds."""

    steps: int  # of the serial run
    seeds: int
    runs: dict[Protocol, list[EndedRun]] = field(default_factory=dict)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return tuple(Budget(unit, self.steps) for unit in ("updates", "samples", "steps"))

    def groups(self) -> dict[Protocol, ComparedGroup]:
        """Declare the runs of each training, the longest first.

        The rate is constant, so that a short run is the beginning of a long one.
        """
        updates: dict[Protocol, int] = {}
        for budget in self.budgets:
            for protocol in budget.protocols():
                updates[protocol.training] = max(updates.get(protocol.training, 0), budget.updates(protocol))
        longest_first = sorted(updates, key=lambda training: -updates[training] * training.workers)
        return {training: self._declare(training, updates[training]) for training in longest_first}

    def _declare(self, training: Protocol, updates: int) -> ComparedGroup:
        settings = {
            "strategy": {"name": "parameter_server"},
            "optimizer": {"name": "SGD", "lr": training.rate},
            "batch_size": training.batch,
            "average_iterates": training.averaged,
            "own": training.own,
            "updates": updates,
            "every": updates if training.averaged else self.steps // 10,
        }
        ranks = training.workers + (training.workers > 1)
        averaged = ", averaged" * training.averaged
        name = f"{training.workers} of batch {training.batch}, {training.own} samples, rate {training.rate:g}{averaged}"
        return declare_group(name, ranks, settings, cluster(training.batch), loop=f"{JOB}:train")

    def rmse(self, protocol: Protocol, budget: Budget) -> list[float]:
        """List the RMSE on the test set of each seed."""
        return [curve(run)[budget.updates(protocol)] for run in self.runs[protocol.training]]

    def apart(self, protocol: Protocol, budget: Budget) -> Interval:
        """Estimate by how much the protocol's RMSE is above that of the serial run."""
        return difference(self.rmse(protocol, budget), self.rmse(SERIAL, budget))

    def rows(self) -> Iterator[dict[str, str]]:
        """Make the table: a row per protocol, a column per budget with RMSE and, in brackets, its difference."""
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
        return f"{text} ({apart:+.3f}){'*' * excludes(apart, 0)}"


def curve(run: EndedRun) -> dict[int, float]:
    """Return the RMSE after each number of updates at which it was looked at."""
    return {look.step: look.metrics["rmse"] for look in run.curve}


# --- the answer in words, made from the numbers by rules that it states -----------------------------------------------
def paragraph(results: Results, job: Mapping[Setup, Sequence[float]], epochs: int) -> str:
    apart = [results.apart(case, budget) for budget in results.budgets for case in CASES]
    better, worse = sum(found.high < 0 for found in apart), sum(found.low > 0 for found in apart)
    sentences = [
        f"Of {len(apart)} comparisons with the serial run the cases are more accurate in {better} and less accurate in "
        f"{worse} (the 95 % interval of the paired difference excludes 0; where nothing differs, 1 in 20 does).",
        _overfitting(results),
        *(_under(results, budget) for budget in results.budgets),
        "A control matches a difference if it differs from the serial run the same way and the case can't be told from "
        f"it. Gradients in the cases are {_staleness(results):.2f} updates old on average.",
        _job(job, epochs),
    ]
    return wrap(" ".join(sentences))


def job_row(setup: Setup, job: Mapping[Setup, Sequence[float]]) -> dict[str, str]:
    """Make a row of the job's table."""
    apart = difference(job[setup], job[JOB_REFERENCE])
    marked = "" if setup is JOB_REFERENCE else f"{apart:+.3f}{'*' * excludes(apart, 0)}"
    return {"": setup.name, "RMSE": f"{interval(job[setup]):.3f}", f"minus {JOB_REFERENCE.name}": marked}


def explanation(case: Sequence[float], reference: Sequence[float], controls: Mapping[str, Sequence[float]]) -> str:
    """Tell whether runs of a case and of a reference differ, and which controls differ from the reference alike."""
    apart = difference(case, reference)
    if not excludes(apart, 0):
        return "cannot be told from 0"
    found = "more accurate, " if apart.mean < 0 else "less accurate, "
    rest = {name: difference(case, values) for name, values in controls.items()}
    own = {name: difference(values, reference) for name, values in controls.items()}
    nearest = sorted(rest, key=lambda name: abs(rest[name].mean))
    alike = [name for name in nearest if excludes(own[name], 0) and own[name].mean * apart.mean > 0]
    matching = [name for name in alike if not excludes(rest[name], 0)]
    if not matching:
        name = nearest[0]
        left = f"the nearest, {name}: {own[name]:+.3f}, leaves {rest[name]:+.3f}"
        return f"{found}matched by no control ({left})"
    return found + "matched by " + " and by ".join(f"{name} ({own[name]:+.3f})" for name in matching)


def _under(results: Results, budget: Budget) -> str:
    told = []
    for number, case in enumerate(CASES, 1):
        compared = [control for control in case.controls() if control in budget.protocols()]
        controls = {control.name: results.rmse(control, budget) for control in compared}
        text = explanation(results.rmse(case, budget), results.rmse(SERIAL, budget), controls)
        told.append(f"case {number} {results.apart(case, budget):+.3f}, {text}")
    return f"With {budget.name}: {'; '.join(told)}."


def _overfitting(results: Results) -> str:
    """Tell how the serial run itself goes on: what more updates do."""
    curves = list(map(curve, results.runs[SERIAL.training]))
    means = {clock: fmean(curve[clock] for curve in curves) for clock in curves[0]}
    lowest = min(means, key=means.__getitem__)
    later = 2 * results.steps
    return (
        f"The serial run's RMSE is {means[results.steps]:.3f} after its {results.steps:,} steps, was lowest after "
        f"{lowest:,} ({means[lowest]:.3f}), and would be {means[later]:.3f} after {later:,}."
    )


def _staleness(results: Results) -> float:
    return fmean(run.summary.staleness.mean for case in CASES for run in results.runs[case.training])


def _job(job: Mapping[Setup, Sequence[float]], epochs: int) -> str:
    means = {setup: f"{interval(values):.3f}" for setup, values in job.items()}
    controls = {control.name: job[control] for control in JOB_CONTROLS}
    return (
        f"The job as it is (Adam with a falling rate, batch {JOB_CASE.batch} per worker, {epochs} epochs) ends at "
        f"{means[JOB_CASE]} with {JOB_CASE.name} and at {means[JOB_REFERENCE]} with {JOB_REFERENCE.name}, a difference "
        f"of {difference(job[JOB_CASE], job[JOB_REFERENCE]):+.3f}: the server is "
        f"{explanation(job[JOB_CASE], job[JOB_REFERENCE], controls)}."
    )


# --- the study --------------------------------------------------------------------------------------------------------
def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, results and the answer.")] = Path("runs/regression"),
    quick: Annotated[bool, typer.Option(help="Few steps and two seeds: how it works, and no answer.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Make the runs that are missing, and say what they show."""
    steps, seeds, epochs = (100, 2, 2) if quick else (10_000, 5, job.defaults["epochs"])
    results, study = Results(steps, seeds), Study(output)
    wanted: dict[Protocol | Setup, ComparedGroup] = {**results.groups()}
    wanted |= {setup: setup.declare(epochs) for setup in JOB_SETUPS}
    settings = {"data": {"path": str(output / "friedman1.h5")}}
    with GroupRuns(JOB, output, workers, settings=settings, cluster={"network": NETWORK}) as groups:
        found = groups.make(wanted, range(seeds))
    results.runs = {one: of_one for one, of_one in found.items() if isinstance(one, Protocol)}
    of_job = {setup: [run.summary.metrics["rmse"] for run in found[setup]] for setup in JOB_SETUPS}

    title = f"RMSE on the test set, SGD at rate {RATE}, {seeds} seeds, 95 % intervals; in brackets minus the serial"
    study.table(f"{title} run's, * where that excludes 0", results.rows())
    study.table(f"The job as it is, {epochs} epochs", [job_row(setup, of_job) for setup in JOB_SETUPS])
    print(answer := paragraph(results, of_job, epochs))
    parts = [*(f"{name}:\n\n{markdown(rows)}" for name, rows in study.tables.items()), answer]
    study.file("answer.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    study.end([run for of_one in found.values() for run in of_one], steps=steps, answer=answer)


if __name__ == "__main__":
    start(main)
