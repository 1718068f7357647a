"""Carry tensors one way between children and parents, compressed or as they are.

Compressed, both ends remember what they must, so that nothing is lost and both have the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.compress import CompressionConfig, Compressor, Feedback, Span, load
from hpcdist.errors import ConfigError
from hpcdist.strategies.server.placement import Shard

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
        spans: the parameters in each flat tensor of a whole request.

    Reference: Hanlin Tang, Chen Yu, Xiangru Lian, Tong Zhang, Ji Liu, "DoubleSqueeze: parallel stochastic gradient
    descent with double-pass error-compensated compression", 2019; for differences, Constantin Philippenko, Aymeric
    Dieuleveut, "Preserved central model for faster bidirectional compression in distributed settings", 2021.
    """

    config: CompressionConfig
    content: Literal["gradients", "values", "moves"]
    spans: Sequence[Sequence[Span]]

    def check(self) -> None:
        """Raise ConfigError where what differences leave out would grow."""
        config = self.config
        try:
            if self.content == "values":
                load(config.name).Config.from_mapping(config.options, "strategy.compression").check_feedback()
        except ValueError as error:
            raise ConfigError(
                "strategy.compression must lose less than there is where differences of parameters are compressed, as "
                f"with error feedback; got {config.name}: {error} Or set strategy.compress_answers = false, if only "
                "gradients are to be compressed."
            ) from error

    def compressors(self, shard: Shard, stream: int = 0) -> list[Compressor]:
        """Make one compressor for each flat tensor's part."""
        parts = zip(shard.ranges, shard.spans(self.spans), strict=True)
        return [self.config.make(stop - start, own, stream) for (start, stop), own in parts]


