"""The parts of a model that is held by several ranks together: what all kinds of them have for strategies."""

from __future__ import annotations

import abc
from typing import Any

from torch import nn

from hpcdist.parallel.agreement import Agreement
from hpcdist.parallel.grid import Grid


class PartOfModel(nn.Module, abc.ABC):
    """A rank's part of a model that the ranks of its replica hold together: its parameters are those of this rank.

    Attributes:
        grid: the ranks of the replica, and those that have the same part of the others.
        agreement: with the other ranks of the replica, on gradients.
        optimizers: distributed ones, which train these parameters.
    """

    grid: Grid
    agreement: Agreement
    optimizers: list[Any]

    @abc.abstractmethod
    def share_values(self) -> None:
        """Collective in the replica. Make parameters that several of its ranks have equal to the first one's."""
