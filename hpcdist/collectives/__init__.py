"""All-reduce algorithms, one file each, found by the file's name; and the choice among them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hpcdist.collectives.base import AllReduce
from hpcdist.comm.communicator import Communicator
from hpcdist.registry import catalogue

__all__ = ["AllReduce", "allreduce", "available", "load"]

available = catalogue("collectives").available
load: Callable[[str], type[AllReduce]] = catalogue("collectives").load


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
