"""The run's file system: shared by all nodes, free space, locks that work between nodes, speed.

Rank 0 creates a temporary folder, in which every node reads, writes, and locks a file. Calls on files may hang if a
server is dead, so each has a timeout.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO

from hpcdist.comm.communicator import Communicator
from hpcdist.records import read_bounded
from hpcdist.tools.console import amount
from hpcdist.tools.doctor import base
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Finding, Nodes, Requirements

CALL_S = 6.0  # timeout of the calls of one step
SEEN_S = 4.0  # timeout for a new file to appear on other nodes: NFS caches a folder's list
FREED_S = 2.0  # timeout for a released lock to become free
SAMPLE_BYTES, BLOCK_BYTES, SAMPLE_S = 1 << 24, 1 << 20, 1.5
NO_ROOM_BYTES, LITTLE_ROOM_BYTES = 1 << 27, 1 << 32  # a checkpoint of a small model, of a large one

_try = partial(base.attempt, CALL_S, "the file system's answer")


# --- measuring --------------------------------------------------------------------------------------------------------
def measure(comm: Communicator, nodes: Nodes, required: Requirements) -> dict:
    """Collective. Measure free bytes, visibility of new files and locks on each node; then write and read speed."""
    is_first, reader = comm.rank == 0, nodes.leaders[-1]  # rank that reads: its page cache does not hold rank 0's file
    created = base.gather(comm, _try(lambda: _start(required.folder)) if is_first else None)[0]
    if "error" in created:
        return {"folder": str(required.folder.absolute()), "error": created["error"]}
    folder = Path(created["made"])
    try:
        return {
            "folder": created["folder"],
            "missing": created["missing"],
            "nodes": _check_visibility(comm, nodes, folder, created["token"]),
            "locks": _locks(comm, nodes, folder / "lock"),
            "write": base.gather(comm, _try(lambda: _write(folder / "sample")) if is_first else None)[0],
            "read": base.gather(comm, _try(lambda: _read(folder / "sample")) if comm.rank == reader else None)[reader],
        }
    finally:
        if is_first:
            _try(partial(shutil.rmtree, folder, ignore_errors=True))


def _check_visibility(comm: Communicator, nodes: Nodes, folder: Path, token: str) -> dict[str, dict]:
    """Collective. Return `_see_and_write` by node; on rank 0, "arrived" is False if it does not see the node's file."""
    node = nodes.of[comm.rank]
    rows = base.gather_by_node(comm, nodes, lambda: _try(lambda: _see_and_write(folder, token, node)))
    if comm.rank == 0:
        writers = [name for name in nodes.names if rows[name].get("seen_s") is not None]
        files = {name: folder / f"node{nodes.names.index(name)}" for name in writers}
        for name in _try(lambda: {"missing": _missing(files)}).get("missing", files):  # all, if this call fails
            rows[name]["arrived"] = False
    return rows


def _locks(comm: Communicator, nodes: Nodes, path: Path) -> dict:
    """Collective. Return whether rank 0 gets a lock, and by node whether it is refused there until it is released."""
    # The first rank of each other node tries the lock; on a single node the second rank, or the only one.
    is_trying, held = comm.rank in (nodes.leaders[1:] or [min(1, comm.size - 1)]), ExitStack()
    of_rank_0 = _try(lambda: {"held": _lock(held.enter_context(open(path, "w")))}) if comm.rank == 0 else None
    taken = base.gather(comm, of_rank_0)[0]
    row = _try(partial(_refused, path)) if is_trying and taken.get("held") else None
    base.gather(comm, None)  # barrier: all have tried
    _try(held.close)
    base.gather(comm, None)  # barrier: the lock is released
    if row and "error" not in row:
        row |= _try(partial(_freed, path))
    rows = base.gather(comm, row)
    return {**taken, "nodes": {nodes.name(rank): row for rank, row in enumerate(rows) if row}}


def _start(requested: Path) -> dict:
    """Create a temporary folder, with a token in a file, in the requested folder or its nearest parent that exists."""
    requested = requested.absolute()
    folder = next(path for path in (requested, *requested.parents) if path.is_dir())
    created, token = folder / f".hpcdist-doctor-{secrets.token_hex(4)}", secrets.token_hex(16)
    created.mkdir()
    _write_all(created / "token", token.encode())
    note = "" if folder == requested else f" ({requested} does not exist: a run makes it there)"
    return {"folder": str(folder), "made": str(created), "token": token, "missing": note}


def _see_and_write(folder: Path, token: str, node: int) -> dict:
    """Wait for rank 0's file, then write this node's. Return the seconds (None: not seen) and the free bytes."""
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


def _missing(files: Mapping[str, Path]) -> list[str]:
    """Return the nodes whose file (of `files`, by node) rank 0 does not see within SEEN_S."""
    until = time.monotonic() + SEEN_S
    while not all(path.exists() for path in files.values()) and time.monotonic() < until:
        time.sleep(0.02)
    return [name for name, path in files.items() if not path.exists()]


def _lock(file: IO) -> bool:
    """Try to lock an open file with flock, as HDF5 does; return False if another open file has the lock.

    NFS passes locks to its server, and some file systems refuse them with OSError.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refused(path: Path) -> dict:
    """Return whether another process's lock is respected."""
    with open(path, "r+") as file:
        return {"refused": not _lock(file)}


