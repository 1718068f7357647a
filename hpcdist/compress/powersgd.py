"""PowerSGD: each matrix as a product of two thin matrices, by one step of a power iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import CHUNK, slices
from hpcdist.compress.base import Linear, Span
from hpcdist.config.settings import Field


class _Matrix(NamedTuple):
    """A matrix: its elements in the tensor, and the slices of its factors P and Q in the first and second message."""

    elements: slice
    rows: int
    columns: int
    left: slice
    right: slice


@final
class PowerSgd(Linear):
    """Send two thin factors of each matrix M: P̂ = orthogonalised MQ, then MᵀP̂, the Q of the next step.

    A parameter of several dimensions is a matrix of its first dimension by the others. Vectors, and matrices whose
    factors would not have fewer elements, are sent uncompressed. An all-reduce sums P and Q over the ranks, so that P̂
    belongs to the summed matrix; each rank keeps its error M − P̂P̂ᵀM. Two all-reduces serve all parameters.

    Bytes in float32: 4r(rows + columns) for each matrix, 4n for n uncompressed elements. Error: 0 if the rank of the
    summed matrix is at most r. Otherwise it is at least the error of the best approximation of rank r, and close to it
    if matrices change slowly between steps; it is always less than M, because P̂P̂ᵀM is a projection. Elements above
    8.5e37/(ranks · max(rows, columns)) in float32 are clipped, so that products can't overflow; the excess stays in the
    residual.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression={"name": "powersgd", "rank": 2})

    Reference: Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi, "PowerSGD: practical low-rank gradient compression
    for distributed optimization", 2019; algorithm 1.
    """

    class Config(Linear.Config):
        rank: int = Field(2, "r, the rank of the approximation: columns of the matrices P and Q", ge=1)

    config: Config
    remembers = ("start",)

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        super().__init__(config, count, spans)
        self._matrices: list[_Matrix] = []
        self._whole: list[tuple[slice, slice]] = []  # uncompressed elements, and their slice of the first message
        first = second = 0  # elements of the messages so far
        for span in self.spans:
            elements, size = slice(span.start, span.stop), span.stop - span.start
            rows = span.shape[0] if span.shape else 1
            columns = size // max(1, rows)
            if config.rank * (rows + columns) < size:
                left, right = (slice(a, a + config.rank * b) for a, b in ((first, rows), (second, columns)))
                self._matrices.append(_Matrix(elements, rows, columns, left, right))
                first, second = left.stop, right.stop
            else:
                self._whole.append((elements, slice(first, first + size)))
                first += size
        self._first, self._second = first, second
        # Any start that is equal on all ranks and machines will do, such as uniform numbers.
        self.start = torch.from_numpy(np.random.Generator(np.random.SFC64(0)).random(second) - 0.5)

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._factors(tensor, 1, lambda flat: None)).view(torch.uint8)  # without other ranks

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        dtype = np.float32 if len(message) == 4 * (self._first + self._second) else np.float64
        factors = torch.from_numpy(message.numpy().view(dtype)).to(out.dtype)
        first, second = factors.split([self._first, self._second])
        self._expand(first, second, out, weight)

    def reduce(self, tensor: Tensor, out: Tensor, ranks: int, allreduce: Callable[[Tensor], None]) -> None:
        self._expand(*self._factors(tensor, ranks, allreduce), out.zero_(), 1.0)

    def _factors(self, tensor: Tensor, ranks: int, allreduce: Callable[[Tensor], None]) -> tuple[Tensor, Tensor]:
        """Collective. Return both messages, summed: P̂ with uncompressed elements, and Q. `tensor` becomes the error."""
        start = self.start.to(tensor.dtype)
        first, second = tensor.new_empty(self._first), tensor.new_empty(self._second)
        for elements, part in self._whole:
            first[part] = tensor[elements]
            tensor[elements] = 0
        excess = [self._clip(self._matrix(tensor, m), ranks) for m in self._matrices]
        for m in self._matrices:
            torch.mm(self._factor(start, m.right), self._matrix(tensor, m).T, out=self._factor(first, m.left))
        allreduce(first)
        for m in self._matrices:
            matrix, left, right = self._matrix(tensor, m), self._factor(first, m.left), self._factor(second, m.right)
            left.copy_(orthogonalised(left))
            torch.mm(left, matrix, out=right)
            matrix.addmm_(left.T, right, alpha=-1)
        for m, beyond in zip(self._matrices, excess, strict=True):
            if beyond is not None:
                limit = torch.finfo(tensor.dtype).max
                self._matrix(tensor, m).add_(beyond).clamp_(-limit, limit)
        allreduce(second)
        for m in self._matrices:
            largest = second[m.right].abs().max()
            if largest > 0:  # a matrix of zeros has no directions
                # Only directions matter; norms might grow without bound.
                self.start[m.right] = second[m.right] / largest
        return first, second

    @staticmethod
    def _clip(matrix: Tensor, ranks: int) -> Tensor | None:
        """Clip a matrix's elements so that no product overflows; return the excess, or None."""
        limit = torch.finfo(matrix.dtype).max / (4 * ranks * max(matrix.shape))
        if max(abs(value.item()) for value in torch.aminmax(matrix)) <= limit:
            return None
        cut = matrix.clamp(-limit, limit)
        beyond = matrix - cut
        matrix.copy_(cut)
        return beyond

    def _expand(self, first: Tensor, second: Tensor, out: Tensor, weight: float) -> None:
        """Add `weight` times the products of the factors to `out`."""
        for elements, part in self._whole:
            out[elements].add_(first[part], alpha=weight)
        for m in self._matrices:
            add_product(self._matrix(out, m), weight * self._factor(first, m.left), self._factor(second, m.right))

    def _factor(self, flat: Tensor, place: slice) -> Tensor:
        """View a factor, at `place` in a message, as its transpose: r rows are faster than r columns."""
        return flat[place].view(self.config.rank, -1)

    @staticmethod
    def _matrix(flat: Tensor, m: _Matrix) -> Tensor:
        return flat[m.elements].view(m.rows, m.columns)


