"""Keep buffers that change in training, such as batch norm's statistics, the same on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel

_SMALL = 1 << 18  # elements of a buffer whose values are compared: torch counts no changes by its batch norm
_UNKNOWN = 1 << 32  # added to the sum of `look` for each rank that has a change of a buffer that is not agreed upon


class ChangingBuffers:
    """Find the floating-point buffers that change, and average them over the ranks.

    A buffer that nobody changes (a mask, a table of positions) is never sent. Each rank's counts as much as its
    samples. Integers, such as the number of batches, stay as they are.

    Messages: one all-reduce of the changed buffers, in float64; one exchange more where others than before change.
    """

    def __init__(self, comm: Communicator, model: FlatModel):
        self._comm, self._model = comm, model
        self._agreed: list[int] = []  # positions of the buffers that change, on any rank
        self._note()

    def _note(self) -> None:
        self._seen = self._stamps()
        self._values = [t.detach().clone() if _is_compared(t) else None for t in self._model.flat_buffers.tensors()]

    def _stamps(self) -> list[tuple[int, int]]:
        return [(id(tensor), tensor._version) for tensor in self._model.flat_buffers.tensors()]

    def look(self) -> int:
        """Look for changed buffers; return this rank's part of a sum over all ranks, for `average`."""
        changed = self._changed()
        return int(bool(changed)) + _UNKNOWN * (not set(changed) <= set(self._agreed))

    def _changed(self) -> list[int]:
        tensors, now = self._model.flat_buffers.tensors(), self._stamps()
        changed = []
        for i, (tensor, old, new, values) in enumerate(zip(tensors, self._seen, now, self._values, strict=True)):
            if tensor.is_floating_point() and (old != new or (values is not None and not torch.equal(values, tensor))):
                changed.append(i)
        return changed

    def average(self, changes: int) -> None:
        """Collective where `changes` is not 0. Average the changed buffers over the ranks.

        Args:
            changes: the sum over the ranks of the results of `look`.
        """
        if changes == 0:
            return
        if changes >= _UNKNOWN:
            mine = [*self._agreed, *self._changed()]
            self._agreed = sorted(set().union(*self._comm.gather(mine)))
        self._model.buffers  # noqa: B018 (takes in those that were replaced)
        tensors = self._model.flat_buffers.tensors()
        self._mean([tensors[position] for position in self._agreed])
        self._model.flat_buffers.forget()
        self._note()

    def _mean(self, tensors: list[Tensor]) -> None:
        weight = self._model.passes.mean_weight
        wide = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])
        wide = wide * weight if weight else torch.zeros_like(wide)
        self._comm.allreduce(wide)
        wide /= self._comm.size
        for tensor, part in zip(tensors, wide.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


def _is_compared(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() <= _SMALL
