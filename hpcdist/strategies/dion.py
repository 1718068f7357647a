"""Dion: step matrices along orthonormal low-rank factors of their momentum; ranks exchange only the factors."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.compress.powersgd import add_product
from hpcdist.config.settings import Field
from hpcdist.errors import ConfigError, suggestion
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Update
from hpcdist.strategies.common.gradients import shorten
from hpcdist.strategies.synchronous.own_step import OwnStep, Trained, rate_of


@final
class Dion(OwnStep):
    """Step matrices along orthonormal factors of their momentum; all other parameters by the local optimiser.

    For each matrix X of m × n each rank adds its gradient to its momentum, B = M + G. P is the orthonormal basis of the
    mean of BQ over the ranks, R the mean of BᵀP; M ← B − (1 − μ)PRᵀ, Q ← the columns of R, normalised, and X ← (1 −
    ηλ)X − η√(m/n)·PQᵀ. So the r largest directions of the momentum have the same weight, and the rest stays in M. M
    differs between ranks; its mean over ranks equals, to rounding, the M of one process on the mean gradient.

    Matrices are the parameters of two or more dimensions (the first by the others), except those matched by `others`,
    which should contain embeddings and the head. These and vectors are updated by the local optimiser, such as AdamW,
    on the mean gradient. Learning rate η and decay λ of a matrix are read from its group; η is multiplied by `rate`,
    because an orthonormal step is larger than Adam's. Replicas are bitwise equal. A single rank follows the same rule.

    Bytes per rank and step: for a matrix, instead of mn elements, r(m + n) by all-reduce and rm by all-gather; for the
    others their gradients; and 40 bytes of agreement. Memory: M, and Q. One rank computes each basis, in float64, so
    that ranks share the work and have the same bits.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "dion", fraction=0.5)

    Reference: Kwangjun Ahn, Byron Xu et al., "Dion: distributed orthonormalized updates", 2025.
    """

    class Config(OwnStep.Config):
        fraction: float = Field(0.25, "r: rank of the factors, as a part of the shorter side", gt=0, le=1)
        momentum: float = Field(0.95, "μ: part of the factors' product that stays in M", ge=0, lt=1)
        rate: float = Field(1.0, "learning rate of the matrices, as a multiple of their group's", gt=0)
        others: tuple[str, ...] = Field((), "names of matrices for the local optimiser, such as embed* and head.weight")

    config: Config
    kinds: ClassVar = ()
    advice: ClassVar = "one of torch's"
    runs_optimizer = True  # for the others

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        self._names_known = False
        self._momentum = self.state.sharded("momentum", model.params, reshard="mean")  # M
        self.basis: dict[str, Tensor] = self.state.by_parameter("basis", self)  # Q of each matrix, shape (r, n)

    def _require_others(self) -> None:
        """Raise ConfigError unless each of `others` names a parameter, of any stage; a frozen one may train later."""
        names = [*(slot.name for slot in self.model.slots), *(n for n, _ in self.model.module.named_parameters())]
        known = [*dict.fromkeys(names)]
        if self.stages is not None and self.config.others:
            known = [name for of_stage in self.stages.comm.gather(known) for name in of_stage]
        for pattern in self.config.others:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ConfigError(
                    "strategy.others must name parameters, such as embed* and head.weight; got "
                    f"{pattern!r}, which matches none of {shorten(known, 30)}.{suggestion(pattern, known)}"
                )

    def move(self, update: Update) -> None:
        if not self._names_known:  # compared here: a rehearsal, which takes no step, has another model
            self._require_others()
            self._names_known = True
        matrices, others = self._divided()
        self._average([item.views[0] for item in others])
        self._step_matrices(matrices)
        is_other, present = {item.name for item in others}, self.model.gradients.present()
        self.model.gradients.release([slot.name in is_other for slot in self.model.slots])
        update()
        self.model.gradients.release(present)

    def _divided(self) -> tuple[list[Trained], list[Trained]]:
        """Return the matrices, and the other parameters, each with views of its gradient and its momentum."""
        divided: tuple[list[Trained], list[Trained]] = ([], [])
        for item in self.trained(self.model.grads, self._momentum):
            excluded = any(fnmatchcase(item.name, pattern) for pattern in self.config.others)
            is_other = item.parameter.ndim < 2 or not item.parameter.numel() or excluded  # without elements no factors
            divided[is_other].append(item)
        return divided

    def _step_matrices(self, matrices: Sequence[Trained]) -> None:
        """Collective. Update M, Q and X of each matrix. `factors`, `left` and `right` are Q, P and R, transposed.

        `sums` are B = M + G, in the memory of M unless that is in half precision.
        """
        sums = []
        for item in matrices:
            gradient, momentum = item.views
            wide = momentum.to(torch.promote_types(momentum.dtype, torch.float32))
            wide.add_(gradient, alpha=-1 if item.group.get("maximize") else 1)
            sums.append(wide.view(len(item.parameter), -1))
        factors = [self._basis_of(item, total) for item, total in zip(matrices, sums, strict=True)]
        left = [q @ total.T for q, total in zip(factors, sums, strict=True)]  # transposed: r rows
        self._average(left)
        self._orthonormalise(left)
        right = [p @ total for p, total in zip(left, sums, strict=True)]
        self._average(right)
        for item, total, p, r in zip(matrices, sums, left, right, strict=True):
            total.addmm_(p.T, r, alpha=self.config.momentum - 1)
            item.views[1].copy_(total.view_as(item.parameter))
            self.basis[item.name] = q = _normalised(r)
            rate, x = self.config.rate * rate_of(item.group), item.parameter.detach().view(len(total), -1)
            if decay := item.group.get("weight_decay", 0):
                x.mul_(1 - rate * decay)
            scaled = p * -(rate * (x.shape[0] / x.shape[1]) ** 0.5)
            if x.is_cpu:
                add_product(x, scaled, q)  # with the same bits on every processor
            else:
                x.add_(scaled.T @ q)

    def _orthonormalise(self, matrices: Sequence[Tensor]) -> None:
        """Collective. Replace the rows of each matrix by an orthonormal basis of them; ranks share the matrices."""
        ranks = range(self.comm.size)
        for of_type in _by_dtype(matrices):
            shares = [of_type[rank :: len(ranks)] for rank in ranks]
            bases = [_orthonormal(rows.double()).to(rows) for rows in shares[self.comm.rank]]
            flats = [of_type[0].new_empty(sum(rows.numel() for rows in share)) for share in shares]
            self.calls.all_gather(flats, torch.cat([of_type[0].new_empty(0), *(basis.reshape(-1) for basis in bases)]))
            for share, flat in zip(shares, flats, strict=True):
                _copy_apart(flat, share)

    def _basis_of(self, item: Trained, total: Tensor) -> Tensor:
        """Return Q of a matrix `item`, transposed, in the type of `total`; at first the same random rows everywhere."""
        row_count = max(1, round(self.config.fraction * min(total.shape)))
        if len(self.basis.get(item.name, ())) != row_count:  # also from a checkpoint with another fraction
            noise = np.random.Generator(np.random.SFC64(0)).random((row_count, total.shape[1])) - 0.5
            self.basis[item.name] = _normalised(torch.from_numpy(noise))
        return self.basis[item.name].to(total)

    def _average(self, tensors: Sequence[Tensor]) -> None:
        """Collective. Replace tensors by their means over the ranks, those of one type in one sum."""
        for of_type in _by_dtype(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in of_type])
            self.average([flat])
            _copy_apart(flat, of_type)


def _orthonormal(rows: Tensor) -> Tensor:
    """Compute an orthonormal basis of the rows of a float64 matrix, by Cholesky's factors where they are exact enough.

    They take 0.6 of the time of Householder's reflections, and lose the square of the matrix's condition.
    """
    lower, error = torch.linalg.cholesky_ex(rows @ rows.T)
    if not error:
        basis = torch.linalg.solve_triangular(lower, rows, upper=False)
        if (torch.mv(basis, basis.sum(0)) - 1).abs().max() < 1e-9:  # rows of basis · basisᵀ sum to 1
            return basis
    return torch.linalg.qr(rows.T).Q.T


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    types = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in types]


def _copy_apart(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat tensor's parts into tensors, one after the other."""
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _normalised(rows: Tensor) -> Tensor:
    """Divide each row by its norm, with the same bits on every processor.

    A row that is only rounding error next to the largest row becomes zeros, as where the momentum's rank is lower.
    """
    values = rows.cpu().double().numpy()
    norms = np.sqrt((values * values).sum(axis=1, keepdims=True))
    is_direction = norms > 100 * torch.finfo(rows.dtype).eps * norms.max()
    return torch.from_numpy(np.where(is_direction, values / np.where(is_direction, norms, 1.0), 0.0)).to(rows)
