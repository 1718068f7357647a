"""Scripts of users, run as jobs of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from harness.launch import SETTINGS, SITE, launch, launch_environment
from hpcdist.comm.launch import unlaunched

ROOT = Path(__file__).parents[2]
LIMIT_S = 200  # for a job to end, on a busy machine; ranks that nobody must wait for sleep longer


def write(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    return script


def run(folder: Path, text: str, size: int, *, env: dict | None = None, timeout_s: float = LIMIT_S, **more):
    """Runs a script on `size` ranks; the finished process. Raises TimeoutExpired if it does not end."""
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(folder), **(env or {})}
    return launch(size, [write(folder, text)], env=environment, timeout_s=timeout_s, **more)


def clean_environment(**more: str) -> dict[str, str]:
    """As a login shell has it: no launcher, no MPI started before."""
    import os

    inherited = unlaunched(os.environ)
    return {**inherited, **SETTINGS, "PYTHONPATH": f"{SITE}:{ROOT}", **more}


def run_alone(folder: Path, text: str, **more: str) -> subprocess.CompletedProcess:
    """Runs a script without a launcher."""
    return python_alone(folder, write(folder, text), **more)


def python_alone(folder: Path, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess:
    """Runs `python *arguments` in a folder without a launcher."""
    with launch_environment({"PYTHONPATH": str(ROOT), **more}) as env:
        return subprocess.run(
            [sys.executable, *arguments], env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
        )
