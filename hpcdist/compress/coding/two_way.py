"""Means over the ranks, compressed both ways: to the rank that averages a piece, and from it to all."""

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
from hpcdist.compress.coding.reduction import TAG, receive
from hpcdist.errors import ConfigError


class TwoWayMean:
    """Averages flat tensors over the ranks of `comm`, each of which averages one piece of a tensor for all.

    A rank encodes every piece, with what it has not sent of it before, and sends it to the piece's owner. The owner
    adds the messages in rank order, and encodes their mean with what it has not sent of that before. All ranks decode
    the same bits. Any compressor will do, since each piece has one of its own at both ends.

    Bytes sent per rank: 2m(p − 1)/p for messages of m bytes in all; a parameter that is cut by a border of pieces has
    two of a compressor's scales. Memory: two tensors of errors, and a second one of a pᵗʰ.

    Args:
        comm: used only during a call, with one tag.
        config: the compressor.
        like: flat tensors of the same lengths and dtypes, on any device. They are encoded on the host.
        spans: the parameters in each of them.

    Attributes:
        left: for each tensor what this rank has not sent of its own.
        owed: for each tensor what it has not sent of the means of its piece.
        ranges: the elements of its pieces.

    Raises:
        ConfigError: `config` has a warm-up.

    Reference: Hanlin Tang, Chen Yu, Xiangru Lian, Tong Zhang, Ji Liu, "DoubleSqueeze: parallel stochastic gradient
    descent with double-pass error-compensated compression", 2019.
    """

    def __init__(
        self, comm: Communicator, config: CompressionConfig, like: Sequence[Tensor], spans: Sequence[Sequence[Span]]
    ):
        if config.warmup_steps or config.warmup_ranks is not None:
            raise ConfigError(
                "strategy.compression.warmup_steps and warmup_ranks must be omitted where means are compressed both "
                f"ways; got {config.warmup_steps} and {config.warmup_ranks}. The strategy has a warm-up of its own."
            )
        self._comm = comm
        self.left: list[Tensor] = []
        self.owed: list[Tensor] = []
        self.ranges: list[tuple[int, int]] = []
        self._ends: list[tuple[list[slice], list[Feedback], Feedback]] = []
        for number, (flat, own) in enumerate(zip(like, spans, strict=True)):
            chunks = [slice(*pair) for pair in itertools.pairwise(bounds(flat.numel(), comm.size))]
            stream = number * comm.size + comm.rank
            mine = chunks[comm.rank]

            def ends(chunk: slice, residual: Tensor | None = None) -> Feedback:
                made = config.create(chunk.stop - chunk.start, _within(own, chunk), stream)
                return Feedback(made, flat[chunk], config.error_feedback, residual)

            left = torch.zeros(flat.numel(), dtype=torch.float64 if flat.dtype == torch.float64 else torch.float32)
            sent, back = [ends(chunk, left[chunk]) for chunk in chunks], ends(mine)
            self._ends.append((chunks, sent, back))
            self.left.append(left)
            self.owed.append(back.residual)
            self.ranges.append((mine.start, mine.stop))

    def __call__(self, tensors: Sequence[Tensor], used: Used = None) -> None:
        """Collective. Replace the tensors by their means over the ranks, the same bits on all of them."""
        for tensor, (chunks, sent, back) in zip(tensors, self._ends, strict=True):
            with only_used([*sent, back], used):
                self._average(tensor, chunks, sent, back)

    def _average(self, tensor: Tensor, chunks: list[slice], sent: list[Feedback], back: Feedback) -> None:
        comm = self._comm
        ahead = [(comm.rank + step) % comm.size for step in range(1, comm.size)]  # not all to the same one at once
        messages = {dest: sent[dest].encode(tensor[chunks[dest]]) for dest in (*ahead, comm.rank)}
        requests = [comm.isend(messages[dest], dest, TAG) for dest in ahead]
        own = sent[comm.rank]
        total, arrived = torch.zeros_like(back.residual), {comm.rank: messages[comm.rank]}
        arrived |= {source: receive(comm, source) for source in reversed(ahead)}
        for source in range(comm.size):
            own.compressor.add(arrived[source], total)
        message = back.encode(total.div_(comm.size))
        requests += [comm.isend(message, dest, TAG) for dest in ahead]
        arrived = {comm.rank: message} | {source: receive(comm, source) for source in reversed(ahead)}
        for source, chunk in enumerate(chunks):
            mean = torch.empty(chunk.stop - chunk.start, dtype=back.residual.dtype)
            sent[source].compressor.decode(arrived[source], mean)
            tensor[chunk] = mean.to(tensor)
        for request in requests:
            request.wait()

    def coders(self) -> list[list[dict]]:
        """Return what the compressors keep between messages, for a checkpoint."""
        return [[feedback.compressor.state_dict() for feedback in (*sent, back)] for _, sent, back in self._ends]

    def load_coders(self, saved: Sequence[Sequence[dict]]) -> None:
        """Restore the result of `coders`."""
        for (_, sent, back), states in zip(self._ends, saved):
            for feedback, state in zip((*sent, back), states):
                feedback.compressor.load_state_dict(state)


def _within(spans: Sequence[Span], chunk: slice) -> list[Span]:
    """Return the parts of parameters in a piece, by their places in it; one that is cut is a vector there."""
    found = []
    for span in spans:
        start, stop = max(span.start, chunk.start), min(span.stop, chunk.stop)
        if start < stop:
            shape = span.shape if (start, stop) == (span.start, span.stop) else (stop - start,)
            found.append(replace(span, start=start - chunk.start, stop=stop - chunk.start, shape=shape))
    return found
