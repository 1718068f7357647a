"""Find, verify and load checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hpcdist.checkpoint.folder import listing, step_of
from hpcdist.checkpoint.manifest import FILE_NAME, Manifest, check_file, read_manifest, tensor_file, tree_file
from hpcdist.checkpoint.tensors import TensorFile
from hpcdist.checkpoint.tree import TreeDecoder, understood
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import CheckpointError
from hpcdist.records import parse_json, read_bounded

T = TypeVar("T")


def latest(folder: str | Path, *, fallback: bool = False) -> Path | None:
    """Find the newest checkpoint in the folder, None where there is none.

    Args:
        fallback: verify every file of it (which reads them all), and where it is damaged warn and take the next one.

    Raises:
        CheckpointError: with `fallback`, where there are checkpoints and all are damaged.
    """
    paths = listing(Path(folder))
    if not paths or not fallback:
        return paths[0] if paths else None
    reasons = []
    for path in paths:
        try:
            verify(path)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            warnings.warn(f"A damaged checkpoint is passed over in favour of {path.name}: {reason}", stacklevel=2)
        return path
    raise _all_damaged(folder, reasons)


def _all_damaged(folder: str | Path, reasons: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{folder} must hold a checkpoint that is whole; got {len(reasons)} damaged. {' '.join(reasons)}"
    )


def verify(path: str | Path) -> Manifest:
    """Check every file of a checkpoint against the manifest, and return that.

    Raises:
        CheckpointError: a file is missing or damaged; names it.
    """
    path = Path(path)
    return _or_advise(path, lambda: _verify(path, None))


def verify_together(comm: Communicator, path: str | Path) -> Manifest:
    """Collective. Check a checkpoint's files, each on one rank, and the manifest on all.

    Rank r of p checks the files of the saved ranks r, r + p, r + 2p...: where as many ranks go on as saved, its own.

    Raises:
        CheckpointError: files are missing or damaged; names them, on all ranks.
    """
    path = Path(path)
    return _or_advise(path, lambda: _verify_together(comm, path))


def latest_together(comm: Communicator, folder: str | Path) -> tuple[Path, Manifest] | None:
    """Collective. Find the newest checkpoint in the folder that all ranks can read; None where there is none.

    Files are checked as by `verify_together`. Newer ones that are damaged, or that a rank can't read, are passed over
    with a warning on rank 0.

    Args:
        folder: of checkpoints; or one of them, in whose place no other is taken.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    folder = Path(folder)
    leads = comm.rank == comm.failures.living[0]  # other ranks may see a shared folder later
    found = comm.together(lambda: [path.name for path in listing(folder)] if leads else None)
    names = comm.gather(found)[comm.failures.living[0]]
    if not names:
        alone = comm.gather((folder / FILE_NAME).is_file() if leads else None)[comm.failures.living[0]]
        return (folder, verify_together(comm, folder)) if alone else None
    reasons: list[str] = []
    for name in names:
        try:
            manifest = _verify_together(comm, folder / name)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        for reason in reasons if leads else ():
            warnings.warn(f"A damaged checkpoint is passed over in favour of {name}: {reason}", stacklevel=2)
        return folder / name, manifest
    raise _all_damaged(folder, reasons)


class SavedRank:
    """The state that a rank has saved, in files that have been verified; any place in it can be decoded by itself."""

    def __init__(self, path: str | Path, rank: int):
        tree, tensors = Path(path) / tree_file(rank), Path(path) / tensor_file(rank)
        with understood(tree):
            self._tree = parse_json(read_bounded(tree, tree.stat().st_size), tree, CheckpointError)
        with understood(tensors):
            file = TensorFile(tensors)
        self._decoder, self._where = TreeDecoder(file.read, file.places, tree), tree

    def at(self, *keys: str, default: Any = None) -> Any:
        """Return what is saved under these keys of nested dicts, tensors on the CPU; `default` where nothing is."""
        node = self._tree
        for key in keys:
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return self._decoder.decode(node)

    def names(self, *keys: str) -> list[str]:
        """Return the keys of a nested dict."""
        with understood(self._where):
            node = self._tree
            for key in keys:
                node = node[key]
            return list(node)


def read(path: str | Path, rank: int) -> Any:
    """Read the state that `rank` saved, tensors on the CPU, from files that have been verified."""
    return SavedRank(path, rank).at()


def load(path: str | Path, rank: int) -> tuple[Any, Manifest]:
    """Load the state that `rank` saved, tensors on the CPU, and the manifest. Only this rank's files are read.

    Raises:
        CheckpointError: no checkpoint, a damaged one (which file, what is wrong, where an older one is), or no such
            rank in it.
    """
    path = Path(path)
    manifest = _or_advise(path, lambda: _verify(path, rank))
    return read(path, rank), manifest


def load_all(path: str | Path) -> list[Any]:
    """Load every rank's state, in rank order, tensors on the CPU, to go on with another number of ranks.

    Raises:
        CheckpointError: as for `load`.
    """
    return [read(path, rank) for rank in range(verify(path).ranks)]


def _verify(path: Path, rank: int | None) -> Manifest:
    manifest = read_manifest(path)
    if rank is not None and not 0 <= rank < manifest.ranks:
        raise CheckpointError(
            f"rank must be one of the {manifest.ranks} that saved {path}; got {rank}. "
            "To go on with another number of ranks, read all states with load_all."
        )
    _check_files(path, manifest, manifest.files if rank is None else (tree_file(rank), tensor_file(rank)))
    return manifest


def _verify_together(comm: Communicator, path: Path) -> Manifest:
    failure = None
    try:
        manifest = read_manifest(path)
        for rank in range(comm.rank, manifest.ranks, comm.size):
            _check_files(path, manifest, (tree_file(rank), tensor_file(rank)))
    except (CheckpointError, OSError) as error:  # whatever it is: the other ranks wait to hear of it
        failure = error
    failures = comm.gather("" if failure is None else str(failure))
    damage = dict.fromkeys(text for text in failures if text)  # all ranks may have found the same
    if damage:
        raise CheckpointError(" ".join(damage)) from failure
    return manifest


def _check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    for name in names:
        check_file(path / name, manifest.files[name])


def _or_advise(path: Path, action: Callable[[], T]) -> T:
    """Return the result of `action`; where it raises, name an older checkpoint, if there is one."""
    try:
        return action()
    except CheckpointError as error:
        older = [other for other in listing(path.parent) if step_of(other) < step_of(path)]
        if not older:
            raise
        raise CheckpointError(f"{error} An older checkpoint is at {older[0]}.") from None
