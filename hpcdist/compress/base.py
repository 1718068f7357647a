"""The interface of all compressors: encode a tensor as a message, and add a message to a tensor."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from hpcdist.config import Settings
from hpcdist.errors import refuse_former
from hpcdist.model.flat import FlatModel

# Methods of before, and what to write.
_FORMER = {
    **dict.fromkeys(("state", "load_state"), 'remembers = ("start",)'), "sent": "count_sent(self, message, counts)",
    "begin": "def start_sum(self, own, ranks)",
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """The position of a parameter in a flat tensor, its shape, and its number among all parameters."""

    start: int
    stop: int
    shape: tuple[int, ...]
    number: int = 0


def spans(model: FlatModel) -> list[list[Span]]:
    """List the trainable parameters in each of `model.params`, ascending."""
    of_groups: list[list[Span]] = [[] for _ in model.params]
    for number, slot in enumerate(model.slots):
        of_groups[slot.group].append(Span(slot.start, slot.stop, tuple(slot.shape), number))
    return of_groups


class Compressor(abc.ABC):
    """Encodes one flat tensor, such as a gradient, at every step; may keep state from one step to the next.

    Subclasses are final, one per module, and named after it. Tensors are float32 or float64, on the CPU, contiguous and
    finite. A message is a flat uint8 tensor; its length is the bytes that are sent.

    Args:
        count: elements of the tensor.
        spans: the parameters in it, ascending and without gaps; empty if it is one vector.

    Attributes:
        faithful: one message has a small relative error. With other compressors only the sum of several messages is
            close to the sum of the tensors, by error feedback.
        feeds_back: error feedback is on by default.
        combines: ranks combine their messages by the mean, or by a majority vote for each element. A vote needs the
            messages of all ranks at once, which servers do not have.
        remembers: the attributes that a message changes: tensors, numbers, None.
        along: those of them that have an element for each of the tensor's, or are None.
        stream: seeds random rounding, so that each rank draws its own numbers.
    """

    class Config(Settings):
        """Options of a compressor."""

        def check_feedback(self) -> None:
            """Raise ValueError if error feedback may diverge, because an error may be larger than its tensor."""

        def check_without_feedback(self) -> None:
            """Raise ValueError if an option says what becomes of an error that is forgotten."""

    faithful: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = True
    combines: ClassVar[Literal["mean", "majority"]] = "mean"
    remembers: ClassVar[tuple[str, ...]] = ()
    along: ClassVar[tuple[str, ...]] = ()
    stream: int = 0

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        refuse_former(cls, _FORMER)

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        self.config, self.count = config, count
        self.spans = tuple(spans) or (Span(0, count, (count,)),)

    @abc.abstractmethod
    def encode_residual_(self, tensor: Tensor) -> Tensor:
        """Encode `tensor` and leave the error there: tensor − decoded message.

        Args:
            tensor: shape (count,). Overwritten by the error.

        Returns:
            The message: flat, uint8, of any length.
        """

    @abc.abstractmethod
    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Decode a message and add `weight` times the result to `out`.

        Args:
            message: of a compressor with the same options, count and spans.
            out: shape (count,), float32 or float64, on the CPU.
        """

    def accumulate(self, residual: Tensor, tensor: Tensor) -> None:
        """Add `tensor` to the residual, the sum of all that has not been sent yet; both have shape (count,)."""
        residual.add_(tensor)

    def encode_sum_(self, residual: Tensor, tensor: Tensor) -> Tensor:
        """Add `tensor` to the residual, encode the sum, and leave the error in `residual`.

        A compressor that works piece by piece may add each piece just before it encodes it, while it is in the cache.
        """
        self.accumulate(residual, tensor)
        return self.encode_residual_(residual)

    def encode(self, tensor: Tensor) -> Tensor:
        """Encode `tensor`, which is not changed."""
        return self.encode_residual_(tensor.clone())

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Decode a message into `out`: shape (count,), float32 or float64, on the CPU."""
        self.add(message, out.zero_())

    def count_sent(self, message: Tensor, counts: Tensor) -> None:
        """Add 1 for each element that a message gives: for all, unless the compressor chooses some.

        Then it gives the elements in it, and those that it shows to be 0.

        Args:
            counts: shape (count,), float32 or float64, on the CPU.
        """
        counts.add_(1)

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return what the compressor remembers, for a checkpoint."""
        return {name: getattr(self, name) for name in self.remembers}

    @final
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict()` returned, but for tensors of another shape, which are of other parameters."""
        for name in self.remembers:
            pair = getattr(self, name), state[name]
            if len({value.shape for value in pair if isinstance(value, Tensor)}) < 2:
                setattr(self, name, deepcopy(state[name]))


class Linear(Compressor):
    """A compressor whose messages an all-reduce can sum, because it encodes linearly."""

    @abc.abstractmethod
    def reduce(self, tensor: Tensor, out: Tensor, ranks: int, allreduce: Callable[[Tensor], None]) -> None:
        """Collective. Sum the decoded messages of all ranks, with the same bits on each.

        Args:
            tensor: shape (count,). Overwritten by the error of its message.
            out: shape (count,), overwritten by the sum. Must not be `tensor`.
            allreduce: replaces a flat tensor by its sum over the ranks.
        """


class Recoded(Compressor):
    """A compressor of single elements, whose sums are encoded again: each rank sums one piece of the tensor for all.

    `encode_residual_` and `add` accept any piece of the tensor. Sums have full precision; the error of an encoded sum
    stays on the rank that encoded it. See `recode` in `compress/coding/reduction.py`.
    """

    def share(self, tensor: Tensor, ranks: int) -> Tensor:
        """Do as `encode_residual_`, with values so small that the sum of `ranks` messages is finite."""
        return self.encode_residual_(tensor)

    def start_sum(self, own: Tensor, ranks: int) -> Tensor:
        """Start the sum over `ranks` ranks with this rank's own piece.

        Returns:
            The decoded message of `own` as a new tensor, with the error left in `own`; or `own` itself, in compressors
            that do not encode it before it is summed.
        """
        total = torch.empty_like(own)
        self.decode(self.share(own, ranks), total)
        return total

    @abc.abstractmethod
    def combine(self, total: Tensor, ranks: int) -> Tensor:
        """Encode a sum over `ranks` ranks, and leave the error in `total`."""
