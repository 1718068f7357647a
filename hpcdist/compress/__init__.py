"""Compression of what is sent: one file per compressor, found by the file's name; error feedback around any of them."""

from hpcdist.compress.base import Compressor, Linear
from hpcdist.compress.catalogue import CompressionConfig, available, load
from hpcdist.compress.feedback import Feedback
from hpcdist.compress.reduction import Reduction
from hpcdist.compress.spans import Span, spans

__all__ = ["CompressionConfig", "Compressor", "Feedback", "Linear", "Reduction", "Span", "available", "load", "spans"]
