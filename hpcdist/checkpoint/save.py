"""Save a checkpoint: every rank its own files, all of them or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import folder as folders
from hpcdist.checkpoint.manifest import tensor_file, tree_file, write_manifest
from hpcdist.checkpoint.tensors import write_tensors
from hpcdist.checkpoint.tree import encode
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import CheckpointError, MismatchError
from hpcdist.records import Stamp, sync, write_durably


def save(
    comm: Communicator,
    folder: str | Path,
    step: int,
    state: Any,
    *,
    meta: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Collective. Save every rank's state as the checkpoint of `step`, and return its path.

    It returns once the checkpoint is durable on all ranks. Until then the ones before it stay. Remains of crashed
    attempts in the folder are removed; two runs must not share a folder. Where ranks have died the others save, and
    count as that many. A checkpoint of the same step is replaced; those of later steps (the run went back) are renamed
    and kept, with a warning. Messages: three small exchanges.

    Args:
        folder: on a file system that all ranks see; made where it is missing.
        step: the same on all ranks, at least 0.
        state: this rank's; see `hpcdist.checkpoint.tree.encode` for what it may hold. Not changed.
        meta: data that `load` needs beforehand (strategy, model signature...), no tensors; rank 0's is taken.
        keep: how many checkpoints stay in the folder, this one included, at least 1.

    Raises:
        MismatchError: the ranks' steps differ.
        CheckpointError: some rank can't save its state, or `step` or `keep` is out of range. Raised on all ranks; the
            checkpoints before this one are still there.
    """
    step, folder, leads = int(step), Path(folder), comm.rank == comm.failures.living[0]
    proposals = _together(comm, step, lambda: [step, _prepare(folder, step, keep) if leads else None])
    steps = [its_step for its_step, _ in proposals]
    if len(set(steps)) > 1:
        raise MismatchError(f"step must be the same on all ranks; got {steps} on ranks 0 to {comm.size - 1}.")
    temporary = folder / proposals[0][1]
    try:
        stamps = _together(comm, step, lambda: _write_rank(temporary, comm.failures.living.index(comm.rank), state))
        files = {name: Stamp(*stamp) for of_rank in stamps for name, stamp in of_rank.items()}
        _together(comm, step, lambda: _finish(temporary, step, meta, files, keep) if leads else None)
    except BaseException as error:
        if leads or isinstance(error, CheckpointError):  # else it may be about to be published
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder / folders.step_name(step)


def _together(comm: Communicator, step: int, work: Callable[[], Any]) -> list[Any]:
    """Collective. Run `work` on all ranks, and return their results, of types that JSON has, on every rank.

    Raises:
        CheckpointError: it has failed on some rank; on all ranks.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # whatever it is: the other ranks wait to hear of it
        failure = error
    reason = None if failure is None else _describe(failure)
    replies = {rank: reply for rank, reply in enumerate(comm.gather([result, reason])) if rank in comm.failures.living}
    failed = [f"on rank {rank}: {reason}" for rank, (_, reason) in replies.items() if reason is not None]
    if failed:
        raise CheckpointError(
            f"The checkpoint of step {step} must be saved by all ranks; got {' '.join(failed)}"
        ) from failure
    return [result for result, _ in replies.values()]


def _describe(failure: Exception) -> str:
    if isinstance(failure, CheckpointError):
        return str(failure)
    if isinstance(failure, OSError):
        return f"{failure}. Is there space, and may you write there?"
    return f"{type(failure).__name__}: {failure}."


def _prepare(folder: Path, step: int, keep: int) -> str:
    if step < 0 or keep < 1:
        raise CheckpointError(f"step and keep must be at least 0 and 1; got {step} and {keep}.")
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync(folder.parent)
    folders.clean(folder)
    return folders.temporary_name(step)


def _write_rank(temporary: Path, rank: int, state: Any) -> dict[str, Stamp]:
    tree, tensors, places = encode(state)
    temporary.mkdir(exist_ok=True)
    metadata = {name: json.dumps(place.describe()) for name, place in places.items()}
    files = {
        tensor_file(rank): write_tensors(temporary / tensor_file(rank), tensors, metadata),
        tree_file(rank): write_durably(temporary / tree_file(rank), [json.dumps(tree).encode()]),
    }
    sync(temporary)
    return files


def _finish(temporary: Path, step: int, meta: Mapping[str, Any] | None, files: dict[str, Stamp], keep: int) -> None:
    for name, stamp in files.items():
        if not (temporary / name).is_file() or (temporary / name).stat().st_size != stamp.bytes:
            raise CheckpointError(
                f"{temporary / name} must be visible to rank 0; got another rank's file that is not. "
                "Give a folder on a file system that all ranks share."
            )
    write_manifest(temporary, step, dict(meta or {}), files)
    sync(temporary)
    folders.publish(temporary, step, keep)
