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

    def describe_parts(self) -> dict[str, dict[str, Any]]:
        """Describe the tensors that are parts of larger ones, by name, for a checkpoint; none where a rank has layers.

        `of` is the name of the whole tensor, and `shape` its shape. `ranks` of the replica that have parts of it are in
        nested lists; `dims` has, for each depth, the dimension of the tensor that is cut there, as `torch.chunk` cuts,
        or None where all have the same. `dims` itself is None where the parts do not lie so.
        """
        return {}

    @abc.abstractmethod
    def share_values(self) -> None:
        """Collective in the replica. Make parameters that several of its ranks have equal to the first one's."""
