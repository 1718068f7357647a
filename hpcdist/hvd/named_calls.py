"""The named calls: their properties, and how each is run."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from hpcdist.collectives.calls import Collectives
from hpcdist.collectives.calls.tensors import type_of
from hpcdist.hvd.compression import Compressed

Average, Sum, Adasum, Min, Max, Product = "Average", "Sum", "Adasum", "Min", "Max", "Product"
OPERATIONS = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}
FUSED_BYTES = 1 << 20  # tensors up to this size are sent in one message with others
CACHED_DIGESTS = 1 << 16  # of names and properties
KIND_BITS = 255  # bits of a name's digest that identify the kind of call
CACHED_PLANS = 16  # divisions of the fusion buffer that are cached
Plan = tuple[Tensor, tuple[Tensor, ...]]  # a flat tensor, and views of its parts


class NamedCall:
    """A collective call submitted on a rank, also called a request, and later its result.

    Args:
        name: the same on all ranks.
        properties: values of `PROPERTIES`, hashable.
    """

    kind: ClassVar[str] = ""  # of call: allreduce, allgather...
    PROPERTIES: ClassVar[tuple[str, ...]] = ()  # names of values that must be equal on all ranks

    def __init__(self, name: str, properties: tuple[Any, ...] = ()):
        self.name, self.properties = name, properties
        self.result: Any = None  # of calls that create it
        self.error: BaseException | None = None
        self.done = False  # the result, or the error, is available
        self.first_exchanged_s = 0.0  # time of the first exchange that contained it

    @property
    def fusion_key(self) -> Any:
        """Return a key that is equal for requests that one call can combine; None: no fusion."""
        return None

    @property
    def key(self) -> tuple[int, int]:
        """Return digests of the name, and of the properties."""
        return name_digest(self.kind, self.name), _digest(*self.properties)

    def to_json(self) -> list[Any]:
        """Return the kind, name and properties, from which `STANDINS` create this call on a rank that has joined."""
        return [self.kind, self.name, _to_json(self.properties)]

    def describe(self) -> dict[str, str]:
        """Return the properties as text, by name."""
        return dict(zip(self.PROPERTIES, map(_text, self.properties)))

    def run(self, calls: Collectives) -> None:
        """Collective. Make the call: set `result`, or fill the caller's tensors; not of `Join` and refused calls."""
        raise NotImplementedError

    def run_fused(self, calls: Collectives, requests: Sequence[Any], buffer: FusionBuffer) -> None:
        """Collective. Make the calls of `requests`, which are `self` and others with its `fusion_key`, by one call."""
        self.run(calls)


class Join(NamedCall):
    """A rank has no more requests; the result is the last rank that joined."""

    kind = "join"

    def __init__(self) -> None:
        super().__init__("")
        self.since_ns = time.time_ns()


# --- kinds of calls ---------------------------------------------------------------------------------------------------
def _dtypes(tensors: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    return tuple([each.dtype for each in tensors])


def _shapes(tensors: Sequence[Tensor]) -> tuple[torch.Size, ...]:
    return tuple([each.shape for each in tensors])


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return tensor * factor in the tensor's dtype, computed in float64 for integers, in float32 for 16-bit floats."""
    if factor == 1.0:
        return tensor
    if not tensor.is_floating_point():
        return (tensor.double() * factor).to(tensor.dtype)
    return (tensor.float() * factor).to(tensor.dtype) if tensor.itemsize == 2 else tensor * factor


def _mean_of_integers(total: Tensor, size: int, postscale: float) -> Tensor:
    """Return total / size * postscale, rounded once, towards 0."""
    return total.div(size, rounding_mode="trunc") if postscale == 1.0 else scaled(total, postscale / size)


@lru_cache(maxsize=CACHED_DIGESTS)
def _fused_with(dtypes: Sequence[torch.dtype], shapes: Sequence[torch.Size], op: str, *scales: float) -> Any:
    """Return the fusion key of an all-reduce; None if it can't be fused."""
    n_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes))
    alone = n_bytes > FUSED_BYTES or len(set(dtypes)) > 1 or op == Adasum
    return None if alone else (dtypes[0], op, *scales)


