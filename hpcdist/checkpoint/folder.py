"""Name, sort and change a run's checkpoints in their folder, so that a crash can't damage one.

Every change is one rename, so that at any moment each entry is either a complete checkpoint or visibly none::

    step-00001234                    a checkpoint
    step-00001234.replaced           the former checkpoint of this step, until the new one is complete
    step-00001234.abandoned-<token>  of later steps than the run resumed from; kept, never used
    step-00001234.tmp-<token>        being written
    step-00001234.deleted-<token>    being removed
"""

from __future__ import annotations

import re
import secrets
import shutil
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpcdist.errors import CheckpointError
from hpcdist.records import sync

_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name; -1 for other names."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def listing(folder: Path) -> list[Path]:
    """Return the checkpoints in the folder, the newest first."""
    try:
        paths = [path for path in folder.iterdir() if step_of(path) >= 0 and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} must be a folder that can be listed; got {error.strerror}.") from None
    return sorted(paths, key=lambda path: (-step_of(path), path.name))


def clean(folder: Path) -> None:
    """Remove incomplete files of crashed attempts."""
    for pattern in ("step-*.tmp-*", "step-*.deleted-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, step: int, keep: int, best: Sequence[int] = ()) -> None:
    """Give a complete checkpoint its final name; keep the newest `keep` ones, and the first one of the steps `best`."""
    folder, final = temporary.parent, temporary.with_name(step_name(step))
    if final.exists():
        replaced = folder / f"{final.name}.replaced"
        if replaced.exists():
            discard(replaced)
        final.rename(replaced)
    temporary.rename(final)
    sync(folder)
    # If the run resumed from an earlier step, checkpoints of later steps must not count as its latest.
    for path in [path for path in listing(folder) if step_of(path) > step]:
        abandoned = path.rename(path.with_name(f"{path.name}.abandoned-{secrets.token_hex(4)}"))
        warnings.warn(
            f"{path} is of a later step than {final.name}, which was just saved: the run went back. It is now "
            f"{abandoned.name}; delete it if you don't need it.",
            stacklevel=2,
        )
    n_kept, best_path = 0, best_of(folder, best)
    for path in listing(folder):
        superseded = path.with_suffix("") != path and path.with_suffix("").exists()  # .replaced by a complete one
        if superseded or (n_kept >= keep and path != best_path):
            discard(path)
        else:
            n_kept += 1


def best_of(folder: Path, steps: Iterable[int]) -> Path | None:
    """Return the checkpoint of the first of these steps that has one; None if none has."""
    return next((path for step in steps if (path := folder / step_name(step)).is_dir()), None)


def discard(path: Path) -> None:
    """Remove a checkpoint; it is renamed before its first file is deleted."""
    doomed = path.with_name(f"{path.name}.deleted-{secrets.token_hex(4)}")
    try:
        shutil.rmtree(path.rename(doomed))
    except OSError as error:
        warnings.warn(f"{path} could not be removed: {error}. Delete it by hand.", stacklevel=2)
