"""Save a checkpoint: every rank its files, all of them or none. What several ranks have in common is written once.

Ranks compare the checksums of their tensors. Where several have the same tensor under the same name, one of them writes
it, and the files of the others say which. So replicas of a model jointly write one state, each about as many bytes.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcdist.checkpoint import folder as folders
from hpcdist.checkpoint.manifest import tensor_file, tree_file, write_manifest
from hpcdist.checkpoint.refusal import raise_on_all_ranks
from hpcdist.checkpoint.tensors import OWNERS, file_content
from hpcdist.checkpoint.tree import encode
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.work import CallQueue, Work
from hpcdist.errors import CheckpointError, MismatchError
from hpcdist.records import CHECKSUMS, Stamp, sync, tensor_bytes, write_durably

SHARED_BYTES = 64  # length of the shortest tensor that is written once; naming its owner takes as many bytes
SIZE_BYTES, KEY_BYTES = 8, 24  # of a tensor's length, and of that with its checksum


def save(
    comm: Communicator,
    folder: str | Path,
    step: int,
    state: Any,
    *,
    meta: Mapping[str, Any] | None = None,
    keep: int = 3,
    best: Sequence[int] = (),
) -> Path:
    """Collective. Save every rank's state as the checkpoint of `step`, and return its path.

    It returns once the checkpoint is durable on all ranks. Until then the ones before it stay. Remains of crashed
    attempts in the folder are removed; two runs must not share a folder. If ranks have died, the others save, and
    count as that many. A checkpoint of the same step is replaced; those of later steps (the run went back) are renamed
    and kept, with a warning. Messages: six small exchanges, in one of them 24 bytes for each tensor of a rank.

    Args:
        folder: on a file system that all ranks see; created if it is missing.
        step: the same on all ranks, at least 0.
        state: this rank's; see `hpcdist.checkpoint.tree.encode` for what it may hold. Not changed.
        meta: data that is read before the state (strategy, model signature...), no tensors; rank 0's is taken.
        keep: how many checkpoints stay in the folder, this one included, at least 1.
        best: steps, the best first: the checkpoint of the first one that has any stays, too.

    Raises:
        MismatchError: the ranks' steps differ.
        CheckpointError: some rank can't save its state, or `step` or `keep` is out of range. Raised on all ranks;
            earlier checkpoints remain.
    """
    draft = _Draft(comm, folder, step, state, meta=meta, keep=keep, best=best)
    draft.publish()
    return draft.path


class Saver:
    """Save the checkpoints of a run, in the background where asked: a thread then writes copies of what this rank has.

    At most one checkpoint is being written; the end of the script waits for it. The copies stay for the next one:
    memory grows by the part of the state that this rank writes. Where no further thread may communicate (MPI without
    THREAD_MULTIPLE), or ranks outlive others, nothing is done in the background.
    """

    def __init__(self) -> None:
        self._work, self._kept = Work(), dict[str, Tensor]()
        self.seconds = 0.0  # from the start of the last `save` until its checkpoint was there
        # A copy of the communicator for the thread, from the first checkpoint in the background on.
        self._aside: tuple[Communicator, CallQueue] | None = None

    def save(
        self, comm: Communicator, folder: str | Path, step: int, state: Any, *, background: bool = False, **options: Any
    ) -> Path:
        """Collective. Save a checkpoint as the function `save` does, when the one before is complete; return its path.

        Raises:
            MismatchError, CheckpointError: as of the function; or the checkpoint before could not be written.
        """
        self.wait()
        start, real = comm.now(), comm.platform.virtual is None
        if not background or comm.failures.tolerant or (real and not comm.platform.concurrent):
            path = save(comm, folder, step, state, **options)
            self.seconds = comm.now() - start
            return path
        if self._aside is None:
            copy = comm.split(0)
            self._aside = copy, CallQueue(real) if comm.size == 1 else copy.queue()
            if real:
                atexit.register(self._end)
        comm, queue = self._aside
        draft = _Draft(comm, folder, step, state, **options)
        self._kept = draft.copy_tensors(self._kept)

        def publish() -> None:
            draft.publish(patient=True)
            self.seconds = comm.now() - start

        self._work = queue.submit(publish)
        return draft.path

    def wait(self) -> None:
        """Block until the checkpoint that is being written is there. Not collective.

        Raises:
            CheckpointError: some rank could not write it. Raised once, on all ranks, each at its next call.
        """
        work, self._work = self._work, Work()
        work.wait()

    def close(self) -> None:
        """Collective. Wait as `wait` does, and release the thread and the copies."""
        self.wait()
        if self._aside is not None:
            comm, queue = self._aside
            queue.close()
            comm.close()
        self._aside, self._kept = None, {}

    def _end(self) -> None:
        try:
            self.wait()
        except Exception as error:  # which Python would only show here, and exit with the status 0
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)


class _Draft:
    """Collective. This rank's part of a checkpoint to be written at `path`; the arguments are `save`'s.

    `publish`, also collective, may follow in another thread, on a communicator that no other thread uses.
    """

    def __init__(
        self, comm: Communicator, folder: str | Path, step: int, state: Any, *, meta: Mapping[str, Any] | None = None,
        keep: int = 3, best: Sequence[int] = (),
    ):  # fmt: skip
        self._comm, self._step, self._keep, self._best = comm, int(step), keep, tuple(best)
        self._alive, folder = comm.failures.alive, Path(folder)
        self._rank, self._meta = self._alive.index(comm.rank), dict(meta or {})
        rule = f"The checkpoint of step {step} must be saved by all ranks; got "
        self._agreed = partial(raise_on_all_ranks, comm, rule=rule)  # runs a function on each rank
        # `name` is that of the temporary folder on rank 0; None on others, which learn it from `proposals`.
        name, (tree, tensors, positions) = self._agreed(
            lambda: (None if self._rank else _prepare(folder, self._step, keep), encode(state))
        )
        proposals = [each for each in comm.gather([self._step, name]) if each is not None]
        steps = [step for step, _ in proposals]
        if len(set(steps)) > 1:
            raise MismatchError(f"step must be the same on all ranks; got {steps} on ranks 0 to {comm.size - 1}.")
        self._temporary, self.path = folder / proposals[0][1], folder / folders.step_name(self._step)
        owners = _owners(comm, tensors)
        others = {name: owner for name, owner in owners.items() if owner != self._rank}
        self._tensors = {name: tensor for name, tensor in tensors.items() if name not in others}
        self._metadata = {name: json.dumps(asdict(position)) for name, position in positions.items()}
        self._metadata |= {OWNERS: json.dumps(others)} if others else {}
        self._tree = json.dumps(tree).encode()

    def copy_tensors(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace the tensors by copies, and return these; copies of an earlier draft (`kept`) are overwritten."""
        copies = {}
        for name, tensor in self._tensors.items():
            data, copy = torch.from_numpy(tensor_bytes(tensor)), kept.get(name)
            copy = copy if copy is not None and copy.shape == data.shape else torch.empty_like(data)
            copies[name] = copy.copy_(data)
            self._tensors[name] = copy.view(tensor.dtype).view(tensor.shape)
        return copies

    def publish(self, *, patient: bool = False) -> None:
        """Collective. Write the files, and give the checkpoint its name when all ranks have written theirs."""

        def with_all(work: Callable[[], Any]) -> Any:
            try:
                return work()
            finally:
                if patient:  # leave the core to other threads while waiting for other ranks
                    _await_all(self._comm)

        try:
            local_stamps = self._agreed(lambda: with_all(self._write))
            by_rank = self._comm.gather({name: list(stamp) for name, stamp in local_stamps.items()})
            stamps = {name: Stamp(*stamp) for rank in self._alive for name, stamp in by_rank[rank].items()}
            self._agreed(lambda: with_all(lambda: None if self._rank else self._finish(stamps)))
        except BaseException as error:
            if not self._rank or isinstance(error, CheckpointError):  # else it may be about to be published
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise

    def _write(self) -> dict[str, Stamp]:
        """Write this rank's two files; return their lengths and checksums by name."""
        self._temporary.mkdir(exist_ok=True)
        tensors, tree = (self._temporary / name(self._rank) for name in (tensor_file, tree_file))
        files = {tensors.name: write_durably(tensors, file_content(self._tensors, self._metadata))}
        files[tree.name] = write_durably(tree, [self._tree])
        sync(self._temporary)
        return files

    def _finish(self, files: dict[str, Stamp]) -> None:
        """On rank 0: check that all ranks' files are visible, write the manifest, and rename the folder."""
        for name, stamp in files.items():
            if not (self._temporary / name).is_file() or (self._temporary / name).stat().st_size != stamp.bytes:
                raise CheckpointError(
                    f"{self._temporary / name} must be visible to rank 0; got another rank's file that is not. "
                    "Give a folder on a file system that all ranks share."
                )
        write_manifest(self._temporary, self._step, self._meta, files)
        sync(self._temporary)
        folders.publish(self._temporary, self._step, self._keep, self._best)


