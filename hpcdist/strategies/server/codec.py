"""Compress the tensors of requests, or of replies.

Both ends of a transfer remember what they must, so that nothing is lost and both have the same numbers.
"""

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

Content = Literal["gradients", "values", "moves"]  # of the tensors that go one way, see `Codec`
WHOLE, NOTHING = -1, -2  # in the place of a message's length: uncompressed; none
_ALIGNED = 8  # bytes at whose multiples messages lie, so that they can be read as any dtype


@dataclass(frozen=True)
class Codec:
    """Compress the tensors that go one way between children and parents, by what they are.

    - gradients: what a message lacks is added to the next one, by error feedback;
    - values: both ends keep what the receiver has so far, and a message is of what that lacks. So what one message
      leaves out is in the next one by itself;
    - moves: each message by itself. Both ends go by what it stands for.

    Uncompressed go the first `warmup_steps` messages from one rank to another, those that would be longer otherwise,
    and what a rank sends to itself.

    Args:
        name: whether the tensors go from children to parents.
        spans: the parameters in each flat tensor of a whole request.
        state: where what both ends remember is declared.

    Raises:
        ConfigError: values are compressed, and what differences leave out would grow.

    Reference: Hanlin Tang, Chen Yu, Xiangru Lian, Tong Zhang, Ji Liu, "DoubleSqueeze: parallel stochastic gradient
    descent with double-pass error-compensated compression", 2019; for differences, Constantin Philippenko, Aymeric
    Dieuleveut, "Preserved central model for faster bidirectional compression in distributed settings", 2021.
    """

    config: CompressionConfig
    name: Literal["requests", "replies"]
    content: Content
    spans: Sequence[Sequence[Span]]
    state: State

    def __post_init__(self):
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
        """Make one compressor for each flat tensor's part."""
        parts = zip(shard.ranges, shard.spans(self.spans), strict=True)
        return [self.config.create(stop - start, own, stream) for (start, stop), own in parts]


