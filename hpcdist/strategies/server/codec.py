"""Compress the tensors of requests, or of replies; both ends of a transfer keep the state that this needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.compress import CompressionConfig, Compressor, Feedback, Span, Used, load, only_used
from hpcdist.errors import ConfigError
from hpcdist.strategies.common.state import State, copy_all
from hpcdist.strategies.server.placement import Shard
from hpcdist.strategies.server.slots import Ends, EndsOf, TensorSlots

Content = Literal["gradients", "values", "moves"]  # of requests or of replies, see `Codec`
WHOLE, NOTHING = -1, -2  # special lengths: an uncompressed message; no message
_ALIGNED = 8  # messages start at multiples of 8 bytes, so that they can be read as any dtype


@dataclass(frozen=True)
class Codec:
    """Compresses the requests, or the replies, of children and parents, by the content of their tensors.

    - gradients: error feedback adds the error of a message to the next message;
    - values: both ends keep the receiver's values, and a message is the difference to them, so that the next
      difference contains the error of this message;
    - moves: messages are independent, and both ends apply the decoded message.

    Sent uncompressed are the first `warmup_steps` messages of each pair of ranks, messages that compression would not
    shorten, and messages of a rank to itself.

    Args:
        name: requests (from children to parents) or replies.
        spans: the parameters in each flat tensor of a whole request.
        state: declares the state of both ends.

    Raises:
        ConfigError: values are compressed by a compressor whose error would grow.

    Reference: Hanlin Tang, Chen Yu, Xiangru Lian, Tong Zhang, Ji Liu, "DoubleSqueeze: parallel stochastic gradient
    descent with double-pass error-compensated compression", 2019; for differences, Constantin Philippenko, Aymeric
    Dieuleveut, "Preserved central model for faster bidirectional compression in distributed settings", 2021.
    """

    config: CompressionConfig
    name: Literal["requests", "replies"]
    content: Content
    spans: Sequence[Sequence[Span]]
    state: State

    def __post_init__(self) -> None:
        config = self.config
        try:
            if self.content == "values":
                load(config.name).Config.from_mapping(config.options, "strategy.compression").check_feedback()
        except ValueError as error:
            raise ConfigError(
                "strategy.compression must lose less than there is where differences of parameters are compressed, as "
                f"with error feedback; got {config.name}: {error} Or set strategy.compress_replies = false, if only "
                "gradients are to be compressed."
            ) from error

    def compressors(self, shard: Shard, stream: int = 0) -> list[Compressor]:
        """Create a compressor for each flat tensor's part in the shard."""
        parts = zip(shard.ranges, shard.spans(self.spans), strict=True)
        return [self.config.create(stop - start, of_part, stream) for (start, stop), of_part in parts]


