"""A process that dies while it saves leaves a whole checkpoint, wherever it dies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcdist

DRIVER = Path(__file__).with_name("crash_driver.py")


@pytest.mark.time_limit(300)  # more than a hundred processes are started and killed
def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(hpcdist.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(DRIVER), str(tmp_path / "checkpoints")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    crashes = dict(re.findall(r"(.+): (\d+)\n", done.stdout))
    assert list(crashes) == ["same again", "went back", "two ranks"]
    assert all(int(number) > 20 for number in crashes.values()), crashes
