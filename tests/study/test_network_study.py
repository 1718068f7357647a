"""The job on slow networks: run as a user would on two hosts, and what it says of numbers made up."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from harness import studies
from harness.cases import each
from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.config.merge import load as load_settings
from hpcdist.records import Evaluation, RecordWriter, StepRecord, load_summary, read_evaluations, record_path
from hpcdist.tools.compare.folder import read
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.simulate.cluster import ClusterConfig
from hpcdist.tools.simulate.launcher import Simulation
from study.pretended import ended

STUDY = "network"
TIME_LIMIT_S = 600  # it takes 50 s on two free cores

pytestmark = pytest.mark.time_limit(TIME_LIMIT_S)


def start(output: Path, **env: str):
    return studies.start("network", output, "--hosts", "2", limit_s=TIME_LIMIT_S, **env)


@pytest.mark.alone
@pytest.mark.extended
def test_the_quick_job_as_a_user_runs_it(study, tmp_path):
    if reason := study.why_not(study.Cable(100)):
        pytest.skip(reason)
    job = start(tmp_path)
    assert job.returncode == 0, job.stderr
    runs = {run["name"].split(",")[0]: run for run in read(tmp_path)["runs"]}
    assert set(runs) == set(study.SETUPS)
    for run in runs.values():
        found, settings = load_summary(tmp_path / run["folder"]), load_settings({}, None, run["set"])
        looks = read_evaluations(tmp_path / run["folder"])
        seconds, accuracies = [look.seconds for look in looks], [look.metrics["accuracy"] for look in looks]
        assert [look.step for look in looks] == list(range(settings["every"], looks[-1].step + 1, settings["every"]))
        assert seconds == sorted(seconds) and found.wall_s == seconds[-1]
        assert accuracies[-1] >= settings["target"] or looks[-1].step >= settings["limit"]
        assert all(accuracy < settings["target"] for accuracy in accuracies[:-1])
        assert found.latency_s > 0 and 50e6 / 8 < found.bandwidth_bytes_s < 110e6 / 8, "the cable's 100 Mbit/s"
    dense = load_summary(tmp_path / runs["allreduce"]["folder"])
    steps = read_evaluations(tmp_path / runs["allreduce"]["folder"])[-1].step
    n_bytes = 4 * (65 * 1000 + 1001 * 1000 + 1001 * 10)
    assert dense.metrics["accuracy"] >= study.QUICK.target
    assert dense.bytes_per_step == pytest.approx(n_bytes, rel=1e-3), "2n(p − 1)/p"
    assert dense.wall_s / steps > n_bytes * 8 / 110e6, "all of it went through the cables"

    with open(tmp_path / "table.csv") as file:
        table = {row["setup"]: row for row in csv.DictReader(file)}
    assert 0.75 < float(table["allreduce"]["ratio"]) < 1.25, "the virtual cluster's prediction of the step time"
    assert float(table["strom"]["MB/step"]) < 0.05 * float(table["allreduce"]["MB/step"])
    assert "predicted" in job.stdout and (tmp_path / "claims.txt").read_text() in job.stdout + "\n"
    assert (tmp_path / "network.png").stat().st_size > 10_000

    before = studies.made(tmp_path)
    again = start(tmp_path)
    assert again.returncode == 0 and again.stdout == job.stdout
    assert studies.made(tmp_path) == before, "finished runs are not made again"


def test_where_there_are_no_tools_it_ends_with_one_message(study, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="error: this job must be able to make hosts on this machine; "):
        study.main(tmp_path / "out", quick=True, slowest=False)
    assert not (tmp_path / "out").exists()


# --- what it foretells: networks measured as they are, steps as long as they must be ---------------------------------
@each("size", [2, 3])
def test_a_network_is_measured_as_it_is(training, size):
    network = Network(latency_s=5e-3, bandwidth_bytes_s=12e6)
    for found in run_virtual(lambda comm: training.measure_network(comm, 10), size, network=network):
        assert found["latency_s"] == pytest.approx(5e-3, rel=1e-3)
        assert found["bandwidth_bytes_s"] == pytest.approx(12e6, rel=0.03)


def test_a_step_takes_as_long_as_computing_and_a_ring(study, tmp_path):
    computing_s = [[0.1, 0.2, 0.1, 0.4], [0.3, 0.2, 0.1, 0.1]]  # of each rank; the slower one counts
    for rank, seconds in enumerate(computing_s):
        with RecordWriter(record_path(tmp_path / "real", rank)) as writer:
            for step, computing in enumerate(seconds, 1):
                writer.write(StepRecord(step, computing_s=computing))
    real = ended([Evaluation(4, 0, 64, 1.0, {"accuracy": 0.9})], latency_s=1e-3, bandwidth_bytes_s=1e6)
    scale = study.Scale(hidden=200, batch=8)
    group = scale.predicted(study.Cable(), study.DENSE, replace(real, folder=tmp_path / "real"))
    run = PlannedRun(group.name, "strategy", 2, 0, (*group.settings, "seed=0"), "run", group.cluster, group.loop)
    (tmp_path / "run").mkdir()
    Simulation(str(study.JOB), ClusterConfig(compute="0s"), 1, {}).train(run, tmp_path / "run")
    found = load_summary(tmp_path / "run")
    n_bytes = 4 * (65 * 200 + 201 * 200 + 201 * 10)
    assert load_settings({}, None, group.settings)["steps"] == 4 and found.samples == 4 * 2 * 8
    assert found.bytes_per_step == pytest.approx(n_bytes, rel=0.01), "2n(p − 1)/p"
    expected_s = (0.3 + 0.2 + 0.1 + 0.4) / 4 + 2 * (1e-3 + n_bytes / 2 / 1e6)
    assert found.wall_s / 4 == pytest.approx(expected_s, rel=0.05)


# --- what it says -----------------------------------------------------------------------------------------------------
def outcome(study, setup: str, train_s: float, predicted: float, mbit_s: float | None = 100, reached: bool = True):
    """A run of ten steps in two looks."""
    looks = [(5, 0.6 * train_s, 0.5), (10, train_s, 0.95 if reached else 0.6)]
    curve = [Evaluation(step, 0, 64 * step, seconds, {"accuracy": right}) for step, seconds, right in looks]
    measured = {"wall_s": train_s, "bytes_per_step": 4e6, "latency_s": 1e-3, "bandwidth_bytes_s": 12e6}
    run, ahead = ended(curve, {"target": 0.9}, **measured), ended(wall_s=10 * predicted)
    return study.Outcome(study.Cable(mbit_s), setup, [run], ahead)


def test_the_table_and_the_answers(study):
    found = study.Results(
        [
            outcome(study, "allreduce", 50.0, 5.0),
            outcome(study, "strom", 5.0, 0.51),
            outcome(study, "sgp", 30.0, 3.9, reached=False),
            outcome(study, "allreduce", 4.0, 0.2, mbit_s=1000),
            outcome(study, "strom", 4.0, 0.4, mbit_s=1000),
        ]
    )
    rows = list(found.rows())
    assert [row["target [s]"] for row in rows] == ["50.00", "5.00", "not reached", "4.00", "4.00"]
    assert [row["sooner"] for row in rows] == ["1.0 x", "10.0 x", "", "1.0 x", "1.0 x"]
    assert [row["- s"] for row in rows][:2] == ["20.00", "2.00"]
    assert [row["ratio"] for row in rows] == ["1.00", "1.02", "1.30", "0.50", "1.00"]
    text = "\n\n".join(found.paragraphs()).replace("\n", " ")
    assert "At 100 Mbit/s one strategy reaches the target 5 times sooner than dense all-reduce: SHOWN." in text
    assert "Times sooner: strom 10.0." in text and "1 Gbit/s one strategy" not in text
    assert "is within 25% of the measured one: SHOWN IN PART, for 3 of 5." in text
    assert "where not: sgp at 100 Mbit/s 1.30; allreduce at 1 Gbit/s 0.50." in text
    assert [row["bandwidth [Mbit/s]"] for row in found.network_rows()] == ["96.0", "96.0"]


def test_several_seeds_have_a_geometric_mean_and_an_interval(study):
    one, other = (outcome(study, "allreduce", seconds, 5.0) for seconds in (40.0, 62.5))
    between = outcome(study, "allreduce", 50.0, 5.0)
    found = study.Results([replace(one, runs=[one.run, other.run, between.run]), outcome(study, "strom", 5.0, 0.5)])
    dense, strom = found.rows()
    assert dense["target [s]"] == "50.00" and strom["sooner"] == "10.0 x"
    low, high = map(float, dense["95 %"].split(" to "))
    assert low * high == pytest.approx(50.0**2, rel=0.01) and low < 40 and strom["95 %"] == ""
    short = outcome(study, "allreduce", 70.0, 5.0, reached=False)
    assert replace(one, runs=[one.run, short.run]).target_s is None, "a seed that never got there"


def test_a_race_that_nobody_wins(study):
    slow = [outcome(study, "allreduce", 50.0, 9.0), outcome(study, "strom", 11.0, 9.0)]
    text = "\n\n".join(study.Results(slow).paragraphs()).replace("\n", " ")
    assert "than dense all-reduce: NOT SHOWN. Times sooner: strom 4.5." in text
    assert "of the measured one: NOT SHOWN, for 0 of 2." in text
    none = [outcome(study, "allreduce", 50.0, 5.0, reached=False), outcome(study, "strom", 11.0, 1.1)]
    text = "\n\n".join(study.Results(none).paragraphs()).replace("\n", " ")
    assert "NOT SHOWN. Times sooner: none, as they or all-reduce did not reach it." in text
    assert "of the measured one: SHOWN, for 2 of 2." in text
