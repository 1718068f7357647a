"""Decide alike in all stages of a replica: whether gradients are finite, and how large they are together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.comm.communicator import Communicator, Traffic
from hpcdist.model.pieces import pieces


class Agreement:
    """Exchange a few numbers among the ranks that hold one model's stages, in every step.

    Args:
        comm: the ranks of a replica; nobody else sends on it. This object closes it.
        repeated: parameters of this rank that an earlier stage has too, and that count there: tied weights.
        announces: gradients are announced as ready, in buckets, before the last of them is computed.
    """

    def __init__(self, comm: Communicator, repeated: Iterable[nn.Parameter] = (), *, announces: bool = False):
        self._comm, self._repeated, self.announces = comm, set(map(id, repeated)), announces

    @property
    def count(self) -> int:
        """Return the number of ranks that have a stage each."""
        return self._comm.size

    def nonfinite(self, names_of: Mapping[int, list[str]]) -> dict[int, list[str]]:
        """Collective in the replica. Join the names of parameters whose gradient is not finite, over all stages.

        Messages: one number; the names where there are some.
        """
        word = torch.tensor([len(names_of)], dtype=torch.int64)
        self._comm.allreduce(word)
        if not word.item():
            return {}
        joined: dict[int, list[str]] = {}
        for of_stage in self._comm.gather(list(names_of.items())):
            for key, names in of_stage:
                known = joined.setdefault(key, [])
                known += [name for name in names if name not in known]
        return joined

    def spread_overflow(self, grads: Iterable[Tensor]) -> None:
        """Collective in the replica. Make a gradient NaN here where some of another rank are not finite.

        So each rank's GradScaler sees an overflow, and leaves the step out.
        """
        grads = list(grads)
        here = any(not torch.isfinite(grad).all() for grad in grads)
        word = torch.tensor([here], dtype=torch.int64)
        self._comm.allreduce(word)
        if grads and not here and word.item():
            grads[0].fill_(torch.nan)

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Collective in the replica. Compute the 2-norm of all stages' gradients together, the same on all ranks."""
        return global_norm(parameters, self._comm, self._repeated)

    @property
    def traffic(self) -> Traffic:
        """Return the account of what has been exchanged so far."""
        return self._comm.trace.traffic

    def close(self) -> None:
        """Collective in the replica. Close the communicator."""
        self._comm.close()


def global_norm(parameters: Iterable[nn.Parameter], comm: Communicator, repeated: Any = ()) -> Tensor:
    """Collective. Compute the 2-norm of the ranks' gradients together: a float64 scalar on the CPU, the same on all.

    Args:
        parameters: of this rank.
        repeated: ids of those that another rank counts.
    """
    grads = [p.grad for p in parameters if p.grad is not None and id(p) not in repeated]
    squares = [float(torch.linalg.vector_norm(piece, dtype=_wide(piece))) ** 2 for piece in pieces(grads)]
    places = torch.zeros(comm.size, dtype=torch.float64)  # one each: a sum of zeros and one number is exact
    places[comm.rank] = math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan
    comm.allreduce(places)
    return torch.tensor(math.sqrt(sum(places.tolist())), dtype=torch.float64)


def _wide(grad: Tensor) -> torch.dtype:
    return torch.complex128 if grad.is_complex() else torch.float64


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Multiply gradients in place by max_norm / norm where the norm is larger, as torch's `clip_grad_norm_` does."""
    factor = min(1.0, max_norm / (float(norm) + 1e-6)) if not torch.isnan(norm) else math.nan
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
