"""Transfers: their account, checks of their arguments, requests for those under way, the exchange with neighbours."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import NoReturn

import torch
from torch import Tensor

from hpcdist.errors import CommunicationError

ANY = -1  # any source, any tag
TAG_LIMIT = 1 << 15  # tags are 0 <= tag < TAG_LIMIT; every MPI offers at least that many


@dataclass
class Traffic:
    """One rank's transfers, in bytes, messages and seconds, and its seconds of waiting, since the communicator exists.

    `bytes_sent` and `messages_sent` count what this rank put on the network, one-sided puts and accumulates
    included; `bytes_fetched` and `messages_fetched` count what it took by one-sided gets. Calls on a rank's own window
    move nothing and count nothing. `communicating_s` are the seconds inside calls that move data, `waiting_s` those
    spent until another rank acts (barrier, `Window.wait`, `probe`); the two don't overlap.
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
    """A message that has arrived, as `probe` describes it: its source rank, its tag and its length in bytes."""

    source: int
    tag: int
    n_bytes: int


class Request(abc.ABC):
    """A transfer under way. The tensor may be touched again once it is complete."""

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


def check_wanted(source: int, tag: int, size: int) -> None:
    """Check what messages are asked for, where both may be ANY; raise CommunicationError otherwise."""
    if source != ANY:
        check_rank(source, size, "source")
    if tag != ANY:
        check_tag(tag)


class Closed:
    """Takes the place of what has been released: raises CommunicationError whatever is asked of it."""

    def __init__(self, what: str = "a communicator", end: str = "closed"):
        self._rule = f"{what} must not be used once it is {end}. Use it before that, or make another one."

    def __getattr__(self, name: str) -> NoReturn:
        raise CommunicationError(self._rule)


# torch adds these under another name only: two's complement addition knows no sign.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
# Narrow floats are summed in these, and rounded once, wherever all ranks' addends meet.
WIDE = {dtype: torch.float32 for name, dtype in vars(torch).items() if name.startswith("float8")}
WIDE |= {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
_ADDABLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
_ADDABLE |= {torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128}


def addable(tensor: Tensor) -> Tensor:
    """View a tensor under a dtype that torch can add."""
    tensor = tensor.detach()
    if tensor.dtype in SIGNED:
        return tensor.view(SIGNED[tensor.dtype])
    if tensor.dtype not in _ADDABLE:
        raise CommunicationError(f"dtype of a sum must be a number; got {tensor.dtype}. Convert the tensor first.")
    return tensor


class Neighbourhood(abc.ABC):
    """Repeated exchange of tensors with the same ranks. Made by `Communicator.neighbourhood`."""

    _sources: Sequence[int]

    def start(self, send: Tensor, received: Tensor) -> Request:
        """Collective. Start to send `send` to all destinations, and to receive a tensor like it from every source.

        Never blocks. Exchanges match in the order in which ranks start them. Until the request is complete `send`
        must not change and `received` must not be looked at. Messages: one of `send.nbytes` per destination.

        Args:
            send: flat; of one length and dtype on all ranks.
            received: flat, of len(sources) · len(send) elements, overwritten: the sources' tensors one after the
                other, in the order of `sources`.

        Raises CommunicationError where the tensors do not fit each other.
        """
        check_flat(send, "send")
        check_flat(received, "received")
        expected = len(self._sources) * send.numel()
        if received.numel() != expected or received.dtype != send.dtype:
            raise CommunicationError(
                f"received must have {expected} elements of {send.dtype}, as many as are sent for each of "
                f"{len(self._sources)} sources; got {received.numel()} of {received.dtype}. Allocate them so."
            )
        return self._start(send, received)

    @abc.abstractmethod
    def _start(self, send: Tensor, received: Tensor) -> Request:
        """Start the exchange, of tensors whose lengths have been checked."""

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Release the neighbourhood; no exchange may be under way."""