def _await_all(comm: Communicator) -> None:
    """Collective. Wait for all ranks, by messages: in a collective call of MPI a rank would keep its core busy."""
    token, (first, *others) = torch.zeros(1, dtype=torch.uint8), comm.failures.alive
    leads = comm.rank == first
    for sends in (not leads, leads):  # the first rank receives a token of each other rank, then sends one to each
        for peer in others if leads else [first]:
            if sends:
                comm.isend(token, peer).wait()
            else:
                comm.probe(peer)  # which sleeps
                comm.irecv(token, peer).wait()


def _owners(comm: Communicator, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Collective. Return by tensor name the rank that writes it: of those that have it, the one with least to write.

    Ranks are numbered among those alive, and all must get the same result. Short tensors are missing; each rank writes
    these itself.
    """
    if comm.size == 1:
        return {}
    keys = {}  # by name: a tensor's length and checksum, the same on all ranks that have it
    for name, tensor in tensors.items():
        if tensor.nbytes >= SHARED_BYTES:
            checksum = CHECKSUMS["xxh3_128"]()
            checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            checksum.update(tensor_bytes(tensor).data)
            keys[name] = tensor.nbytes.to_bytes(SIZE_BYTES, "big") + checksum.digest()
    keys_by_rank = comm.gather(b"".join(keys.values()))
    holders: dict[bytes, list[int]] = {}
    for rank, keys_of_rank in enumerate(keys_by_rank[rank] for rank in comm.failures.alive):
        for start in range(0, len(keys_of_rank), KEY_BYTES):
            holders.setdefault(keys_of_rank[start : start + KEY_BYTES], []).append(rank)
    # Few owners to choose from first, then the longest: ranks write about as much, and the same part each time.
    sizes = {key: int.from_bytes(key[:SIZE_BYTES], "big") for key in holders}
    written, owners = [0] * len(keys_by_rank), {}
    for key in sorted(holders, key=lambda key: (len(holders[key]), -sizes[key])):
        owners[key] = min(holders[key], key=written.__getitem__)
        written[owners[key]] += sizes[key]
    return {name: owners[key] for name, key in keys.items()}


def _prepare(folder: Path, step: int, keep: int) -> str:
    """Create the folder, or remove incomplete checkpoints in it; return a name for the temporary one."""
    if step < 0 or keep < 1:
        raise CheckpointError(f"step and keep must be at least 0 and 1; got {step} and {keep}.")
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync(folder.parent)
    folders.clean(folder)
    return f"{folders.step_name(step)}.tmp-{secrets.token_hex(4)}"