def _freed(path: Path) -> dict:
    """Return whether the released lock becomes free; other ranks try, too, and hold it briefly."""
    until = time.monotonic() + FREED_S
    with open(path, "r+") as file:
        while not (freed := _lock(file)) and time.monotonic() < until:
            time.sleep(0.01)
        return {"freed": freed}


def _write_all(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path) -> dict:
    """Write up to SAMPLE_BYTES for at most about SAMPLE_S; return bytes and seconds."""
    block, written, start = secrets.token_bytes(BLOCK_BYTES), 0, time.monotonic()
    with open(path, "xb", buffering=0) as file:
        while written < SAMPLE_BYTES and time.monotonic() - start < SAMPLE_S:
            written += file.write(block)
        os.fsync(file.fileno())
    return {"bytes": written, "seconds": time.monotonic() - start}


def _read(path: Path) -> dict:
    """Read a file for at most about SAMPLE_S; return bytes and seconds."""
    read, start = 0, time.monotonic()
    with open(path, "rb", buffering=0) as file:
        while (data := file.read(BLOCK_BYTES)) and time.monotonic() - start < SAMPLE_S:
            read += len(data)
    return {"bytes": read, "seconds": time.monotonic() - start}


# --- judging ----------------------------------------------------------------------------------------------------------
def judge(measured: dict, nodes: Nodes, required: Requirements) -> Iterator[Finding]:
    """Report nodes that can't use the folder, little space, faulty locks, failed samples; or one line with speeds."""
    if "error" in measured:
        text = f"folder must be one that can be written; got {measured['folder']} on {nodes.names[0]}: "
        yield Finding(ERROR, f"{text}{measured['error']}. Choose another one with --folder")
        return
    sharing = list(_sharing(measured, nodes))
    locking = [] if sharing else list(_locking(measured, required.environ))
    findings = [*sharing, *_room(measured), *locking, *([] if sharing else _samples(measured))]
    yield from findings
    if not any(finding.status == ERROR for finding in findings):
        yield Finding(OK, _summary(measured, nodes, holds=not locking and not _locking_disabled(required.environ)))


def _sharing(measured: dict, nodes: Nodes) -> Iterator[Finding]:
    """Report nodes that don't see, or can't write to, the folder."""
    folder, rows, first = measured["folder"], measured["nodes"], nodes.names[0]
    blind = [name for name, row in rows.items() if row.get("seen_s", 0) is None]
    if blind and len(blind) == len(nodes.names) - 1:
        text = f"folder must be on a file system that all nodes share; got {folder}, where {base.listed(blind)} "
        text += f"see{'s' * (len(blind) == 1)} no file of {first}. Choose another one with --folder"
        yield Finding(ERROR, text)
        return
    for name, row in rows.items():
        if name in blind:
            text = f"{name} does not see the file of {first} in {folder} within {SEEN_S:g} s: is it mounted there?"
            yield Finding(ERROR, text, (name,))
        elif "error" in row:
            yield Finding(ERROR, f"{name} can't use {folder}: {row['error']}", (name,))
        elif not row.get("arrived", True):
            yield Finding(ERROR, f"{first} does not see the file of {name} in {folder} within {SEEN_S:g} s", (name,))


def _room(measured: dict) -> Iterator[Finding]:
    room = [row["free_bytes"] for row in measured["nodes"].values() if "free_bytes" in row]
    if room and min(room) < LITTLE_ROOM_BYTES:
        text = f"{measured['folder']} has {amount(min(room))} of free space: a run writes records and checkpoints"
        yield Finding(ERROR if min(room) < NO_ROOM_BYTES else WARNING, text)


def _locking(measured: dict, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report locks that are refused, or don't work between nodes."""
    if _locking_disabled(environ):
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
            text = f"locks must work between nodes; got one on {name}, of a file in {folder} that rank 0"
            yield Finding(WARNING, f"{text} has locked. {advice}")
        elif not row["freed"]:
            text = f"a released lock of a file in {folder} stays refused on {name}. {advice}"
            yield Finding(WARNING, text, (name,))


def _locking_disabled(environ: Mapping[str, str]) -> bool:
    return environ.get("HDF5_USE_FILE_LOCKING", "").upper() in ("FALSE", "0")


def _samples(measured: dict) -> Iterator[Finding]:
    for what in ("write", "read"):
        if "error" in measured[what]:
            yield Finding(ERROR, f"{measured['folder']} must allow to {what} a file; got {measured[what]['error']}")


def _summary(measured: dict, nodes: Nodes, holds: bool) -> str:
    """Describe a folder without errors in one line. `holds`: locks were checked and work."""
    rows = measured["nodes"].values()
    text = f"{measured['folder']}{measured.get('missing', '')}: {amount(min(row['free_bytes'] for row in rows))} free"
    if len(nodes.names) > 1:
        text += f", seen by all nodes within {1e3 * max(row['seen_s'] for row in rows):.0f} ms"
    text += ", locks work" if holds else ""
    for what in ("write", "read"):
        text += f", {what} {amount(measured[what]['bytes'] / max(measured[what]['seconds'], 1e-9))}/s"
    return text
