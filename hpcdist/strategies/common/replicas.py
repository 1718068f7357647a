"""Give all replicas the same model at the start, and compute the model that they stand for together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.pieces import PIECE, sums
from hpcdist.errors import MismatchError
from hpcdist.model.flat import FlatModel
from hpcdist.model.slots import describe_difference
from hpcdist.strategies.common.gradients import shorten


def spread_model(comm: Communicator, model: FlatModel) -> None:
    """Collective. Give all ranks the parameters and buffers of rank 0.

    Raises:
        MismatchError: a rank has parameters or buffers of other names, shapes or types than rank 0.
    """
    _require_equal_models(comm, model)
    for tensor in (*model.params, *model.frozen, *model.buffers):
        comm.broadcast(tensor, 0)
    for tensor in model.others():
        flat = tensor.contiguous().reshape(-1)
        comm.broadcast(flat, 0)
        tensor.copy_(flat.view(tensor.shape))


def _require_equal_models(comm: Communicator, model: FlatModel) -> None:
    signatures = comm.gather(model.signature())
    odd = [rank for rank, signature in enumerate(signatures) if signature != signatures[0]]
    if not odd:
        return
    text = model.description() if comm.rank in (0, odd[0]) else ""
    descriptions = comm.gather(text)
    where = describe_difference(descriptions[0], descriptions[odd[0]], "on rank 0", f"on rank {odd[0]}")
    others = f", and those of {shorten([f'rank {rank}' for rank in odd[1:]])}," if odd[1:] else ""
    raise MismatchError(
        f"the model must be the same on every rank; rank {odd[0]}'s parameters or buffers{others} differ from rank 0's "
        f"in name, shape, dtype or requires_grad, first {where}. Build it from the same code and options everywhere."
    )


def with_buffers(strategy: Any, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Collective. Return parameters and buffers: the given parameters, and the means of the workers' buffers."""
    return params, mean_over(strategy.comm, strategy.model.buffers, _workers(strategy))


def frozen_consensus(strategy: Any) -> list[Tensor] | None:
    """Collective. Average the workers' frozen parameters, shaped like `model.frozen`; None where all are equal.

    A loop may change frozen parameters: those of a slow copy of the model that follows it, for example.
    """
    comm = strategy.comm
    found = comm.gather(repr(sums(strategy.model.frozen)))
    if len({found[rank] for rank in comm.failures.living}) == 1:
        return None
    return mean_over(comm, strategy.model.frozen, _workers(strategy))


def _workers(strategy: Any) -> list[int]:
    return [rank for rank in strategy.config.workers(strategy.comm.size) if rank in strategy.comm.failures.living]


def mean_over(comm: Communicator, tensors: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    """Collective. Average each tensor over some ranks; return new tensors, the same on every rank."""
    # Summed in float64, so that the mean of equal float32 replicas is that same float32 to the bit.
    means = []
    for tensor in tensors:
        mean = tensor.clone()
        for part in torch.split(mean, PIECE) if mean.numel() and comm.size > 1 else ():
            wide = part.to(torch.complex128 if part.is_complex() else torch.float64)
            if comm.rank not in ranks:
                wide.zero_()
            comm.allreduce(wide)
            wide /= len(ranks)
            part.copy_(wide if part.is_floating_point() or part.is_complex() else wide.round())
        means.append(mean)
    return means
