"""Find, verify, describe and read checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import copy
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist.checkpoint.folder import listing, step_of
from hpcdist.checkpoint.manifest import FILE_NAME, Manifest, check_file, read_manifest, tensor_file, tree_file
from hpcdist.checkpoint.refusal import raise_on_all_ranks, understood
from hpcdist.checkpoint.tensors import TensorFile
from hpcdist.checkpoint.tree import TreeDecoder
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import CheckpointError
from hpcdist.records import parse_json, read_bounded


# --- the newest -------------------------------------------------------------------------------------------------------
def latest(folder: str | Path, *, fallback: bool = False) -> Path | None:
    """Return the newest checkpoint in the folder; None if there is none.

    Example:
        >>> from hpcdist import checkpoint
        >>> checkpoint.latest("checkpoints") is None  # the folder need not exist
        True

    Args:
        fallback: read and verify the checkpoint's files. If a file is damaged, warn and try the next checkpoint.

    Raises:
        CheckpointError: with `fallback`, if there are checkpoints and all are damaged.
    """
    paths = listing(Path(folder))
    if not fallback:
        return paths[0] if paths else None
    found = _first_whole(folder, paths, None, warns=True)
    return None if found is None else found[0]


def latest_on_all_ranks(comm: Communicator, folder: str | Path) -> tuple[Path, Manifest] | None:
    """Collective. Return the newest checkpoint in the folder that all ranks can read; None if there is none.

    Files are checked as by `verify`. Newer checkpoints that are damaged, or that a rank can't read, are
    skipped with a warning on rank 0.

    Args:
        folder: a folder of checkpoints; or one checkpoint, which is then the only candidate.
    """
    folder, first = Path(folder), comm.failures.alive[0]
    leads = comm.rank == first  # other ranks may see a shared folder later
    local = raise_on_all_ranks(comm, lambda: [path.name for path in listing(folder)] if leads else [])
    names, is_checkpoint = comm.gather([local, leads and (folder / FILE_NAME).is_file()])[first]
    if is_checkpoint and not names:
        return folder, verify(folder, comm)
    return _first_whole(folder, [folder / name for name in names], comm, leads)


def _first_whole(
    folder: str | Path, paths: Sequence[Path], comm: Communicator | None, warns: bool
) -> tuple[Path, Manifest] | None:
    """Return the first checkpoint that is whole, perhaps with warnings about those before it; see `verify`.

    None if `paths` is empty; CheckpointError if none passes.
    """
    reasons: list[str] = []
    for path in paths:
        try:
            manifest = _verify(path, comm)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        for reason in reasons if warns else ():
            warnings.warn(f"A damaged checkpoint is skipped in favour of {path.name}: {reason}", stacklevel=3)
        return path, manifest
    if not reasons:
        return None
    raise CheckpointError(
        f"{folder} must hold a checkpoint that is whole; got {len(reasons)} damaged. {' '.join(reasons)}"
    )


# --- checks -----------------------------------------------------------------------------------------------------------
def verify(path: str | Path, comm: Communicator | None = None) -> Manifest:
    """Check every file of a checkpoint against its manifest; return the manifest.

    Args:
        comm: the ranks that check the files together: rank r of p those of the saved ranks r, r + p, r + 2p... Then
            collective, and all ranks check the manifest.

    Raises:
        CheckpointError: files are missing or damaged; names them, on all ranks.
    """
    path = Path(path)
    try:
        return _verify(path, comm)
    except CheckpointError as error:
        older = [other for other in listing(path.parent) if step_of(other) < step_of(path)]
        if not older:
            raise
        raise CheckpointError(f"{error} An older checkpoint is at {older[0]}.") from None


def _verify(path: Path, comm: Communicator | None) -> Manifest:
    """Check a checkpoint as `verify` does, whose message also names an older one."""

    def check(first: int, stride: int) -> Manifest:
        manifest = read_manifest(path)
        for rank in range(first, manifest.ranks, stride):
            for name in (tree_file(rank), tensor_file(rank)):
                check_file(path / name, manifest.files[name])
        return manifest

    return check(0, 1) if comm is None else raise_on_all_ranks(comm, lambda: check(comm.rank, comm.size))


# --- states -----------------------------------------------------------------------------------------------------------
def tensor_files(path: str | Path) -> Callable[[int], TensorFile]:
    """Return a function that opens the file with a rank's tensors, once."""
    return cache(lambda rank: TensorFile(Path(path) / tensor_file(rank)))


class SavedRank:
    """The state that a rank has saved, in verified files; parts of it can be decoded separately.

    Args:
        files: from `tensor_files`, for several ranks of a checkpoint.

    Example:
        >>> from hpcdist import checkpoint
        >>> folder = checkpoint.save(comm, "checkpoints", step=10, state={"model": {"x": 1.5}})
        >>> checkpoint.SavedRank(folder, rank=0).at("model", "x")
        1.5
    """

    _keys: tuple[str, ...] = ()  # of nested dicts, see `under`

    def __init__(self, path: str | Path, rank: int, files: Callable[[int], TensorFile] | None = None):
        where, files = Path(path) / tree_file(rank), files or tensor_files(path)
        with understood(where):
            self._tree = parse_json(read_bounded(where, where.stat().st_size), where, CheckpointError)
        with understood(Path(path) / tensor_file(rank)):
            file = files(rank)
        self._where = where
        self._decoder = TreeDecoder(lambda name: files(file.owners.get(name, rank)).read(name), file.positions, where)

    def under(self, *keys: str) -> SavedRank:
        """Return the values under these keys of nested dicts."""
        part = copy(self)
        part._keys = (*self._keys, *keys)
        return part

    def at(self, *keys: str, default: Any = None) -> Any:
        """Return the value under these keys of nested dicts, tensors on the CPU; `default` if there is none."""
        node = self._tree
        for key in (*self._keys, *keys):
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return self._decoder.decode(node)

    def names(self, *keys: str) -> list[str]:
        """Return the keys of a nested dict."""
        with understood(self._where):
            node = self._tree
            for key in (*self._keys, *keys):
                node = node[key]
            return list(node)


# --- a run's checkpoints ----------------------------------------------------------------------------------------------
class SavedCheckpoint(NamedTuple):
    """A checkpoint on disk; numbers that can't be read are None."""

    path: Path
    step: int
    written: datetime  # when it was finished, in local time
    ranks: int | None  # that saved it
    stages: int | None  # of the model
    n_bytes: int  # of all files
    version: str | None  # of hpcdist, that wrote it
    damage: str | None  # the message about missing or damaged files; None if it is complete


def survey(run: str | Path) -> list[SavedCheckpoint]:
    """Describe all checkpoints of a run, the newest first. Every file is read.

    Args:
        run: the folder of a run, a folder of checkpoints, or one checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    return [_describe(path) for path in _all(Path(run))]


def find(run: str | Path, step: int | None = None) -> Path:
    """Return a run's checkpoint of a step; None: the newest complete one, with a warning about newer ones.

    Args:
        run: as in `survey`.

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
    """Return the checkpoints of `run`, as for `survey`, newest first; raise CheckpointError if there is none."""
    if (run / FILE_NAME).is_file():  # one checkpoint
        return [run]
    paths = listing(run / "checkpoints") or listing(run)  # the folder of a run, or of checkpoints
    if not paths:
        raise CheckpointError(
            f"{run} must be the folder of a run with checkpoints, a folder of checkpoints, or one of them; got none "
            "there. Pass the folder that the run was started with."
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
