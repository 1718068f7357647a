"""Carry tensors one way between children and parents: requests up, replies down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.strategies.server.codec import NOTHING, Codec, Decoder, Encoder, buffers, room
from hpcdist.strategies.server.shards import Shard

Ends = Sequence[tuple[int, Shard]]  # ranks, and the shard that goes from or to each


class Channel:
    """Collective. Open windows in which each rank has a slot for every rank that sends to it.

    Compressed, a rank has in common with its parents, and with each child, what `codec.py` keeps: with parents, whose
    shards differ, the parts of one whole request.

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
