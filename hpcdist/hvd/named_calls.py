"""The calls themselves: what each must be like on all ranks, and how it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist.collectives.calls import Collectives
from hpcdist.hvd.adasum import adasum
from hpcdist.hvd.matching import STANDINS, NamedCall

Average, Sum, Adasum, Min, Max, Product = "Average", "Sum", "Adasum", "Min", "Max", "Product"
OPERATIONS = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}
FUSED_BYTES = 1 << 20  # up to here a tensor travels together with others


def _dtype(tensors: Sequence[Tensor]) -> str:
    return ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in tensors}))


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Multiply a tensor; integers in float64, and 16-bit floats in float32."""
    if factor == 1.0:
        return tensor
    if not tensor.is_floating_point():
        return (tensor.double() * factor).to(tensor.dtype)
    return (tensor.float() * factor).to(tensor.dtype) if tensor.itemsize == 2 else tensor * factor


class Allreduce(NamedCall):
    """Sum tensors, or combine them otherwise.

    Args:
        outs: get the results.
    """

    def __init__(
        self, name: str, tensors: Sequence[Tensor], outs: Sequence[Tensor], op: str, prescale: float, postscale: float
    ):
        shapes = [list(one.shape) for one in tensors]
        like = {"dtype": _dtype(tensors), "shape": shapes, "op": op, "prescale": prescale, "postscale": postscale}
        super().__init__("allreduce", name, like)
        self._tensors, self._outs, self._op, self._prescale, self._postscale = tensors, outs, op, prescale, postscale
        if op != Adasum and sum(one.nbytes for one in tensors) <= FUSED_BYTES:
            self.together = "allreduce", op, like["dtype"], prescale, postscale

    def make(self, calls: Collectives, others: Sequence[Any] = ()) -> None:
        every = [self, *others]
        given = [scaled(one, self._prescale) for request in every for one in request._tensors]
        outs = [one for request in every for one in request._outs]
        for one, out in zip(given, outs, strict=True):
            if one.data_ptr() != out.data_ptr():
                out.copy_(one)
        if self._op == Adasum:
            for out in outs:
                adasum(calls, out)
        else:
            calls.all_reduce(outs if len(outs) > 1 else outs[0], OPERATIONS[self._op])
        for out in outs:
            if self._op == Average:
                out.div_(calls.size, rounding_mode=None if out.is_floating_point() or out.is_complex() else "trunc")
            if self._postscale != 1.0:
                out.copy_(scaled(out, self._postscale))
        for request in every:
            request.found = list(request._outs)

    @classmethod
    def of_zeros(cls, name: str, like: Mapping[str, Any]) -> Allreduce:
        """Make what a rank that has joined brings."""
        tensors = [torch.zeros(shape, dtype=getattr(torch, like["dtype"])) for shape in like["shape"]]
        return cls(name, tensors, tensors, like["op"], like["prescale"], like["postscale"])


class Allgather(NamedCall):
    """Collect tensors, whose first dimensions may differ between ranks."""

    def __init__(self, name: str, tensors: Sequence[Tensor]):
        like = {"dtype": _dtype(tensors), "shape after the first dimension": [list(one.shape[1:]) for one in tensors]}
        super().__init__("allgather", name, like)
        self._tensors = tensors

    def make(self, calls: Collectives, others: Sequence[Any] = ()) -> None:
        rows = torch.empty(calls.size, len(self._tensors), dtype=torch.int64)
        calls.all_gather(rows, torch.tensor([one.shape[0] for one in self._tensors]))
        self.found = []
        for lengths, own in zip(rows.t().tolist(), self._tensors):
            out = own.new_empty(sum(lengths), *own.shape[1:])
            calls.all_gather(list(out.split(lengths)), own)
            self.found.append((out, lengths))


class Broadcast(NamedCall):
    """Copy a rank's tensor to all."""

    def __init__(self, name: str, tensor: Tensor, out: Tensor, root: int, global_root: int):
        like = {"dtype": _dtype([tensor]), "shape": list(tensor.shape), "root rank": global_root}
        super().__init__("broadcast", name, like)
        self._tensor, self._out, self._root = tensor, out, root

    def make(self, calls: Collectives, others: Sequence[Any] = ()) -> None:
        if self._out.data_ptr() != self._tensor.data_ptr() and calls.rank == self._root:
            self._out.copy_(self._tensor)
        calls.broadcast(self._out, self._root)
        self.found = [self._out]


class Alltoall(NamedCall):
    """Send each rank some rows of a tensor."""

    def __init__(self, name: str, tensor: Tensor, splits: list[int]):
        super().__init__("alltoall", name, {"dtype": _dtype([tensor]), "shape after the first": list(tensor.shape[1:])})
        self._tensor, self._splits = tensor, splits

    def make(self, calls: Collectives, others: Sequence[Any] = ()) -> None:
        received = torch.empty(calls.size, dtype=torch.int64)
        calls.all_to_all(received, torch.tensor(self._splits))
        out = self._tensor.new_empty(int(received.sum()), *self._tensor.shape[1:])
        calls.all_to_all(list(out.split(received.tolist())), list(self._tensor.split(self._splits)))
        self.found = out, received


class Reducescatter(NamedCall):
    """Combine tensors; each rank gets some rows of the result."""

    def __init__(self, name: str, tensors: Sequence[Tensor], op: str, prescale: float, postscale: float):
        like = {"dtype": _dtype(tensors), "shape": [list(one.shape) for one in tensors], "op": op}
        super().__init__("reducescatter", name, like | {"prescale": prescale, "postscale": postscale})
        self._tensors, self._op, self._prescale, self._postscale = tensors, op, prescale, postscale

    def make(self, calls: Collectives, others: Sequence[Any] = ()) -> None:
        self.found = []
        for tensor in self._tensors:
            each, more = divmod(tensor.shape[0], calls.size)
            lengths = [each + (rank < more) for rank in range(calls.size)]
            parts = list(scaled(tensor, self._prescale).contiguous().split(lengths))
            out = torch.empty_like(parts[calls.rank])
            calls.reduce_scatter(out, parts, OPERATIONS[self._op])
            if self._op == Average:
                out.div_(calls.size, rounding_mode=None if out.is_floating_point() else "trunc")
            self.found.append(scaled(out, self._postscale))


class Barrier(NamedCall):
    def __init__(self, name: str):
        super().__init__("barrier", name, {})

    def make(self, calls: Collectives, others: Sequence[Any] = ()) -> None:
        calls.barrier()


STANDINS |= {"allreduce": Allreduce.of_zeros, "barrier": lambda name, like: Barrier(name)}