# All ranks must get the same bits from the same sums, on any processor, but the order in which a BLAS adds depends on
# the processor. So a basis is summed in NumPy's order, and products are exact in float64.
def orthogonalised(rows: Tensor) -> Tensor:
    """Compute an orthonormal basis of a matrix's rows, float64; other directions replace dependent rows.

    By Gram-Schmidt, twice for each row, which leaves only rounding errors.

    Reference: Luc Giraud, Julien Langou, Miroslav Rozložník, Jasper van den Eshof, "Rounding error analysis of the
    classical Gram-Schmidt orthogonalization process", 2005.
    """
    basis = rows.numpy().astype(np.float64)
    next_unit = 0
    for index, vector in enumerate(basis):  # a view, changed in place
        vector /= max(np.abs(vector).max(), np.finfo(np.float64).tiny)  # squares must not overflow
        full_norm = _norm(vector)
        _reject(vector, basis[:index])
        while not _norm(vector) > 1e-12 * full_norm:  # only rounding errors remain: use another direction
            vector[:] = 0
            vector[next_unit], full_norm = 1, 1
            next_unit += 1
            _reject(vector, basis[:index])
        vector /= _norm(vector)
        _reject(vector, basis[:index])
        vector /= _norm(vector)
    return torch.from_numpy(basis)


def _norm(vector: np.ndarray) -> float:
    return math.sqrt((vector * vector).sum())


def _reject(vector: np.ndarray, basis: np.ndarray) -> None:
    """Subtract the components along the basis."""
    vector -= ((basis * vector).sum(axis=1)[:, None] * basis).sum(axis=0)


def add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ · right to a matrix, with the same bits on every processor.

    Each factor is split into parts with few bits, so that sums of their products are exact in float64, in any order.
    The error equals rounding the factors to at least 22 bits, or 44 bits in float64.

    Args:
        left, right: shapes (r, rows) and (r, columns), on the host.

    Reference: Katsuhisa Ozaki, Takeshi Ogita, Shin'ichi Oishi, Siegfried M. Rump, "Error-free transformations of matrix
    multiplication by using fast routines of matrix multiplication and its applications", 2012.
    """
    bits, count = (53 - len(left).bit_length()) // 2, 2 if out.dtype == torch.float64 else 1
    lefts, rights = _parts(left, bits, count), _parts(right, bits, count)
    for chunk in slices(len(out), max(1, CHUNK // 2 // out.shape[1])):
        for index, part in enumerate(lefts):
            for other in rights[: count - index]:  # without the products of small parts, which are negligible
                out[chunk].add_(part[:, chunk].T @ other)


def _parts(factor: Tensor, bits: int, count: int) -> list[Tensor]:
    """Split a factor into parts of `bits` bits, below the largest magnitude of each column, in float64."""
    remainder = factor.numpy().astype(np.float64)
    exponents = np.frexp(np.abs(remainder).max(axis=0))[1].clip(min=-900)  # so that no grid is 0
    parts = []
    for index in range(1, count + 1):
        part = remainder * np.ldexp(1.0, index * bits - exponents)
        np.rint(part, out=part)
        part *= np.ldexp(1.0, exponents - index * bits)
        if index < count:
            remainder -= part
        parts.append(torch.from_numpy(part))
    return parts
