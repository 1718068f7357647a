"""Choose a compressor, and feed the error of each message back: it is added to the next tensor, and so sent late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator
from hpcdist.compress.base import Compressor, Span
from hpcdist.compress.none import Uncompressed
from hpcdist.config import Named
from hpcdist.errors import UnknownNameError
from hpcdist.model.flat import zeroed
from hpcdist.registry import catalogue

NONE = "none"
Used = Tensor | Sequence[bool] | None  # whether each parameter has a gradient, see `only_used`; None: all have


class CompressionConfig(Named):
    """A compressor by name, with its own options beside these."""

    name: str = Field(NONE, description="compressor, see `hpcdist compressors`; none sends everything uncompressed")
    error_feedback: bool = Field(
        True, description="add what a message leaves out to the next one; with signsgd and terngrad false"
    )
    warmup_steps: int = Field(0, ge=0, description="first steps in which messages are uncompressed")
    warmup_ranks: int | None = Field(
        None, ge=1, description="so many ranks send in the warm-up steps, compressed; none: all ranks, uncompressed"
    )

    _votes: ClassVar[bool] = False  # ranks can vote, because all messages are there at once

    @model_validator(mode="before")
    @classmethod
    def _default_feedback(cls, value: Any) -> Any:
        options = {"name": value} if isinstance(value, str) else value
        if isinstance(options, Mapping) and "error_feedback" not in options:
            name = options.get("name", cls.model_fields["name"].default)
            with suppress(UnknownNameError):  # `_check` raises it
                if isinstance(name, str) and not catalogue("compressors").load(name).feeds_back:
                    return {**options, "error_feedback": False}
        return value

    @model_validator(mode="after")
    def _check(self) -> CompressionConfig:
        if self.name != NONE:
            chosen = catalogue("compressors").load(self.name)
            if chosen.combines == "majority" and not self._votes:
                raise ValueError(
                    "strategy.compression.name must be a compressor whose messages are averaged, unless strategy is "
                    f"allreduce, where all ranks vote at once; got {self.name}. Take ef_signsgd or onebit."
                )
            options = chosen.Config.from_mapping(self.options, "strategy.compression")
            if self.error_feedback:
                options.check_feedback()
            else:
                options.check_without_feedback()
            if self.warmup_ranks is not None and not self.warmup_steps:
                raise ValueError(
                    "strategy.compression.warmup_ranks must be omitted without warmup_steps, in which so many ranks "
                    f"send; got {self.warmup_ranks}. Give both, or neither."
                )
        elif self.options:
            known = ", ".join(catalogue("compressors").available())
            raise ValueError(
                f"strategy.compression.name must be one of {known} with option {next(iter(self.options))}; got none."
            )
        return self

    def __bool__(self) -> bool:
        return self.name != NONE

    def create(self, count: int, spans: Sequence[Span] = (), stream: int = 0) -> Compressor:
        """Make the compressor of a flat tensor of `count` elements; each tensor needs its own `stream`."""
        cls = catalogue("compressors").load(self.name)
        compressor = cls(cls.Config.from_mapping(self.options, "strategy.compression"), count, spans)
        compressor.stream = stream
        return compressor

    def feedbacks(self, comm: Communicator, like: Sequence[Tensor], spans: Sequence[Sequence[Span]]) -> list[Feedback]:
        """Make a compressor with error feedback, as far as it is on, for each of this rank's flat tensors.

        Args:
            like: tensors of the same lengths and dtypes.
            spans: the parameters in each of them.
        """
        return [
            Feedback(self.create(flat.numel(), own, place * comm.size + comm.rank), flat, self.error_feedback)
            for place, (flat, own) in enumerate(zip(like, spans, strict=True))
        ]


class JointCompression(CompressionConfig):
    """A compressor for strategies in which the gradients of all ranks meet at each step, so that ranks can vote."""

    _votes = True


class Feedback:
    """A compressor with its residual, the sum of the errors so far: Σ tensors = Σ messages + residual.

    Memory: one more tensor. Without feedback (`enabled` false) the error of a message is forgotten.

    Args:
        like: a tensor of the same length and dtype. The residual of half precision is float32.
        residual: the memory of the residual, zeros; None: of its own.

    Reference: Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, "1-bit stochastic gradient descent and its
    application to data-parallel distributed training of speech DNNs", 2014; Sai Praneeth Karimireddy, Quentin Rebjock,
    Sebastian Stich, Martin Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes", 2019.
    """

    def __init__(self, compressor: Compressor, like: Tensor, enabled: bool = True, residual: Tensor | None = None):
        self.compressor, self._enabled = compressor, enabled
        self._whole = Uncompressed(Uncompressed.Config(), like.numel())
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.residual = torch.zeros(like.numel(), dtype=dtype) if residual is None else residual
        self._all_sent = True  # the residual is zero

    def encode(self, tensor: Tensor, whole: bool = False) -> Tensor:
        """Encode the sum of `tensor`, on any device, and the residual; uncompressed if `whole`."""
        if whole:
            return self._whole.encode_residual_(self.to_send(tensor))
        return self.compressor.encode_sum_(self.residual, self._on_host(tensor))

    def encode_change_(self, new: Tensor, old: Tensor, share: float, whole: bool = False) -> Tensor:
        """Encode `share` times the change from `old` to `new`, and set `new` back to `old`; flat, on any device."""
        if self._adds and new.is_cpu and new.dtype == self.residual.dtype and not whole:
            self._start()
            for residual, changed, before in alongside(self.residual, new, old):
                residual.add_(changed.sub(before).mul_(share))
                changed.copy_(before)
            return self.compressor.encode_residual_(self.residual)
        message = self.encode(new.sub_(old).mul_(share), whole)
        new.copy_(old)
        return message

    def add_residual_(self, tensor: Tensor) -> None:
        """Add the residual to `tensor`, on any device; the rounding error in its dtype stays in the residual."""
        if self._all_sent and self._adds:
            return
        tensor.copy_(self.to_send(tensor))
        self.residual.sub_(tensor.to(self.residual))

    def add(self, message: Tensor, out: Tensor, whole: bool = False, weight: float = 1.0) -> None:
        """Decode a message and add `weight` times the result to `out`, on any device."""
        compressor = self._whole if whole else self.compressor
        if out.dtype == self.residual.dtype and out.device == self.residual.device:
            compressor.add(message, out, weight)
        else:
            decoded = torch.empty_like(self.residual)
            compressor.decode(message, decoded)
            out.add_(decoded.to(out.device, out.dtype), alpha=weight)

    def to_send(self, tensor: Tensor) -> Tensor:
        """Add `tensor`, on any device, to the residual, and return the residual for the compressor to encode."""
        self.compressor.accumulate(self.residual, self._on_host(tensor))
        return self.residual

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor that will be added to the residual to its device."""
        self._start()
        return tensor.to(self.residual.device)

    def _start(self) -> None:
        """Prepare the residual for an addition; without feedback, forget it."""
        if not self._enabled:
            self.residual.zero_()
        self._all_sent = False

    @property
    def _adds(self) -> bool:
        """Tell whether accumulating is plain addition for this compressor."""
        return type(self.compressor).accumulate is Compressor.accumulate

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self.residual, "compressor": self.compressor.state_dict()}

    def set_residual(self, residual: Tensor) -> None:
        """Begin with a saved residual."""
        self.residual.copy_(residual)
        self._all_sent = not self.residual.any()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.set_residual(state["residual"])
        self.compressor.load_state_dict(state["compressor"])


@contextmanager
def only_used(feedbacks: Iterable[Feedback], used: Used) -> Iterator[None]:
    """Let what is left of parameters without a gradient wait while others are sent; what messages leave out is added.

    `used` has a flag for each number of the compressors' spans.
    """
    flags = None if used is None else torch.as_tensor(used).tolist()
    spans = ((feedback.residual, span) for feedback in feedbacks for span in feedback.compressor.spans)
    left = [] if flags is None else [part[span.start : span.stop] for part, span in spans if not flags[span.number]]
    with zeroed(left, adds=True):
        yield
