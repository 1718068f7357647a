"""Average tensors over the ranks with compression in both directions: to the rank that averages a chunk, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hpcdist.collectives.base import bounds
from hpcdist.comm.communicator import Communicator
from hpcdist.compress.base import Span
from hpcdist.compress.coding.feedback import CompressionConfig, Feedback, Used, only_used
from hpcdist.compress.coding.reduction import exchange
from hpcdist.errors import ConfigError


class TwoWayMean:
    """Averages flat tensors over the ranks of `comm`; each rank averages one chunk of a tensor for all ranks.

    A rank encodes every chunk, with its residual from earlier messages, and sends it to the chunk's owner. The owner
    adds the messages in rank order, and encodes their mean, with the residual of earlier means. All ranks decode the
    same bits. Any compressor works, because each chunk has one at both ends.

    Bytes sent per rank: 2m(p − 1)/p for messages of m bytes in total on p ranks; a parameter that is split between
    chunks has two of a compressor's scales. Memory: a residual as long as the tensors, and one of 1/p of that length.

    Args:
        comm: used only during a call, with one tag.
        config: the compressor.
        templates: flat tensors with the lengths and dtypes to average, on any device. They are encoded on the host.
        spans: the parameters in each tensor.

    Attributes:
        residuals: for each tensor, the error feedback of this rank's messages.
        mean_residuals: for each tensor, the error feedback of the means of this rank's chunk.
        ranges: elements of each tensor in this rank's chunk.

    Raises:
        ConfigError: `config` has a warm-up.

    Reference: Hanlin Tang, Chen Yu, Xiangru Lian, Tong Zhang, Ji Liu, "DoubleSqueeze: parallel stochastic gradient
    descent with double-pass error-compensated compression", 2019.
    """

    def __init__(
        self, comm: Communicator, config: CompressionConfig, templates: Sequence[Tensor],
        spans: Sequence[Sequence[Span]],
    ):  # fmt: skip
        if config.warmup_steps or config.warmup_ranks is not None:
            raise ConfigError(
                "strategy.compression.warmup_steps and warmup_ranks must be omitted where means are compressed in "
                f"both directions; got {config.warmup_steps} and {config.warmup_ranks}. The strategy has its own "
                "warm-up."
            )
        self._comm = comm
        self.residuals: list[Tensor] = []
        self.mean_residuals: list[Tensor] = []
        self.ranges: list[tuple[int, int]] = []
        # By tensor: its chunks, the feedback of the messages for each chunk, and of the means of this rank's chunk.
        self._ends: list[tuple[list[slice], list[Feedback], Feedback]] = []
        for number, (flat, flat_spans) in enumerate(zip(templates, spans, strict=True)):
            chunks = [slice(*pair) for pair in itertools.pairwise(bounds(flat.numel(), comm.size))]
            stream = number * comm.size + comm.rank
            local_chunk = chunks[comm.rank]

            def create_feedback(chunk: slice, residual: Tensor | None = None) -> Feedback:
                compressor = config.create(chunk.stop - chunk.start, _within(flat_spans, chunk), stream)
                return Feedback(compressor, flat[chunk], config.error_feedback, residual)

            residuals = torch.zeros(flat.numel(), dtype=torch.float64 if flat.dtype == torch.float64 else torch.float32)
            sent, back = [create_feedback(chunk, residuals[chunk]) for chunk in chunks], create_feedback(local_chunk)
            self._ends.append((chunks, sent, back))
            self.residuals.append(residuals)
            self.mean_residuals.append(back.residual)
            self.ranges.append((local_chunk.start, local_chunk.stop))

    def __call__(self, tensors: Sequence[Tensor], used: Used = None) -> None:
        """Collective. Replace the tensors by their means over the ranks, bitwise equal on all ranks."""
        for tensor, (chunks, sent, back) in zip(tensors, self._ends, strict=True):
            with only_used([*sent, back], used):
                self._average(tensor, chunks, sent, back)

    def _average(self, tensor: Tensor, chunks: list[slice], sent: list[Feedback], back: Feedback) -> None:
        comm = self._comm
        arrived = {comm.rank: sent[comm.rank].encode(tensor[chunks[comm.rank]])}
        arrived |= exchange(comm, lambda dest: sent[dest].encode(tensor[chunks[dest]]))
        decoder = sent[comm.rank]
        reuses_tensor = tensor.dtype == back.residual.dtype and tensor.is_cpu  # its memory is free: all is encoded
        total = tensor[chunks[comm.rank]].zero_() if reuses_tensor else torch.zeros_like(back.residual)
        for source in range(comm.size):
            decoder.compressor.add(arrived[source], total)
        message = back.encode(total.div_(comm.size))
        arrived = {comm.rank: message, **dict(exchange(comm, lambda _: message))}
        for source, chunk in enumerate(chunks):
            mean = tensor[chunk] if reuses_tensor else torch.empty(chunk.stop - chunk.start, dtype=back.residual.dtype)
            sent[source].compressor.decode(arrived[source], mean)
            if not reuses_tensor:
                tensor[chunk] = mean.to(tensor)

    def coders(self) -> list[list[dict]]:
        """Return the compressors' state, for a checkpoint."""
        return [[feedback.compressor.state_dict() for feedback in (*sent, back)] for _, sent, back in self._ends]

    def load_coders(self, saved: Sequence[Sequence[dict]]) -> None:
        """Restore the result of `coders`."""
        for (_, sent, back), states in zip(self._ends, saved):
            for feedback, state in zip((*sent, back), states):
                feedback.compressor.load_state_dict(state)


def _within(spans: Sequence[Span], chunk: slice) -> list[Span]:
    """Return the spans of the parameters in a chunk, relative to its start; a split parameter becomes a vector."""
    parts = []
    for span in spans:
        start, stop = max(span.start, chunk.start), min(span.stop, chunk.stop)
        if start < stop:
            shape = span.shape if (start, stop) == (span.start, span.stop) else (stop - start,)
            parts.append(replace(span, start=start - chunk.start, stop=stop - chunk.start, shape=shape))
    return parts
