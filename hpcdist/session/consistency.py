"""Check that ranks are at the same place in the user's loop, and have what must be the same there."""

from __future__ import annotations

import logging
import math
import os
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import sum_and_norm
from hpcdist.comm.communicator import Communicator
from hpcdist.model.hyperparameters import unequal_steps
from hpcdist.records.digest import tensor_bytes
from hpcdist.session import rules
from hpcdist.session.world import current
from hpcdist.strategies import Strategy
from hpcdist.strategies.common.gradients import FIRST_STEPS

_log = logging.getLogger("hpcdist")
_MODES = ("no", "eval()", "train()", "train() and eval()")  # by `modes` of an Attachment
_FEW = 64  # data sets, or tensors, that a data set holds in a list
_ROWS, _ENTRIES = 8, 1024  # of the samples that are compared


def start_epoch(optimizer: Any) -> None:
    """Collective. Let the strategy start again from parameters that the loop has set since the last epoch.

    Raises MismatchError where these, or the optimiser's state, must be the same on all ranks and are not, and where a
    rank begins no epoch.
    """
    strategy: Strategy = optimizer.strategy
    first, optimizer.attachment.epoch_started = not optimizer.attachment.epoch_started, True
    if strategy.comm.size == 1:
        return
    resets = strategy.state.resets or type(strategy).reset_from_model is not Strategy.reset_from_model
    replicates = rules.forbids("replicas differ", strategy)
    strategy.model.refresh()
    looks = first or resets or replicates
    mine = [strategy.model.touched(), _sketch(strategy)] if looks else [False, _Sketch()]
    found = _gathered(optimizer, "at an epoch's start", [*mine, _masks(strategy) if first else 0])
    touched = any(touched for touched, _, _ in found.values())
    if replicates or (first and touched):
        _require_replicas(strategy, {rank: sketch for rank, (_, sketch, _) in found.items()})
    require_same_state(optimizer, strategy.comm, type(strategy), optimizer.attachment.loads)
    masks = [found[rank][2] for rank in strategy.config.workers(strategy.comm.size) if rank in found]
    if len(masks) > 1 and masks[0] and len(set(masks)) == 1 and strategy.comm.rank == min(found):
        _log.info(
            "All ranks draw the same random numbers: their dropout masks are the same. For others seed each rank by "
            "itself when the model is made: torch.manual_seed(seed + hpcdist.rank())."
        )
    if resets and touched:
        strategy.reset_from_model()


def _masks(strategy: Strategy) -> int:
    """Return a checksum of the random state that dropout draws from; 0 where the model has none."""
    modules = [module for module in strategy.model.module.modules() if module.training]
    shares = [getattr(module, "dropout", getattr(module, "p", 0.0)) for module in modules]  # also of attention and RNNs
    drops = any(isinstance(share, float) and share > 0.0 for share in shares)
    return zlib.crc32(torch.get_rng_state().numpy().data) if drops else 0


def require_same_state(optimizer: Any, comm: Communicator, strategy: Any, loads: int | None = None) -> None:
    """Collective. Check that all ranks' optimisers have state of the same parameters, and have loaded it alike.

    Where parameters are the same on all ranks the state must have the same sums, too. Raises MismatchError otherwise.

    Args:
        loads: how often the loop has loaded the state; None before the first step.
    """
    summed = strategy.contract.replicates and strategy.contract.step == "the optimiser's"
    held: list[tuple[int, dict[str, Any]]] = []
    if summed or loads is None:  # else each rank has a state of its own, or servers have it
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = [(i, state) for i, p in enumerate(parameters) if (state := optimizer.state.get(p))]
    which = zlib.crc32(repr([i for i, _ in held]).encode())
    values = [value for _, state in held for value in state.values() if isinstance(value, Tensor) and summed]
    sums = [sum_and_norm(value.detach().reshape(-1)) for value in values if value.is_floating_point()]
    norm = math.sqrt(sum(norm * norm for _, norm in sums))
    mine = [loads or 0, len(held), which, sum(total for total, _ in sums), norm]
    found = comm.failures.retry_on_failure(partial(comm.gather, mine))
    first, names = comm.failures.alive[0], comm.platform.world_ranks
    for rank in comm.failures.alive:
        near = all(_near(one, other, 3e-4 * norm) for one, other in zip(found[first][3:], found[rank][3:], strict=True))
        if found[rank][:3] != found[first][:3] or not near:
            own, theirs = (
                f"{n} parameters{f', norm {norm:.6g}' if norm else ''}, loaded {times} times"
                for times, n, _, _, norm in (found[first], found[rank])
            )
            one, other = names[first], names[rank]
            raise rules.error("the optimiser's state differs", own=own, theirs=theirs, first=one, rank=other)


