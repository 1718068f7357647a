"""Jobs on virtual ranks: the cluster as it is described, its seconds in all files, and runs that are made once."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cases import each
from harness.launch import IMPORTS, wait_until
from hpcdist.comm.virtual import Constant, Exponential, Jitter, Network, SlowSteps, Straggler
from hpcdist.comm.virtual.compute import describe
from hpcdist.errors import ConfigError, RunError
from hpcdist.records import (
    RecordWriter,
    StepRecord,
    load_run,
    load_summary,
    read_evaluations,
    read_records,
    record_path,
)
from hpcdist.tools import cli
from hpcdist.tools.compare import run_all
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.simulate.cluster import ClusterConfig, bytes_per_second, read_cluster, seconds
from hpcdist.tools.simulate.launcher import Simulation, VirtualLauncher
from hpcdist.tools.simulate.step_time import measure_step
from hpcdist.train.runs import specify

JOB = """
import dataclasses
from train import tiny

job = dataclasses.replace(tiny.job, defaults={**tiny.job.defaults, "data": {"path": "digits.h5"}})
"""

# Its loss waits from the tenth step of a rank on, for as long as there is a file `wait`.
WAITING = JOB.replace("import dataclasses", "import dataclasses, itertools, pathlib, time").replace(
    "job = dataclasses.replace(tiny.job, ",
    """
calls = itertools.count()


def loss(outputs, targets):
    while next(calls) > 8 and pathlib.Path("wait").exists():
        time.sleep(0.01)
    return tiny.job.loss(outputs, targets)


