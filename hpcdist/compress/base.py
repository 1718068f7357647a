"""The interface of all compressors: encode a tensor as a message, and add a message to a tensor."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hpcdist.compress.coding.spans import Span
from hpcdist.config import Settings


class Compressor(abc.ABC):
    """Encode one flat tensor, such as a gradient, step after step; may keep state from one step to the next.

    Subclasses are final, one per module; the module's name is the compressor's. Tensors are float32 or float64, on
    the CPU, contiguous and finite. A message is a flat uint8 tensor; its length is the bytes that are sent.

    Args:
        config: this compressor's options.
        count: elements of the tensor.
        spans: the parameters in it, ascending and without gaps; none where it is one vector.

    Attributes:
        faithful: a message alone stands for the tensor, up to a small relative error. Of other compressors several
            must be added up, each of what the ones before have left over, as `Feedback` does.
        feeds_back: error feedback is on by default.
        combines: how ranks combine each other's messages: by their mean, or by a vote, element by element. Where
            messages come one at a time, as at servers, there is nothing to vote on.
        stream: seeds the random numbers of compressors that draw any, so that ranks draw different ones.
    """

    class Config(Settings):
        """Options of a compressor."""

        def check_feedback(self) -> None:
            """Check that error feedback converges with these options: that no error may exceed the tensor.

            Raises:
                ValueError: it may not converge.
            """

    faithful: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = True
    combines: ClassVar[Literal["mean", "majority"]] = "mean"
    stream: int = 0

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        self.config, self.count = config, count
        self.spans = tuple(spans) or (Span(0, count, (count,)),)

    @abc.abstractmethod
    def take(self, tensor: Tensor) -> Tensor:
        """Encode `tensor` in place: return its message, and leave in `tensor` the error, tensor − decoded message.

        Args:
            tensor: shape (count,), float32 or float64, on the CPU, contiguous. Overwritten by the error.

        Returns:
            The message: flat, uint8, of any length.
        """

    @abc.abstractmethod
    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Decode a message and add `weight` times the result to `out`.

        Args:
            message: from `take` or `encode` of a compressor with the same options, count and spans.
            out: shape (count,), float32 or float64, on the CPU. Overwritten.
            weight: factor of the decoded values.
        """

    def accumulate(self, residual: Tensor, tensor: Tensor) -> None:
        """Add `tensor` to the residual, which holds all that has not been sent yet.

        Args:
            residual: shape (count,). Overwritten by the sum; `take` encodes it next.
            tensor: shape (count,), finite; stays as it is.
        """
        residual.add_(tensor)

    def take_sum(self, residual: Tensor, tensor: Tensor) -> Tensor:
        """Add `tensor` to the residual and encode the sum in place: `accumulate`, and then `take`.

        A compressor that goes through its tensor once, piece by piece, may accumulate each piece just before.

        Args:
            residual: shape (count,). Overwritten by the error.
            tensor: shape (count,), finite; stays as it is.
        """
        self.accumulate(residual, tensor)
        return self.take(residual)

    def encode(self, tensor: Tensor) -> Tensor:
        """Encode `tensor` and return the message; `tensor` stays as it is."""
        return self.take(tensor.clone())

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Decode a message into `out`, which is overwritten: shape (count,), float32 or float64, on the CPU."""
        self.add(message, out.zero_())

    def state(self) -> dict:
        """Return the state that the compressor keeps between steps: tensors, numbers and None, for a checkpoint."""
        return {}

    def load_state(self, state: dict) -> None:
        """Restore the state that `state()` returned."""


class Linear(Compressor):
    """A compressor that encodes linearly, so that messages are summed by an all-reduce instead of gathered."""

    @abc.abstractmethod
    def reduce(self, tensor: Tensor, out: Tensor, ranks: int, allreduce: Callable[[Tensor], None]) -> None:
        """Collective. Sum the decoded messages of all ranks; the result is the same to the bit on all of them.

        Args:
            tensor: this rank's, shape (count,). Overwritten by the error of its message.
            out: shape (count,). Overwritten by the sum; another tensor than `tensor`.
            ranks: number of ranks.
            allreduce: replaces a flat tensor by its sum over the ranks.
        """


class Recoded(Compressor):
    """A compressor of single elements, whose sums are encoded again: each rank sums one piece of the tensor for all.

    `take` and `add` accept any piece of the tensor. So ranks needn't gather messages, and sums are taken in full
    precision; the error of an encoded sum stays on the rank that encoded it. See `compress/coding/recoding.py`.
    """

    def share(self, tensor: Tensor, ranks: int) -> Tensor:
        """Encode `tensor` in place, as `take` does, for a sum over `ranks` messages in the tensor's dtype."""
        return self.take(tensor)

    def begin(self, own: Tensor, ranks: int) -> Tensor:
        """Start the sum over `ranks` ranks with this rank's own piece.

        Args:
            own: this rank's addend. Overwritten by its error where a new tensor is returned.
            ranks: number of ranks.

        Returns:
            The decoded message for `own` as a new tensor; or `own` itself, where it is encoded with the sum only.
        """
        total = torch.empty_like(own)
        self.decode(self.share(own, ranks), total)
        return total

    @abc.abstractmethod
    def combine(self, total: Tensor, ranks: int) -> Tensor:
        """Encode a sum over `ranks` ranks in place: return its message, and leave the error in `total`."""
