"""`tests/gpu.sh` where there is no GPU: it measures the CPU instead, so that it works where there is one."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks.compress import CONFIGS
from comm.jobs_here import clean_environment
from gpu import report, run
from harness.launch import commands, find_mpirun, wait_until

ROOT = Path(__file__).parents[2]


def session(folder: Path, **changes) -> run.Session:
    options = {"output": folder / "out", "wheels": None, "seconds": 60.0, "device": "cpu", "quick": True}
    (folder / "run").mkdir()
    return run.Session(argparse.Namespace(**{**options, **changes}), folder / "run")


@pytest.mark.extended
@pytest.mark.time_limit(500)
@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
def test_all_of_it_runs_on_the_cpu(tmp_path):
    command = ["bash", ROOT / "tests" / "gpu.sh", "--quick", "--device", "cpu", "--output", tmp_path]
    environment = clean_environment(PYTHON=sys.executable, PYTHONPATH=str(ROOT))  # DDP needs torch's compiler
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("gpu-*.json")
    found = json.loads(path.read_text())
    parts = {part["name"]: part for part in found["parts"]}
    skipped = {name: part["reason"] for name, part in parts.items() if part["state"] == "skipped"}
    assert skipped == {"horovod_build": "it is built by tests/run.sh on machines without a GPU"}
    assert list(parts) == [
        "environment", "ranks", "tests", "tests_on_ranks", "loops", "horovod_build", "steps", "messages",
        "coding", "horovod",
    ]  # fmt: skip
    assert found["missing"] == [] and found["seconds"] < 480 and found["environment"]["torch"]
    for name in ("tests", "tests_on_ranks"):
        assert " passed" in parts[name]["output"] and "skipped" not in parts[name]["output"]
    assert "stages\na_job\n" in parts["loops"]["output"]
    steps = {row["name"]: row for row in parts["steps"]["rows"]}
    sides = ("alone", "ddp_gloo", "allreduce", "parameter_server", "gossip_pull", "allreduce_gloo")
    assert list(steps) == [f"small/{side}" for side in sides]
    assert all(row["ranks"] == 2 and row["median_s"] > 0 and row["speedup"] > 0 for row in steps.values())
    names = [row["name"] for row in parts["coding"]["rows"]]
    assert names[0] == "copy" and {*names[1:]} == {*CONFIGS}
    assert [row["name"] for row in parts["messages"]["rows"]] == ["sendrecv/host", "allreduce/host"] * 2
    assert "GPU-aware MPI is left out: torch finds no CUDA device." in parts["messages"]["notes"]
    text = path.with_suffix(".md").read_text()
    for line in ("# ", "| small/gossip_pull |", "## Compressors", "GPU-aware MPI is left out", " passed"):
        assert line in text


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    one = session(tmp_path)
    start = time.monotonic()
    part = one.run("tests", ["bash", "-c", "setsid sleep 77.0123 & echo begun; sleep 77"], 0.8)  # times three
    assert time.monotonic() - start < 30
    assert (part["state"], part["reason"], part["output"]) == ("late", "took longer than 2 s", "begun\n")
    wait_until(lambda: not any("77.0123" in command for command in commands()))
    assert "late: took longer" in one.path.with_name(one.path.name + ".md").read_text()


def test_parts_after_a_failure_go_on_until_there_is_no_time_left(tmp_path):
    one = session(tmp_path)
    assert one.run("tests", ["bash", "-c", "echo no such thing; exit 3"], 20)["reason"] == "exit status 3"
    assert one.run("steps", ["true"], 20)["state"] == "done"
    one.options.seconds = 1.0
    assert one.run("coding", ["true"], 20)["reason"] == "there is no time left"
    one.found["environment"] = {"gpus": [{"name": "a GPU", "gib": 80.0}], "problems": {"mpi": "none"}}
    text = report.markdown(one.found)
    assert "| tests | failed |" in text and "no such thing" in text and "a GPU (80.0 GiB)" in text
    assert "skipped: there is no time left" in text


def test_wheels_bring_what_is_missing_and_the_rest_is_named(tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("hpcdist_none_such", "numpy"):  # the latter is there, and stays
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            folder = f"{name}-1.0.dist-info"
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{folder}/RECORD", "")
    one = session(tmp_path)
    monkeypatch.setattr(run, "required", lambda: ["numpy", "hpcdist-none-such", "hpcdist-nowhere"])
    assert run.missing(one) == ["hpcdist-none-such", "hpcdist-nowhere"]
    assert run.take_wheels(one, wheels) == ["hpcdist_none_such-1.0-py3-none-any.whl"]
    assert run.missing(one) == ["hpcdist-nowhere"]
    one.found |= {"missing": ["hpcdist-nowhere"], "environment": {}}
    assert "**missing packages**: hpcdist-nowhere" in report.markdown(one.found)


def test_the_project_says_what_it_needs():
    assert {"torch", "mpi4py", "h5py", "pydantic", "constriction", "pytest", "hypothesis"} <= set(run.required())
    assert "tomli" not in run.required()


def test_without_a_launcher_its_parts_are_skipped(tmp_path):
    one = session(tmp_path)
    (tmp_path / "bin").mkdir()
    one.environ["PATH"] = str(tmp_path / "bin")
    assert run.find_launcher(one) == "there is neither mpirun nor mpiexec"
    (tmp_path / "bin" / "mpirun").write_text('#!/bin/sh\nshift 2; exec "$@"\n')  # worlds of one rank
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    one.environ["PATH"] += ":/usr/bin:/bin"
    one.start = time.monotonic()
    assert run.find_launcher(one) == "no launcher starts two ranks that find each other"
    assert "must start one world of 2 ranks; it does not" in one.parts[0]["reason"]


def test_why_horovod_is_not_built(tmp_path):
    one = session(tmp_path, device="cuda")
    for changes, reason in (
        ({"nvcc": ""}, "there is no nvcc"),
        ({"nccl": ""}, "this torch has no NCCL"),
        ({}, r"there is no source package horovod-*.tar.gz in WHEELS"),
    ):
        one.found |= {"environment": {"nvcc": "13", "nccl": "2.28", **changes}, "launcher": "mpirun"}
        assert run.why_no_horovod(one) == reason
