"""Choose a compressor; error feedback adds the error of each message to the next tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator
from hpcdist.compress.base import Compressor, Span
from hpcdist.compress.none import Uncompressed
from hpcdist.config.settings import Field, Named, joint_rule
from hpcdist.errors import UnknownNameError
from hpcdist.model.flat import zeroed
from hpcdist.registry import catalogue

NONE = "none"
Used = Tensor | Sequence[bool] | None  # whether each parameter has a gradient, see `only_used`; None: all have


class CompressionConfig(Named):
    """A compressor by name, with common options and the compressor's options."""

    name: str = Field(NONE, "compressor, see `hpcdist compressors`; none sends everything uncompressed")
    error_feedback: bool = Field(
        True, "add the error of each message to the next tensor; with signsgd and terngrad false"
    )
    warmup_steps: int = Field(0, "first steps in which messages are uncompressed", ge=0)
    warmup_ranks: int | None = Field(
        None, "number of ranks that send in warm-up steps, compressed; none: all ranks, uncompressed", ge=1
    )

    _votes: ClassVar[bool] = False  # ranks can vote, because all messages are available at the same time

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

    @joint_rule
    def _check(self) -> None:
        if self.name != NONE:
            chosen = catalogue("compressors").load(self.name)
            if chosen.combines == "majority" and not self._votes:
                raise ValueError(
                    "strategy.compression.name must be a compressor whose messages are averaged, unless strategy is "
                    f"allreduce, where all ranks vote; got {self.name}. Use ef_signsgd or onebit."
                )
            options = chosen.Config.from_mapping(self.options, "strategy.compression")
            if self.error_feedback:
                options.check_feedback()
            else:
                options.check_without_feedback()
            if self.warmup_ranks is not None and not self.warmup_steps:
                raise ValueError(
                    "strategy.compression.warmup_ranks must be omitted without warmup_steps, where it applies; "
                    f"got {self.warmup_ranks}. Set both, or neither."
                )
        elif self.options:
            known = ", ".join(catalogue("compressors").available())
            raise ValueError(
                f"strategy.compression.name must be one of {known} with option {next(iter(self.options))}; got none."
            )

    def __bool__(self) -> bool:
        return self.name != NONE

    def create(self, count: int, spans: Sequence[Span] = (), stream: int = 0) -> Compressor:
        """Create the compressor of a flat tensor of `count` elements; `stream` must differ between tensors."""
        cls = catalogue("compressors").load(self.name)
        compressor = cls(cls.Config.from_mapping(self.options, "strategy.compression"), count, spans)
        compressor.stream = stream
        return compressor

    def feedbacks(
        self, comm: Communicator, templates: Sequence[Tensor], spans: Sequence[Sequence[Span]]
    ) -> list[Feedback]:
        """Create a `Feedback` for each of this rank's flat tensors.

        Args:
            templates: tensors with the lengths and dtypes to encode.
            spans: the parameters in each tensor.
        """
        return [
            Feedback(self.create(flat.numel(), flat_spans, index * comm.size + comm.rank), flat, self.error_feedback)
            for index, (flat, flat_spans) in enumerate(zip(templates, spans, strict=True))
        ]


class JointCompression(CompressionConfig):
    """A compressor for strategies that sum all ranks' gradients in each step, so that ranks can vote."""

    _votes = True


class Feedback:
    """A compressor with its residual, the sum of the errors so far: Σ tensors = Σ messages + residual.

    Memory: one more tensor. Without feedback (`enabled` false) the error of a message is dropped.

    Args:
        template: a tensor with the length and dtype to encode. The residual of half precision is float32.
        residual: zeros to use as the residual's memory; None: allocate it.

    Reference: Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, "1-bit stochastic gradient descent and its
    application to data-parallel distributed training of speech DNNs", 2014; Sai Praneeth Karimireddy, Quentin Rebjock,
    Sebastian Stich, Martin Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes", 2019.
    """

    def __init__(self, compressor: Compressor, template: Tensor, enabled: bool = True, residual: Tensor | None = None):
        self.compressor, self._enabled = compressor, enabled
        self._whole = Uncompressed(Uncompressed.Config(), template.numel())
        if residual is None:
            residual = torch.zeros(template.numel(), dtype=torch.promote_types(template.dtype, torch.float32))
        self.residual = residual
        self._all_sent = True  # the residual is zero

    def encode(self, tensor: Tensor, whole: bool = False) -> Tensor:
        """Return the message of `tensor`, on any device, plus the residual; uncompressed if `whole`."""
        if whole:
            return self._whole.encode_residual_(self.to_send(tensor))
        return self.compressor.encode_sum_(self.residual, self._on_host(tensor))

    def encode_change_(self, new: Tensor, old: Tensor, share: float, whole: bool = False) -> Tensor:
        """Encode `share` · (`new` − `old`), and set `new` back to `old`; flat tensors on any device."""
        if self._accumulates_by_addition and new.is_cpu and new.dtype == self.residual.dtype and not whole:
            self._start()  # then the same as below, in one pass over memory
            for residual, changed, before in alongside(self.residual, new, old):
                residual.add_(changed.sub(before).mul_(share))
                changed.copy_(before)
            return self.compressor.encode_residual_(self.residual)
        message = self.encode(new.sub_(old).mul_(share), whole)
        new.copy_(old)
        return message

    def add_residual_(self, tensor: Tensor) -> None:
        """Add the residual to `tensor`, on any device; the residual keeps the rounding error of the tensor's dtype."""
        if self._all_sent and self._accumulates_by_addition:
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
        """Add `tensor`, on any device, to the residual; return the residual, which the compressor encodes."""
        self.compressor.accumulate(self.residual, self._on_host(tensor))
        return self.residual

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the residual's device, and prepare the residual."""
        self._start()
        return tensor.to(self.residual.device)

    def _start(self) -> None:
        """Prepare the residual for an addition: without feedback, clear it."""
        if not self._enabled:
            self.residual.zero_()
        self._all_sent = False

    @property
    def _accumulates_by_addition(self) -> bool:
        """Whether this compressor accumulates by plain addition."""
        return type(self.compressor).accumulate is Compressor.accumulate

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self.residual, "compressor": self.compressor.state_dict()}

    def set_residual(self, residual: Tensor) -> None:
        """Load a saved residual."""
        self.residual.copy_(residual)
        self._all_sent = not self.residual.any()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.set_residual(state["residual"])
        self.compressor.load_state_dict(state["compressor"])


@contextmanager
def only_used(feedbacks: Iterable[Feedback], used: Used) -> Iterator[None]:
    """Set the residuals of parameters without a gradient aside while messages are encoded; add them back afterwards.

    `used`: a flag per parameter, indexed by `Span.number`; None: all parameters have a gradient.
    """
    flags = [] if used is None else torch.as_tensor(used).tolist()
    spans = ((feedback.residual, span) for feedback in feedbacks for span in feedback.compressor.spans)
    unused = [] if all(flags) else [part[span.start : span.stop] for part, span in spans if not flags[span.number]]
    with zeroed(unused, adds=True):
        yield
