"""Users' tensors as collective calls take them: flat, contiguous, on the host, and put back where those are copies."""

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
    """Yield a tensor's elements, shape (n,), and put them back, unless with `write=False`, where they are copies."""
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
    """Yield tensors of one dtype together, with their elements one after the other, shape (n,)."""
    if isinstance(tensors, Tensor):
        with flattened(comm, tensors, write=write) as elements:
            yield [([tensors], elements)]
        return
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    with ExitStack() as until:
        found = []
        for group in groups.values():
            own = [
                one.detach().view(-1)  # as `flattened` does, in a tenth of the time
                if one.is_cpu and is_dense(one)
                else until.enter_context(flattened(comm, one, write=write))
                for one in group
            ]
            found.append((group, own, torch.cat(own)))
        yield [(group, joined) for group, _, joined in found]
        for _, own, joined in found if write else ():
            torch._foreach_copy_(own, list(joined.split([len(one) for one in own])))


@contextmanager
def for_each_rank(
    comm: Communicator, given: Tensors | None, name: str, *, write: bool = True, here: bool = True, joint: bool = False
) -> Iterator[tuple[list[Tensor], Tensor | None]]:
    """Yield a flat tensor for each rank, of a list, or equal parts of one tensor, with that one; or none at all.

    Args:
        here: this rank has such tensors.
        joint: of a list of equal lengths make one tensor, so that ranks with a list do what those with a tensor do.
    """
    size = comm.size
    if isinstance(given, Tensor):
        if given.numel() % size:
            raise ConfigError(
                f"{name} must have as many elements for each of {size} ranks; got shape {tuple(given.shape)}. Give a "
                "list with a tensor for each rank."
            )
        with flattened(comm, given, write=write) as elements:
            yield list(elements.view(size, -1)) if len(elements) else [elements] * size, elements
        return
    parts = list(given or ()) if here else []
    if len(parts) != size * here or len({one.dtype for one in parts}) > 1:
        types = ", ".join(sorted({type_of(one.dtype) for one in parts})) or "none"
        raise ConfigError(
            f"{name} must be a tensor for each of {size} ranks, all of one dtype; got {len(parts)}, of {types}."
        )
    with ExitStack() as until:
        flat = [until.enter_context(flattened(comm, one, write=write)) for one in parts]
        lengths = {len(one) for one in flat}
        if not joint or len(lengths) != 1 or 0 in lengths:
            yield flat, None
            return
        whole = torch.cat(flat)
        joined = list(whole.view(size, -1))
        yield joined, whole
        for one, part in zip(flat, joined) if write else ():
            one.copy_(part)


def each(tensors: Tensors) -> Sequence[Tensor]:
    """Return several tensors as they are, and one in a list."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor is its elements in some memory, one after the other."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def type_of(dtype: torch.dtype) -> str:
    """Name a dtype without the module."""
    return str(dtype).removeprefix("torch.")


def require_fit(name: str, tensor: Tensor, part: Tensor) -> None:
    """Raise ConfigError if a tensor is not as long as this rank's part, and of its dtype."""
    if tensor.numel() != len(part) or tensor.dtype != part.dtype:
        raise ConfigError(
            f"{name} must be like this rank's part, {len(part)} elements of {type_of(part.dtype)}; got shape "
            f"{tuple(tensor.shape)} of {type_of(tensor.dtype)}. Make both alike."
        )
