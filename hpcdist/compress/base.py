"""What all compressors share: a tensor becomes a message, and a message is added to a tensor."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from hpcdist.compress.spans import Span
from hpcdist.config import Settings


class Compressor(abc.ABC):
    """Codes one flat tensor, at each step what it is then; may remember what helps with the next one.

    Subclasses are final, one per module; the module's name is the compressor's. Tensors are float32 or float64, on
    the CPU, contiguous and finite. A message is a flat uint8 tensor; its length is the bytes that are sent.

    Args:
        config: this compressor's options.
        count: elements of the tensor.
        spans: the parameters in it, ascending and without gaps; none where it is one vector.

    Attributes:
        faithful: a message alone stands for the tensor, up to a small relative error. Of other compressors several
            must be added up, each of what the ones before have left over, as `Feedback` does.
        stream: compressors that draw random numbers draw apart where this differs, as between ranks.
    """

    class Config(Settings):
        """Options of a compressor."""

        def check_feedback(self) -> None:
            """Raises ValueError where error feedback would not converge: where an error may exceed the tensor."""

    faithful: ClassVar[bool] = False
    stream: int = 0

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        self.config, self.count = config, count
        self.spans = tuple(spans) or (Span(0, count, (count,)),)

    @abc.abstractmethod
    def take(self, tensor: Tensor) -> Tensor:
        """The message for `tensor`; leaves there what the message lacks, so that before = message + after."""

    @abc.abstractmethod
    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Adds `weight` times what the message stands for to `out`."""

    def accumulate(self, residual: Tensor, tensor: Tensor) -> None:
        """Adds `tensor` to what has not been sent yet."""
        residual.add_(tensor)

    def encode(self, tensor: Tensor) -> Tensor:
        """The message for `tensor`, which stays as it is."""
        return self.take(tensor.clone())

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Copies what the message stands for into `out`."""
        self.add(message, out.zero_())

    def state(self) -> dict:
        """What the compressor remembers, as a checkpoint can hold it."""
        return {}

    def load_state(self, state: dict) -> None:
        """Takes up what `state()` gave."""


class Linear(Compressor):
    """A compressor whose messages can be added while they travel, so that ranks needn't gather them."""

    @abc.abstractmethod
    def reduce(self, tensor: Tensor, out: Tensor, ranks: int, allreduce: Callable[[Tensor], None]) -> None:
        """Collective. The sum over the ranks of what their messages stand for, the same to the bit on all of them.

        Args:
            tensor: this rank's; what its message lacks is left there.
            out: overwritten by the sum; another tensor than `tensor`.
            ranks: how many there are.
            allreduce: replaces a flat tensor by its sum over the ranks.
        """