def follow_servers(optimizer: Any, place: str) -> None:
    """Collective where servers make the updates. Give this rank's model what they have changed outside of an epoch.

    Raises MismatchError where a rank is at another `place` in the loop.
    """
    strategy: Strategy = optimizer.strategy
    if strategy.contract.updates == "on servers" and strategy.comm.size > 1:
        strategy.model.refresh()
        _gathered(optimizer, place, None)
        strategy.reset_from_model()


def require_same_steps(optimizer: Any, place: str) -> None:
    """Collective. Raise MismatchError where a rank is at another `place` in the loop, or has taken other steps.

    Ranks that take their steps together must have used as many batches; replicas must have the same parameters.
    """
    strategy: Strategy = optimizer.strategy
    if strategy.comm.size == 1:
        return
    replicates = rules.forbids("replicas differ", strategy)
    sketch = _sketch(strategy) if replicates else _Sketch()
    found = _gathered(optimizer, place, [strategy.model.gradients.batches_used, sketch])
    workers = [rank for rank in strategy.config.workers(strategy.comm.size) if rank in found]
    if strategy.contract.synchronous:
        error = unequal_steps({rank: found[rank][0] for rank in workers}, "batches that steps were taken for")
        if error is not None:
            raise error
    if replicates:
        _require_replicas(strategy, {rank: sketch for rank, (_, sketch) in found.items()})


def _gathered(optimizer: Any, place: str, value: Any) -> dict[int, Any]:
    """Collective. Return each living rank's value; raise MismatchError where a rank is at another place in the loop.

    Workers must have trained in the same mode. Those that don't take their steps together compare their first batches.
    """
    strategy: Strategy = optimizer.strategy
    comm, own = strategy.comm, optimizer.attachment
    mine = [place, value, strategy.gradients.checksums, [own.modes, own.others]]
    own.modes = 0
    found = comm.failures.retry_on_failure(partial(comm.gather, mine))
    places = {rank: found[rank][0] for rank in comm.failures.alive}
    first = comm.failures.alive[0]
    odd = next((rank for rank in places if places[rank] != places[first]), None)
    if odd is not None:
        habit = "ranks are at different places in the loop"
        serving = sorted(set(places).difference(strategy.config.workers(comm.size)))
        takes_no_step = f" Rank {serving[0]} serves and takes no step: count epochs." if serving else ""
        facts = {"first": first, "place": places[first], "rank": odd, "other": places[odd]}
        raise rules.error(habit, serving=takes_no_step, **facts)
    workers = [rank for rank in strategy.config.workers(comm.size) if rank in places]
    if not strategy.contract.synchronous:
        _warn_of_same_batches([found[rank][2] for rank in workers], 1, comm.rank == workers[0])
    _require_one_mode({rank: found[rank][3] for rank in workers if found[rank][3][0]})
    return {rank: found[rank][1] for rank in comm.failures.alive}


