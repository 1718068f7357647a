"""Sum compressed tensors over the ranks, or average them with compression in both directions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from hpcdist import collectives
from hpcdist.collectives.base import bounds
from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator, Envelope, Request
from hpcdist.comm.transfer import WIDE
from hpcdist.compress.base import Linear, Recoded, Span
from hpcdist.compress.coding.feedback import CompressionConfig, Feedback, Used, only_used
from hpcdist.errors import ConfigError

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
        # Memory for the sums; None: the tensor's, if its dtype and device are those of the residual.
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
        warming, size = self.calls <= self._config.warmup_steps, self._comm.size
        senders = min(self._config.warmup_ranks or size, size) if warming else size
        outs = [tensor if out is None else out for tensor, out in zip(tensors, self._sums, strict=True)]
        with only_used(self.feedbacks, used):
            if warming and self._config.warmup_ranks is None:
                for tensor, feedback in zip(tensors, self.feedbacks, strict=True):
                    feedback.add_residual_(tensor)
                    self._allreduce(tensor)
                return size
            if isinstance(self.feedbacks[0].compressor, (Linear, Recoded)):
                self._reduce(tensors, outs, senders)
            else:
                self._gather(tensors, outs, senders)
        for tensor, out in zip(tensors, outs, strict=True):
            if out is not tensor:
                tensor.copy_(out)
        return 1 if self._over_senders else senders

    def mean(self, tensors: Sequence[Tensor], used: Used = None) -> None:
        """Collective. Replace the tensors by their means over the ranks that have sent."""
        wide = [tensor.to(WIDE.get(tensor.dtype, tensor.dtype)) for tensor in tensors]  # divide before rounding
        senders = self(wide, used)
        for tensor, total in zip(tensors, wide, strict=True):
            total.div_(senders)
            if total is not tensor:
                tensor.copy_(total)

    def _reduce(self, tensors: Sequence[Tensor], outs: Sequence[Tensor], senders: int) -> None:
        """Sum by an all-reduce, or by `recode`, into `outs`; ranks that do not send contribute their residuals."""
        idle = self._comm.rank >= senders  # in a warm-up only some ranks send
        for tensor, feedback, out in zip(tensors, self.feedbacks, outs, strict=True):
            compressor, residual = feedback.compressor, feedback.to_send(tensor.zero_() if idle else tensor)
            if isinstance(compressor, Linear):
                compressor.reduce(residual, out, self._comm.size, self._allreduce)
            elif isinstance(compressor, Recoded):
                recode(self._comm, compressor, residual, out, senders)

    def _gather(self, tensors: Sequence[Tensor], outs: Sequence[Tensor], senders: int) -> None:
        """Sum by an all-gather into `outs`, which may be `tensors`: these are encoded before they are overwritten."""
        idle = self._comm.rank >= senders  # in a warm-up only some ranks send
        messages = [] if idle else [f.encode(tensor) for f, tensor in zip(self.feedbacks, tensors, strict=True)]
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

    def close(self) -> None:
        """Collective. Release the all-reduce."""
        self._allreduce.close()


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

            residuals = torch.zeros(flat.numel(), dtype=torch.promote_types(flat.dtype, torch.float32))
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
        """Average a tensor in place: `sent` encode its chunks for their owners, `back` the mean of this rank's one."""
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
    chunks = [slice(*pair) for pair in itertools.pairwise(bounds(tensor.numel(), comm.size))]
    arrivals = exchange(comm, lambda dest: compressor.share(tensor[chunks[dest]], comm.size))
    local = tensor[chunks[comm.rank]]
    total = compressor.start_sum(local, comm.size)
    for _, message in arrivals:
        compressor.add(message, total)
    combined = compressor.combine(total, senders)
    if total is not local:
        local.add_(total)  # the errors of the message and of the sum
    arrivals = exchange(comm, lambda _: combined)
    compressor.decode(combined, out[chunks[comm.rank]])
    for source, message in arrivals:
        compressor.decode(message, out[chunks[source]])


def exchange(
    comm: Communicator, message_to: Callable[[int], Tensor] | None, sources: Container[int] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Collective. Send `message_to(dest)` to every other rank; return an iterator over (source, message received).

    Messages are sent before this function returns. The iterator must be exhausted: it receives, and completes sends.

    Args:
        message_to: None: this rank sends nothing.
        sources: the ranks that send; None: all.
    """
    ahead = [(comm.rank + step) % comm.size for step in range(1, comm.size)]  # ranks start with different peers
    sends: list[tuple[Request, Tensor]] = []  # a message must be kept until its request completes
    if message_to is not None:
        for dest in ahead:
            message = message_to(dest)
            sends.append((comm.isend(message, dest, TAG), message))

    def arrive() -> Iterator[tuple[int, Tensor]]:
        for source in reversed(ahead):
            if sources is None or source in sources:
                yield source, receive(comm, source)
        for request, _ in sends:
            request.wait()

    return arrive()


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
    local = join_messages(messages) if comm.rank in senders else torch.empty(0)
    joined = dict(exchange(comm, (lambda _: local) if comm.rank in senders else None, senders)) | {comm.rank: local}
    return [split_message(joined[source], count) for source in senders]
