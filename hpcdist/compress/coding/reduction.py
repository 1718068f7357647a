"""Sum compressed tensors over the ranks."""

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

TAG = 1 << 14  # strategies and collectives use smaller tags


class Reduction:
    """Sums flat tensors over the ranks of `comm`, compressed.

    Messages of `Linear` compressors are all-reduced. With `Recoded` compressors each rank sums one chunk and sends the
    sum to the others. All other messages are all-gathered, and each rank adds them in rank order. So the result is
    bitwise equal on all ranks. Bytes sent per rank on p ranks with messages of m bytes: 2m(p − 1)/p with `Linear` and
    `Recoded`, else m(p − 1), and 4 for each tensor but the last.

    The sum of a vote is its outcome times the number of ranks, so that the mean is the outcome.

    Args:
        comm: used only during a call, with one tag.
        templates: flat tensors with the lengths and dtypes to sum, on any device. They are encoded on the host.
        spans: the parameters in each tensor.
        over_senders: compute, in place of the sum, each element's mean over the ranks whose messages contain it.
            Needs a compressor that chooses elements (`count_sent`).

    Attributes:
        feedbacks: a compressor with its residual for each tensor.
        calls: number of sums so far.
        working: work tensors on the host, as long as the tensors.
    """

    def __init__(
        self, comm: Communicator, config: CompressionConfig, templates: Sequence[Tensor],
        spans: Sequence[Sequence[Span]], over_senders: bool = False,
    ):  # fmt: skip
        self._comm, self._config, self._over_senders = comm, config, over_senders
        self.feedbacks = config.feedbacks(comm, templates, spans)
        residuals = [feedback.residual for feedback in self.feedbacks]
        self._sums = [
            None if (flat.dtype, flat.device) == (residual.dtype, residual.device) else torch.empty_like(residual)
            for flat, residual in zip(templates, residuals, strict=True)
        ]
        self._counts = [torch.empty_like(residual) for residual in residuals] if over_senders else []
        self._allreduce = collectives.load("auto")(comm)
        self.working = [tensor for tensor in (*self._sums, *self._counts) if tensor is not None]
        self.calls = 0

    def __call__(self, tensors: Sequence[Tensor], used: Used = None) -> int:
        """Collective. Replace the tensors by their sums over the ranks; return the divisor for the mean.

        The divisor is the number of ranks that have sent, or 1 where elements are means already (`over_senders`).
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
        """Collective. Replace the tensors by their means over the ranks that have sent."""
        wide = [tensor.to(WIDE.get(tensor.dtype, tensor.dtype)) for tensor in tensors]  # divide before rounding
        senders = self(wide, used)
        for tensor, total in zip(tensors, wide, strict=True):
            total.div_(senders)
            if total is not tensor:
                tensor.copy_(total)

    def _reduce(self, tensors: Sequence[Tensor], senders: int) -> None:
        idle = self._comm.rank >= senders  # in a warm-up only some ranks send
        for tensor, feedback, out in zip(tensors, self.feedbacks, self._outs(tensors), strict=True):
            compressor, residual = feedback.compressor, feedback.to_send(tensor.zero_() if idle else tensor)
            if isinstance(compressor, Linear):
                compressor.reduce(residual, out, self._comm.size, self._allreduce)
            elif isinstance(compressor, Recoded):
                recode(self._comm, compressor, residual, out, senders)
            if out is not tensor:
                tensor.copy_(out)

    def _gather(self, tensors: Sequence[Tensor], senders: int) -> None:
        idle = self._comm.rank >= senders  # in a warm-up only some ranks send
        messages = [] if idle else [f.encode(tensor) for f, tensor in zip(self.feedbacks, tensors, strict=True)]
        outs = self._outs(tensors)
        for out in (*outs, *self._counts):
            out.zero_()
        for messages_of_rank in gather(self._comm, messages, len(tensors), range(senders)):
            for index, (feedback, message) in enumerate(zip(self.feedbacks, messages_of_rank, strict=True)):
                feedback.compressor.add(message, outs[index])
                if self._counts:
                    feedback.compressor.count_sent(message, self._counts[index])
        for total, counts in zip(outs, self._counts):
            for out, count in alongside(total, counts):
                out.div_(count.clamp_(min=1))
        for tensor, out in zip(tensors, outs, strict=True):
            if out is not tensor:
                tensor.copy_(out)

    def _outs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the memory for each sum: the tensor, or a work tensor if its dtype or device differs."""
        return [tensor if out is None else out for tensor, out in zip(tensors, self._sums, strict=True)]

    def close(self) -> None:
        """Collective. Release the all-reduce."""
        self._allreduce.close()


