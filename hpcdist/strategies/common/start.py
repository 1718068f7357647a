"""Begin with the same model on all ranks."""

from __future__ import annotations

from hpcdist.comm.communicator import Communicator
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
