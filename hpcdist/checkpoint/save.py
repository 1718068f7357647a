"""Save a checkpoint: every rank its own files, all of them or none."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import folder as folders
from hpcdist.checkpoint.manifest import tensor_file, tree_file, write_manifest
from hpcdist.checkpoint.refusal import raise_on_all_ranks
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
    best: Sequence[int] = (),
) -> Path:
    """Collective. Save every rank's state as the checkpoint of `step`, and return its path.

    It returns once the checkpoint is durable on all ranks. Until then the ones before it stay. Remains of crashed
    attempts in the folder are removed; two runs must not share a folder. If ranks have died, the others save, and
    count as that many. A checkpoint of the same step is replaced; those of later steps (the run went back) are renamed
    and kept, with a warning. Messages: five small exchanges.

    Args:
        folder: on a file system that all ranks see; made if it is missing.
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
    step, folder, alive = int(step), Path(folder), comm.failures.alive
    first = alive[0]
    leads = comm.rank == first
    agreed = partial(raise_on_all_ranks, comm, rule=f"The checkpoint of step {step} must be saved by all ranks; got ")
    name = agreed(lambda: _prepare(folder, step, keep) if leads else None)
    proposals = comm.gather([step, name])
    steps = [proposals[rank][0] for rank in alive]
    if len(set(steps)) > 1:
        raise MismatchError(f"step must be the same on all ranks; got {steps} on ranks 0 to {comm.size - 1}.")
    temporary = folder / proposals[first][1]
    try:
        own = agreed(lambda: _write_rank(temporary, alive.index(comm.rank), state))
        of_ranks = comm.gather({name: list(stamp) for name, stamp in own.items()})
        stamps = {name: Stamp(*stamp) for rank in alive for name, stamp in of_ranks[rank].items()}
        agreed(lambda: _finish(temporary, step, meta, stamps, keep, best) if leads else None)
    except BaseException as error:
        if leads or isinstance(error, CheckpointError):  # else it may be about to be published
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder / folders.step_name(step)


def _prepare(folder: Path, step: int, keep: int) -> str:
    if step < 0 or keep < 1:
        raise CheckpointError(f"step and keep must be at least 0 and 1; got {step} and {keep}.")
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync(folder.parent)
    folders.clean(folder)
    return f"{folders.step_name(step)}.tmp-{secrets.token_hex(4)}"


def _write_rank(temporary: Path, rank: int, state: Any) -> dict[str, Stamp]:
    tree, tensors, positions = encode(state)
    temporary.mkdir(exist_ok=True)
    metadata = {name: json.dumps(position.describe()) for name, position in positions.items()}
    files = {
        tensor_file(rank): write_tensors(temporary / tensor_file(rank), tensors, metadata),
        tree_file(rank): write_durably(temporary / tree_file(rank), [json.dumps(tree).encode()]),
    }
    sync(temporary)
    return files


def _finish(
    temporary: Path,
    step: int,
    meta: Mapping[str, Any] | None,
    files: dict[str, Stamp],
    keep: int,
    best: Sequence[int],
) -> None:
    for name, stamp in files.items():
        if not (temporary / name).is_file() or (temporary / name).stat().st_size != stamp.bytes:
            raise CheckpointError(
                f"{temporary / name} must be visible to rank 0; got another rank's file that is not. "
                "Give a folder on a file system that all ranks share."
            )
    write_manifest(temporary, step, dict(meta or {}), files)
    sync(temporary)
    folders.publish(temporary, step, keep, best)
