"""Sums over the ranks of compressed tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from hpcdist import collectives
from hpcdist.collectives.base import bounds
from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator, Envelope, Request
from hpcdist.comm.transfer import WIDE
from hpcdist.compress.base import Linear, Recoded, Span
from hpcdist.compress.coding.feedback import CompressionConfig, Used, only_used

TAG = 1 << 14  # strategies and collectives use smaller ones


class Reduction:
    """Sums flat tensors over the ranks of `comm`, compressed.

    Messages of `Linear` compressors are all-reduced. With `Recoded` ones each rank sums one piece and sends the others
    its sum. All other messages go to every rank, which adds them in rank order. So all ranks have the same bits. Bytes
    sent per rank: 2m(p − 1)/p for messages of m bytes of the first two kinds, m(p − 1) for the others, and 4 for each
    tensor but the last.

    The sum of a vote is its outcome times the number of ranks, so that the mean is the outcome.

    Args:
        comm: used only during a call, with one tag.
        like: flat tensors of the same lengths and dtypes, on any device. They are encoded on the host.
        spans: the parameters in each of them.
        over_senders: give each element the mean over the ranks whose messages give it, 0 or not, in place of the sum.
            Compressors must choose elements (`count_sent`).

    Attributes:
        feedbacks: of each tensor, with what this rank has not sent.
        calls: how many sums so far.
        working: memory on the host, as long as the tensors.
    """

    def __init__(
        self,
        comm: Communicator,
        config: CompressionConfig,
        like: Sequence[Tensor],
        spans: Sequence[Sequence[Span]],
        over_senders: bool = False,
    ):
        self._comm, self._config, self._over_senders = comm, config, over_senders
        self.feedbacks = config.feedbacks(comm, like, spans)
        residuals = [feedback.residual for feedback in self.feedbacks]
        self._sums = [
            None if (flat.dtype, flat.device) == (residual.dtype, residual.device) else torch.empty_like(residual)
            for flat, residual in zip(like, residuals, strict=True)
        ]
        self._counts = [torch.empty_like(residual) for residual in residuals] if over_senders else []
        self._allreduce = collectives.load("auto")(comm)
        self.working = [tensor for tensor in (*self._sums, *self._counts) if tensor is not None]
        self.calls = 0

    def __call__(self, tensors: Sequence[Tensor], used: Used = None) -> int:
        """Collective. Replace the tensors by their sums over the ranks; return the number by which means divide them.

        That is how many ranks have sent any, or 1 where each element is its mean already.
        """
        self.calls += 1
        with only_used(self.feedbacks, used):
            return self._sum(tensors)

    def _sum(self, tensors: Sequence[Tensor]) -> int:
        config = self._config
        senders = self._comm.size
        if self.calls <= config.warmup_steps and config.warmup_ranks is None:
            for tensor, feedback in zip(tensors, self.feedbacks, strict=True):
                feedback.add_residual_(tensor)
                self._allreduce(tensor)
            return senders
        if self.calls <= config.warmup_steps and config.warmup_ranks is not None:
            senders = min(config.warmup_ranks, senders)
        if isinstance(self.feedbacks[0].compressor, (Linear, Recoded)):
            self._reduce(tensors, senders)
        else:
            self._gather(tensors, senders)
            if self._over_senders:
                return 1
        return senders

    def mean(self, tensors: Sequence[Tensor], used: Used = None) -> None:
        """Collective. Replace the tensors by their means over the ranks that have sent any."""
        wide = [tensor.to(WIDE.get(tensor.dtype, tensor.dtype)) for tensor in tensors]  # the mean of a sum not rounded
        senders = self(wide, used)
        for tensor, total in zip(tensors, wide, strict=True):
            total.div_(senders)
            if total is not tensor:
                tensor.copy_(total)

    def _reduce(self, tensors: Sequence[Tensor], senders: int) -> None:
        silent = self._comm.rank >= senders
        for tensor, feedback, into in zip(tensors, self.feedbacks, self._outs(tensors), strict=True):
            compressor, residual = feedback.compressor, feedback.to_send(tensor.zero_() if silent else tensor)
            if isinstance(compressor, Linear):
                compressor.reduce(residual, into, self._comm.size, self._allreduce)
            elif isinstance(compressor, Recoded):
                recode(self._comm, compressor, residual, into, senders)
            if into is not tensor:
                tensor.copy_(into)

    def _gather(self, tensors: Sequence[Tensor], senders: int) -> None:
        silent = self._comm.rank >= senders
        messages = [] if silent else [f.encode(tensor) for f, tensor in zip(self.feedbacks, tensors, strict=True)]
        outs = self._outs(tensors)
        for out in (*outs, *self._counts):
            out.zero_()
        for messages_of_rank in gather(self._comm, messages, len(tensors), range(senders)):
            for place, (feedback, message) in enumerate(zip(self.feedbacks, messages_of_rank, strict=True)):
                feedback.compressor.add(message, outs[place])
                if self._counts:
                    feedback.compressor.count_sent(message, self._counts[place])
        for whole, counts in zip(outs, self._counts):
            for out, count in alongside(whole, counts):
                out.div_(count.clamp_(min=1))
        for tensor, out in zip(tensors, outs, strict=True):
            if out is not tensor:
                tensor.copy_(out)

    def _outs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return for each tensor where it is summed: there, or in working memory if it is of another type or device."""
        return [tensor if out is None else out for tensor, out in zip(tensors, self._sums, strict=True)]

    def close(self) -> None:
        """Collective. Release the all-reduce."""
        self._allreduce.close()