job = dataclasses.replace(tiny.job, loss=loss, """,
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tiny_job.py").write_text(JOB)
    return tmp_path


def hpcdist(*arguments: str) -> int:
    return cli._run([*arguments], True)


# --- a cluster in words -----------------------------------------------------------------------------------------------
def test_times_and_bandwidths_have_units():
    assert [seconds(text, "x") for text in ("50us", "20 ms", "1.5s", "3e-3", "7ns", "2µs")] == pytest.approx(
        [5e-5, 2e-2, 1.5, 3e-3, 7e-9, 2e-6]
    )
    assert [bytes_per_second(text, "x") for text in ("10Gbit/s", "1.25 GB/s", "2MiB/s", "8bit/s", "inf")] == (
        pytest.approx([1.25e9, 1.25e9, 2 * 2**20, 1.0, math.inf])
    )


def test_a_cluster_is_read_from_a_file_and_from_flags():
    Path("fast.toml").write_text('network = "1us,100Gbit/s"\nranks_per_node = 4\nintra_network = "0,inf"\n')
    cluster = read_cluster(Path("fast.toml"), None, "straggler:2,4,jitter:20ms,0.2")
    assert cluster.links() == Network(1e-6, 1.25e10, 4, 0.0, math.inf)
    assert cluster.steps(lambda given: given) == Straggler(Jitter(0.02, 0.2), 2, 4.0)
    assert read_cluster(None, None, None).steps(lambda given: given or 0.5) == Constant(0.5)
    assert read_cluster(None, None, "exponential:measured").steps(lambda given: given or 0.5) == Exponential(0.5)
    slow = read_cluster(None, None, "slow:0.01,4,jitter:20ms,0.2").steps(lambda given: given)
    assert slow == SlowSteps(Jitter(0.02, 0.2), 0.01, 4.0)
    assert read_cluster(Path("fast.toml"), "5us,1Gbit/s", None).links().latency_s == pytest.approx(5e-6)


@each(
    "case",
    [
        ("50us", None, "network must be LATENCY,BANDWIDTH; got '50us'. Write it as 50us,10Gbit/s."),
        ("50,10Gb/s", None, "bandwidth of network must be a bandwidth in bit/s or B/s, with k, M or G before it"),
        ("5 parsecs,inf", None, "latency of network must be a time in ns, us, ms or s; got '5 parsecs'."),
        (None, "gamma:20ms", "compute must be measured, SECONDS, constant:SECONDS, jitter:SECONDS,CV"),
        (None, "jitter:20ms", "compute must be measured, SECONDS"),
        (None, "jitter:20ms,much", "the CV of compute must be a number; got 'much'."),
        (None, "slow:2,4,20ms", "probability must be a number from 0 to 1; got 2.0"),
        (None, "slow:few,4,20ms", "the part of slow steps must be a number; got 'few'."),
        (
            None,
            "replay:nowhere",
            "compute must be replay:RUN with a run's folder; got 'replay:nowhere', which does not exist",
        ),
        (None, "20 minutes", "compute must be a time in ns, us, ms or s; got '20 minutes'."),
    ],
)
def test_what_can_not_be_read_is_refused(case):
    network, compute, message = case
    with pytest.raises(ConfigError, match=message):
        read_cluster(None, network, compute)


def test_steps_take_as_long_as_in_another_run():
    for rank, of_rank in enumerate([(0.5, 0.25), (2.0,)]):
        with RecordWriter(record_path("run", rank)) as writer:
            for step, computing_s in enumerate(of_rank, 1):
                writer.write(StepRecord(step, computing_s=computing_s))
    model = ClusterConfig(compute="replay:run").steps(lambda given: given)
    assert [model.sample(0, None) for _ in range(3)] == [0.5, 0.25, 0.5] and model.sample(1, None) == 2.0
    assert describe(model) == {"model": "Replay", "source": "run"}
    twice = ClusterConfig(compute="replay:run").steps(lambda given: 2 * given)
    assert [twice.sample(0, None) for _ in range(2)] == [1.0, 0.5], "a control's batch takes longer in proportion"
    assert ClusterConfig(compute="replay:run").described() == "replay:run"
    model.check(2)
    with pytest.raises(ConfigError, match="ranks of Replay must be at most the 2 of run; got 3"):
        model.check(3)


def test_a_step_of_more_samples_takes_longer():
    given = Simulation("tiny_job.py", ClusterConfig(compute="20ms"), 16, {})
    measured = Simulation("tiny_job.py", ClusterConfig(), 16, {16: 0.002, 64: 0.004})
    assert given._step_s(0.02, 64) == pytest.approx(0.08)
    assert [measured._step_s(None, samples) for samples in (16, 64, 128)] == [0.002, 0.004, 0.008]
    assert "steps: 5 (5 s), for 16 samples" in str(Simulation("tiny_job.py", ClusterConfig(compute="5"), 16, {}))
    assert "16 samples" in str(given) and "4 ms for 64 samples, as measured here" in str(measured)


def test_the_step_of_a_job_is_measured():
    job, config = specify(Path("tiny_job.py"), None, ["accumulation=2"])
    job.data(Path(config.data.path))
    assert 0 < measure_step(job, config, 32) < 1.0
    assert measure_step(job, config, 100 * 359) > measure_step(job, config, 359), "more than there are"


# --- the command ------------------------------------------------------------------------------------------------------
COMPUTE = "slow:0,2,straggler:3,2,10ms"  # no step is slow, and the controls have no rank 3
ARGUMENTS = ("tiny_job.py", "--ranks", "4", "--strategies", "allreduce,parameter_server", "--budget", "samples=700")
CLUSTER = ("--network", "1ms,1Gbit/s", "--target", "accuracy=0.3", "--output", "out", "--compute", COMPUTE)


def test_a_job_is_simulated_and_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(run_all, "find_spec", lambda name: None)  # no report: it takes seconds
    assert hpcdist("simulate", *ARGUMENTS, *CLUSTER, "--workers", "1") == 0
    out, said = capsys.readouterr()
    assert f"steps: {COMPUTE} (0.01 s), for 16 samples" in said and "5 of 5" in said
    names = [line.split("  ")[0].strip() for line in out.splitlines()]
    assert {"allreduce", "parameter_server", "one rank", "serial, batch 64"} <= set(names)
    assert "speedup" in out and "to 0.3" in out and "on virtual ranks" in out and "staleness" in out

    alone, four = load_summary("out/runs/serial-r1-s0"), load_summary("out/runs/allreduce-r4-s0")
    assert alone.wall_s == pytest.approx(45 * 0.01), "of 16 samples each; the straggler is no rank of these"
    assert 12 * 0.02 < four.wall_s < 12 * 0.02 + 2 and four.seconds.communicating > 0
    assert load_summary("out/runs/serial-batch=64-r1-s0").wall_s == pytest.approx(12 * 0.04)
    assert load_summary("out/runs/parameter_server-r4-s0").staleness.max > 0
    virtual = load_run("out/runs/allreduce-r4-s0").virtual
    assert virtual["network"]["bandwidth_bytes_s"] == 1.25e8 and virtual["compute"]["base"]["model"] == "Straggler"
    assert read_evaluations("out/runs/allreduce-r4-s0")[-1].seconds == four.wall_s
    found = json.loads(Path("out/comparison.json").read_text())
    assert found["virtual"]["compute"] == COMPUTE and found["virtual"]["samples"] == 16
    made = Path("out/runs/serial-r1-s0/summary.json").stat().st_mtime_ns
    assert hpcdist("simulate", "--output", "out", "--workers", "1") == 0
    assert "5 of 5 runs are there already" in capsys.readouterr().err
    assert Path("out/runs/serial-r1-s0/summary.json").stat().st_mtime_ns == made

    assert hpcdist("compare", "--output", "out") == 1
    assert "--output must hold a comparison on real ranks; got out, on virtual ones." in capsys.readouterr().err
    content = {**found, "declared": {**found["declared"], "virtual": None}}
    Path("out/comparison.json").write_text(json.dumps(content))
    assert hpcdist("simulate", "--output", "out") == 1
    assert "--output must hold a comparison on virtual ranks; got out, on real ones." in capsys.readouterr().err
    assert hpcdist("simulate", "--strategies", "allreduce") == 1
    assert "JOB must be given to start a simulation; got none." in capsys.readouterr().err


def test_measured_times_are_kept_with_the_folder_and_a_straggler_must_be_a_rank(monkeypatch, capsys):
    monkeypatch.setattr(run_all, "find_spec", lambda name: None)
    arguments = ("simulate", "tiny_job.py", "--no-controls", "--ranks", "2", "--set", "epochs=1", "--output", "out")
    assert hpcdist(*arguments) == 0
    first = json.loads(Path("out/comparison.json").read_text())["virtual"]["step_s"]
    assert list(first) == ["16"] and "as measured here with one thread" in capsys.readouterr().err
    assert hpcdist(*arguments) == 0
    assert json.loads(Path("out/comparison.json").read_text())["virtual"]["step_s"] == first
    assert hpcdist("simulate", "tiny_job.py", "--ranks", "2", "--compute", "straggler:2,4,1ms") == 1
    assert "rank of Straggler must be one of the run's 2 ranks" in capsys.readouterr().err


# --- processes --------------------------------------------------------------------------------------------------------
def test_runs_in_processes_are_those_made_here(here):
    simulation = Simulation(str(here / "tiny_job.py"), ClusterConfig(compute="jitter:10ms,0.3"), 16, {})
    job, config = specify(here / "tiny_job.py", None, [])
    job.data(Path(config.data.path))
    overrides = (f"data.path={here}/digits.h5", "epochs=1")
    run = PlannedRun("allreduce", "strategy", 2, 0, overrides, "run")
    VirtualLauncher(simulation).run(run, here / "by-one")
    with VirtualLauncher(simulation, workers=2) as beside:
        beside.run(run, here / "by-two")
        with pytest.raises(RunError, match="run bad on virtual ranks failed: .*strategy must be one of"):
            beside.run(PlannedRun("x", "strategy", 2, 0, (*overrides, "strategy=gosip"), "bad"), here / "bad")
    assert load_summary(here / "by-two") == load_summary(here / "by-one")


def _group(leader: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        found += [int(stat.parent.name)] * (int(group) == leader and state != "Z")
    return found


def test_an_interrupted_simulation_ends_its_processes_and_goes_on(monkeypatch, capsys):
    Path("tiny_job.py").write_text(WAITING)
    Path("wait").touch()
    arguments = ["simulate", "tiny_job.py", "--ranks", "2", "--strategies", "allreduce,gossip_pull", "--no-controls"]
    arguments += ["--compute", "10ms", "--set", "epochs=1", "--set", "checkpoint.every_steps=4", "--workers", "2"]
    command = [sys.executable, "-m", "hpcdist", *arguments, "--output", "out"]
    with open("log", "wb") as log:
        first = subprocess.Popen(command, env={**os.environ, **IMPORTS}, stderr=log, start_new_session=True)
        made = "runs/*/checkpoints/step-????????/manifest.json"  # none that is being written
        wait_until(lambda: len({p.parts[2] for p in Path("out").glob(made)}) == 2 or first.poll() is not None, 120)
        assert len(_group(first.pid)) >= 3
        os.killpg(first.pid, signal.SIGTERM)  # to all of them; SIGINT may be ignored where tests run in the background
        assert first.wait(100) == 130
    wait_until(lambda: not _group(first.pid))
    said = Path("log").read_text()
    assert "`hpcdist simulate --output out` resumes it" in said and "Traceback" not in said
    assert not list(Path("out").glob("runs/*/failure.txt"))

    Path("wait").unlink()
    monkeypatch.setattr(run_all, "find_spec", lambda name: None)
    assert hpcdist("simulate", "--output", "out", "--workers", "1") == 0, capsys.readouterr()
    for name in ("allreduce", "gossip_pull"):
        folder = Path("out/runs") / f"{name}-r2-s0"
        assert [record.step for record in read_records(folder)[1]] == list(range(1, 13))
        assert load_run(folder).last.went_on_from is not None