# --- algorithms to sum messages ---------------------------------------------------------------------------------------
def recode(comm: Communicator, compressor: Recoded, tensor: Tensor, out: Tensor, senders: int) -> None:
    """Collective. Sum the decoded messages of all ranks and encode the sum again; bitwise equal on all ranks.

    A reduce-scatter and an all-gather: each rank encodes every chunk of its tensor and sends it to the chunk's owner;
    the owner adds the messages in a fixed order, in the tensor's dtype, and sends the encoded sum to all ranks.
    Bytes sent per rank: 2m(p − 1)/p for messages of m bytes in total; messages: 2(p − 1).

    Args:
        tensor: this rank's addend. Overwritten with the errors of its messages, including its chunk's sum.
        out: overwritten with the sum. Must not be `tensor`.
        senders: number of ranks that contribute; the others add only their residuals.

    Reference: Jeremy Bernstein, Jiawei Zhao, Kamyar Azizzadenesheli, Anima Anandkumar, "signSGD with majority vote is
    communication efficient and fault tolerant", 2019; Hanlin Tang, Chen Yu, Xiangru Lian, Tong Zhang, Ji Liu,
    "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated compression", 2019.
    """
    cuts = bounds(tensor.numel(), comm.size)
    chunks = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
    local_chunk = chunks[comm.rank]
    ahead = [(comm.rank + step) % comm.size for step in range(1, comm.size)]  # ranks start with different peers
    sends = [_send(comm, compressor.share(tensor[chunks[dest]], comm.size), dest) for dest in ahead]
    local = tensor[local_chunk]
    total = compressor.start_sum(local, comm.size)
    for source in reversed(ahead):
        compressor.add(receive(comm, source), total)
    message = compressor.combine(total, senders)
    if total is not local:
        local.add_(total)  # the errors of the message and of the sum
    sends += [_send(comm, message, dest) for dest in ahead]
    compressor.decode(message, out[local_chunk])
    for source in reversed(ahead):
        compressor.decode(receive(comm, source), out[chunks[source]])
    for request, _ in sends:
        request.wait()


def _send(comm: Communicator, message: Tensor, dest: int) -> tuple[Request, Tensor]:
    """Start sending; return the request, and the message, to be kept until the request completes."""
    return comm.isend(message, dest, TAG), message


def receive(comm: Communicator, source: int) -> Tensor:
    """Receive a message of unknown length."""
    envelope = cast(Envelope, comm.probe(source, TAG))  # None only without waiting
    message = torch.empty(envelope.n_bytes, dtype=torch.uint8)
    comm.irecv(message, source, TAG).wait()
    return message


def join_messages(messages: Sequence[Tensor]) -> Tensor:
    """Join messages to one: the lengths of all messages but the last, 4 bytes each, then the messages."""
    lengths = torch.tensor([len(message) for message in messages[:-1]], dtype=torch.int32).view(torch.uint8)
    return torch.cat([lengths, *messages])


def split_message(joined: Tensor, count: int) -> list[Tensor]:
    """Split a joined message into its `count` messages."""
    head = 4 * (count - 1)
    lengths = joined[:head].clone().view(torch.int32).tolist()
    return list(joined[head:].split([*lengths, len(joined) - head - sum(lengths)]))


def gather(comm: Communicator, messages: Sequence[Tensor], count: int, senders: Sequence[int]) -> list[list[Tensor]]:
    """Collective. All-gather the `count` messages of each rank in `senders`; return them in the order of `senders`.

    Bytes sent by a sender: p − 1 times its messages, and 4 for each message but the last. Receivers probe for lengths.
    """
    joined = {}
    sends = []
    if comm.rank in senders:
        joined[comm.rank] = join_messages(messages)
        others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]  # ranks start with different peers
        sends = [comm.isend(joined[comm.rank], dest, TAG) for dest in others]
    for step in range(1, comm.size):
        source = (comm.rank - step) % comm.size
        if source in senders:
            joined[source] = receive(comm, source)
    for send in sends:
        send.wait()
    return [split_message(joined[source], count) for source in senders]
