"""Horovod's own tests of its interface for PyTorch, on hpcdist.

HPCDIST_HOROVOD_TESTS names a folder with test_torch.py, test_adasum_pytorch.py and common.py of Horovod 0.28.1.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from comm.jobs_here import ROOT
from harness.launch import find_mpirun, launch

FOLDER = Path(os.environ.get("HPCDIST_HOROVOD_TESTS", ROOT / "none"))
SUITE = Path(__file__).with_name("horovod_suite.py")
LIMIT_S = 600
# torch's optimiser Muon, which these tests make of every kind's name, refuses their network.
MUON = {"test_broadcast_state", "test_broadcast_state_options", "test_force_allreduce"}

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed"),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="HPCDIST_HOROVOD_TESTS names no folder with Horovod's tests"),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.time_limit(LIMIT_S + 60)
def test_horovods_own_tests_pass(size, tmp_path):
    # Long cycles: some tests want two calls of one name to be under way at the same time.
    env = {"PYTHONPATH": str(ROOT), "HOROVOD_CYCLE_TIME": "20"}
    deselected = [word for name in sorted(MUON) for word in ("--deselect", f"test_torch.py::TorchTests::{name}")]
    job = launch(size, [SUITE, FOLDER, tmp_path, *deselected], env=env, timeout_s=LIMIT_S, compiler=True)
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-2000:]
    for rank in range(size):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        failed = {name: why for name, (state, why) in found.items() if state == "failed"}
        counts = Counter(state for state, _ in found.values())
        print(f"rank {rank} of {size}: {dict(counts)}")
        assert not failed, failed
        assert counts["passed"] > 95 and not MUON & set(found)