class Allreduce(NamedCall):
    """Sum tensors, or reduce them by another operation, into `outs`."""

    kind = "allreduce"
    PROPERTIES = ("dtype", "shape", "op", "prescale", "postscale")

    def __init__(
        self, name: str, tensors: Sequence[Tensor], outs: Sequence[Tensor], op: str, prescale: float, postscale: float
    ):
        super().__init__(name, (_dtypes(tensors), _shapes(tensors), op, float(prescale), float(postscale)))
        self._tensors, self._outs, self._op, self._prescale, self._postscale = tensors, outs, op, prescale, postscale

    @property
    def fusion_key(self) -> Any:
        return _fused_with(*self.properties)

    def run(self, calls: Collectives) -> None:
        for each, out in zip(self._tensors, self._outs, strict=True):
            if self._prescale != 1.0 or each.data_ptr() != out.data_ptr():
                out.copy_(scaled(each, self._prescale))
            self._combine(calls, out)

    def run_fused(self, calls: Collectives, requests: Sequence[Allreduce], buffer: FusionBuffer) -> None:
        # All requests have one fusion key: dtype, operation and scales are those of `self`.
        tensors = [each for request in requests for each in request._tensors]
        if len(tensors) == 1:
            self.run(calls)
            return
        flat, parts = buffer.take(tensors)
        # One call of torch, because each would wait for the script's thread to release the GIL.
        torch._foreach_copy_(parts, tensors)
        if self._prescale != 1.0:
            flat.copy_(scaled(flat, self._prescale))
        self._combine(calls, flat)
        torch._foreach_copy_([each for request in requests for each in request._outs], parts)

    def _combine(self, calls: Collectives, out: Tensor) -> None:
        """Collective. Replace `out` by its reduction over the ranks, times `postscale`."""
        if self._op == Adasum:
            _adasum(calls, out)
        elif self._op == Average and not out.is_floating_point() and not out.is_complex():
            calls.all_reduce(total := out.long())  # int64 sums don't wrap around
            out.copy_(_mean_of_integers(total, calls.size, self._postscale))
            return
        else:
            calls.all_reduce(out, "mean" if self._op == Average else OPERATIONS[self._op])
        if self._postscale != 1.0:
            out.copy_(scaled(out, self._postscale))

    @classmethod
    def of_zeros(cls, name: str, properties: Sequence[Any]) -> Allreduce:
        """Return the allreduce to which a rank contributes zeros after `hvd.join()`; `properties`: see `to_json`."""
        dtypes, shapes, *more = properties
        tensors = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in zip(dtypes, shapes)]
        return cls(name, tensors, tensors, *more)


def _adasum(calls: Collectives, tensor: Tensor) -> None:
    """Collective. Replace a tensor by the ranks' combination: of pairs of ranks, then pairs of pairs, and so on.

    Tensors of ranks beyond the largest power of two are first combined with those of the first ranks. Sums are in
    float64; memory: ranks times the tensor.

    Reference: Saeed Maleki, Madan Musuvathi, Todd Mytkowicz, Olli Saarikivi, Tianju Xu, Vadim Eksarevskiy, Jaliya
    Ekanayake, Emad Barsoum, "Scaling distributed training with adaptive summation", 2021.
    """
    gathered = tensor.new_empty(calls.size, tensor.numel())
    calls.all_gather(gathered, tensor)
    addends = list(gathered.double())
    power = 1 << (calls.size.bit_length() - 1)
    for index in range(power, calls.size):
        addends[index - power] = _pair(addends[index - power], addends[index])
    addends = addends[:power]
    while len(addends) > 1:
        addends = [_pair(a, b) for a, b in zip(addends[::2], addends[1::2])]
    tensor.copy_(addends[0].view(tensor.shape))


