"""Choose a compressor by name, with its options, error feedback and warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from pydantic import Field, model_validator

from hpcdist.compress.base import Compressor, Span
from hpcdist.config import Named
from hpcdist.errors import UnknownNameError
from hpcdist.registry import catalogue

NONE = "none"


class CompressionConfig(Named):
    """A compressor by name, with its own options beside these."""

    name: str = Field(NONE, description="compressor, see `hpcdist compressors`; none: all is sent as it is")
    error_feedback: bool = Field(
        True, description="add what a message lacks to the next one; false by itself with signsgd and terngrad"
    )
    warmup_steps: int = Field(0, ge=0, description="first steps in which all is sent uncompressed")
    warmup_ranks: int | None = Field(
        None, ge=1, description="in these steps compress all the same, but only so many ranks send; none: as they are"
    )

    _votes: ClassVar[bool] = False  # ranks can vote, because all messages are there at once

    @model_validator(mode="before")
    @classmethod
    def _default_feedback(cls, value: Any) -> Any:
        given = {"name": value} if isinstance(value, str) else value
        if isinstance(given, Mapping) and "error_feedback" not in given:
            name = given.get("name", cls.model_fields["name"].default)
            with suppress(UnknownNameError):  # `_check` raises it
                if isinstance(name, str) and not catalogue("compressors").load(name).feeds_back:
                    return {**given, "error_feedback": False}
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
        elif self.options:
            known = ", ".join(catalogue("compressors").available())
            raise ValueError(
                f"strategy.compression.name must be one of {known} with option {next(iter(self.options))}; got none."
            )
        return self

    def __bool__(self) -> bool:
        return self.name != NONE

    def make(self, count: int, spans: Sequence[Span] = (), stream: int = 0) -> Compressor:
        """Make the compressor of a flat tensor of `count` elements; each tensor needs its own `stream`."""
        cls = catalogue("compressors").load(self.name)
        compressor = cls(cls.Config.from_mapping(self.options, "strategy.compression"), count, spans)
        compressor.stream = stream
        return compressor


class JointCompression(CompressionConfig):
    """A compressor for strategies in which the gradients of all ranks meet at each step, so that ranks can vote."""

    _votes = True
