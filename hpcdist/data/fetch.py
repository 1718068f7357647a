"""Fetch data sets as their authors released them, verified by checksums: from a folder, Debian or a mirror."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

from hpcdist.errors import DataError, UnknownNameError
from hpcdist.records.files import read_bounded, replace_durably, writing

TIMEOUT_S = 20.0  # longest silence of a mirror
BLOCK_BYTES = 1 << 20
_logger = logging.getLogger(__name__)
Show = Callable[[str, int, "int | None"], None]  # (file's name, bytes so far, bytes in all or None)


@dataclass(frozen=True)
class Release:
    """The original files of a data set: names, checksums, mirrors."""

    title: str
    importer: str  # writes the files as HDF5
    sha256: Mapping[str, str]  # the checksum of each file, uncompressed
    mirrors: Sequence[str]  # addresses of folders with the gzipped files, tried in this order
    package: str | None = None  # Debian's, with the same files
    installed: Path | None = None  # the folder in which the package installs them


RELEASES = {  # the mirrors are those of torchvision
    "mnist": Release(
        "MNIST",
        "mnist",
        {
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
    ),
    "fashion-mnist": Release(
        "Fashion-MNIST",
        "fashion-mnist",
        {
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        package="dataset-fashion-mnist",
        installed=Path("/usr/share/datasets/fashion-mnist"),
    ),
}


class Unavailable(Exception):
    """An origin does not have the files, so the next one is tried."""


def fetch(name: str, folder: Path, *, source: Path | None = None, show: Show = lambda file, n, total: None) -> str:
    """Put a data set's original files, uncompressed, into a folder; return where they came from.

    Files in the folder are kept if their checksums are right. Without `source` the others come from Debian's package,
    installed or not, or from a mirror, in this order. An interrupted download is resumed.

    Args:
        name: one of RELEASES.
        source: a folder that has the files, gzipped or not; then no other location is tried.
        show: called during downloads.

    Raises:
        UnknownNameError: there is no data set of this name.
        DataError: no location has the originals; the message gives the reason for each.
        OutputError: a file can't be written.
    """
    if name not in RELEASES:
        raise UnknownNameError("data set", name, list(RELEASES))
    release = RELEASES[name]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if all(_is_original(folder / file, sha) for file, sha in release.sha256.items()):
            return f"{folder}, where they were already"
        reasons = []
        for origin, copy_to in _origins(release, source, show):
            try:
                copy_to(folder)
                return origin
            except Unavailable as reason:
                reasons.append(f"{origin}: {reason}")
    raise DataError(
        f"{release.title}'s four files must come from one of these places; none has them: {'; '.join(reasons)}. "
        "Download them where there is a network, and name their folder by --from."
    )


def fetch_first(names: Sequence[str], folder: Path) -> str:
    """Fetch the first available data set of `names` into `folder/name`; return its name, or raise DataError.

    Data sets that are already in `folder` are tried first.
    """
    reasons = []
    for name in sorted(  # False, for a data set with all its files, comes before True
        names, key=lambda name: not all((folder / name / file).exists() for file in RELEASES[name].sha256)
    ):
        try:
            _logger.info(f"data: {RELEASES[name].title} from {fetch(name, folder / name)}")
            return name
        except DataError as reason:
            reasons.append(str(reason))
    raise DataError("\n".join(reasons))


def _origins(release: Release, source: Path | None, show: Show) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield the origins to try, the nearest first: a name, and a function that copies the files to a folder."""
    if source is not None:
        yield str(source), partial(_copy, release, source)
        return
    if release.package is not None and release.installed is not None:
        installed, package = release.installed, release.package
        yield f"Debian's package {package}, installed", partial(_copy, release, installed)
        yield f"Debian's package {package}", partial(_unpack, release, package, installed)
    for mirror in release.mirrors:
        yield mirror, partial(_download, release, mirror, show)


# --- a folder ---------------------------------------------------------------------------------------------------------
def _copy(release: Release, source: Path, folder: Path) -> None:
    """Copy the files of a release from `source` to `folder`; raise Unavailable if one is missing or not original."""
    if not source.is_dir():
        raise Unavailable("there is no such folder")
    for file, sha in release.sha256.items():
        # torchvision and others also write train-images.idx3-ubyte.
        names = [f"{stem}{end}" for stem in (file, file.replace("-idx", ".idx")) for end in ("", ".gz")]
        path = next((source / candidate for candidate in names if (source / candidate).is_file()), None)
        if path is None:
            raise Unavailable(f"it has none of {', '.join(names)}")
        _accept(path, folder / file, sha)


def _accept(path: Path, target: Path, sha: str) -> None:
    """Write a file uncompressed to `target`, atomically; raise Unavailable if its sha256 is not `sha`."""
    try:
        data = read_bounded(path)
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (EOFError, OSError, zlib.error) as error:
        raise Unavailable(f"{path.name} can't be read ({error})") from None
    if (checksum := hashlib.sha256(data).hexdigest()) != sha:
        raise Unavailable(f"{path.name} is not the original: its sha256 is {checksum}, not {sha}")
    replace_durably(target, data)


def _is_original(path: Path, sha: str) -> bool:
    try:
        return hashlib.sha256(read_bounded(path)).hexdigest() == sha
    except OSError:
        return False


# --- Debian's package -------------------------------------------------------------------------------------------------
def _unpack(release: Release, package: str, installed: Path, folder: Path) -> None:
    """Download Debian's package and extract the files, without installing it, which would need root."""
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"there is no {missing[0]}")
    with tempfile.TemporaryDirectory(prefix="hpcdist-") as scratch:
        _command(["apt-get", "--quiet", "download", package], scratch)
        archive = next(Path(scratch).glob("*.deb"))
        _command(["dpkg-deb", "--extract", str(archive), "files"], scratch)
        _copy(release, Path(scratch, "files", *installed.parts[1:]), folder)


def _command(command: list[str], folder: str) -> None:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.startswith("E:")] or result.stderr.splitlines()
        raise Unavailable(f"{command[0]}: {lines[0] if lines else f'status {result.returncode}'}")


# --- a mirror ---------------------------------------------------------------------------------------------------------
def _download(release: Release, mirror: str, show: Show, folder: Path) -> None:
    """Download the files that are missing."""
    for file, sha in release.sha256.items():
        if _is_original(folder / file, sha):
            continue
        compressed = folder / f"{file}.gz"
        _get(f"{mirror}{file}.gz", compressed, show)
        try:
            _accept(compressed, folder / file, sha)
        finally:
            compressed.unlink()


def _get(url: str, path: Path, show: Show) -> None:
    """Download a file, and resume an earlier attempt."""
    unfinished = path.with_name(f"{path.name}.download")
    n_bytes = unfinished.stat().st_size if unfinished.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={n_bytes}-"} if n_bytes else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            resumed = response.status == 206
            n_bytes = n_bytes if resumed else 0
            length = response.headers.get("Content-Length")
            total = None if length is None else n_bytes + int(length)
            with open(unfinished, "ab" if resumed else "wb") as file:
                while block := response.read(BLOCK_BYTES):
                    file.write(block)
                    n_bytes += len(block)
                    show(path.name, n_bytes, total)
        if total is not None and n_bytes < total:
            raise Unavailable(f"the connection ended after {n_bytes} of {total} bytes of {path.name}")
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: the earlier attempt has got all bytes, but has not renamed the file
            raise Unavailable(f"{error.code} {error.reason} for {path.name}") from None
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise Unavailable(f"{getattr(error, 'reason', error)}") from None
    os.replace(unfinished, path)
