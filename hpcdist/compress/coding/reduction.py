"""Sums over the ranks of compressed tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdist import collectives
from hpcdist.comm.communicator import Communicator
from hpcdist.compress.base import Linear, Recoded
from hpcdist.compress.coding.config import CompressionConfig
from hpcdist.compress.coding.feedback import Feedback
from hpcdist.compress.coding.gather import gather
from hpcdist.compress.coding.recoding import recode
from hpcdist.compress.coding.spans import Span


class Reduction:
    """Collective. Sum compressed flat tensors over the ranks of `comm`.

    Messages of `Linear` compressors are all-reduced. Of `Recoded` ones every rank sums one piece, and sends the
    others the sum. All other messages go to every rank, which adds them in rank order. So sums are the same to the
    bit on all ranks. Bytes sent per rank: 2m(p − 1)/p for messages of m bytes of the first two kinds, m(p − 1) for
    the others, and 4 per tensor but the last where there are several.

    Where ranks vote, the sum is the outcome times their number, so that the mean is the outcome.

    Args:
        comm: used while a call lasts, with one tag.
        like: flat tensors of the lengths and dtypes of those to come, on any device; the host encodes and decodes.
        spans: for each of them the parameters that lie in it.
    """

    def __init__(
        self, comm: Communicator, config: CompressionConfig, like: Sequence[Tensor], spans: Sequence[Sequence[Span]]
    ):
        self._comm, self._config = comm, config
        self._feedbacks = [
            Feedback(config.make(flat.numel(), own, place * comm.size + comm.rank), flat, config.error_feedback)
            for place, (flat, own) in enumerate(zip(like, spans, strict=True))
        ]
        self._sums = [torch.empty_like(feedback.residual) for feedback in self._feedbacks]
        self._allreduce = collectives.load("auto")(comm)
        self.calls = 0

    def __call__(self, tensors: Sequence[Tensor]) -> int:
        """Collective. Replace the tensors by their sums over the ranks; return the number of ranks that sent."""
        config, self.calls = self._config, self.calls + 1
        warming = self.calls <= config.warmup_steps
        if warming and config.warmup_ranks is None:
            for tensor, feedback in zip(tensors, self._feedbacks, strict=True):
                feedback.take_whole(tensor)
                self._allreduce(tensor)
            return self._comm.size
        senders = min(config.warmup_ranks, self._comm.size) if warming else self._comm.size
        if isinstance(self._feedbacks[0].compressor, (Linear, Recoded)):
            self._reduce(tensors, senders)
        else:
            self._gather(tensors, senders)
        return senders

    def _reduce(self, tensors: Sequence[Tensor], senders: int) -> None:
        silent = self._comm.rank >= senders
        for tensor, feedback, out in zip(tensors, self._feedbacks, self._sums, strict=True):
            compressor, residual = feedback.compressor, feedback.to_send(tensor.zero_() if silent else tensor)
            into = tensor if tensor.dtype == out.dtype and tensor.is_cpu else out
            if isinstance(compressor, Linear):
                compressor.reduce(residual, into, self._comm.size, self._allreduce)
            else:
                recode(self._comm, compressor, residual, into, senders)
            if into is out:
                tensor.copy_(out)

    def _gather(self, tensors: Sequence[Tensor], senders: int) -> None:
        silent = self._comm.rank >= senders
        messages = [] if silent else [f.encode(tensor) for f, tensor in zip(self._feedbacks, tensors, strict=True)]
        for out in self._sums:
            out.zero_()
        for messages_of_rank in gather(self._comm, messages, len(tensors), range(senders)):
            for feedback, message, out in zip(self._feedbacks, messages_of_rank, self._sums, strict=True):
                feedback.compressor.add(message, out)
        for tensor, out in zip(tensors, self._sums, strict=True):
            tensor.copy_(out)

    def state(self) -> dict:
        """Return this rank's residuals, and the state of its compressors."""
        return {"calls": self.calls, "feedbacks": [feedback.state() for feedback in self._feedbacks]}

    def load_state(self, state: dict) -> None:
        """Restore the state that `state()` or `reshard()` returned."""
        self.calls = state["calls"]
        for feedback, saved in zip(self._feedbacks, state["feedbacks"], strict=True):
            feedback.load_state(saved)

    @staticmethod
    def reshard(states: Sequence[dict]) -> dict:
        """Make one state for every rank of a world of another size, with the mean of all residuals."""
        feedbacks = [Feedback.reshard(saved) for saved in zip(*(state["feedbacks"] for state in states), strict=True)]
        return {"calls": states[0]["calls"], "feedbacks": feedbacks}

    def close(self) -> None:
        """Collective. Release the all-reduce."""
        self._allreduce.close()
