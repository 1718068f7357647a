"""Slots in windows for the tensors of requests, or of replies: as they are, or compressed.

Both ends of a compressed transfer keep the state that this needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.compress import CompressionConfig, Compressor, Feedback, Span, Used, load, only_used
from hpcdist.errors import ConfigError
from hpcdist.strategies.common.state import State, copy_all
from hpcdist.strategies.server.placement import Shard

Senders = Callable[[int], Sequence[int]]  # the ranks that send to a rank
Covers = Callable[[int, int], Shard]  # (sender, receiver) -> the shard that is sent
Content = Literal["gradients", "values", "moves"]  # of requests or of replies, see `Codec`
WHOLE, NOTHING = -1, -2  # special lengths: an uncompressed message; no message
_ALIGNED = 8  # messages start at multiples of 8 bytes, so that they can be read as any dtype


class TensorSlots:
    """Collective. Allocate windows in which each rank has a slot for the tensors of every rank that sends to it.

    Args:
        templates: flat tensors as long as a whole request.
        senders: returns the ranks that send to a rank.
        dests: the ranks that this rank sends to.
        covers: returns the shard that a (sender, receiver) sends.

    Attributes:
        n_lengths: number of message lengths to send with the tensors.
        whole: the received tensors of all sources.
    """

    dtype: torch.dtype | None = None  # of the windows; None: the tensors' dtype
    n_lengths = 0

    def __init__(
        self, comm: Communicator, templates: Sequence[Tensor], senders: Senders, dests: Sequence[int], covers: Covers
    ):
        local_sources = senders(comm.rank)
        slots, lengths = self._layout(templates, [covers(source, comm.rank) for source in local_sources])
        self._windows = [comm.window(n, self.dtype or t.dtype) for n, t in zip(lengths, templates, strict=True)]
        self._slots = {
            source: [window.local[first:last] for window, (first, last) in zip(self._windows, slot, strict=True)]
            for source, slot in zip(local_sources, slots, strict=True)
        }
        self._starts: dict[int, list[int]] = {}  # offsets of this rank's slot at each destination
        for dest in dests:
            sources = senders(dest)
            layout, _ = self._layout(templates, [covers(source, dest) for source in sources])
            self._starts[dest] = [first for first, _ in layout[sources.index(comm.rank)]]
        self.whole = [window.local for window in self._windows]

    def room(self, part: Tensor) -> int:
        """Return the number of window elements for a part of a tensor."""
        return part.numel()

    def _layout(
        self, templates: Sequence[Tensor], shards: Sequence[Shard]
    ) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Place slots in a row: return each one's range of elements in each window, and the windows' lengths."""
        offsets, slots = [0] * len(templates), []
        for shard in shards:
            sizes = map(self.room, shard.of(templates))
            slots.append([(first, first + size) for first, size in zip(offsets, sizes, strict=True)])
            offsets = [last for _, last in slots[-1]]
        return slots, offsets

    def puts(self, dest: int, tensors: Sequence[Tensor], used: Used = None) -> tuple[list[Put], list[int]]:
        """Return the puts that send this shard's `tensors` to `dest`, and the message lengths."""
        targets = zip(self._windows, tensors, self._starts[dest])
        return [Put(window, part, dest, start) for window, part, start in targets if part.numel()], []

    def sent(self, dest: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the last sent `tensors` as the destination decodes them."""
        return tensors

    def read(self, source: int, lengths: Sequence[int]) -> Iterable[Tensor]:
        """Return the received tensors of `source`."""
        return self._slots[source]

    def close(self) -> None:
        """Collective. Close the windows."""
        self._slots.clear()  # views of the windows' memory
        self.whole = []
        for window in self._windows:
            window.close()


OpenSlots = Callable[[Communicator, Sequence[Tensor], Senders, Sequence[int], Covers], TensorSlots]


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
    return [torch.zeros(t.numel(), dtype=torch.promote_types(t.dtype, torch.float32)) for t in templates]


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
                encode = self._gradient if self._content == "gradients" else self._values
                messages.append(encode(part, kept, feedback, whole or not part.numel()))
        return [message for message, _ in messages], [length for _, length in messages]

    def _gradient(self, part: Tensor, kept: Tensor, feedback: Feedback, whole: bool) -> tuple[Tensor, int]:
        """Encode a part of a gradient; uncompressed if `whole`, or if the message would not be shorter."""
        if whole:
            return feedback.encode(part, whole=True), WHOLE
        message = feedback.encode(part)
        if len(message) < kept.nbytes:
            return message, len(message)
        feedback.compressor.add(message, kept)  # undo: back to the residual
        message = kept.clone().view(torch.uint8)
        kept.zero_()
        return message, WHOLE

    def _values(self, part: Tensor, kept: Tensor, feedback: Feedback, whole: bool) -> tuple[Tensor, int]:
        """Encode a part, uncompressed in the same cases as `_gradient`; `kept` becomes what the receiver has decoded.

        Of values the difference to `kept` is encoded, and of moves (changes of parameters) the part itself.
        """
        compressor, are_values = feedback.compressor, self._content == "values"
        if not whole:
            message = compressor.encode_residual_(part.to(kept) - kept if are_values else part.to(kept, copy=True))
            if len(message) < kept.nbytes:
                (compressor.add if are_values else compressor.decode)(message, kept)
                return message, len(message)
        kept.copy_(part)
        return kept.clone().view(torch.uint8), WHOLE

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

    def __init__(
        self, codec: Codec, comm: Communicator, templates: Sequence[Tensor], senders: Senders, dests: Sequence[int],
        covers: Covers,
    ):  # fmt: skip
        buffers = _buffers(templates)
        super().__init__(comm, buffers, senders, dests, covers)
        self._comm, self._codec, self.n_lengths, state = comm, codec, len(templates), codec.state
        up, values = codec.name == "requests", codec.content == "values"
        sent = {dest: covers(comm.rank, dest) for dest in dests}  # shards by rank
        received = {source: covers(source, comm.rank) for source in senders(comm.rank)}
        parents, children = (sent, received) if up else (received, sent)
        # On another number of ranks each worker starts with the mean of the saved workers' residuals.
        self.whole = state.sharded(
            f"{codec.name}.whole", tensors=buffers if parents else [], start="parameters" if values else "zeros",
            reshard="worker mean" if codec.content == "gradients" else "start", optional=True,
        )  # fmt: skip
        self._common: dict[int, list[Tensor]] = {}  # state shared with each child; one for all, except for values
        for child, shard in children.items():
            shared = next(iter(self._common.values()), None)
            if shared is None or values:
                shared = state.scratch(_buffers(shard.of(buffers)))
            self._common[child] = shared
        self._common_above = {parent: shard.of(self.whole) for parent, shard in parents.items()}
        leaving, arriving = (self._common_above, self._common) if up else (self._common, self._common_above)
        self._encoders = {
            dest: Encoder(codec, shard, leaving[dest], comm.rank * comm.size + dest, whole=dest == comm.rank)
            for dest, shard in sent.items()
        }
        # All children send the same shard to a rank, so that one list of compressors decodes all requests.
        shared_coders = codec.compressors(next(iter(received.values()))) if received and up else None
        # The decoder of each source's messages, and the tensors that they overwrite or are added to.
        self._decoders = {
            source: (shared_coders or codec.compressors(shard), arriving[source]) for source, shard in received.items()
        }
        encoders = self._encoders

        def set_sent(count: int) -> None:
            for encoder in encoders.values():
                encoder.sent = count

        def load_senders(saved: Sequence[Sequence[Any]]) -> None:
            for dest, sender in saved:
                encoders[dest].load_state_dict(sender)

        state.custom(
            f"{codec.name}.sent", lambda: max((encoder.sent for encoder in encoders.values()), default=0), set_sent,
            lambda: set_sent(0), reshard=max, optional=True,
        )  # fmt: skip
        state.custom(
            f"{codec.name}.senders", lambda: [[dest, encoder.state_dict()] for dest, encoder in encoders.items()],
            load_senders, lambda: None, optional=True,
        )  # fmt: skip
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

    def _agree(self) -> None:
        """Collective. After loading, set parents' copies of the values to their children's: n bytes per child."""
        above = [(parent, t) for parent, tensors in self._common_above.items() for t in tensors if t.numel()]
        sends = [self._comm.isend(tensor, parent) for parent, tensor in above]
        for child, tensors in self._common.items():
            for tensor in filter(Tensor.numel, tensors):
                self._comm.irecv(tensor, child, 0).wait()
        for send in sends:
            send.wait()
