"""Find a run's checkpoints, and describe each: whole or damaged, of how many ranks, how large."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from hpcdist.checkpoint.folder import listing, step_of
from hpcdist.checkpoint.load import latest, verify
from hpcdist.checkpoint.manifest import FILE_NAME, read_manifest
from hpcdist.errors import CheckpointError


class SavedCheckpoint(NamedTuple):
    """A checkpoint as it is on disk.

    Attributes:
        written: when it was finished, in local time.
        ranks, stages: that saved it; None where that can't be read.
        n_bytes: of all files that are there.
        version: of hpcdist, that wrote it.
        damage: which file is missing or damaged; None where all are whole.
    """

    path: Path
    step: int
    written: datetime
    ranks: int | None
    stages: int | None
    n_bytes: int
    version: str | None
    damage: str | None


def survey(run: str | Path) -> list[SavedCheckpoint]:
    """Describe all checkpoints of a run, the newest first. Every file is read.

    Args:
        run: the folder of a run, a folder of checkpoints, or one checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    return [_describe(path) for path in _all(Path(run))]


def find(run: str | Path, step: int | None = None) -> Path:
    """Find a checkpoint of a run: of that step, or the newest one that is whole, with a warning about newer ones.

    Args:
        run: as for `survey`.

    Raises:
        CheckpointError: there is none, or none of that step; or all are damaged.
    """
    paths = _all(Path(run))
    if step is None:
        return paths[0] if paths == [Path(run)] else latest(paths[0].parent, fallback=True) or paths[0]
    for path in paths:
        if step_of(path) == step:
            return path
    steps = ", ".join(str(step_of(path)) for path in paths)
    raise CheckpointError(f"step must be that of a checkpoint in {run}; got {step}, and there are {steps}.")


def _all(run: Path) -> list[Path]:
    if (run / FILE_NAME).is_file():
        return [run]
    paths = listing(run / "checkpoints") or listing(run)
    if not paths:
        raise CheckpointError(
            f"{run} must be the folder of a run with checkpoints, a folder of checkpoints, or one of them; got none "
            "there. Give the folder that the run was given."
        )
    return paths


def _describe(path: Path) -> SavedCheckpoint:
    files = [file.stat() for file in path.iterdir() if file.is_file()]
    n_bytes = sum(file.st_size for file in files)
    written = datetime.fromtimestamp(max((file.st_mtime for file in files), default=path.stat().st_mtime))
    ranks = stages = version = damage = None
    try:
        manifest = read_manifest(path)
        ranks, stages, version = manifest.ranks, manifest.meta.get("stages", 1), manifest.version
        verify(path)
    except CheckpointError as error:
        damage = str(error)
    return SavedCheckpoint(path, step_of(path), written, ranks, stages, n_bytes, version, damage)
