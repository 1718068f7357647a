"""Send parameters in half precision, or as they are, to ranks that keep no state about the sender."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hpcdist import compress
from hpcdist.compress import CompressionConfig
from hpcdist.compress.coding.casting import Cast
from hpcdist.strategies.base import Strategy


class WireConfig(Strategy.Config):
    """Options of strategies whose ranks send their parameters themselves."""

    compression: CompressionConfig = Field(
        CompressionConfig(), description="fp16 or bf16: parameters travel in half precision"
    )

    @model_validator(mode="after")
    def _stands_for_itself(self):
        chosen = self.compression
        if chosen and not issubclass(compress.load(chosen.name), Cast):
            raise ValueError(
                "strategy.compression must be none, fp16 or bf16 where ranks send their parameters to others that "
                f"remember nothing of them; got {chosen.name}. For other compressors take dpsgd, local_sgd or strom."
            )
        if chosen.warmup_steps or not chosen.error_feedback:
            raise ValueError(
                "strategy.compression must be without warmup_steps and error_feedback = false where parameters travel "
                f"in half precision; got {chosen.warmup_steps} and {chosen.error_feedback}. Leave them out."
            )
        return self


class Wire:
    """Round parameters to the type in which they are sent.

    Attributes:
        like: flat tensors of the lengths and the type in which parameters are sent, on the host. Of arbitrary content.
    """

    def __init__(self, config: CompressionConfig, params: Sequence[Tensor]):
        cast = compress.load(config.name) if config else None
        self._most = torch.finfo(cast.dtype).max if cast else None
        self.like = [torch.empty_like(p, device="cpu", dtype=cast.dtype if cast else p.dtype) for p in params]
        self._packed = [torch.empty_like(p, dtype=cast.dtype) for p in params] if cast else []

    def pack(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the message: `params` themselves, or rounded copies that are valid until the next call."""
        for packed, own in zip(self._packed, params):
            packed.copy_(own.detach().clamp(-self._most, self._most))
        return self._packed or params
