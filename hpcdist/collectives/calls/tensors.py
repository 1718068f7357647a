"""Convert users' tensors for collective calls: flat, contiguous, on the host; copies are written back afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError

Tensors = Tensor | Sequence[Tensor]
DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)


@contextmanager
def flattened(comm: Communicator, tensor: Tensor, *, write: bool = True) -> Iterator[Tensor]:
    """Yield a tensor's elements, shape (n,); if they are a copy, write them back at the end, unless `write=False`."""
    tensor = tensor.detach()
    elements = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    with comm.memory.host(elements, write=write) as host:
        yield host
    if write and (elements.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg()):
        tensor.copy_(elements.view(tensor.shape))


@contextmanager
def by_dtype(
    comm: Communicator, tensors: Tensors, *, write: bool = True
) -> Iterator[list[tuple[list[Tensor], Tensor]]]:
    """Yield for each dtype its tensors and their concatenation, shape (n,), written back at the end if `write`."""
    if isinstance(tensors, Tensor):
        with flattened(comm, tensors, write=write) as elements:
            yield [([tensors], elements)]
        return
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    with ExitStack() as stack:
        result = []
        for group in groups.values():
            flat = [
                tensor.detach().view(-1)  # the same as `flattened`, in a tenth of the time
                if tensor.is_cpu and is_dense(tensor)
                else stack.enter_context(flattened(comm, tensor, write=write))
                for tensor in group
            ]
            result.append((group, flat, torch.cat(flat)))
        yield [(group, joined) for group, _, joined in result]
        for _, flat, joined in result if write else ():
            torch._foreach_copy_(flat, list(joined.split([len(part) for part in flat])))


@contextmanager
def for_each_rank(
    comm: Communicator, tensors: Tensors | None, name: str, *, write: bool = True, here: bool = True,
    joint: bool = False,
) -> Iterator[tuple[list[Tensor], Tensor | None]]:  # fmt: skip
    """Context: yield one flat tensor per rank, and the tensor of which they are views, if any; write copies back.

    Args:
        tensors: a list with a tensor for each rank, or one tensor, which is split into equal parts.
        name: of the argument, for messages.
        write: write copies back at the end.
        here: this rank takes part; False on ranks other than the root of a gather or scatter: they get an empty list.
        joint: concatenate the tensors of a list if they have equal lengths above 0, so that ranks with a list and ranks
            with one tensor run the same call; otherwise a list is yielded with None.
    """
    size = comm.size
    if isinstance(tensors, Tensor):
        if tensors.numel() % size:
            raise ConfigError(
                f"{name} must have the same number of elements for each of {size} ranks; got shape "
                f"{tuple(tensors.shape)}. Pass a list with a tensor for each rank."
            )
        with flattened(comm, tensors, write=write) as elements:
            yield list(elements.view(size, -1)) if len(elements) else [elements] * size, elements
        return
    parts = list(tensors or ()) if here else []
    if len(parts) != size * here or len({part.dtype for part in parts}) > 1:
        types = ", ".join(sorted({type_of(part.dtype) for part in parts})) or "none"
        raise ConfigError(
            f"{name} must be a tensor for each of {size} ranks, all of one dtype; got {len(parts)}, of {types}."
        )
    with ExitStack() as stack:
        flat = [stack.enter_context(flattened(comm, part, write=write)) for part in parts]
        lengths = {len(part) for part in flat}
        if not joint or len(lengths) != 1 or 0 in lengths:
            yield flat, None
            return
        whole = torch.cat(flat)
        views = list(whole.view(size, -1))
        yield views, whole
        for part, view in zip(flat, views) if write else ():
            part.copy_(view)


def zeros_like(comm: Communicator, flats: Sequence[Tensor]) -> list[Tensor] | None:
    """Collective. Return `RankMemory.zeros` with the lengths and dtypes of flat tensors; None for device tensors."""
    return [comm.memory.zeros(len(flat), flat.dtype) for flat in flats] if all(flat.is_cpu for flat in flats) else None


def each(tensors: Tensors) -> Sequence[Tensor]:
    """Return a sequence of tensors unchanged, and a single tensor as a list."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's memory holds exactly its elements: contiguous, without lazy conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def type_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def require_fit(name: str, tensor: Tensor, part: Tensor) -> None:
    """Raise ConfigError if a tensor's length or dtype differs from that of this rank's part."""
    if tensor.numel() != len(part) or tensor.dtype != part.dtype:
        raise ConfigError(
            f"{name} must match this rank's part, {len(part)} elements of {type_of(part.dtype)}; got shape "
            f"{tuple(tensor.shape)} of {type_of(tensor.dtype)}. Use the same length and dtype."
        )