def buffers(like: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros to code with: on the host, in float32, or in float64 for tensors of that."""
    return [torch.zeros(t.numel(), dtype=torch.float64 if t.dtype == torch.float64 else torch.float32) for t in like]


def room(part: Tensor) -> int:
    """Return the bytes that the longest message takes for such a part of a buffer."""
    return -(-part.nbytes // _ALIGNED) * _ALIGNED


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
        self._feedbacks = []
        for compressor, part in zip(codec.compressors(shard, stream), self.kept, strict=True):
            feedback = Feedback(compressor, part[:0], config.error_feedback)
            feedback.residual = part
            self._feedbacks.append(feedback)

    def encode(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """Return the messages to send, and what stands in the place of their lengths."""
        self.sent += 1
        whole = self._whole or self.sent <= self._warmup
        messages = []
        for part, kept, feedback in zip(parts, self.kept, self._feedbacks, strict=True):
            found = None if whole or not part.numel() else self._compressed(part, kept, feedback)
            messages.append(self._uncompressed(part, kept, feedback, whole) if found is None else (found, len(found)))
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

    def state(self) -> dict:
        """Return what the compressors remember."""
        return {"sent": self.sent, "compressors": [feedback.compressor.state() for feedback in self._feedbacks]}

    def load_state(self, state: dict) -> None:
        """Take up what `state()` gave."""
        self.sent = state["sent"]
        for feedback, saved in zip(self._feedbacks, state["compressors"], strict=True):
            feedback.compressor.load_state(saved)


class Decoder:
    """Decode what one rank sends of one shard.

    Args:
        compressors: of `Codec.compressors`, for all senders of the shard.
        slots: where messages arrive.
        out: buffers, overwritten by what each message stands for; values are kept up to date there.
    """

    def __init__(self, codec: Codec, compressors: list[Compressor], slots: Sequence[Tensor], out: Sequence[Tensor]):
        self._adds = codec.content == "values"
        self._compressors, self._slots, self.out = compressors, list(slots), list(out)

    def read(self, lengths: Sequence[int]) -> Iterator[Tensor]:
        """Decode messages of these lengths, one after the other; to be taken once."""
        for compressor, slot, out, length in zip(self._compressors, self._slots, self.out, lengths, strict=True):
            if length == WHOLE:
                out.copy_(slot[: out.nbytes].view(out.dtype))
            elif length != NOTHING:
                (compressor.add if self._adds else compressor.decode)(slot[:length], out)
            yield out


Ends = Sequence[tuple[int, Shard]]  # ranks, and the shard that goes from or to each


class Channel:
    """Collective. Open windows in which each rank has a slot for every rank that sends to it.

    Compressed, a rank has in common with its parents, and with each child, what encoders and decoders keep: with
    parents, whose shards differ, the parts of one whole request.

    Args:
        codec: how the tensors are compressed; None: not at all.
        like: flat tensors as long as a whole request; if values are sent, those that both ends have by now.
        sources: from which ranks a rank's arrive.
        dests: to which ranks this rank's go.
        up: from children to parents.

    Attributes:
        words: how many lengths go beside the tensors.
        whole: in common with the parents, if compressed.
        arrived: what has arrived from all sources, put together.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: Codec | None,
        like: Sequence[Tensor],
        sources: Callable[[int], Ends],
        dests: Ends,
        up: bool,
    ):
        self._comm, self._codec = comm, codec
        self._wide = like if codec is None else buffers(like)
        self.words = 0 if codec is None else len(like)
        own = sources(comm.rank)
        slots, lengths = self._lay(own)
        dtypes = [t.dtype if codec is None else torch.uint8 for t in like]
        self._windows = [comm.window(n, dtype) for n, dtype in zip(lengths, dtypes, strict=True)]
        self._slots = {
            source: [window.local[first:last] for window, (first, last) in zip(self._windows, slot, strict=True)]
            for (source, _), slot in zip(own, slots, strict=True)
        }
        self._dests = dict(dests)
        self._begins = {dest: self._own_slot(sources(dest)) for dest in self._dests}
        self.whole: list[Tensor] = []
        self._parents, self._children = map(dict, (dests, own) if up else (own, dests))
        self._common: dict[int, list[Tensor]] = {}
        if codec is not None:
            self._remember(own, up)
            self.begin(like)
        self.arrived = [window.local for window in self._windows] if codec is None else self.whole

    def _lay(self, ends: Ends) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Return where the slots of these ranks lie in each window, and how long the windows are; in elements."""
        at, slots = [0] * len(self._wide), []
        for _, shard in ends:
            sizes = [part.numel() if self._codec is None else room(part) for part in shard.of(self._wide)]
            slots.append([(first, first + size) for first, size in zip(at, sizes, strict=True)])
            at = [last for _, last in slots[-1]]
        return slots, at

    def _own_slot(self, ends: Ends) -> list[int]:
        """Return where this rank's slot begins in each window of a rank to which these send."""
        slot = [source for source, _ in ends].index(self._comm.rank)
        return [first for first, _ in self._lay(ends)[0][slot]]

    def _remember(self, own: Ends, up: bool) -> None:
        """Make the codecs of all ends, and what they have in common with the other end."""
        codec, rank = self._codec, self._comm.rank
        self.whole = self._wide if self._parents else []
        for child, shard in self._children.items():
            shared = next(iter(self._common.values()), None)
            each = shared is None or codec.content == "values"
            self._common[child] = buffers(shard.of(self._wide)) if each else shared
        below, above = self._common, {parent: shard.of(self.whole) for parent, shard in self._parents.items()}
        leaving, arriving = (above, below) if up else (below, above)
        self._common_above = above
        self._encoders = {
            dest: Encoder(codec, shard, leaving[dest], rank * self._comm.size + dest, whole=dest == rank)
            for dest, shard in self._dests.items()
        }
        decoders = codec.compressors(own[0][1]) if own and up else None  # for all children the same
        self._decoders = {
            source: Decoder(codec, decoders or codec.compressors(shard), self._slots[source], arriving[source])
            for source, shard in own
        }

    # --- tensors --------------------------------------------------------------------------------------------------
    def puts(self, dest: int, tensors: Sequence[Tensor]) -> tuple[list[Put], list[int]]:
        """Encode this shard's `tensors`, or none, for `dest`: the puts that bring them, and the lengths to tell it."""
        if not tensors:
            return [], [NOTHING] * self.words
        payload, lengths = (tensors, []) if self._codec is None else self._encoders[dest].encode(tensors)
        places = zip(self._windows, payload, self._begins[dest], strict=True)
        return [Put(window, part, dest, begin) for window, part, begin in places if part.numel()], lengths

    def sent(self, dest: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what the `tensors` sent last stand for at their destination."""
        return tensors if self._codec is None else self._encoders[dest].kept

    def read(self, source: int, lengths: Sequence[int]) -> Iterable[Tensor]:
        """Decode what has arrived from `source`. Compressed gradients are decoded as they are gone through, once."""
        if self._codec is None:
            return self._slots[source]
        found = self._decoders[source].read(lengths)
        return found if self._codec.content == "gradients" else list(found)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def begin(self, like: Sequence[Tensor]) -> None:
        """Begin as if nothing had been sent, or with the values in `like` at both ends."""
        for whole, values in zip(self.whole, like):
            whole.copy_(values) if self._codec.content == "values" else whole.zero_()
        if self._codec.content == "values":
            for child, shard in self._children.items():
                for own, values in zip(self._common[child], shard.of(like), strict=True):
                    own.copy_(values)

    def state(self) -> dict:
        """Return what compressors remember, and what a child has in common with its parents."""
        senders = [[dest, encoder.state()] for dest, encoder in self._encoders.items()]
        sent = max((encoder.sent for encoder in self._encoders.values()), default=0)
        return {"whole": self.whole, "senders": senders, "sent": sent}

    def reshard(self, states: Sequence[dict], workers: int) -> dict:
        """Return a state for another number of ranks: each worker has the mean of the gradients that were not sent."""
        if not states:
            return {}
        resharded: dict = {"sent": max(state["sent"] for state in states)}
        if self._codec.content == "gradients":
            sums = zip(*(state["whole"] for state in states if state["whole"]), strict=True)
            resharded["whole"] = [sum(tensors) / workers for tensors in sums]
        return resharded

    def load_state(self, state: dict, like: Sequence[Tensor]) -> None:
        """Collective. Take up what `state()` gave; what is not in there begins with `like`.

        Parents get their values from their children: n bytes of messages per child.
        """
        self.begin(like)
        for whole, saved in zip(self.whole, state.get("whole", [])):
            whole.copy_(saved)
        for encoder in self._encoders.values():
            encoder.sent = state.get("sent", 0)
        for dest, saved in state.get("senders", []):
            self._encoders[dest].load_state(saved)
        if self._codec.content != "values":
            return
        above = [(parent, t) for parent, tensors in self._common_above.items() for t in tensors if t.numel()]
        sends = [self._comm.isend(tensor, parent) for parent, tensor in above]
        for child, tensors in self._common.items():
            for tensor in filter(Tensor.numel, tensors):
                self._comm.irecv(tensor, child, 0).wait()
        for send in sends:
            send.wait()

    def close(self) -> None:
        """Collective. Close the windows."""
        self._slots.clear()  # their memory goes
        self.arrived = []
        if self._codec is not None:
            self._decoders.clear()
        for window in self._windows:
            window.close()