def _pair(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of two vectors, each less half of its projection onto the other one; zeros have no effect."""
    dot, square_a, square_b = (torch.dot(x, y).item() for x, y in ((a, b), (a, a), (b, b)))
    return a * (1 - dot / (2 * square_a) if square_a else 1) + b * (1 - dot / (2 * square_b) if square_b else 1)


class CompressedAllreduce(NamedCall):
    """Sum or average tensors in place, compressed."""

    kind = "compressed_allreduce"
    PROPERTIES = ("dtype", "shape", "op", "compression")

    def __init__(self, name: str, tensors: Sequence[Tensor], op: str, compression: Compressed):
        super().__init__(name, (_dtypes(tensors), _shapes(tensors), op, repr(compression.config)))
        self._tensors, self._op, self._compression = tensors, op, compression

    def run(self, calls: Collectives) -> None:
        flat = [each.reshape(-1) for each in self._tensors]
        reduction = self._compression.reduction(self.name, calls.comm, flat, _shapes(self._tensors))
        (reduction.mean if self._op == Average else reduction)(flat)
        for each, total in zip(self._tensors, flat):
            if total.data_ptr() != each.data_ptr():
                each.copy_(total.view(each.shape))


class Allgather(NamedCall):
    """Gather tensors, whose first dimensions may differ between ranks."""

    kind = "allgather"
    PROPERTIES = ("dtype", "shape after the first dimension")

    def __init__(self, name: str, tensors: Sequence[Tensor]):
        super().__init__(name, (_dtypes(tensors), tuple([each.shape[1:] for each in tensors])))
        self._tensors = tensors

    def run(self, calls: Collectives) -> None:
        lengths_by_rank = torch.empty(calls.size, len(self._tensors), dtype=torch.int64)
        calls.all_gather(lengths_by_rank, torch.tensor([each.shape[0] for each in self._tensors]))
        self.result = []
        for lengths, tensor in zip(lengths_by_rank.t().tolist(), self._tensors):
            out = tensor.new_empty(sum(lengths), *tensor.shape[1:])
            calls.all_gather(list(out.split(lengths)), tensor)
            self.result.append((out, lengths))


class Broadcast(NamedCall):
    """Copy a rank's tensor to all ranks."""

    kind = "broadcast"
    PROPERTIES = ("dtype", "shape", "root rank")

    def __init__(self, name: str, tensor: Tensor, out: Tensor, root: int, global_root: int):
        super().__init__(name, (tensor.dtype, tensor.shape, global_root))
        self._tensor, self._out, self._root = tensor, out, root

    def run(self, calls: Collectives) -> None:
        if self._out.data_ptr() != self._tensor.data_ptr() and calls.rank == self._root:
            self._out.copy_(self._tensor)
        calls.broadcast(self._out, self._root)


class Alltoall(NamedCall):
    """Send some rows of a tensor to each rank."""

    kind = "alltoall"
    PROPERTIES = ("dtype", "shape after the first dimension")

    def __init__(self, name: str, tensor: Tensor, splits: list[int]):
        super().__init__(name, (tensor.dtype, tensor.shape[1:]))
        self._tensor, self._splits = tensor, splits

    def run(self, calls: Collectives) -> None:
        n_received = torch.empty(calls.size, dtype=torch.int64)
        calls.all_to_all(n_received, torch.tensor(self._splits))
        out = self._tensor.new_empty(int(n_received.sum()), *self._tensor.shape[1:])
        calls.all_to_all(list(out.split(n_received.tolist())), list(self._tensor.split(self._splits)))
        self.result = out, n_received


class Reducescatter(NamedCall):
    """Reduce tensors; each rank gets some rows of the result."""

    kind = "reducescatter"
    PROPERTIES = ("dtype", "shape", "op", "prescale", "postscale")

    def __init__(self, name: str, tensors: Sequence[Tensor], op: str, prescale: float, postscale: float):
        super().__init__(name, (_dtypes(tensors), _shapes(tensors), op, float(prescale), float(postscale)))
        self._tensors, self._op, self._prescale, self._postscale = tensors, op, prescale, postscale

    def run(self, calls: Collectives) -> None:
        self.result = []
        for tensor in self._tensors:
            n_rows, remainder = divmod(tensor.shape[0], calls.size)
            lengths = [n_rows + (rank < remainder) for rank in range(calls.size)]
            local, averaged = scaled(tensor, self._prescale).contiguous(), self._op == Average
            averages_integers = averaged and not local.is_floating_point() and not local.is_complex()
            parts = list((local.long() if averages_integers else local).split(lengths))
            out = torch.empty_like(parts[calls.rank])
            calls.reduce_scatter(out, parts, "mean" if averaged and not averages_integers else OPERATIONS[self._op])
            mean = _mean_of_integers(out, calls.size, self._postscale).to(tensor.dtype) if averages_integers else None
            self.result.append(scaled(out, self._postscale) if mean is None else mean)


class Barrier(NamedCall):
    kind = "barrier"

    def run(self, calls: Collectives) -> None:
        calls.barrier()


# By kind of call: creates the part of a rank that has joined, from the call's name and its properties, as `to_json`
# returns them. Calls of other kinds are refused after a join.
STANDINS: dict[str, Callable[[str, Any], NamedCall]] = {"allreduce": Allreduce.of_zeros, "barrier": Barrier}


# --- digests, and the memory of fused tensors -------------------------------------------------------------------------
@lru_cache(maxsize=CACHED_DIGESTS, typed=True)
def _digest(*values: Any) -> int:
    """Return a 64-bit digest of values, the same on all ranks."""
    text = repr(list(map(_text, values))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


@lru_cache(maxsize=CACHED_DIGESTS)
def name_digest(kind: str, name: str) -> int:
    """Return the digest of a name, with that of its kind in the last bits."""
    return (_digest(name) & ~KIND_BITS) | (_digest(kind) & KIND_BITS)


def _text(value: Any) -> str:
    """Return a property as text, without torch's type names."""
    if not isinstance(value, tuple):
        return type_of(value) if isinstance(value, torch.dtype) else str(value)
    return ", ".join(str(list(each)) if isinstance(each, torch.Size) else _text(each) for each in value)


def _to_json(value: Any) -> Any:
    """Return a property in types that JSON has: dtypes as names."""
    if isinstance(value, tuple):
        return [_to_json(each) for each in value]
    return type_of(value) if isinstance(value, torch.dtype) else value


class FusionBuffer:
    """A flat tensor that is reused for several tensors; allocating memory would take as long as the call.

    Its memory grows to the largest size that was requested.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._plans: dict[tuple[torch.device, torch.dtype, tuple[torch.Size, ...]], Plan] = {}

    def take(self, tensors: Sequence[Tensor]) -> Plan:
        """Return a flat, uninitialised tensor, and views of its parts with the shapes of `tensors`, all of one dtype.

        The memory is on their device, or on the host if they are on several; valid until the next call.
        """
        devices, dtype = {each.device for each in tensors}, tensors[0].dtype
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        shapes = tuple([each.shape for each in tensors])
        plan = self._plans.get((device, dtype, shapes))
        if plan is None:
            counts = [math.prod(shape) for shape in shapes]
            memory, total = self._memory.get((device, dtype)), sum(counts)
            if memory is None or len(memory) < total:  # plans with views of the old memory are dropped
                self._plans = {key: plan for key, plan in self._plans.items() if key[:2] != (device, dtype)}
                memory = self._memory[device, dtype] = torch.empty(total, dtype=dtype, device=device)
            flat = memory[:total]
            parts = tuple(part.view(shape) for part, shape in zip(flat.split(counts), shapes))
            while len(self._plans) >= CACHED_PLANS:
                self._plans.pop(next(iter(self._plans)))
            plan = self._plans[device, dtype, shapes] = flat, parts
        return plan
