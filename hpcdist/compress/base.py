"""The interface of all compressors: encode a tensor as a message, and add a message to a tensor."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from hpcdist.config.settings import Settings
from hpcdist.errors import refuse_former
from hpcdist.model.flat import FlatModel

_FORMER = {  # former names, and the line to write instead
    **dict.fromkeys(("state", "load_state"), 'remembers = ("start",)'), "sent": "count_sent(self, message, counts)",
    "begin": "def start_sum(self, local, ranks)", "along": 'elementwise = ("velocity",)',
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A parameter in a flat tensor: elements [start, stop), shape, and number among all parameters."""

    start: int
    stop: int
    shape: tuple[int, ...]
    number: int = 0


def spans(model: FlatModel) -> list[list[Span]]:
    """Return the spans of the trainable parameters in each tensor of `model.params`, ascending."""
    of_groups: list[list[Span]] = [[] for _ in model.params]
    for number, slot in enumerate(model.slots):
        of_groups[slot.group].append(Span(slot.start, slot.stop, tuple(slot.tensor.shape), number))
    return of_groups


class Compressor(abc.ABC):
    """Encodes one flat tensor, such as a gradient, as a message in every step; may keep state between steps.

    Subclasses are final, one per module, with a similar name. Tensors are float32 or float64, on the CPU, contiguous
    and finite. A message is a flat uint8 tensor; its length is the number of bytes sent.

    Args:
        count: number of elements of the tensor.
        spans: the parameters in the tensor, ascending and without gaps; empty for a single vector.

    Attributes:
        faithful: a single message has a small relative error. With other compressors only the sum of several messages
            approximates the sum of the tensors, by error feedback.
        feeds_back: error feedback is on by default.
        combines: how ranks combine messages: by the mean, or by a majority vote per element. A vote needs the messages
            of all ranks at the same time, which servers do not have.
        remembers: names of the attributes that are state (tensors, numbers, None); checkpoints save them.
        elementwise: names in `remembers` of tensors with one element per element of the encoded tensor, or None.
        parts: the elements of each parameter that has some.
        stream: seed of random rounding, different on each rank and for each tensor.
    """

    class Config(Settings):
        def check_feedback(self) -> None:
            """Raise ValueError if error feedback may diverge, because an error may be larger than its tensor."""

        def check_without_feedback(self) -> None:
            """Raise ValueError if an option needs error feedback."""

    faithful: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = True
    combines: ClassVar[Literal["mean", "majority"]] = "mean"
    remembers: ClassVar[tuple[str, ...]] = ()
    elementwise: ClassVar[tuple[str, ...]] = ()
    stream: int = 0

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        refuse_former(cls, _FORMER)

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        self.config, self.count = config, count
        self.spans = tuple(spans) or (Span(0, count, (count,)),)
        self.parts = [slice(span.start, span.stop) for span in self.spans if span.stop > span.start]

    @abc.abstractmethod
    def encode_residual_(self, tensor: Tensor) -> Tensor:
        """Encode `tensor`, and overwrite it with the error: tensor − decoded message.

        Args:
            tensor: shape (count,). Overwritten with the error.

        Returns:
            The message: flat, uint8, of any length.
        """

    @abc.abstractmethod
    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Decode a message and add `weight` times the result to `out`.

        Args:
            message: encoded by a compressor with the same options, count and spans.
            out: shape (count,), float32 or float64, on the CPU.
        """

    def accumulate(self, residual: Tensor, tensor: Tensor) -> None:
        """Add `tensor` to the residual, the sum of the errors so far; both have shape (count,)."""
        residual.add_(tensor)

    def encode_sum_(self, residual: Tensor, tensor: Tensor) -> Tensor:
        """Add `tensor` to the residual, encode the sum, and overwrite `residual` with the error.

        A compressor that works in chunks may override it, to add each chunk just before encoding, while it is in cache.
        """
        self.accumulate(residual, tensor)
        return self.encode_residual_(residual)

    def encode(self, tensor: Tensor) -> Tensor:
        """Encode a copy of `tensor`; return the message."""
        return self.encode_residual_(tensor.clone())

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Decode a message into `out`: shape (count,), float32 or float64, on the CPU."""
        self.add(message, out.zero_())

    def count_sent(self, message: Tensor, counts: Tensor) -> None:
        """Add 1 to the count of each element whose value a message contains; by default to all.

        A sparse compressor overrides it: a message contains the chosen elements, and the elements known to be 0.
        `counts`: shape (count,), float32 or float64, on the CPU.
        """
        counts.add_(1)

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return the attributes in `remembers`, for a checkpoint."""
        return {name: getattr(self, name) for name in self.remembers}

    @final
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict()`, except tensors whose shape has changed, as with other parameters.

        An attribute that the state lacks, as that of another compressor, stays as it is.
        """
        for name in state.keys() & self.remembers:
            values = getattr(self, name), state[name]
            if len({value.shape for value in values if isinstance(value, Tensor)}) < 2:
                setattr(self, name, deepcopy(state[name]))


class Linear(Compressor):
    """A compressor with a linear code, so that an all-reduce can sum its messages."""

    @abc.abstractmethod
    def reduce(self, tensor: Tensor, out: Tensor, ranks: int, allreduce: Callable[[Tensor], None]) -> None:
        """Collective. Sum the decoded messages of all ranks; the result is bitwise equal on all ranks.

        Args:
            tensor: shape (count,). Overwritten with the error of its message.
            out: shape (count,), overwritten with the sum. Must not be `tensor`.
            allreduce: replaces a flat tensor by its sum over the ranks, in place.
        """


class Recoded(Compressor):
    """A compressor that encodes elements independently, for a reduce-scatter and all-gather with recoded sums.

    Each rank sums one chunk of the tensor in full precision and encodes the sum again; that error stays on this rank.
    `encode_residual_` and `add` accept any chunk of the tensor. See `recode` in `compress/coding/reduction.py`.
    """

    def share(self, tensor: Tensor, ranks: int) -> Tensor:
        """Encode like `encode_residual_`, with values limited so that the sum of `ranks` messages is finite."""
        return self.encode_residual_(tensor)

    def start_sum(self, local: Tensor, ranks: int) -> Tensor:
        """Return the first addend of a sum over `ranks` ranks: `local`, this rank's chunk, as encoded and decoded.

        That is a new tensor; `local` is overwritten with the error. Or `local`, if it is not encoded before the sum.
        """
        total = torch.empty_like(local)
        self.decode(self.share(local, ranks), total)
        return total

    @abc.abstractmethod
    def combine(self, total: Tensor, ranks: int) -> Tensor:
        """Encode a sum over `ranks` ranks, and overwrite `total` with the error."""