def _buffers(like: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros to code with: on the host, in float32, or in float64 for tensors of that."""
    return [torch.zeros(t.numel(), dtype=torch.float64 if t.dtype == torch.float64 else torch.float32) for t in like]


class Encoder:
    """Encode one shard for one rank.

    Args:
        kept: the shard's part of buffers. Afterwards there are: of gradients, what has not been sent; of values, what
            the receiver has; of moves, what the message stands for.
        whole: nothing is compressed.
    """

    def __init__(self, codec: Codec, shard: Shard, kept: Sequence[Tensor], stream: int = 0, whole: bool = False):
        config = codec.config
        self._content, self.kept = codec.content, list(kept)
        self._warmup = config.warmup_steps if config.warmup_ranks is None else 0
        self._whole, self.sent = whole, 0
        coders = zip(codec.compressors(shard, stream), self.kept, strict=True)
        self._feedbacks = [Feedback(coder, part, config.error_feedback, part) for coder, part in coders]

    def encode(self, parts: Sequence[Tensor], used: Used = None) -> tuple[list[Tensor], list[int]]:
        """Return the messages to send, and what stands in the place of their lengths."""
        self.sent += 1
        whole = self._whole or self.sent <= self._warmup
        messages = []
        for part, kept, feedback in zip(parts, self.kept, self._feedbacks, strict=True):
            with only_used([feedback], used if self._content == "gradients" else None):
                found = None if whole or not part.numel() else self._compressed(part, kept, feedback)
                sent = self._uncompressed(part, kept, feedback, whole) if found is None else (found, len(found))
                messages.append(sent)
        return [message for message, _ in messages], [length for _, length in messages]

    def _compressed(self, part: Tensor, kept: Tensor, feedback: Feedback) -> Tensor | None:
        """Return the message; None if it would not be shorter than the tensor."""
        compressor = feedback.compressor
        if self._content == "gradients":
            message = feedback.encode(part)
            if len(message) < kept.nbytes:
                return message
            compressor.add(message, kept)  # back to what is left to be sent
            return None
        lacks = part.to(kept) - kept if self._content == "values" else part.to(kept, copy=True)
        message = compressor.encode_residual_(lacks)
        if len(message) >= kept.nbytes:
            return None
        if self._content == "values":
            compressor.add(message, kept)
        else:
            compressor.decode(message, kept)
        return message

    def _uncompressed(self, part: Tensor, kept: Tensor, feedback: Feedback, at_once: bool) -> tuple[Tensor, int]:
        """Return the tensor as a message, with what stands in the place of its length."""
        if self._content != "gradients":
            kept.copy_(part)
        elif at_once:
            return feedback.encode(part, whole=True), WHOLE
        message = kept.clone().view(torch.uint8)
        if self._content == "gradients":
            kept.zero_()
        return message, WHOLE

    def state_dict(self) -> dict[str, Any]:
        """Return what the compressors remember."""
        return {"sent": self.sent, "compressors": [feedback.compressor.state_dict() for feedback in self._feedbacks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.sent = state["sent"]
        for feedback, saved in zip(self._feedbacks, state["compressors"], strict=True):
            feedback.compressor.load_state_dict(saved)


class CodedSlots(TensorSlots):
    """Collective. Open slots for the messages that encode the tensors which go one way.

    A rank has in common with each child, and with its parents, what encoders and decoders keep: with parents, whose
    shards differ, the parts of one whole request.

    Args:
        like: flat tensors as long as a whole request; if values are sent, those that both ends have by now.

    Attributes:
        whole: what this rank has in common with its parents, put together; empty where it has none.
    """

    dtype = torch.uint8

    def __init__(self, codec: Codec, comm: Communicator, like: Sequence[Tensor], sources: EndsOf, dests: Ends):
        wide = _buffers(like)
        super().__init__(comm, wide, sources, dests)
        self._comm, self._codec, self.words, state = comm, codec, len(like), codec.state
        own, up, values = sources(comm.rank), codec.name == "requests", codec.content == "values"
        parents, children = map(dict, (dests, own) if up else (own, dests))
        # On another number of ranks each worker has the mean over the saved ones of the gradients that were not sent.
        self.whole = state.sharded(
            f"{codec.name}.whole", tensors=wide if parents else [], start="parameters" if values else "zeros",
            reshard="worker mean" if codec.content == "gradients" else "start", optional=True,
        )  # fmt: skip
        self._common: dict[int, list[Tensor]] = {}
        for child, shard in children.items():
            shared = next(iter(self._common.values()), None)
            if shared is None or values:
                shared = state.scratch(_buffers(shard.of(wide)))
            self._common[child] = shared
        self._common_above = {parent: shard.of(self.whole) for parent, shard in parents.items()}
        leaving, arriving = (self._common_above, self._common) if up else (self._common, self._common_above)
        self._encoders = {
            dest: Encoder(codec, shard, leaving[dest], comm.rank * comm.size + dest, whole=dest == comm.rank)
            for dest, shard in dests
        }
        shared_coders = codec.compressors(own[0][1]) if own and up else None  # for all children the same
        # What each source's messages are decoded by, and what they overwrite or are added to.
        self._decoders = {
            source: (shared_coders or codec.compressors(shard), arriving[source]) for source, shard in own
        }
        state.value(f"{codec.name}.sent", 0, self, "messages", reshard="max", optional=True)
        state.custom(f"{codec.name}.senders", self._senders, self._load_senders, lambda: None, optional=True)
        if values:
            copy_all(self.whole, like)
            for child, shard in children.items():
                copy_all(self._common[child], shard.of(like))
            state.after_load(self._agree)

    def room(self, part: Tensor) -> int:
        """Return the bytes that the longest message takes for such a part of a buffer."""
        return -(-part.nbytes // _ALIGNED) * _ALIGNED

    def puts(self, dest: int, tensors: Sequence[Tensor], used: Used = None) -> tuple[list[Put], list[int]]:
        if not tensors:
            return [], [NOTHING] * self.words
        messages, lengths = self._encoders[dest].encode(tensors, used)
        return super().puts(dest, messages)[0], lengths

    def sent(self, dest: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._encoders[dest].kept

    def read(self, source: int, lengths: Sequence[int]) -> Iterable[Tensor]:
        """Decode what has arrived from `source`; compressed gradients are decoded as they are gone through, once."""
        found = self._decoded(source, lengths)
        return found if self._codec.content == "gradients" else list(found)

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
        """The largest number of messages that have been sent to one rank; setting it sets the number of each rank."""
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
        """Collective. Give parents the values that their children have: n bytes of messages per child."""
        above = [(parent, t) for parent, tensors in self._common_above.items() for t in tensors if t.numel()]
        sends = [self._comm.isend(tensor, parent) for parent, tensor in above]
        for child, tensors in self._common.items():
            for tensor in filter(Tensor.numel, tensors):
                self._comm.irecv(tensor, child, 0).wait()
        for send in sends:
            send.wait()
