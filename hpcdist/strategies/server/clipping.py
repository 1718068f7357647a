"""Clip the mean gradient of an update by the norm of all of it, of which each server has a part."""

from __future__ import annotations

import torch
from torch import nn

from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.server.placement import Placement


class UpdateClip:
    """Collective. Clip the gradients of a server's shard, together with all other servers."""

    def __init__(self, comm: Communicator, model: FlatModel, place: Placement, clip_norm: float):
        self._model, self._shard, self._clip_norm = model, place.shard, clip_norm
        self._norms: Communicator | None = None  # of the servers, where there are several
        if len(place.roles.servers) > 1:
            self._norms = comm.split(0 if place.shard is not None else 1)

    def __call__(self) -> None:
        """Collective among the servers. Scale the gradients down where the norm of all of them is too large."""
        if self._norms is None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
            return
        grads = self._shard.of(self._model.grads)
        square = torch.zeros(1, dtype=torch.float64)
        for grad in grads:
            square += torch.linalg.vector_norm(grad, dtype=torch.float64).cpu() ** 2
        self._norms.allreduce(square)
        scale = self._clip_norm / (float(square) ** 0.5 + 1e-6)
        for grad in grads if scale < 1.0 else ():
            grad.mul_(scale)

    def close(self) -> None:
        """Collective. Close the servers' communicator."""
        if self._norms is not None:
            self._norms.close()