# --- ways to sum messages ---------------------------------------------------------------------------------------------
def recode(comm: Communicator, compressor: Recoded, tensor: Tensor, out: Tensor, senders: int) -> None:
    """Collective. Sum the decoded messages of all ranks, and encode the sum again; the same bits on all ranks.

    Each rank owns one piece of the tensor. It encodes the other pieces and sends each to its owner, adds the messages
    for its own piece, in a fixed order and the tensor's dtype, and sends the encoded sum to all ranks.
    Bytes sent per rank: 2m(p − 1)/p for messages of m bytes in all; messages: 2(p − 1).

    Args:
        tensor: this rank's addend. Overwritten by the errors of its messages, that of its sum included.
        out: overwritten by the sum. Must not be `tensor`.
        senders: number of ranks that contribute; the others add only their residuals.

    Reference: Jeremy Bernstein, Jiawei Zhao, Kamyar Azizzadenesheli, Anima Anandkumar, "signSGD with majority vote is
    communication efficient and fault tolerant", 2019; Hanlin Tang, Chen Yu, Xiangru Lian, Tong Zhang, Ji Liu,
    "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated compression", 2019.
    """
    cuts = bounds(tensor.numel(), comm.size)
    chunks = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
    own = chunks[comm.rank]
    ahead = [(comm.rank + step) % comm.size for step in range(1, comm.size)]  # not all to the same one at once
    sends = [_send(comm, compressor.share(tensor[chunks[dest]], comm.size), dest) for dest in ahead]
    mine = tensor[own]
    total = compressor.start_sum(mine, comm.size)
    for source in reversed(ahead):
        compressor.add(receive(comm, source), total)
    message = compressor.combine(total, senders)
    if total is not mine:
        mine.add_(total)
    sends += [_send(comm, message, dest) for dest in ahead]
    compressor.decode(message, out[own])
    for source in reversed(ahead):
        compressor.decode(receive(comm, source), out[chunks[source]])
    for request, _ in sends:
        request.wait()


def _send(comm: Communicator, message: Tensor, dest: int) -> tuple[Request, Tensor]:
    """Start sending; return the request, and the message, which must live until the request is complete."""
    return comm.isend(message, dest, TAG), message


def receive(comm: Communicator, source: int) -> Tensor:
    """Receive a message of any length."""
    envelope = cast(Envelope, comm.probe(source, TAG))  # None only without waiting
    message = torch.empty(envelope.n_bytes, dtype=torch.uint8)
    comm.irecv(message, source, TAG).wait()
    return message


def join(messages: Sequence[Tensor]) -> Tensor:
    """Join messages to one: the lengths of all but the last, 4 bytes each, then the messages."""
    lengths = torch.tensor([len(message) for message in messages[:-1]], dtype=torch.int32).view(torch.uint8)
    return torch.cat([lengths, *messages])


def cut(joined: Tensor, count: int) -> list[Tensor]:
    """Cut a joined message into its `count` messages."""
    head = 4 * (count - 1)
    lengths = joined[:head].clone().view(torch.int32).tolist()
    return list(joined[head:].split([*lengths, len(joined) - head - sum(lengths)]))


def gather(comm: Communicator, messages: Sequence[Tensor], count: int, senders: Sequence[int]) -> list[list[Tensor]]:
    """Collective. Gather the `count` messages of each of the `senders`, in this order, on every rank.

    Bytes sent by a sender: p − 1 times its messages, and 4 for each of them but the last. Receivers probe for lengths.
    """
    joined = {}
    sends = []
    if comm.rank in senders:
        joined[comm.rank] = join(messages)
        others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]  # not all to the same one at once
        sends = [comm.isend(joined[comm.rank], dest, TAG) for dest in others]
    for step in range(1, comm.size):
        source = (comm.rank - step) % comm.size
        if source in senders:
            joined[source] = receive(comm, source)
    for send in sends:
        send.wait()
    return [cut(joined[source], count) for source in senders]
