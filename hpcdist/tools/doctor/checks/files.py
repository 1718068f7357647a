"""The run's file system: shared by all nodes, with room, locks that hold between nodes, and speed.

Rank 0 makes a folder that every node looks into, writes to, and locks a file in; it is gone at the end. Every call
that touches files may hang where a server is dead, so each has a limit.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hpcdist.records import read_bounded
from hpcdist.tools.console import amount
from hpcdist.tools.doctor.base import (
    ERROR,
    OK,
    WARNING,
    Finding,
    Nodes,
    Requirements,
    attempt,
    gather,
    gather_by_node,
    listed,
)

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator

CALL_S = 6.0  # how long the calls of one step may take
SEEN_S = 4.0  # how long a new file may take to be seen on other nodes: NFS keeps a folder's list for a while
FREED_S = 2.0  # how long a lock that was given back may stay refused
SAMPLE_BYTES, BLOCK_BYTES, SAMPLE_S = 1 << 24, 1 << 20, 1.5
NO_ROOM_BYTES, LITTLE_ROOM_BYTES = 1 << 27, 1 << 32  # a checkpoint of a small model; of a large one

_try = partial(attempt, CALL_S, "the file system's answer")


# --- measuring --------------------------------------------------------------------------------------------------------
def measure(comm: Communicator, nodes: Nodes, required: Requirements) -> dict:
    """Collective. Measure by node the free bytes, the time until it sees a new file, and locks; then the speeds."""
    first, last = comm.rank == 0, nodes.leaders[-1]  # whose memory does not hold what rank 0 wrote
    made = gather(comm, _try(lambda: _start(required.folder)) if first else None)[0]
    if "error" in made:
        return {"folder": str(required.folder.absolute()), "error": made["error"]}
    folder = Path(made["made"])
    try:
        return {
            "folder": made["folder"],
            "missing": made["missing"],
            "nodes": _share(comm, nodes, folder, made["token"]),
            "locks": _locks(comm, nodes, folder / "lock"),
            "write": gather(comm, _try(lambda: _write(folder / "sample")) if first else None)[0],
            "read": gather(comm, _try(lambda: _read(folder / "sample")) if comm.rank == last else None)[last],
        }
    finally:
        if first:
            _try(partial(shutil.rmtree, folder, ignore_errors=True))


def _share(comm: Communicator, nodes: Nodes, folder: Path, token: str) -> dict[str, dict]:
    """Collective. Find out whether each node sees rank 0's file, and whether rank 0 sees each node's."""
    node = nodes.of[comm.rank]
    found = gather_by_node(comm, nodes, lambda: _try(lambda: _look(folder, token, node)))
    if comm.rank == 0:
        able = [name for name in nodes.names if found[name].get("seen_s") is not None]
        wrote = {name: folder / f"node{nodes.names.index(name)}" for name in able}
        for name in _try(lambda: {"missing": _missing(wrote)}).get("missing", wrote):
            found[name]["arrived"] = False
    return found


def _locks(comm: Communicator, nodes: Nodes, path: Path) -> dict:
    """Collective. Find out whether rank 0 gets a lock, and whether others are refused it until it is given back."""
    # The lock is tried by the first rank of each other node; on one node by its second rank, or by the only one.
    lock, asks = _Lock(path), comm.rank in (nodes.leaders[1:] or [min(1, comm.size - 1)])
    held = gather(comm, _try(lock.take) if comm.rank == 0 else None)[0]
    refused = _try(lock.refused) if asks and held.get("held") else None
    gather(comm, None)
    if comm.rank == 0:
        _try(lock.drop)
    gather(comm, None)
    rows = gather(comm, _try(lambda: lock.free(refused)) if refused and "error" not in refused else refused)
    return {**held, "nodes": {nodes.name(rank): row for rank, row in enumerate(rows) if row}}


def _start(wanted: Path) -> dict:
    """Make a folder in the one that is wanted, or in the nearest one above it that exists."""
    wanted = wanted.absolute()
    folder = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    made, token = folder / f".hpcdist-doctor-{secrets.token_hex(4)}", secrets.token_hex(16)
    made.mkdir()
    _write_all(made / "token", token.encode())
    missing = "" if folder == wanted else f" ({wanted} does not exist: a run makes it there)"
    return {"folder": str(folder), "made": str(made), "token": token, "missing": missing}


def _look(folder: Path, token: str, node: int) -> dict:
    """Wait for the file that rank 0 wrote, then write one of this node's own."""
    start = time.monotonic()
    while True:
        with suppress(FileNotFoundError):
            if read_bounded(folder / "token") == token.encode():
                break
        if time.monotonic() - start > SEEN_S:
            return {"seen_s": None}
        time.sleep(0.02)
    seen_s = time.monotonic() - start
    _write_all(folder / f"node{node}", token.encode())
    return {"seen_s": seen_s, "free_bytes": shutil.disk_usage(folder).free}


def _missing(wrote: Mapping[str, Path]) -> list[str]:
    """List the nodes whose own file rank 0 does not see."""
    until = time.monotonic() + SEEN_S
    while not all(path.exists() for path in wrote.values()) and time.monotonic() < until:
        time.sleep(0.02)
    return [name for name, path in wrote.items() if not path.exists()]


