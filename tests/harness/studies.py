"""The studies of jobs/studies, run as a user would: their quick version, in one process beside their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "jobs" / "studies"
TIME_LIMIT_S = 300  # each takes 15 s on a free core


def start(
    name: str, output: Path, *options: str, limit_s: float = TIME_LIMIT_S, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the quick version of a study, or go on with it, in the folder `output`."""
    command = [sys.executable, FOLDER / f"{name}.py", "--quick", "--workers", "1", "--output", output, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s - 20, env={**os.environ, **env})


def made(folder: Path) -> dict[Path, int]:
    """When each run of a study was made."""
    return {path: path.stat().st_mtime_ns for path in sorted(folder.glob("**/summary.json"))}
