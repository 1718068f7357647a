"""Describe the requests that children push to their parents, and the replies to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

# Kinds of requests: a gradient, or a sum of weighted ones, whose reply brings parameters; a push without; a fetch of
# parameters without a gradient; the end of a period.
GRADIENT, SUM, PUSH, FETCH, PAUSE = 1, 2, 3, 4, 5
NOBODY = -1


@dataclass
class ServerRequest:
    """A request to a server, in its slot. `tensors` and `used` are views that stay valid until the reply.

    `clocks` has one entry per gradient that the tensors are the sum of, `weight` is the sum of their weights, `values`
    are the hyper-parameters of the worker, float64.
    Compressed gradients are decoded as `tensors` is gone through, once, into memory that all requests share.
    """

    source: int
    kind: int
    weight: float
    clocks: tuple[int, ...]
    tensors: Iterable[Tensor] = field(repr=False)
    used: Tensor = field(repr=False)
    values: Tensor = field(repr=False, default_factory=lambda: torch.empty(0, dtype=torch.float64))


class Reply(NamedTuple):
    """Let the child of a request go on, with this shard's `tensors` (none: nothing new) and `clock`.

    The parent has held the reply back for `held_s` seconds because of the rank `blocker`.
    """

    request: ServerRequest
    clock: int
    tensors: Sequence[Tensor] = ()
    blocker: int = NOBODY
    held_s: float = 0.0


class ReplyHead(NamedTuple):
    """Tell a child its parent's clock, and for how many seconds the reply was held back because of which rank."""

    clock: int
    blocker: int
    held_s: float


def waited_for(heads: Iterable[ReplyHead]) -> dict[int, float]:
    """Return the seconds that replies were held back because of each rank."""
    return {head.blocker: head.held_s for head in heads if head.blocker != NOBODY}
