"""Check that ranks are at the same place in the user's loop, and have what must be the same there."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.pieces import sum_and_norm
from hpcdist.model.hyperparameters import unequal_steps
from hpcdist.session import rules
from hpcdist.session.world import current
from hpcdist.strategies import Strategy
from hpcdist.strategies.common.gradients import FIRST_STEPS

_FIRST_ROWS = 8


def begin_epoch(optimizer: Any) -> None:
    """Collective. Take up parameters that the loop has set since the last epoch.

    Raises:
        MismatchError: they must be the same on all ranks, and are not; or some rank begins no epoch.
    """
    strategy: Strategy = optimizer.strategy
    first, optimizer.attachment.begun = not optimizer.attachment.begun, True
    if strategy.comm.size == 1:
        return
    takes_up = type(strategy).take_up is not Strategy.take_up
    replicates = rules.forbids("replicas differ", strategy)
    strategy.model.refresh()
    looks = first or takes_up or replicates
    mine = [strategy.model.touched(), _sketch(strategy)] if looks else [False, _Sketch()]
    found = _gathered(strategy, "at an epoch's start", mine)
    touched = any(touched for touched, _ in found.values())
    if replicates or (first and touched):
        _require_replicas(strategy, {rank: sketch for rank, (_, sketch) in found.items()})
    if takes_up and touched:
        strategy.take_up()


def follow_servers(strategy: Strategy, place: str) -> None:
    """Collective where servers make the updates. Give this rank's model what they have changed outside of an epoch.

    Args:
        place: where in the loop that is, for the message.

    Raises:
        MismatchError: some rank is elsewhere.
    """
    if strategy.contract.updates == "on servers" and strategy.comm.size > 1:
        strategy.model.refresh()
        _gathered(strategy, place, None)
        strategy.take_up()


def require_same_steps(strategy: Strategy, place: str) -> None:
    """Collective. Check that all ranks are there, and that those which step together did so for as many batches.

    Args:
        place: where in the loop that is, for the message.

    Raises:
        MismatchError: they did not.
    """
    if strategy.comm.size == 1:
        return
    replicates = rules.forbids("replicas differ", strategy)
    sketch = _sketch(strategy) if replicates else _Sketch()
    found = _gathered(strategy, place, [strategy.model.passes.batches_used, sketch])
    workers = [rank for rank in strategy.config.workers(strategy.comm.size) if rank in found]
    if strategy.contract.synchronous:
        error = unequal_steps({rank: found[rank][0] for rank in workers}, "batches that steps were taken for")
        if error is not None:
            raise error
    if replicates:
        _require_replicas(strategy, {rank: sketch for rank, (_, sketch) in found.items()})


def _gathered(strategy: Strategy, place: str, value: Any) -> dict[int, Any]:
    """Collective. Return each living rank's value, which it has at the same place in the loop.

    Workers that don't take their steps together compare here whether they have begun with the same batch.

    Raises:
        MismatchError: some rank is elsewhere.
    """
    comm = strategy.comm
    found = comm.failures.retry_on_failure(partial(comm.gather, [place, value, strategy.gradients.checksums]))
    places = {rank: found[rank][0] for rank in comm.failures.living}
    first = comm.failures.living[0]
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
    return {rank: found[rank][1] for rank in comm.failures.living}


class _Sketch(NamedTuple):
    """What tells replicas apart: sum and norm of each flat tensor, and in how many steps the loop changed gradients."""

    parameters: Sequence[Sequence[float]] = ()
    changed: int = 0


def _sketch(strategy: Strategy) -> _Sketch:
    return _Sketch(list(map(sum_and_norm, strategy.model.params)), strategy.model.passes.changed_by_loop)


def compare_first_batches(optimizer: Any) -> None:
    """Collective, once, where workers take their steps together. Warn if all have trained on the same batches."""
    strategy: Strategy = optimizer.strategy
    sums = strategy.gradients.checksums
    if sums is not None and len(sums) == FIRST_STEPS and strategy.contract.synchronous:
        peers = optimizer.attachment.peers
        found = peers.failures.retry_on_failure(partial(peers.gather, sums))
        strategy.gradients.checksums = None
        living = peers.failures.living
        _warn_of_same_batches([found[rank] for rank in living], FIRST_STEPS, peers.rank == living[0])


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
                raise rules.error(habit, strategy, rank=rank, first=first, own=own, theirs=theirs)
            raise rules.error("replicas differ", strategy, rank=rank, first=first)


def _near(one: float, other: float, tolerance: float) -> bool:
    return str(one) == str(other) or abs(one - other) <= tolerance  # as text: a NaN is equal to itself


# --- loaders ----------------------------------------------------------------------------------------------------------
def require_same_loader(group: Communicator, settings: Mapping[str, Any], dataset: Any) -> None:
    """Collective in `group`. Check that all workers' loaders deal out the same samples.

    Of the data set its length is compared, the indices of a Subset, and the first rows of a TensorDataset.

    Raises:
        MismatchError: they don't.
    """
    mine: dict[str, Any] = {name: str(value) for name, value in settings.items()}
    if hasattr(dataset, "__len__"):
        mine |= {"the data set's length": len(dataset)}
    mine |= _described(dataset)
    found = group.failures.retry_on_failure(partial(group.gather, mine))
    first, numbers = group.failures.living[0], group.trace.world_ranks
    for rank in group.failures.living:
        for name, value in found[first].items():
            if not _alike(value, found[rank].get(name)):
                facts = {"name": name, "own": value, "theirs": found[rank].get(name)}
                one, other = numbers[first], numbers[rank]
                raise rules.error("workers read different data", first=one, rank=other, **facts)


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two values are equal; numbers that have been computed, but for rounding."""
    computed = isinstance(one, float) and isinstance(other, float)
    return str(one) == str(other) or (computed and math.isclose(one, other, rel_tol=1e-3))


def _described(dataset: Any) -> dict[str, Any]:
    if isinstance(dataset, Subset):
        indices = ",".join(map(str, dataset.indices))
        return {"the checksum of Subset.indices": zlib.crc32(indices.encode()), **_described(dataset.dataset)}
    if type(dataset) is TensorDataset:
        rows = [tensor[:_FIRST_ROWS] for tensor in dataset.tensors if not tensor.is_complex()]
        return {f"the sum of the first rows of tensor {i}": _sum_of(part) for i, part in enumerate(rows)}
    return {}


def _sum_of(rows: Tensor) -> float:
    """Return a sum in which each row has another weight, so that their order counts."""
    return sum(weight * row.to(torch.float64).abs().sum().item() for weight, row in enumerate(rows, start=1))
