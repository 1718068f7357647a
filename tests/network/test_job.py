"""The job on slow networks: run as a user would on two hosts, and what it says of numbers made up."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.study import Run

JOB = Path(__file__).parents[2] / "jobs" / "network.py"
TIME_LIMIT_S = 600  # it takes 50 s on two free cores

pytestmark = pytest.mark.time_limit(TIME_LIMIT_S)


def start(output: Path, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, JOB, "--quick", "--hosts", "2", "--workers", "2", "--output", output]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIME_LIMIT_S - 20, env={**os.environ, **env}
    )


@pytest.fixture
def study(kit):
    """The modules of the study."""
    from network_study import results, setups

    return setups, results


@pytest.mark.alone
def test_the_quick_job_as_a_user_runs_it(kit, study, tmp_path):
    setups, _ = study
    if reason := kit.why_not(kit.Cable(100)):
        pytest.skip(reason)
    job = start(tmp_path)
    assert job.returncode == 0, job.stderr
    runs = [Run(**json.loads(line)) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [run.settings["setup"] for run in runs] == list(setups.SETUPS)
    for run in runs:
        found, settings = run.measured, run.settings
        steps, seconds, accuracies = zip(*found["curve"], strict=True)
        assert list(steps) == list(range(settings["every"], found["steps"] + 1, settings["every"]))
        assert list(seconds) == sorted(seconds) and found["train_s"] == seconds[-1]
        assert found["reached"] == (accuracies[-1] >= settings["target"])
        assert all(accuracy < settings["target"] for accuracy in accuracies[:-1])
        assert 0 < found["latency_s"] and 50e6 / 8 < found["bandwidth_bytes_s"] < 110e6 / 8, "the cable's 100 Mbit/s"
    dense = runs[0].measured
    n_bytes = 4 * (65 * 1000 + 1001 * 1000 + 1001 * 10)
    assert dense["reached"] and dense["bytes_per_step"] == pytest.approx(n_bytes, rel=1e-3), "2n(p − 1)/p"
    assert dense["step_s"] > n_bytes * 8 / 110e6, "all of it went through the cables"

    with open(tmp_path / "table.csv") as file:
        table = {row["setup"]: row for row in csv.DictReader(file)}
    assert 0.75 < float(table["allreduce"]["ratio"]) < 1.25, "the virtual cluster's prediction of the step time"
    assert float(table["strom"]["MB/step"]) < 0.05 * float(table["allreduce"]["MB/step"])
    assert "predicted" in job.stdout and (tmp_path / "claims.txt").read_text() in job.stdout + "\n"
    assert (tmp_path / "network.png").stat().st_size > 10_000

    before = (tmp_path / "runs.jsonl").read_bytes()
    again = start(tmp_path)
    assert again.returncode == 0 and again.stdout == job.stdout
    assert (tmp_path / "runs.jsonl").read_bytes() == before, "finished runs are not made again"


def test_where_there_are_no_tools_it_ends_with_one_message(tmp_path):
    job = start(tmp_path / "out", PATH=str(tmp_path))
    assert job.returncode == 1 and job.stdout == ""
    (line,) = job.stderr.splitlines()
    assert line.startswith("error: this job must be able to make hosts on this machine; ")
    assert not (tmp_path / "out").exists()


# --- what it says -----------------------------------------------------------------------------------------------------
def outcome(results, setup: str, train_s: float, predicted: float, mbit_s: float | None = 100, reached: bool = True):
    """A run of ten steps in two looks."""
    settings = {"setup": setup, "network": {"mbit_s": mbit_s, "delay_ms": 0.0}, "target": 0.9}
    curve = [[5, 0.6 * train_s, 0.5], [10, train_s, 0.95 if reached else 0.6]]
    measured = {"steps": 10, "train_s": train_s, "step_s": train_s / 10, "curve": curve, "reached": reached}
    measured |= {"bytes_per_step": 4e6, "latency_s": 1e-3, "bandwidth_bytes_s": 12e6}
    return results.Outcome(Run(settings, measured), Run({}, {"step_s": predicted}))


def test_the_table_and_the_answers(study):
    _, results = study
    found = results.Results(
        [
            outcome(results, "allreduce", 50.0, 5.0),
            outcome(results, "strom", 5.0, 0.51),
            outcome(results, "sgp", 30.0, 3.9, reached=False),
            outcome(results, "allreduce", 4.0, 0.2, mbit_s=1000),
            outcome(results, "strom", 4.0, 0.4, mbit_s=1000),
        ]
    )
    rows = list(found.rows())
    assert [row["target [s]"] for row in rows] == ["50.00", "5.00", "not reached", "4.00", "4.00"]
    assert [row["sooner"] for row in rows] == ["1.0 x", "10.0 x", "", "1.0 x", "1.0 x"]
    assert [row["- s"] for row in rows][:2] == ["20.00", "2.00"]
    assert [row["ratio"] for row in rows] == ["1.00", "1.02", "1.30", "0.50", "1.00"]
    text = found.text().replace("\n", " ")
    assert "At 100 Mbit/s one strategy reaches the target 5 times sooner than dense all-reduce: SHOWN." in text
    assert "Times sooner: strom 10.0." in text and "1 Gbit/s one strategy" not in text
    assert "is within 25% of the measured one: SHOWN IN PART, for 3 of 5." in text
    assert "where not: sgp at 100 Mbit/s 1.30; allreduce at 1 Gbit/s 0.50." in text
    assert [row["bandwidth [Mbit/s]"] for row in found.network_rows()] == ["96.0", "96.0"]


def test_a_race_that_nobody_wins(study):
    _, results = study
    slow = [outcome(results, "allreduce", 50.0, 9.0), outcome(results, "strom", 11.0, 9.0)]
    text = results.Results(slow).text().replace("\n", " ")
    assert "than dense all-reduce: NOT SHOWN. Times sooner: strom 4.5." in text
    assert "of the measured one: NOT SHOWN, for 0 of 2." in text
    none = [outcome(results, "allreduce", 50.0, 5.0, reached=False), outcome(results, "strom", 11.0, 1.1)]
    text = results.Results(none).text().replace("\n", " ")
    assert "NOT SHOWN. Times sooner: none, as they or all-reduce did not reach it." in text
    assert "of the measured one: SHOWN, for 2 of 2." in text
