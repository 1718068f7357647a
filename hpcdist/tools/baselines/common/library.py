"""The part of a baseline that is the library's own: how it averages gradients."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from hpcdist.comm.communicator import Communicator


class Library(abc.ABC):
    """Collective. Start a library on the ranks of `comm`.

    Attributes:
        name: in place of a strategy's.
        remarks: sentences about what can't be measured from outside.
    """

    name: str
    remarks: tuple[str, ...]

    @staticmethod
    def why_not() -> str | None:
        """Return the reason why the library can't be used here; None if it can."""
        return None

    @abc.abstractmethod
    def __init__(self, comm: Communicator, device: torch.device): ...

    @abc.abstractmethod
    def wrap(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, passes: int
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Collective. Return the module to call and the optimiser to step, as the library wants them.

        Args:
            passes: backward passes of a step.
        """

    def adding(self) -> AbstractContextManager[object]:
        """Return the context of a backward pass that only adds to gradients."""
        return nullcontext()

    def synchronize(self) -> None:
        """Collective. Make gradients their means over the ranks, where the backward pass has not."""

    def stepping(self) -> AbstractContextManager[object]:
        """Return the context in which the optimiser steps."""
        return nullcontext()

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. End what was started."""
