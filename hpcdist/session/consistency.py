"""Check that ranks are at the same point of the user's loop, with values that must be equal there."""

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
from hpcdist.model.hyperparameters import unequal_steps_error
from hpcdist.records.digest import tensor_bytes
from hpcdist.session import rules
from hpcdist.session.world import current
from hpcdist.strategies import Strategy
from hpcdist.strategies.common.gradients import FIRST_STEPS

_log = logging.getLogger("hpcdist")
_MODES = ("no", "eval()", "train()", "train() and eval()")  # by `Attachment.modes`
_FEW = 64  # maximum length of a data set's list of tensors or data sets
_ROWS, _ENTRIES = 8, 1024  # number of rows, or entries, that are compared


def start_epoch(optimizer: Any) -> None:
    """Collective. Reset the strategy from the model if the loop has changed its parameters since the last epoch.

    Raises MismatchError if parameters or optimiser states that must be equal differ, or a rank is not at this point.
    """
    strategy: Strategy = optimizer.strategy
    is_first, optimizer.attachment.epoch_started = not optimizer.attachment.epoch_started, True
    if strategy.comm.size == 1:
        return
    can_reset = strategy.state.resets or type(strategy).reset_from_model is not Strategy.reset_from_model
    needs_replicas = rules.forbids("replicas differ", strategy)
    strategy.model.refresh()
    compares = is_first or can_reset or needs_replicas
    local = [strategy.model.touched(), _summarise_replica(strategy)] if compares else [False, _ReplicaSummary()]
    by_rank = _gathered(optimizer, "at an epoch's start", [*local, _dropout_state(strategy) if is_first else 0])
    touched = any(touched for touched, _, _ in by_rank.values())
    if needs_replicas or (is_first and touched):
        _require_replicas(strategy, {rank: summary for rank, (_, summary, _) in by_rank.items()})
    require_same_state(optimizer, strategy.comm, type(strategy), optimizer.attachment.loads)
    states = [by_rank[rank][2] for rank in strategy.config.workers(strategy.comm.size) if rank in by_rank]
    if len(states) > 1 and states[0] and len(set(states)) == 1 and strategy.comm.rank == min(by_rank):
        _log.info(
            "All ranks use the same random numbers: their dropout masks are identical. For different masks call "
            "torch.manual_seed(seed + hpcdist.rank()) once the model is created."
        )
    if can_reset and touched:
        strategy.reset_from_model()


def _dropout_state(strategy: Strategy) -> int:
    """Return a checksum of the random state that dropout uses; 0 if the model has no dropout."""
    modules = [module for module in strategy.model.module.modules() if module.training]
    rates = [getattr(module, "dropout", getattr(module, "p", 0.0)) for module in modules]  # also of attention and RNNs
    has_dropout = any(isinstance(rate, float) and rate > 0.0 for rate in rates)
    return zlib.crc32(torch.get_rng_state().numpy().data) if has_dropout else 0


def require_same_state(optimizer: Any, comm: Communicator, strategy: Any, loads: int | None = None) -> None:
    """Collective. Raise MismatchError unless all ranks' optimisers have state of the same parameters, loaded as often.

    If parameters are replicated, sums and norms of the state must be equal too, up to rounding.

    Args:
        strategy: a Strategy or its class.
        loads: number of calls of `load_state_dict`; None when the optimiser is being distributed.
    """
    compares_values = strategy.contract.replicates and strategy.contract.step == "the optimiser's"
    states: list[tuple[int, dict[str, Any]]] = []
    if compares_values or loads is None:  # else states differ by rank, or servers have them
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = [(i, state) for i, p in enumerate(parameters) if (state := optimizer.state.get(p))]
    indices_checksum = zlib.crc32(repr([i for i, _ in states]).encode())
    values = [value for _, state in states for value in state.values() if isinstance(value, Tensor) and compares_values]
    sums = [sum_and_norm(value.detach().reshape(-1)) for value in values if value.is_floating_point()]
    norm = math.sqrt(sum(norm * norm for _, norm in sums))
    local = [loads or 0, len(states), indices_checksum, sum(total for total, _ in sums), norm]
    by_rank = comm.failures.retry_on_failure(partial(comm.gather, local))
    first, names = comm.failures.alive[0], comm.platform.world_ranks
    for rank in comm.failures.alive:
        is_close = all(_close_to(a, b, 3e-4 * norm) for a, b in zip(by_rank[first][3:], by_rank[rank][3:], strict=True))
        if by_rank[rank][:3] != by_rank[first][:3] or not is_close:
            expected, got = (
                f"{n} parameters{f', norm {norm:.6g}' if norm else ''}, loaded {times} times"
                for times, n, _, _, norm in (by_rank[first], by_rank[rank])
            )
            facts: dict[str, Any] = {"expected": expected, "got": got, "first": names[first], "rank": names[rank]}
            raise rules.error("the optimiser's state differs", **facts)