def _buffers(templates: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros on the host, as long as the tensors, in float32, or float64 for float64 tensors."""
    return [
        torch.zeros(t.numel(), dtype=torch.float64 if t.dtype == torch.float64 else torch.float32) for t in templates
    ]


class Encoder:
    """Encode one shard for one rank.

    Args:
        kept: buffers as long as the shard. After encoding they contain the residual (gradients), the receiver's
            values (values), or the decoded message (moves).
        whole: send everything uncompressed.
    """

    def __init__(self, codec: Codec, shard: Shard, kept: Sequence[Tensor], stream: int = 0, whole: bool = False):
        config = codec.config
        self._content, self.kept = codec.content, list(kept)
        self._warmup = config.warmup_steps if config.warmup_ranks is None else 0
        self._whole, self.sent = whole, 0
        coders = zip(codec.compressors(shard, stream), self.kept, strict=True)
        self._feedbacks = [Feedback(coder, part, config.error_feedback, part) for coder, part in coders]

    def encode(self, parts: Sequence[Tensor], used: Used = None) -> tuple[list[Tensor], list[int]]:
        """Return a message for each part, and its length, or WHOLE if it is uncompressed."""
        self.sent += 1
        whole = self._whole or self.sent <= self._warmup
        messages = []
        for part, kept, feedback in zip(parts, self.kept, self._feedbacks, strict=True):
            with only_used([feedback], used if self._content == "gradients" else None):
                coded = None if whole or not part.numel() else self._compressed(part, kept, feedback)
                sent = self._uncompressed(part, kept, feedback, whole) if coded is None else (coded, len(coded))
                messages.append(sent)
        return [message for message, _ in messages], [length for _, length in messages]

    def _compressed(self, part: Tensor, kept: Tensor, feedback: Feedback) -> Tensor | None:
        """Return the message; None if it would not be shorter than the tensor."""
        compressor = feedback.compressor
        if self._content == "gradients":
            message = feedback.encode(part)
            if len(message) < kept.nbytes:
                return message
            compressor.add(message, kept)  # undo: back to the residual
            return None
        to_send = part.to(kept) - kept if self._content == "values" else part.to(kept, copy=True)
        message = compressor.encode_residual_(to_send)
        if len(message) >= kept.nbytes:
            return None
        if self._content == "values":
            compressor.add(message, kept)
        else:
            compressor.decode(message, kept)
        return message

    def _uncompressed(self, part: Tensor, kept: Tensor, feedback: Feedback, uncompressed: bool) -> tuple[Tensor, int]:
        """Return the tensor as an uncompressed message, and WHOLE. `uncompressed`: without trying `_compressed`."""
        if self._content != "gradients":
            kept.copy_(part)
        elif uncompressed:
            return feedback.encode(part, whole=True), WHOLE
        message = kept.clone().view(torch.uint8)  # of gradients: the residual, to which `_compressed` has added them
        if self._content == "gradients":
            kept.zero_()
        return message, WHOLE

    def state_dict(self) -> dict[str, Any]:
        """Return the compressors' state."""
        return {"sent": self.sent, "compressors": [feedback.compressor.state_dict() for feedback in self._feedbacks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.sent = state["sent"]
        for feedback, saved in zip(self._feedbacks, state["compressors"], strict=True):
            feedback.compressor.load_state_dict(saved)


class CodedSlots(TensorSlots):
    """Collective. Allocate slots for the compressed messages of requests, or of replies.

    A rank shares the state of encoders and decoders with each child and with its parents; the parents' shards are parts
    of one whole request.

    Args:
        templates: flat tensors as long as a whole request; for values, the initial values of both ends.

    Attributes:
        whole: the state that this rank shares with its parents, for the whole request; empty without parents.
    """

    dtype = torch.uint8

    def __init__(self, codec: Codec, comm: Communicator, templates: Sequence[Tensor], sources: EndsOf, dests: Ends):
        buffers = _buffers(templates)
        super().__init__(comm, buffers, sources, dests)
        self._comm, self._codec, self.n_lengths, state = comm, codec, len(templates), codec.state
        local_sources, up, values = sources(comm.rank), codec.name == "requests", codec.content == "values"
        parents, children = map(dict, (dests, local_sources) if up else (local_sources, dests))  # rank -> shard
        # On another number of ranks each worker starts with the mean of the saved workers' residuals.
        self.whole = state.sharded(
            f"{codec.name}.whole", tensors=buffers if parents else [], start="parameters" if values else "zeros",
            reshard="worker mean" if codec.content == "gradients" else "start", optional=True,
        )  # fmt: skip
        self._common: dict[int, list[Tensor]] = {}  # by child; only of values that differ by child
        for child, shard in children.items():
            shared = next(iter(self._common.values()), None)
            if shared is None or values:
                shared = state.scratch(_buffers(shard.of(buffers)))
            self._common[child] = shared
        self._common_above = {parent: shard.of(self.whole) for parent, shard in parents.items()}
        leaving, arriving = (self._common_above, self._common) if up else (self._common, self._common_above)
        self._encoders = {
            dest: Encoder(codec, shard, leaving[dest], comm.rank * comm.size + dest, whole=dest == comm.rank)
            for dest, shard in dests
        }
        # All children send the same shard to a rank, so that one list of compressors decodes all requests.
        shared_coders = codec.compressors(local_sources[0][1]) if local_sources and up else None
        # The decoder of each source's messages, and the tensors that they overwrite or are added to.
        self._decoders = {
            source: (shared_coders or codec.compressors(shard), arriving[source]) for source, shard in local_sources
        }
        state.value(f"{codec.name}.sent", 0, self, "messages", reshard="max", optional=True)
        state.custom(f"{codec.name}.senders", self._senders, self._load_senders, lambda: None, optional=True)
        if values:
            copy_all(self.whole, templates)
            for child, shard in children.items():
                copy_all(self._common[child], shard.of(templates))
            state.after_load(self._agree)

    def room(self, part: Tensor) -> int:
        """Return the bytes of the longest message for this part of a buffer."""
        return -(-part.nbytes // _ALIGNED) * _ALIGNED

    def puts(self, dest: int, tensors: Sequence[Tensor], used: Used = None) -> tuple[list[Put], list[int]]:
        if not tensors:
            return [], [NOTHING] * self.n_lengths
        messages, lengths = self._encoders[dest].encode(tensors, used)
        return super().puts(dest, messages)[0], lengths

    def sent(self, dest: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._encoders[dest].kept

    def read(self, source: int, lengths: Sequence[int]) -> Iterable[Tensor]:
        """Decode the message from `source`; compressed gradients are decoded while iterating, once."""
        decoded = self._decoded(source, lengths)
        return decoded if self._codec.content == "gradients" else list(decoded)

    def _decoded(self, source: int, lengths: Sequence[int]) -> Iterator[Tensor]:
        coders, arriving = self._decoders[source]
        for compressor, slot, out, length in zip(coders, self._slots[source], arriving, lengths, strict=True):
            if length == WHOLE:
                out.copy_(slot[: out.nbytes].view(out.dtype))
            elif length != NOTHING:
                (compressor.add if self._codec.content == "values" else compressor.decode)(slot[:length], out)
            yield out

    # --- checkpoints ----------------------------------------------------------------------------------------------
    @property
    def messages(self) -> int:
        """The largest number of messages sent to one rank; setting it sets the number of each rank."""
        return max((encoder.sent for encoder in self._encoders.values()), default=0)

    @messages.setter
    def messages(self, sent: int) -> None:
        for encoder in self._encoders.values():
            encoder.sent = sent

    def _senders(self) -> list[list[Any]]:
        return [[dest, encoder.state_dict()] for dest, encoder in self._encoders.items()]

    def _load_senders(self, saved: Sequence[Sequence[Any]]) -> None:
        for dest, state in saved:
            self._encoders[dest].load_state_dict(state)

    def _agree(self) -> None:
        """Collective. After loading, set parents' copies of the values to their children's: n bytes per child."""
        above = [(parent, t) for parent, tensors in self._common_above.items() for t in tensors if t.numel()]
        sends = [self._comm.isend(tensor, parent) for parent, tensor in above]
        for child, tensors in self._common.items():
            for tensor in filter(Tensor.numel, tensors):
                self._comm.irecv(tensor, child, 0).wait()
        for send in sends:
            send.wait()
