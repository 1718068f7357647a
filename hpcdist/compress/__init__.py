"""Compression of messages: one file per compressor, found by the file's name; error feedback for all compressors."""

from __future__ import annotations

from collections.abc import Callable

from hpcdist.compress.base import Compressor, Linear, Recoded, Span, spans
from hpcdist.compress.coding.feedback import CompressionConfig, Feedback, JointCompression, Used, only_used
from hpcdist.compress.coding.reduction import Reduction, TwoWayMean
from hpcdist.registry import catalogue

available = catalogue("compressors").available
load: Callable[[str], type[Compressor]] = catalogue("compressors").load