def follow_servers(optimizer: Any, where: str) -> None:
    """Copy to this rank's model what servers have changed outside of an epoch. Collective if servers run the updates.

    Raises MismatchError if a rank is at another point of the loop than `where`.
    """
    strategy: Strategy = optimizer.strategy
    if strategy.contract.updates == "on servers" and strategy.comm.size > 1:
        strategy.model.refresh()
        _gathered(optimizer, where, None)
        strategy.reset_from_model()


def require_same_steps(optimizer: Any, where: str) -> None:
    """Collective. Raise MismatchError if a rank is at another point of the loop than `where`, or took other steps.

    With synchronous strategies ranks must have used the same number of batches; replicas must be equal.
    """
    strategy: Strategy = optimizer.strategy
    if strategy.comm.size == 1:
        return
    replicates = rules.forbids("replicas differ", strategy)
    summary = _summarise_replica(strategy) if replicates else _ReplicaSummary()
    by_rank = _gathered(optimizer, where, [strategy.model.gradients.batches_used, summary])
    workers = [rank for rank in strategy.config.workers(strategy.comm.size) if rank in by_rank]
    if strategy.contract.synchronous:
        error = unequal_steps_error({rank: by_rank[rank][0] for rank in workers}, "batches that steps were taken for")
        if error is not None:
            raise error
    if replicates:
        _require_replicas(strategy, {rank: summary for rank, (_, summary) in by_rank.items()})


def _gathered(optimizer: Any, where: str, value: Any) -> dict[int, Any]:
    """Collective. Return each surviving rank's value; raise MismatchError if a rank is at another point of the loop.

    Workers must have trained in the same mode; those of asynchronous strategies compare their first batches here.
    `where` names the point, such as "at an evaluation"; ranks compare these texts.
    """
    strategy: Strategy = optimizer.strategy
    comm, attachment = strategy.comm, optimizer.attachment
    local = [where, value, strategy.gradients.checksums, [attachment.modes, attachment.others]]
    attachment.modes = 0
    by_rank = comm.failures.retry_on_failure(partial(comm.gather, local))
    where_of = {rank: by_rank[rank][0] for rank in comm.failures.alive}
    first = comm.failures.alive[0]
    other = next((rank for rank in where_of if where_of[rank] != where_of[first]), None)
    if other is not None:
        pattern = "ranks are at different places in the loop"
        servers = sorted(set(where_of).difference(strategy.config.workers(comm.size)))
        takes_no_step = f" Rank {servers[0]} is a server and takes no step: count epochs." if servers else ""
        facts = {"first": first, "place": where_of[first], "rank": other, "other": where_of[other]}
        raise rules.error(pattern, serving=takes_no_step, **facts)
    workers = [rank for rank in strategy.config.workers(comm.size) if rank in where_of]
    if not strategy.contract.synchronous:
        _warn_of_same_batches([by_rank[rank][2] for rank in workers], 1, comm.rank == workers[0])
    _require_one_mode({rank: by_rank[rank][3] for rank in workers if by_rank[rank][3][0]})
    return {rank: by_rank[rank][1] for rank in comm.failures.alive}


