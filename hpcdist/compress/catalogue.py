"""Which compressors there are, by the names of their files; and the options that choose one."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from functools import cache

from pydantic import Field, model_validator

import hpcdist.compress
from hpcdist.compress.base import Compressor
from hpcdist.compress.spans import Span
from hpcdist.config import Named
from hpcdist.errors import UnknownNameError

NONE = "none"


class CompressionConfig(Named):
    """Which compressor, with its own options beside these."""

    name: str = Field(NONE, description="compressor, see `hpcdist compressors`; none: all is sent as it is")
    error_feedback: bool = Field(True, description="add what a message lacks to the next one")
    warmup_steps: int = Field(0, ge=0, description="first steps in which all is sent uncompressed")
    warmup_ranks: int | None = Field(
        None, ge=1, description="in these steps compress all the same, but only so many ranks send; none: as they are"
    )

    @model_validator(mode="after")
    def _check(self) -> CompressionConfig:
        if self.name != NONE:
            options = load(self.name).Config.from_mapping(self.options, "strategy.compression")
            if self.error_feedback:
                options.check_feedback()
        elif self.options:
            known = ", ".join(available())
            raise ValueError(
                f"strategy.compression.name must be one of {known} with option {next(iter(self.options))}; got none."
            )
        return self

    def __bool__(self) -> bool:
        return self.name != NONE

    def make(self, count: int, spans: Sequence[Span] = (), stream: int = 0) -> Compressor:
        """The compressor for a flat tensor of `count` elements; each of several should have a `stream` of its own."""
        cls = load(self.name)
        compressor = cls(cls.Config.from_mapping(self.options, "strategy.compression"), count, spans)
        compressor.stream = stream
        return compressor


@cache
def _found() -> dict[str, type[Compressor]]:
    classes = {}
    for info in pkgutil.iter_modules(hpcdist.compress.__path__):
        module = importlib.import_module(f"{hpcdist.compress.__name__}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and issubclass(cls, Compressor) and not inspect.isabstract(cls):
                classes[info.name] = cls
    return classes


def available() -> list[str]:
    """The names of all compressors, sorted."""
    return sorted(_found())


def load(name: str) -> type[Compressor]:
    """The compressor's class. Raises UnknownNameError."""
    classes = _found()
    if name not in classes:
        raise UnknownNameError("strategy.compression", name, classes)
    return classes[name]
