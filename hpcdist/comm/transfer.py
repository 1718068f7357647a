"""Transfers: traffic counters, checks of arguments, and requests in flight."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from operator import add, sub
from typing import NoReturn

import torch
from torch import Tensor

from hpcdist.errors import CommunicationError

ANY = -1  # any source (MPI_ANY_SOURCE), any tag
TAG_LIMIT = 1 << 15  # tags are 0 <= tag < TAG_LIMIT, which every MPI supports


@dataclass
class Traffic:
    """Counters of one rank's transfers since the communicator was created.

    Attributes:
        bytes_sent, messages_sent: sent by this rank, one-sided puts and accumulates included.
        bytes_fetched, messages_fetched: read by one-sided gets. Calls on a rank's local window count nothing.
        communicating_s: seconds inside calls that move data.
        waiting_s: seconds spent waiting for another rank (barrier, `Window.wait`, `probe`); not in `communicating_s`.
    """

    bytes_sent: int = 0
    messages_sent: int = 0
    bytes_fetched: int = 0
    messages_fetched: int = 0
    communicating_s: float = 0.0
    waiting_s: float = 0.0

    def sent(self, n_bytes: int, messages: int = 1) -> None:
        self.bytes_sent += n_bytes
        self.messages_sent += messages

    def fetched(self, n_bytes: int, messages: int = 1) -> None:
        self.bytes_fetched += n_bytes
        self.messages_fetched += messages

    def copy(self) -> Traffic:
        return Traffic(**vars(self))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*map(sub, vars(self).values(), vars(earlier).values()))


@dataclass(frozen=True)
class Envelope:
    """The result of `probe`: source rank, tag and length in bytes of an arrived message."""

    source: int
    tag: int
    n_bytes: int


class Request(abc.ABC):
    """A transfer in flight. Do not touch the tensor before the transfer is complete."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Return True once the transfer is complete. Never blocks."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until the transfer is complete; raise DeadlineError past the communicator's deadline."""


def check_flat(tensor: Tensor, name: str = "tensor") -> None:
    """Check that `tensor` is one-dimensional and contiguous; raise CommunicationError otherwise."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise CommunicationError(
            f"{name} must be flat (1 dimension) and contiguous; got shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}. Call .reshape(-1).contiguous() and copy back."
        )


def check_rank(rank: int, size: int, name: str) -> None:
    """Check that `rank` is a rank of a communicator of that size; raise CommunicationError otherwise."""
    if not 0 <= rank < size:
        raise CommunicationError(f"{name} must be a rank in 0..{size - 1}; got {rank}.")


def check_tag(tag: int) -> None:
    """Check that every MPI can carry this tag; raise CommunicationError otherwise."""
    if not 0 <= tag < TAG_LIMIT:
        raise CommunicationError(f"tag must be in 0..{TAG_LIMIT - 1}; got {tag}.")


def check_source_and_tag(source: int, tag: int, size: int) -> None:
    """Check the source and tag of a receive or probe, both may be ANY; raise CommunicationError otherwise."""
    if source != ANY:
        check_rank(source, size, "source")
    if tag != ANY:
        check_tag(tag)


class Closed:
    """Stands in for an object that was closed: any use raises CommunicationError."""

    def __init__(self, what: str = "a communicator", end: str = "closed"):
        self._rule = f"{what} must not be used once it is {end}. Use it before that, or create another one."

    def __getattr__(self, name: str) -> NoReturn:
        raise CommunicationError(self._rule)


# torch can't add these; viewed as signed it can: two's complement addition ignores the sign.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
# Sums of narrow floats over all ranks are computed in these wider types, and rounded once.
WIDE = {dtype: torch.float32 for name, dtype in vars(torch).items() if name.startswith("float8")}
WIDE |= {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
_ADDABLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
_ADDABLE |= {torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128}


def addable(tensor: Tensor) -> Tensor:
    """View a tensor as a dtype of the same width that torch can add; raise CommunicationError if none exists."""
    tensor = tensor.detach()
    if tensor.dtype in SIGNED:
        return tensor.view(SIGNED[tensor.dtype])
    if tensor.dtype not in _ADDABLE:
        raise CommunicationError(f"dtype of a sum must be numeric; got {tensor.dtype}. Convert the tensor first.")
    return tensor
