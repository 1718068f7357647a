"""Keep buffers that change in training, such as batch norm's statistics, the same on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.common.replicas import warn_differences

_SMALL = 1 << 18  # elements of a buffer whose values are compared: torch counts no changes by its batch norm
_UNKNOWN = 1 << 32  # added to the sum of `look` for each rank that has a change of a buffer that is not agreed upon


class ChangingBuffers:
    """Find the buffers that change, and make them the same on all ranks: their mean, or the first rank's.

    A buffer that nobody changes (a mask, a table of positions) is never sent. In a mean each rank's counts as much as
    its samples. Which are averaged, and which stay each rank's own, `FlatBuffers.kinds` says.

    Messages: one all-reduce of the changed buffers that are averaged, in float64, and a broadcast of each other one;
    one exchange more where others than before change, and at the 1st, 2nd, 4th, 8th... change of the latter.
    """

    def __init__(self, comm: Communicator, model: FlatModel):
        self._comm, self._model = comm, model
        self._changed: list[int] = []  # positions of those that have changed here, when `look` was called
        self._agreed: list[int] = []  # positions of the buffers that change, on any rank
        self._steps = 0
        buffers = model.flat_buffers
        self._kinds = [buffers.kinds[slot.group] for slot in buffers.slots]
        self._common = [position for position, kind in enumerate(self._kinds) if kind in ("mean", "first")]
        self._note()

    def _note(self) -> None:
        tensors = self._model.flat_buffers.tensors()
        common = [tensors[position] for position in self._common]
        self._seen = [(id(t), t._version, t.detach().clone() if t.numel() <= _SMALL else None) for t in common]

    def look(self) -> int:
        """Look for changed buffers; return this rank's part of a sum over all ranks, for `average`."""
        tensors, self._changed = self._model.flat_buffers.tensors(), []
        for position, (*stamp, values) in zip(self._common, self._seen, strict=True):
            now = tensors[position]
            if stamp != [id(now), now._version] or (values is not None and not torch.equal(values, now)):
                self._changed.append(position)
        return int(bool(self._changed)) + _UNKNOWN * (not set(self._changed) <= set(self._agreed))

    def average(self, changes: int) -> None:
        """Collective. Make the changed buffers the same on all ranks.

        Args:
            changes: the sum over the ranks of the results of `look`, which is not 0.
        """
        if changes >= _UNKNOWN:
            mine = [*self._agreed, *self._changed]
            self._agreed = sorted(set().union(*self._comm.gather(mine)))
        buffers = self._model.flat_buffers
        buffers.restore(averaged=True)  # after a batch of weight 0
        flats, tensors = self._model.buffers, buffers.tensors()  # with those that were replaced
        averaged = [tensors[position] for position in self._agreed if self._kinds[position] == "mean"]
        if averaged:
            self._mean(averaged)
        first = [position for position in self._agreed if self._kinds[position] == "first"]
        self._steps += 1
        if first and self._steps & (self._steps - 1) == 0:
            counts = self._model.gradients.mean_weight > 0
            warn_differences(self._comm, buffers, flats, range(self._comm.size), counts)
        for position in first:
            slot = buffers.slots[position]
            self._comm.broadcast(flats[slot.group][slot.start : slot.stop], 0)
        self._note()

    def _mean(self, tensors: list[Tensor]) -> None:
        weight = self._model.gradients.mean_weight
        wide = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])
        wide = wide * weight if weight else torch.zeros_like(wide)
        self._comm.allreduce(wide)
        wide /= self._comm.size
        for tensor, part in zip(tensors, wide.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
