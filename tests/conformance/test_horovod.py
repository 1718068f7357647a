"""Horovod's own tests of its interface for PyTorch, on hpcdist.

HPCDIST_HOROVOD_TESTS names a folder with test_torch.py, test_adasum_pytorch.py and common.py of Horovod 0.28.1.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from comm.jobs_here import ROOT
from harness.launch import find_mpirun, launch

FOLDER = Path(os.environ.get("HPCDIST_HOROVOD_TESTS", ROOT / "none"))
SUITE = Path(__file__).with_name("horovod_suite.py")
LIMIT_S = 600
# These fail for Horovod, too: torch's optimiser Muon, which they make of every kind's name, refuses their network.
MUON = {"test_broadcast_state", "test_broadcast_state_options", "test_force_allreduce"}
# And these on one rank: they make a set of all ranks, which is there already, or wait for a second one.
ALONE = ("process_sets", "join_allreduce")

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed"),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="HPCDIST_HOROVOD_TESTS names no folder with Horovod's tests"),
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Returns by rank what became of each test, and why."""

    @cache
    def run(of, size):
        results = tmp_path_factory.mktemp(of)
        # Long cycles: some tests want two calls of one name to be under way at the same time.
        env = {"PYTHONPATH": str(ROOT), "HOROVOD_CYCLE_TIME": "20", "HOROVOD_CPU_OPERATIONS": "mpi"}
        job = launch(size, [SUITE, of, FOLDER, results], env=env, timeout_s=LIMIT_S, compiler=True)
        assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-2000:]
        lines = [(results / f"{rank}.jsonl").read_text().splitlines() for rank in range(size)]
        return [{name: [state, why] for name, state, why in map(json.loads, of_rank)} for of_rank in lines]

    return run


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.time_limit(LIMIT_S + 60)
def test_horovods_own_tests_pass(size, verdicts):
    for rank, found in enumerate(verdicts("hpcdist", size)):
        failed = {name: why for name, (state, why) in found.items() if state == "failed" and not fails(name, size)}
        print(f"hpcdist, rank {rank} of {size}: {Counter(state for state, _ in found.values())}")
        assert len(found) > 110 and not failed, failed


@pytest.mark.skipif(getattr(find_spec("horovod"), "origin", None) is None, reason="Horovod itself is not built")
@pytest.mark.time_limit(2 * LIMIT_S + 60)
def test_what_horovod_passes_passes(verdicts):
    (theirs, *_), (ours, *_) = verdicts("horovod", 2), verdicts("hpcdist", 2)
    passed = {name for name, (state, _) in theirs.items() if state == "passed"}
    print(f"Horovod itself: {Counter(state for state, _ in theirs.values())}")
    assert len(passed) > 95 and {name for name in passed if ours[name][0] != "passed"} == set()


def fails(name, size):
    return name.rpartition("::")[2] in MUON or (size == 1 and name.endswith(ALONE))
