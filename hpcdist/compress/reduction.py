"""Sums over the ranks of what they send compressed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdist import collectives
from hpcdist.comm.communicator import Communicator
from hpcdist.compress.base import Linear
from hpcdist.compress.catalogue import CompressionConfig
from hpcdist.compress.feedback import Feedback
from hpcdist.compress.gather import gather
from hpcdist.compress.spans import Span


class Reduction:
    """Collective. Sums flat tensors over the ranks of `comm`, each rank's as its messages say.

    Messages that can be added are all-reduced; the others go to every rank, which adds them in rank order. So sums are
    the same to the bit on all ranks. Bytes sent per rank: 2m(p − 1)/p for all-reduced messages of m bytes, m(p − 1)
    for the others, and 4 per tensor but the last where there are several.

    Args:
        comm: used while a call lasts, with one tag.
        like: flat tensors of the lengths and dtypes of those to come, on any device; coding is done on the host.
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
        """Collective. Replaces the tensors by their sums over the ranks; returns over how many ranks."""
        config, self.calls = self._config, self.calls + 1
        warming = self.calls <= config.warmup_steps
        if warming and config.warmup_ranks is None:
            for tensor in tensors:
                self._allreduce(tensor)
            return self._comm.size
        senders = min(config.warmup_ranks, self._comm.size) if warming else self._comm.size
        if isinstance(self._feedbacks[0].compressor, Linear):
            self._reduce(tensors, silent=self._comm.rank >= senders)
        else:
            self._gather(tensors, senders)
        return senders

    def _reduce(self, tensors: Sequence[Tensor], silent: bool) -> None:
        for tensor, feedback, out in zip(tensors, self._feedbacks, self._sums, strict=True):
            feedback.reduce(tensor.zero_() if silent else tensor, out, self._comm.size, self._allreduce)
            tensor.copy_(out)

    def _gather(self, tensors: Sequence[Tensor], senders: int) -> None:
        silent = self._comm.rank >= senders
        messages = [] if silent else [f.encode(tensor) for f, tensor in zip(self._feedbacks, tensors, strict=True)]
        for out in self._sums:
            out.zero_()
        for found in gather(self._comm, messages, len(tensors), range(senders)):
            for feedback, message, out in zip(self._feedbacks, found, self._sums, strict=True):
                feedback.compressor.add(message, out)
        for tensor, out in zip(tensors, self._sums, strict=True):
            tensor.copy_(out)

    def state(self) -> dict:
        """What this rank has not sent yet, and what its compressors remember."""
        return {"calls": self.calls, "feedbacks": [feedback.state() for feedback in self._feedbacks]}

    def load_state(self, state: dict) -> None:
        """Takes up what `state()` or `adapted()` gave."""
        self.calls = state["calls"]
        for feedback, saved in zip(self._feedbacks, state["feedbacks"], strict=True):
            feedback.load_state(saved)

    @staticmethod
    def adapted(states: Sequence[dict]) -> dict:
        """One state for every rank of a world of another size: the mean of what was not sent, so that none is lost."""
        feedbacks = [Feedback.adapted(saved) for saved in zip(*(state["feedbacks"] for state in states), strict=True)]
        return {"calls": states[0]["calls"], "feedbacks": feedbacks}

    def close(self) -> None:
        """Collective."""
        self._allreduce.close()
