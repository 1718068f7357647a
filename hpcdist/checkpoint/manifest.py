"""The manifest of a checkpoint: a list of its files with checksums, which shows that it is complete."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcdist.checkpoint.refusal import understood
from hpcdist.checkpoint.tree import TreeDecoder, encode
from hpcdist.errors import CheckpointError
from hpcdist.records import CHECKSUMS, Stamp, open_regular, parse_json, read_bounded, stamp, write_durably
from hpcdist.version import __version__

FILE_NAME = "manifest.json"
FORMAT = "hpcdist checkpoint"
VERSION = 4  # tensors may lie in another rank's file
READ = (2, 3, VERSION)  # in 2 files have a sha256


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's step, number of ranks, metadata, and files."""

    step: int
    ranks: int
    meta: Any  # passed to `save`
    version: str  # of hpcdist, that wrote it
    files: dict[str, Stamp]


def tree_file(rank: int) -> str:
    return f"rank-{rank:04d}.json"


def tensor_file(rank: int) -> str:
    return f"rank-{rank:04d}.safetensors"


def write_manifest(directory: Path, step: int, meta: Any, files: dict[str, Stamp]) -> None:
    """Write and fsync the manifest; raise CheckpointError if `meta` has tensors or objects that can't be stored."""
    tree, tensors, _ = encode(meta, "meta")
    if tensors:
        raise CheckpointError(f"{next(iter(tensors))} must not be a tensor or array; got one. Put it in the state.")
    content = {
        "hpcdist": __version__,
        "step": step,
        "ranks": len(files) // 2,  # each rank has a tree and its tensors
        "meta": tree,
        "files": {name: file._asdict() for name, file in sorted(files.items())},
    }
    manifest = {"format": FORMAT, "version": VERSION, "sha256": _checksum(content), "content": content}
    write_durably(directory / FILE_NAME, [json.dumps(manifest, indent=1).encode()])


def read_manifest(path: str | Path) -> Manifest:
    """Read the manifest of a checkpoint, verified against its checksum.

    Raises:
        CheckpointError: `path` is not a checkpoint, or its manifest is damaged, or of an unknown version.
    """
    path = Path(path)
    file = path / FILE_NAME
    try:
        text = read_bounded(file)
    except (FileNotFoundError, NotADirectoryError):
        inside = "It holds checkpoints: pass one of them, as from latest(folder). " if any(path.glob("step-*/")) else ""
        raise CheckpointError(
            f"{path} must be a checkpoint, a folder with a {FILE_NAME}; got {_what(path)}. {inside}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file} must be readable; got {error.strerror}.") from None
    manifest = parse_json(text, file, CheckpointError)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file} must be the manifest of an {FORMAT}; got other JSON.")
    content = manifest.get("content")
    if manifest.get("version") not in READ:
        writer = content.get("hpcdist") if isinstance(content, dict) else None
        raise CheckpointError(
            f"{file} must be of version {READ[0]} to {VERSION}; got {manifest.get('version')!r:.60}. Read it with the "
            f"version of hpcdist that wrote it, {writer!s:.60}; this is {__version__}."
        )
    if manifest.get("sha256") != _checksum(content):
        raise CheckpointError(f"{file} must match its checksum; got damaged content.")
    with understood(file):
        return _manifest(content, file)


def _manifest(content: Any, file: Path) -> Manifest:
    """Decode the manifest's content, read from `file`; raise ValueError for contradictory fields."""
    files = {name: _stamp(**fields) for name, fields in content["files"].items()}
    step, ranks, writer = content["step"], content["ranks"], content["hpcdist"]
    meta = TreeDecoder(dict[str, Tensor]().__getitem__, {}, file).decode(content["meta"])
    numbers = (step, ranks, *(stamp.bytes for stamp in files.values()))
    expected_names = {name(rank) for rank in range(min(ranks, len(files))) for name in (tree_file, tensor_file)}
    texts = (writer, *(stamp.checksum for stamp in files.values()))
    types_fit = all(type(n) is int and n >= 0 for n in numbers) and all(isinstance(text, str) for text in texts)
    stages = meta.get("stages", 1)
    if (
        not types_fit
        or ranks < 1
        or len(files) != 2 * ranks
        or expected_names != set(files)
        or type(stages) is not int
        or stages < 1
        or ranks % stages
    ):
        raise ValueError(f"its {len(files)} files of {ranks} ranks in {stages} stages")
    return Manifest(step, ranks, meta, writer, files)


def check_file(path: Path, expected: Stamp) -> None:
    """Raise CheckpointError unless a file has the length and the checksum of the manifest."""
    try:
        with open_regular(path) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes != expected.bytes:
                raise CheckpointError(f"{path} must be {expected.bytes} bytes long; got {n_bytes}.")
            checksum = stamp(file, expected.checksum.partition(":")[0]).checksum
    except OSError as error:
        raise CheckpointError(f"{path} must be readable; got {error.strerror}.") from None
    if checksum != expected.checksum:
        raise CheckpointError(f"{path} must have {expected.checksum:.24}...; got {checksum:.24}... (damaged).")


def _stamp(bytes: int, checksum: str = "", sha256: str = "") -> Stamp:
    """Return a file's stamp as the manifest has it since version 3, or of version 2, which has only sha256."""
    name, _, digits = (checksum or f"sha256:{sha256}").partition(":")
    if name not in CHECKSUMS or not digits:
        raise ValueError(f"a checksum must be {' or '.join(CHECKSUMS)}, a colon and digits; got {checksum!r:.40}")
    return Stamp(bytes, f"{name}:{digits}")


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _what(path: Path) -> str:
    if not path.exists():
        return "nothing there"
    return "a folder without one" if path.is_dir() else "a file"