class _Lock:
    """Lock a file as HDF5 does: by flock, which NFS turns into a lock of its server, and some file systems refuse.

    Every call returns what it found out. Locks are of an open file, so that one process can hold and be refused one.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: IO | None = None

    def take(self) -> dict:
        self._file = open(self._path, "w")
        return {"held": self._takes(self._file)}

    def refused(self) -> dict:
        """Find out whether another one's lock is seen."""
        with open(self._path, "r+") as file:
            return {"refused": not self._takes(file)}

    def free(self, before: dict) -> dict:
        """Find out whether the lock can be had again; others, who try too, hold it for a moment only."""
        until = time.monotonic() + FREED_S
        with open(self._path, "r+") as file:
            while not (freed := self._takes(file)) and time.monotonic() < until:
                time.sleep(0.01)
            return before | {"freed": freed}

    def drop(self) -> dict:
        if self._file is not None:
            self._file.close()
        return {}

    @staticmethod
    def _takes(file: IO) -> bool:
        """Try to lock an open file; tell whether nobody else has it locked. Any other failure is an OSError."""
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _write_all(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path) -> dict:
    """Write a file for a moment; return bytes and seconds."""
    block, written, start = secrets.token_bytes(BLOCK_BYTES), 0, time.monotonic()
    with open(path, "xb", buffering=0) as file:
        while written < SAMPLE_BYTES and time.monotonic() - start < SAMPLE_S:
            written += file.write(block)
        os.fsync(file.fileno())
    return {"bytes": written, "seconds": time.monotonic() - start}


def _read(path: Path) -> dict:
    """Read a file for a moment; return bytes and seconds."""
    read, start = 0, time.monotonic()
    with open(path, "rb", buffering=0) as file:
        while (data := file.read(BLOCK_BYTES)) and time.monotonic() - start < SAMPLE_S:
            read += len(data)
    return {"bytes": read, "seconds": time.monotonic() - start}


# --- judging ----------------------------------------------------------------------------------------------------------
def judge(measured: dict, nodes: Nodes, required: Requirements) -> Iterator[Finding]:
    """Report nodes that can't use the folder, too little room, locks and speeds; or in one line that all is well."""
    if "error" in measured:
        text = f"folder must be one that can be written; got {measured['folder']} on {nodes.names[0]}: "
        yield Finding(ERROR, f"{text}{measured['error']}. Choose another one with --folder")
        return
    sharing = list(_sharing(measured, nodes))
    locking = [] if sharing else list(_locking(measured, required.environ))
    found = [*sharing, *_room(measured), *locking, *([] if sharing else _samples(measured))]
    yield from found
    if not any(finding.status == ERROR for finding in found):
        yield Finding(OK, _summary(measured, nodes, holds=not locking and not _off(required.environ)))


def _sharing(measured: dict, nodes: Nodes) -> Iterator[Finding]:
    """Report nodes that do not see, or can't write, the folder."""
    folder, found, first = measured["folder"], measured["nodes"], nodes.names[0]
    blind = [name for name, row in found.items() if row.get("seen_s", 0) is None]
    if blind and len(blind) == len(nodes.names) - 1:
        text = f"folder must be on a file system that all nodes share; got {folder}, where {listed(blind)} "
        text += f"see{'s' * (len(blind) == 1)} nothing of what {first} wrote. Choose another one with --folder"
        yield Finding(ERROR, text)
        return
    for name, row in found.items():
        if name in blind:
            text = f"{name} does not see within {SEEN_S:g} s what {first} wrote to {folder}: is it mounted there?"
            yield Finding(ERROR, text, (name,))
        elif "error" in row:
            yield Finding(ERROR, f"{name} can't use {folder}: {row['error']}", (name,))
        elif not row.get("arrived", True):
            yield Finding(ERROR, f"{first} does not see within {SEEN_S:g} s what {name} wrote to {folder}", (name,))


def _room(measured: dict) -> Iterator[Finding]:
    room = [row["free_bytes"] for row in measured["nodes"].values() if "free_bytes" in row]
    if room and min(room) < LITTLE_ROOM_BYTES:
        text = f"{measured['folder']} has {amount(min(room))} of free space: a run writes records and checkpoints"
        yield Finding(ERROR if min(room) < NO_ROOM_BYTES else WARNING, text)


def _locking(measured: dict, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report locks that are refused, or do not hold between nodes."""
    if _off(environ):
        return
    folder, locks = measured["folder"], measured["locks"]
    advice = "Set HDF5_USE_FILE_LOCKING=FALSE, and let one process at a time write a file"
    if not locks.get("held"):
        text = f"HDF5 must be able to lock files; got {locks.get('error', 'no lock')} in {folder}. {advice}"
        yield Finding(WARNING, text)
        return
    for name, row in locks["nodes"].items():
        if "error" in row:
            yield Finding(WARNING, f"{name} can't lock files in {folder}: {row['error']}. {advice}", (name,))
        elif not row["refused"]:
            text = f"locks must hold between nodes; got one on {name}, of a file in {folder} that rank 0"
            yield Finding(WARNING, f"{text} has locked. {advice}")
        elif not row["freed"]:
            text = f"a lock of a file in {folder} that was given back stays refused on {name}. {advice}"
            yield Finding(WARNING, text, (name,))


def _off(environ: Mapping[str, str]) -> bool:
    return environ.get("HDF5_USE_FILE_LOCKING", "").upper() in ("FALSE", "0")


def _samples(measured: dict) -> Iterator[Finding]:
    for what in ("write", "read"):
        if "error" in measured[what]:
            yield Finding(ERROR, f"{measured['folder']} must allow to {what} a file; got {measured[what]['error']}")


def _summary(measured: dict, nodes: Nodes, holds: bool) -> str:
    rows = measured["nodes"].values()
    text = f"{measured['folder']}{measured.get('missing', '')}: {amount(min(row['free_bytes'] for row in rows))} free"
    if len(nodes.names) > 1:
        text += f", seen by all nodes within {1e3 * max(row['seen_s'] for row in rows):.0f} ms"
    text += ", locks hold" if holds else ""
    for what in ("write", "read"):
        text += f", {what} {amount(measured[what]['bytes'] / max(measured[what]['seconds'], 1e-9))}/s"
    return text
