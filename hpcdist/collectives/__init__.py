"""All-reduce algorithms, one file each, found by the file's name; and the choice among them."""

from __future__ import annotations

from torch import Tensor

from hpcdist.collectives.base import AllReduce
from hpcdist.comm.communicator import Communicator
from hpcdist.registry import COLLECTIVES

__all__ = ["AllReduce", "allreduce", "available", "load"]


def available() -> list[str]:
    """List the names of all algorithms, with `auto`: those of this folder, and those that installed packages add."""
    return COLLECTIVES.available()


def load(name: str) -> type[AllReduce]:
    """Load an algorithm's class, by its name or as `path/to/file.py:Class`; construct it with a communicator.

    Raises:
        UnknownNameError: there is none of that name; lists the known ones.
        ConfigError: there are two of that name; or it can't be imported, or is no all-reduce.
    """
    return COLLECTIVES.load(name)


def allreduce(comm: Communicator, tensor: Tensor, algorithm: str = "auto") -> None:
    """Collective. Replace `tensor` by its sum over all ranks.

    For a sum now and then. In a loop make the algorithm once, `reduce = load(name)(comm)`, and call that: it keeps
    its working memory, windows and communicators from call to call.

    Args:
        tensor: flat and contiguous, same length and dtype on all ranks; any float, complex or integer type.
            Overwritten.
        algorithm: one of `available()`, or `path/to/file.py:Class`.

    Raises:
        UnknownNameError: there is no such algorithm.
        CommunicationError, ConfigError: see `AllReduce.__call__`.
    """
    reduce = load(algorithm)(comm)
    try:
        reduce(tensor)
    finally:
        reduce.close()