def _require_one_mode(modes: Mapping[int, Any]) -> None:
    """Raise MismatchError where ranks have taken steps in other modes, of the model or of modules in it."""
    first = min(modes, default=0)
    for rank, (taken, others) in modes.items():
        if [taken, others] != modes[first]:
            names = [""] if taken != modes[first][0] else sorted(set(others) ^ set(modes[first][1]))
            own, theirs = (
                _MODES[mode if names[0] not in apart else 3 - mode] for mode, apart in (modes[first], modes[rank])
            )
            name, habit = f"module {names[0]}" if names[0] else "the model", "ranks train in different modes"
            raise rules.error(habit, name=name, own=own, theirs=theirs, first=first, rank=rank)


class _Sketch(NamedTuple):
    """What tells replicas apart: sum and norm of each flat tensor, and how the loop has changed gradients."""

    parameters: Sequence[Sequence[float]] = ()
    changed: int = 0


def _sketch(strategy: Strategy) -> _Sketch:
    return _Sketch(list(map(sum_and_norm, strategy.model.params)), strategy.model.gradients.changed_by_loop)


def compare_first_batches(optimizer: Any) -> None:
    """Collective, once, where workers take their steps together. Warn if all have trained on the same batches."""
    strategy: Strategy = optimizer.strategy
    sums = strategy.gradients.checksums
    if sums is not None and len(sums) == FIRST_STEPS and strategy.contract.synchronous:
        peers = optimizer.attachment.peers
        found = peers.failures.retry_on_failure(partial(peers.gather, sums))
        strategy.gradients.checksums = None
        alive = peers.failures.alive
        _warn_of_same_batches([found[rank] for rank in alive], FIRST_STEPS, peers.rank == alive[0])


def _warn_of_same_batches(checksums: Sequence[list[int] | None], steps: int, here: bool) -> None:
    """Warn, `here`, if gradients of the first steps were the same on all workers, to the bit, and not zero."""
    firsts = [tuple(sums[:steps]) for sums in checksums if sums is not None]
    if len(firsts) < max(2, len(checksums)) or len(set(firsts)) > 1 or len(firsts[0]) < steps or not all(firsts[0]):
        return
    session = current()
    for optimizer in session.optimizers:  # once for all
        optimizer.strategy.gradients.checksums = None
    if here and session.comm.rank % session.stages == 0:
        warnings.warn(
            "All workers have trained on the same batches: their gradients are the same to the bit. Let each have its "
            "share of the samples, loader = hpcdist.shard(loader); or draw its own, by another seed on each rank (seed "
            "+ hpcdist.rank()). If that is meant, pass identical_batches='allow' to DistributedOptimizer.",
            stacklevel=4,
        )


def _require_replicas(strategy: Strategy, sketches: Mapping[int, _Sketch]) -> None:
    """Raise MismatchError unless all ranks' parameters have the same sums, but for rounding."""
    first = min(sketches)
    groups, own = sketches[first]
    for rank, (others, theirs) in sorted(sketches.items()):
        for flat, (total, norm), (other, other_norm) in zip(strategy.model.params, groups, others, strict=True):
            tolerance = math.sqrt(torch.finfo(flat.dtype).eps) * norm
            if _near(total, other, tolerance) and _near(norm, other_norm, tolerance):
                continue
            if own != theirs:
                habit = "gradients are changed on some ranks only"
                raise rules.error(habit, strategy, rank=rank, first=first)
            raise rules.error("replicas differ", strategy, rank=rank, first=first)


def _near(one: float, other: float, tolerance: float) -> bool:
    return str(one) == str(other) or abs(one - other) <= tolerance  # as text: a NaN is equal to itself