def _require_one_mode(modes: Mapping[int, Any]) -> None:
    """Raise MismatchError unless ranks took steps in the same modes (`Attachment.modes` and `others`, by rank)."""
    first = min(modes, default=0)
    for rank, (taken, others) in modes.items():
        if [taken, others] != modes[first]:
            names = [""] if taken != modes[first][0] else sorted(set(others) ^ set(modes[first][1]))
            expected, got = (
                _MODES[mode if names[0] not in apart else 3 - mode] for mode, apart in (modes[first], modes[rank])
            )  # 3 - mode: the opposite one
            name, pattern = f"module {names[0]}" if names[0] else "the model", "ranks train in different modes"
            raise rules.error(pattern, name=name, expected=expected, got=got, first=first, rank=rank)


class _ReplicaSummary(NamedTuple):
    """A summary of a replica, to compare: sum and norm of each flat tensor, and how the loop changed gradients."""

    parameters: Sequence[Sequence[float]] = ()
    changed: int = 0


def _summarise_replica(strategy: Strategy) -> _ReplicaSummary:
    return _ReplicaSummary(list(map(sum_and_norm, strategy.model.params)), strategy.model.gradients.changed_by_loop)


def compare_first_batches(optimizer: Any) -> None:
    """Warn if all workers trained on the same batches. Collective, once, for synchronous strategies."""
    strategy: Strategy = optimizer.strategy
    checksums = strategy.gradients.checksums
    if checksums is not None and len(checksums) == FIRST_STEPS and strategy.contract.synchronous:
        peers = optimizer.attachment.peers
        by_rank = peers.failures.retry_on_failure(partial(peers.gather, checksums))
        strategy.gradients.checksums = None
        alive = peers.failures.alive
        _warn_of_same_batches([by_rank[rank] for rank in alive], FIRST_STEPS, peers.rank == alive[0])


def _warn_of_same_batches(checksums: Sequence[list[int] | None], steps: int, here: bool) -> None:
    """Warn, if `here`, that the first `steps` gradients are bitwise identical on all workers, and not zero."""
    firsts = [tuple(sums[:steps]) for sums in checksums if sums is not None]
    if len(firsts) < max(2, len(checksums)) or len(set(firsts)) > 1 or len(firsts[0]) < steps or not all(firsts[0]):
        return
    session = current()
    for optimizer in session.optimizers:  # one warning for all
        optimizer.strategy.gradients.checksums = None
    if here and session.comm.rank % session.stages == 0:
        warnings.warn(
            "All workers have trained on the same batches: their gradients are bitwise identical. Give each its share "
            "of the samples, loader = hpcdist.shard(loader); or use another seed on each rank (seed + hpcdist.rank()). "
            "If it is intended, pass identical_batches='allow' to DistributedOptimizer.",
            stacklevel=4,
        )


def _require_replicas(strategy: Strategy, sketches: Mapping[int, _ReplicaSummary]) -> None:
    """Raise MismatchError unless all ranks' parameters have the same sums and norms, up to rounding."""
    first = min(sketches)
    sums, changed = sketches[first]
    for rank, (other_sums, others_changed) in sorted(sketches.items()):
        for tensor, (total, norm), (other, other_norm) in zip(strategy.model.params, sums, other_sums, strict=True):
            tolerance = math.sqrt(torch.finfo(tensor.dtype).eps) * norm
            if _close_to(total, other, tolerance) and _close_to(norm, other_norm, tolerance):
                continue
            if changed != others_changed:
                pattern = "gradients are changed on some ranks only"
                raise rules.error(pattern, strategy, rank=rank, first=first)
            raise rules.error("replicas differ", strategy, rank=rank, first=first)


def _close_to(a: float, b: float, tolerance: float) -> bool:
    return str(a) == str(b) or abs(a - b) <= tolerance  # as text: a NaN equals itself


