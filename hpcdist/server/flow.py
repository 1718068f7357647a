"""What flows one way between children and parents: letters up, answers down. Where it arrives, and how it is coded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.server.coding import NOTHING, Coding, Receiver, Sender, buffers, room
from hpcdist.server.shards import Shard

Ends = Sequence[tuple[int, Shard]]  # ranks, and the shard that goes from or to each


class Flow:
    """Collective. Windows in which each rank has a slot for every rank that sends to it.

    Compressed, a rank has in common with its parents, and with each child, what `server/coding.py` keeps: with parents,
    whose shards differ, the parts of one whole letter.

    Args:
        coding: how it is compressed; None: not at all.
        like: flat tensors as long as a whole letter; if values flow, those that both ends have by now.
        sources: from whom a rank's arrive.
        dests: to whom this rank's go.
        up: from children to parents.
    """

    def __init__(
        self,
        comm: Communicator,
        coding: Coding | None,
        like: Sequence[Tensor],
        sources: Callable[[int], Ends],
        dests: Ends,
        up: bool,
    ):
        self._comm, self._coding = comm, coding
        self._wide = like if coding is None else buffers(like)
        own = sources(comm.rank)
        slots, lengths = self._lay(own)
        dtypes = [t.dtype if coding is None else torch.uint8 for t in like]
        self._windows = [comm.window(n, dtype) for n, dtype in zip(lengths, dtypes, strict=True)]
        self._slots = {
            source: [window.local[first:last] for window, (first, last) in zip(self._windows, slot, strict=True)]
            for (source, _), slot in zip(own, slots, strict=True)
        }
        self._dests = dict(dests)
        self._begins = {dest: self._own_slot(sources(dest)) for dest in self._dests}
        self.whole: list[Tensor] = []  # in common with the parents
        self._parents, self._children = map(dict, (dests, own) if up else (own, dests))
        self._common: dict[int, list[Tensor]] = {}
        if coding is not None:
            self._remember(own, up)
            self.begin(like)

    @property
    def words(self) -> int:
        """How many lengths go beside the tensors."""
        return 0 if self._coding is None else len(self._wide)

    def _lay(self, ends: Ends) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Where the slots of these ranks lie in each window, and how long the windows are; in elements."""
        at, slots = [0] * len(self._wide), []
        for _, shard in ends:
            sizes = [part.numel() if self._coding is None else room(part) for part in shard.of(self._wide)]
            slots.append([(first, first + size) for first, size in zip(at, sizes, strict=True)])
            at = [last for _, last in slots[-1]]
        return slots, at

    def _own_slot(self, ends: Ends) -> list[int]:
        """Where this rank's slot begins in each window of a rank to which these send."""
        slot = [source for source, _ in ends].index(self._comm.rank)
        return [first for first, _ in self._lay(ends)[0][slot]]

    def _remember(self, own: Ends, up: bool) -> None:
        coding, rank = self._coding, self._comm.rank
        self.whole = self._wide if self._parents else []
        for child, shard in self._children.items():
            shared = next(iter(self._common.values()), None)
            each = shared is None or coding.content == "values"
            self._common[child] = buffers(shard.of(self._wide)) if each else shared
        below, above = self._common, {parent: shard.of(self.whole) for parent, shard in self._parents.items()}
        leaving, arriving = (above, below) if up else (below, above)
        self._common_above = above
        self.senders = {
            dest: Sender(coding, shard, leaving[dest], rank * self._comm.size + dest, whole=dest == rank)
            for dest, shard in self._dests.items()
        }
        decoders = coding.compressors(own[0][1]) if own and up else None  # for all children the same
        self._receivers = {
            source: Receiver(coding, decoders or coding.compressors(shard), self._slots[source], arriving[source])
            for source, shard in own
        }

    # --- what flows -----------------------------------------------------------------------------------------------
    def puts(self, dest: int, tensors: Sequence[Tensor]) -> tuple[list[Put], list[int]]:
        """What brings this shard's `tensors`, or none, to `dest`; and the lengths to tell it."""
        if not tensors:
            return [], [NOTHING] * self.words
        payload, lengths = (tensors, []) if self._coding is None else self.senders[dest].encode(tensors)
        places = zip(self._windows, payload, self._begins[dest], strict=True)
        return [Put(window, part, dest, begin) for window, part, begin in places if part.numel()], lengths

    def told(self, dest: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the `tensors` sent last stand for at their destination."""
        return tensors if self._coding is None else self.senders[dest].kept

    def read(self, source: int, lengths: Sequence[int]) -> Iterable[Tensor]:
        """What has arrived from `source`. Compressed gradients are decoded as they are gone through, once."""
        if self._coding is None:
            return self._slots[source]
        found = self._receivers[source].read(lengths)
        return found if self._coding.content == "gradients" else list(found)

    def arrived(self) -> list[Tensor]:
        """What has arrived from all parents, put together."""
        return [window.local for window in self._windows] if self._coding is None else self.whole

    def common(self, child: int) -> list[Tensor]:
        """Compressed values: those that this rank and a child have in common."""
        return self._common[child]

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def begin(self, like: Sequence[Tensor]) -> None:
        """Nothing has been sent, or both ends have the values in `like`."""
        for whole, values in zip(self.whole, like):
            whole.copy_(values) if self._coding.content == "values" else whole.zero_()
        if self._coding.content == "values":
            for child, shard in self._children.items():
                for own, values in zip(self._common[child], shard.of(like), strict=True):
                    own.copy_(values)

    def state(self) -> dict:
        """What compressors remember, and what a child has in common with its parents."""
        senders = [[dest, sender.state()] for dest, sender in self.senders.items()]
        sent = max((sender.sent for sender in self.senders.values()), default=0)
        return {"whole": self.whole, "senders": senders, "sent": sent}

    def adapted(self, states: Sequence[dict], workers: int) -> dict:
        """For a world of another size: of gradients, each worker has the mean of what was not sent."""
        if self._coding is None or not states:
            return {}
        adapted: dict = {"sent": max(state["sent"] for state in states)}
        if self._coding.content == "gradients":
            sums = zip(*(state["whole"] for state in states if state["whole"]), strict=True)
            adapted["whole"] = [sum(tensors) / workers for tensors in sums]
        return adapted

    def load_state(self, state: dict, like: Sequence[Tensor]) -> None:
        """Collective. Takes up what `state()` gave; what is not in there begins with `like`.

        Parents get their values from their children: n bytes of messages per child.
        """
        self.begin(like)
        for whole, saved in zip(self.whole, state.get("whole", [])):
            whole.copy_(saved)
        for sender in self.senders.values():
            sender.sent = state.get("sent", 0)
        for dest, saved in state.get("senders", []):
            self.senders[dest].load_state(saved)
        if self._coding.content != "values":
            return
        above = [(parent, t) for parent, tensors in self._common_above.items() for t in tensors if t.numel()]
        sends = [self._comm.isend(tensor, parent) for parent, tensor in above]
        for child, tensors in self._common.items():
            for tensor in filter(Tensor.numel, tensors):
                self._comm.irecv(tensor, child, 0).wait()
        for send in sends:
            send.wait()

    def close(self) -> None:
        """Collective."""
        self._slots.clear()  # their memory goes
        if self._coding is not None:
            self._receivers.clear()
        for window in self._windows:
            window.close()
