"""Compression of messages: one file per compressor, found by the file's name; error feedback around any of them."""

from hpcdist.compress.base import Compressor, Linear, Recoded
from hpcdist.compress.coding.config import CompressionConfig, JointCompression
from hpcdist.compress.coding.feedback import Feedback
from hpcdist.compress.coding.reduction import Reduction
from hpcdist.compress.coding.spans import Span, spans
from hpcdist.registry import COMPRESSORS

__all__ = [
    "CompressionConfig",
    "Compressor",
    "Feedback",
    "JointCompression",
    "Linear",
    "Recoded",
    "Reduction",
    "Span",
    "available",
    "load",
    "spans",
]


def available() -> list[str]:
    """List the names of all compressors, sorted: those of this folder, and those that installed packages add."""
    return COMPRESSORS.available()


def load(name: str) -> type[Compressor]:
    """Load a compressor's class, by its name or as `path/to/file.py:Class`.

    Raises:
        UnknownNameError: there is none of that name; lists the known ones.
        ConfigError: there are two of that name; or it can't be imported, or is no compressor.
    """
    return COMPRESSORS.load(name)