# --- loaders ----------------------------------------------------------------------------------------------------------
def require_same_loader(group: Communicator, settings: Mapping[str, Any], dataset: Any) -> None:
    """Collective in `group`. Raise MismatchError unless all workers' loaders distribute the same samples.

    Compares settings, the data set's length, and its fingerprints.
    """
    local: dict[str, Any] = {name: str(value) for name, value in settings.items()}
    if hasattr(dataset, "__len__"):
        local |= {"the data set's length": len(dataset)}
    local |= fingerprints(dataset)
    by_rank = group.failures.retry_on_failure(partial(group.gather, local))
    first, numbers = group.failures.alive[0], group.platform.world_ranks
    for rank in group.failures.alive:
        for name, value in by_rank[first].items():
            if not _equal(value, by_rank[rank].get(name)):
                facts = {"name": name, "expected": value, "got": by_rank[rank].get(name)}
                raise rules.error("workers read different data", first=numbers[first], rank=numbers[rank], **facts)


def changed_fingerprints(dataset: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each fingerprint of a data set that differs from the one saved in a checkpoint."""
    pairs = ((name, now, saved.get(name, now)) for name, now in fingerprints(dataset).items())
    return [f"{name} is {now} here, and {old} in the checkpoint" for name, now, old in pairs if not _equal(now, old)]


def _equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal; computed numbers, up to rounding."""
    computed = isinstance(a, float) and isinstance(b, float)
    return str(a) == str(b) or (computed and math.isclose(a, b, rel_tol=1e-3))


def fingerprints(dataset: Any, path: str = "loader.dataset", holders: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return checksums, by name, of a data set's files and of its lists with one entry per sample; nested ones too.

    They show that sample i is another one, on another rank or in a checkpoint. Samples are not read, because that may
    open files too early, or use random numbers. `holders` are ids of the data sets around this one, against cycles.
    """
    if isinstance(checksum := getattr(dataset, "checksum", None), str):  # of all samples, as HDF5Dataset's
        return {f"the checksum of {path}": checksum}
    result: dict[str, Any] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        parts = {f"{path}.{name}": value}
        if isinstance(value, (list, tuple)) and len(value) <= _FEW:
            parts |= {f"{path}.{name}[{i}]": part for i, part in enumerate(value)}  # tensors, or data sets
        for label, part in parts.items():
            fingerprint = _fingerprint(part, len(dataset)) if hasattr(dataset, "__len__") else None
            if fingerprint is not None:
                result[f"{fingerprint[0]} of {label}"] = fingerprint[1]
            elif hasattr(part, "__getitem__") and hasattr(part, "__dict__") and id(part) not in holders:
                result |= fingerprints(part, label, (*holders, id(dataset)))
    return result


def _fingerprint(value: Any, n: int) -> tuple[str, Any] | None:
    """Return (kind, checksum) if `value` is a file or has an entry for each of `n` samples; else None."""
    if isinstance(value, (str, os.PathLike)):
        return ("the file", f"{Path(value).name}, {os.path.getsize(value)} bytes") if os.path.isfile(value) else None
    if getattr(value, "num_columns", None) == 1:  # the indices of a data set in Arrow tables
        value = np.asarray(value.column(0))
    dims = value.ndim if isinstance(value, (Tensor, np.ndarray)) else int(isinstance(value, (list, tuple, range)))
    if dims == 0 or len(value) != n:
        return None
    positions = np.linspace(0, n - 1, min(n, _ENTRIES if dims == 1 else _ROWS)).astype(np.int64)
    if not isinstance(value, Tensor) and getattr(value, "dtype", np.dtype(object)).kind not in "biufc":  # no numbers
        entries = re.sub(r"[^'\" ]*/", "", repr([value[i] for i in positions.tolist()]))  # folders may differ by node
        return None if " at 0x" in entries else ("the checksum", zlib.crc32(entries.encode()))
    rows = torch.as_tensor(value[torch.from_numpy(positions) if isinstance(value, Tensor) else positions])
    if rows.is_floating_point() or rows.is_complex():
        rows = torch.view_as_real(rows) if rows.is_complex() else rows
        sums = [row.to(torch.float64).abs().sum().item() for row in rows]
        return "the sum of rows", sum(weight * total for weight, total in enumerate(sums, start=1))  # by their order
    return "the checksum", zlib.crc32(tensor_bytes(rows).data)
