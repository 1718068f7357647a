"""Single transfers: checks of their arguments, and requests for those under way."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor

from hpcdist.errors import CommunicationError

ANY = -1  # any source, any tag
TAG_LIMIT = 1 << 15  # tags are 0 <= tag < TAG_LIMIT; every MPI offers at least that many


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
