"""The git commit of the user's files."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit(folder: Path | None = None) -> tuple[str | None, bool]:
    """Return the commit of a folder, by default the current one, and whether tracked files differ from it.

    (None, False) outside of git.
    """
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None, False
    return head.strip(), bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))


def _git(folder: Path | None, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, errors="replace")
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
