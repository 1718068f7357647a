"""The studies of jobs/, run as a user would: their quick version, on two workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

JOBS = Path(__file__).parents[2] / "jobs"
TIME_LIMIT_S = 300  # each takes 15 to 20 s on two free cores


def start(name: str, output: Path) -> subprocess.CompletedProcess:
    """Runs the quick version of a study, or goes on with it, in the folder `output`."""
    command = [sys.executable, JOBS / f"{name}.py", "--quick", "--workers", "2", "--output", output]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S - 20)


def quick(name: str, folder: Path) -> tuple[Path, str]:
    """The folder of a quick run that ended well, and what it printed."""
    job = start(name, folder)
    assert job.returncode == 0, job.stderr
    return folder, job.stdout
