"""Reduction operations over the ranks' tensors: in rank order, for every dtype of torch, reproducible to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import slices
from hpcdist.comm.slots import array_of
from hpcdist.comm.transfer import SIGNED, WIDE
from hpcdist.errors import ConfigError, UnknownNameError

OPERATIONS = ("sum", "mean", "product", "min", "max", "and", "or", "xor")
_ARITHMETIC: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "mean": torch.add, "product": torch.mul}
_ORDERED: dict[str, Callable[..., Tensor]] = {"min": torch.minimum, "max": torch.maximum}
_BITWISE: dict[str, Callable[..., Tensor]] = {
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
}  # fmt: skip
_ARRAYS = {torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
_FUNCTIONS: dict[str, np.ufunc] = {
    "sum": np.add, "mean": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
}  # fmt: skip

Reduce = Callable[[Sequence[Tensor], Tensor], None]  # reduces the tensors of all ranks into the second argument


@cache
def reduction(operation: str, dtype: torch.dtype) -> Reduce:
    """Return a function that reduces flat tensors of this dtype, one per rank, into `out`.

    Of two tensors either may be `out` itself; of more only the first one. Floats of 16 and 8 bits are combined in
    float32 and rounded once. Sums of booleans are `or`, products `and`. Integers wrap around. `min` and `max` propagate
    NaN.

    Raises:
        ConfigError: the operation is unknown, or not defined for this dtype.

    Example:
        >>> from hpcdist.collectives.calls.reduction import reduction
        >>> out = torch.empty(2)
        >>> reduction("max", torch.float32)([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])], out)
        >>> out
        tensor([3., 5.])
    """
    if operation not in OPERATIONS:
        raise UnknownNameError("operation", operation, OPERATIONS)
    if reason := _why_not(operation, dtype):
        raise ConfigError(f"operation {operation!r} must have {reason}; got {dtype}. Convert the tensor first.")
    if dtype is torch.bool:
        operation = {"sum": "or", "product": "and", "min": "and", "max": "or"}.get(operation, operation)
    if dtype in WIDE:
        return _widened(operation, WIDE[dtype])
    if dtype in SIGNED and operation in _ORDERED:
        chained: Callable[..., None] = _chained(_FUNCTIONS[operation])  # works on arrays, too
        return lambda addends, out: chained([array_of(each) for each in addends], array_of(out))
    function = (_ARITHMETIC | _ORDERED | _BITWISE)[operation]
    combined = _chained(function)
    if operation == "mean":
        return _divided(combined)
    if signed := SIGNED.get(dtype):
        return lambda addends, out: combined([each.view(signed) for each in addends], out.view(signed))
    return combined


def array_reduction(
    operation: str, dtype: torch.dtype
) -> Callable[[Sequence[np.ndarray], np.ndarray], Callable[[], object]] | None:
    """Return `bind(arrays, out)`, which returns a function that reduces the arrays into `out`; None if NumPy can't.

    For at least two arrays; bitwise the same as `reduction`, and for short tensors in a third of the time. The returned
    function may be called again whenever the arrays have new contents. It silences NumPy's overflow warnings.
    """
    if operation not in _FUNCTIONS or dtype not in _ARRAYS:
        return None
    context, function = copy_context(), _FUNCTIONS[operation]  # np.errstate in each call would be slower than the sum
    context.run(np.seterr, all="ignore")

    def reduce(arrays: Sequence[np.ndarray], out: np.ndarray) -> None:
        function(arrays[0], arrays[1], out=out)
        for array in arrays[2:]:
            function(out, array, out=out)
        if operation == "mean":
            np.divide(out, len(arrays), out=out)

    def bound(arrays: Sequence[np.ndarray], out: np.ndarray) -> Callable[[], object]:
        if len(arrays) == 2 and operation != "mean":
            return partial(context.run, function, *arrays, out=out)
        return partial(context.run, reduce, arrays, out)

    return bound


def _why_not(operation: str, dtype: torch.dtype) -> str:
    """Returns the kind of numbers that an operation needs, for a message; empty if it is defined for the dtype."""
    integral = not dtype.is_floating_point and not dtype.is_complex
    if operation in _BITWISE and not integral:
        return "integers or booleans"
    if operation == "mean" and integral:
        return "floating-point or complex numbers"
    if operation in _ORDERED and dtype.is_complex:
        return "numbers that have an order"
    return ""


def _chained(function: Callable[..., Tensor]) -> Reduce:
    def reduce(addends: Sequence[Tensor], out: Tensor) -> None:
        if len(addends) == 1:
            out[...] = addends[0]
            return
        function(addends[0], addends[1], out=out)
        for addend in addends[2:]:
            function(out, addend, out=out)

    return reduce


def _divided(reduce: Reduce) -> Reduce:
    def mean(addends: Sequence[Tensor], out: Tensor) -> None:
        reduce(addends, out)
        out.div_(len(addends))

    return mean


def _widened(operation: str, wide: torch.dtype) -> Reduce:
    """Combine in a wider dtype, in chunks, and round once."""
    reduce = reduction(operation, wide)

    def widened(addends: Sequence[Tensor], out: Tensor) -> None:
        for part in slices(out.numel()):
            total = torch.empty(part.stop - part.start, dtype=wide)
            reduce([addend[part].to(wide) for addend in addends], total)
            out[part].copy_(total)

    return widened
