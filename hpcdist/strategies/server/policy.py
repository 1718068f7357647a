"""Decide which gradients make an update, and which workers go on: a protocol of servers, without ranks or tensors."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hpcdist.strategies.server.channel import NOBODY


@dataclass(eq=False)
class Held:
    """Hold a gradient whose worker has no reply yet.

    `clocks` has one entry per gradient that it is the sum of.
    """

    source: int
    clocks: tuple[int, ...]
    added: bool = False  # to the sum of the next update; so is what has no gradient to add
    applied: bool = False  # an update, or a sum that was passed on, has taken all gradients up to this one
    blocker: int = NOBODY  # the rank it waits for


class Policy(abc.ABC):
    """Decide about the gradients that a server holds; `active` are the workers that still take steps.

    A gradient whose worker goes on before its update is added to a sum, in order of arrival; the others are added in
    rank order when the update is made.
    """

    remembers: ClassVar[tuple[str, ...]] = ()  # attributes that a checkpoint keeps, of types that JSON has
    waits = True  # workers may have to wait for others; else `active` is left empty
    divides_by_workers = False  # an update is Σg/λ, whichever gradients are in it; else Σwg/Σw, for weights by samples

    @abc.abstractmethod
    def complete(self, held: Sequence[Held], summed: int, active: Sequence[int]) -> bool:
        """Tell whether the server makes an update now: of the gradients held, and of those `summed` already."""

    @abc.abstractmethod
    def may_go(self, gradient: Held, active: Sequence[int]) -> bool:
        """Tell whether a gradient's worker goes on now, with the parameters as they are; False keeps it waiting."""

    def arrived(self, source: int, staleness: int) -> str | None:
        """Remember that a worker has taken a step; return why its gradient is refused; None: it is not."""
        return None

    def factor(self, staleness: int) -> float:
        """Return how much less a gradient counts for its staleness."""
        return 1.0

    def blocker(self, active: Sequence[int]) -> int:
        """Return the rank for which the workers wait that may not go on."""
        return NOBODY

    def updated(self, staleness: Sequence[int]) -> None:
        """Remember that an update has been made, of gradients of that staleness."""

    def returned(self, worker: int, active: Sequence[int]) -> None:
        """Remember that a worker that was evicted has pushed again."""