# --- loaders ----------------------------------------------------------------------------------------------------------
def require_same_loader(group: Communicator, settings: Mapping[str, Any], dataset: Any) -> None:
    """Collective in `group`. Raise MismatchError unless all workers' loaders deal out the same samples.

    Compares settings, the data set's length, and its `marks`.
    """
    mine: dict[str, Any] = {name: str(value) for name, value in settings.items()}
    if hasattr(dataset, "__len__"):
        mine |= {"the data set's length": len(dataset)}
    mine |= marks(dataset)
    found = group.failures.retry_on_failure(partial(group.gather, mine))
    first, numbers = group.failures.alive[0], group.platform.world_ranks
    for rank in group.failures.alive:
        for name, value in found[first].items():
            if not _alike(value, found[rank].get(name)):
                facts = {"name": name, "own": value, "theirs": found[rank].get(name)}
                one, other = numbers[first], numbers[rank]
                raise rules.error("workers read different data", first=one, rank=other, **facts)


def changed_marks(dataset: Any, saved: Mapping[str, Any]) -> list[str]:
    """Say in which marks a data set differs from that of a checkpoint."""
    pairs = ((name, own, saved.get(name, own)) for name, own in marks(dataset).items())
    return [f"{name} is {own} here, and {old} in the checkpoint" for name, own, old in pairs if not _alike(own, old)]


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two values are equal; numbers that have been computed, but for rounding."""
    computed = isinstance(one, float) and isinstance(other, float)
    return str(one) == str(other) or (computed and math.isclose(one, other, rel_tol=1e-3))


def marks(dataset: Any, path: str = "loader.dataset", holders: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return checksums of a data set's files and of its lists with an entry for each sample, nested data sets included.

    They differ where sample i is another one: on another rank, or in a checkpoint. Samples are not read: that may open
    files too early, or draw numbers.
    """
    if isinstance(checksum := getattr(dataset, "checksum", None), str):  # of all samples, as HDF5Dataset's
        return {f"the checksum of {path}": checksum}
    found: dict[str, Any] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        parts = {f"{path}.{name}": value}
        if isinstance(value, (list, tuple)) and len(value) <= _FEW:
            parts |= {f"{path}.{name}[{i}]": part for i, part in enumerate(value)}  # tensors, or data sets
        for label, part in parts.items():
            mark = _mark(part, len(dataset)) if hasattr(dataset, "__len__") else None
            if mark is not None:
                found[f"{mark[0]} of {label}"] = mark[1]
            elif hasattr(part, "__getitem__") and hasattr(part, "__dict__") and id(part) not in holders:
                found |= marks(part, label, (*holders, id(dataset)))
    return found


def _mark(value: Any, n: int) -> tuple[str, Any] | None:
    """Return the kind and value of a checksum, if `value` is a file, or has an entry for each of `n` samples."""
    if isinstance(value, (str, os.PathLike)):
        return ("the file", f"{Path(value).name}, {os.path.getsize(value)} bytes") if os.path.isfile(value) else None
    if getattr(value, "num_columns", None) == 1:  # the indices of a data set in Arrow's tables
        value = np.asarray(value.column(0))
    dims = value.ndim if isinstance(value, (Tensor, np.ndarray)) else int(isinstance(value, (list, tuple, range)))
    if dims == 0 or len(value) != n:
        return None
    positions = np.linspace(0, n - 1, min(n, _ENTRIES if dims == 1 else _ROWS)).astype(np.int64)
    if not isinstance(value, Tensor) and getattr(value, "dtype", np.dtype(object)).kind not in "biufc":
        entries = re.sub(r"[^'\" ]*/", "", repr([value[i] for i in positions.tolist()]))  # folders may be a node's own
        return None if " at 0x" in entries else ("the checksum", zlib.crc32(entries.encode()))
    rows = torch.as_tensor(value[torch.from_numpy(positions) if isinstance(value, Tensor) else positions])
    if rows.is_floating_point() or rows.is_complex():
        return "the sum of rows", _sum_of(torch.view_as_real(rows) if rows.is_complex() else rows)
    return "the checksum", zlib.crc32(tensor_bytes(rows).data)


def _sum_of(rows: Tensor) -> float:
    """Return a weighted sum that depends on the order of the rows."""
    return sum(weight * row.to(torch.float64).abs().sum().item() for weight, row in enumerate(rows, start=1))
