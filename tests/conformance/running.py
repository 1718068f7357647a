"""Run a suite in MPI jobs: one for as many tests as possible, a new one after a test that failed or hung."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from comm.jobs_here import ROOT
from harness.launch import find_mpirun, launch_environment

SUITE = Path(__file__).with_name("torch_suite.py")
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}
LIMIT_S = 90  # for one test


def run(backend: str, folder: Path, tests: Sequence[str], *, ranks: int = 4, limit_s: float = LIMIT_S) -> dict:
    """Return what became of each test: its state, and why."""
    found: dict[str, dict] = {}
    log = folder / f"{backend}.log"
    while rest := [name for name in tests if name not in found]:
        results = folder / f"{backend}-{len(found)}.jsonl"
        results.touch()
        _run(backend, results, rest, log, ranks, limit_s)
        said = [json.loads(line) for line in results.read_text().splitlines()]
        if not said:
            raise AssertionError(log.read_text(errors="replace")[-3000:])
        found |= {one["test"]: one for one in said if one["state"] != "begun"}
        last = said[-1]
        if last["state"] == "begun":
            text = log.read_text(errors="replace")[-2000:]
            found[last["test"]] = last | {"state": "failed", "why": f"its job ended, or took {limit_s} s: {text}"}
    return found


def _run(backend: str, results: Path, tests: Sequence[str], log: Path, ranks: int, limit_s: float) -> None:
    """Run tests in one job, until one of them takes too long."""
    words = [find_mpirun(), "-n", ranks, sys.executable, SUITE, backend, results, *tests]
    with log.open("ab") as out, launch_environment(ENVIRONMENT, compiler=True) as environment:
        job = subprocess.Popen(list(map(str, words)), stdout=out, stderr=out, env=environment)
        seen, changed_s = 0, time.monotonic()
        while job.poll() is None and time.monotonic() - changed_s < limit_s:
            time.sleep(0.1)
            if (now := results.stat().st_size) != seen:
                seen, changed_s = now, time.monotonic()
        job.terminate()
        job.wait()


def list_tests() -> list[str]:
    """Return the names of the suite's tests, in its order."""
    with launch_environment(ENVIRONMENT, compiler=True) as environment:
        words = [sys.executable, str(SUITE), "--list"]
        return subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout.split()
