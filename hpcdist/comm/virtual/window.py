"""Windows of virtual ranks: other ranks read and change memory at the virtual time of arrival.

With latency a, bandwidth b and n bytes, on free links (`network` says how transfers queue):

- get: the request takes a, then the data a + n/b on the owner's outgoing and the caller's incoming link;
- put, accumulate: the data takes a + n/b, the acknowledgement a;
- fetch_add, compare_and_swap: 2a, as the element is part of the header;
- wait on another rank's memory: a for the request, and a from the change that satisfies it to the return.

A transfer that takes time can be torn, like a real one. Put and accumulate change the first half of the elements when
the first byte arrives and the second half with the last byte. A get reads the second half when the first byte leaves
the owner and the first half with the last byte. MPI guarantees no order; with this one every get that overlaps a put of
equal length is torn, so tests detect code that relies on consistent reads. A transfer that takes no time is not torn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from hpcdist.comm.capabilities import RankMemory
from hpcdist.comm.transfer import addable, check_flat
from hpcdist.comm.virtual.clock import VirtualRank
from hpcdist.comm.virtual.group import Member
from hpcdist.comm.virtual.network import Path
from hpcdist.comm.window import Memory, Predicate, Window, atomic


class Exposed:
    """One rank's memory in a window; wakes ranks that wait for a change of it."""

    def __init__(self, tensor: Tensor, owner: VirtualRank):
        self.tensor, self.owner = tensor.detach(), owner
        self._waiters: list[Waiter] = []

    def changed(self, first: float = -math.inf, stop: float = math.inf) -> None:
        """Wake waiters whose predicate is now true; elements [first, stop), by default any, may have changed."""
        for waiter in tuple(self._waiters):
            if waiter.first < stop and first < waiter.stop:
                waiter.check()

    def watch(self, waiter: Waiter) -> None:
        """Add a waiter; wake it immediately if its predicate is true."""
        self._waiters.append(waiter)
        if self not in self.owner.watched:
            self.owner.watched.append(self)
        waiter.check()

    def unwatch(self, waiter: Waiter) -> None:
        """Remove a waiter; do nothing if its request has not arrived yet."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            if not self._waiters:
                self.owner.watched.remove(self)


class Waiter:
    """A rank that waits until a predicate is true for elements [first, stop) of a rank's memory."""

    def __init__(self, rank: VirtualRank, predicate: Predicate, memory: Exposed, first: int, stop: int):
        self._rank, self._predicate = rank, predicate
        self.first, self.stop = first, stop
        self._elements = memory.tensor[first:stop]
        self.wake: Callable[[], None] | None = None  # None: not waiting (any more)

    def check(self) -> None:
        """Wake the rank if the predicate is true. Runs in the thread of the rank that changed the memory."""
        if self.wake is None:
            return
        try:
            holds = bool(self._predicate(self._elements))
        except BaseException as error:
            holds, self._rank.error = True, error
        if holds:
            self.wake()
            self.wake = None


class VirtualMemory(Memory):
    """One memory per rank of a group, with get and put."""

    def __init__(self, member: Member, local: Tensor, memories: list[Exposed]):
        super().__init__(local, [memory.tensor.numel() for memory in memories], member.rank, member.traffic)
        self._member, self._clock, self._memories = member, member.clock, memories

    def _check(self, rank: int, offset: int, tensor: Tensor | None = None, count: int | None = None) -> int:
        self._member.enter()
        return super()._check(rank, offset, tensor, count)

    # --- transfers ------------------------------------------------------------------------------------------------
    def _get(self, out: Tensor, rank: int, offset: int) -> None:
        memory = self._memories[rank]
        part = memory.tensor[offset : offset + out.numel()]
        with self._member.counted("communicating_s"):
            effect = self._read(out.detach(), part, self._member.path_from(rank))
            self._clock.perform(self._member.me, f"a get from rank {memory.owner.rank}", effect)

    def _read(self, out: Tensor, part: Tensor, path: Path) -> Iterator[float]:
        """Effect of a get: reserve the links, and copy both halves at their times."""
        half, duration_s = out.numel() // 2, path.duration_s(out.nbytes)
        yield self._clock.now_s + path.latency_s
        start_s, end_s = path.out.reserve(self._clock.now_s, duration_s)
        yield start_s
        arrival_s = path.into.reserve(start_s + path.latency_s, duration_s)[1]
        _copy(out[half:], part[half:])
        yield end_s
        _copy(out[:half], part[:half])
        yield arrival_s

    def _put(self, values: Tensor, rank: int, offset: int) -> None:
        self._change("put", values, rank, offset, _copy)

    def writing(self, values: Tensor, rank: int, offset: int) -> Iterator[float]:
        """Return the effect that writes values at their time of arrival."""
        self._check(rank, offset, values)
        return self._write(values.detach(), rank, offset, _copy)

    def _change(self, what: str, values: Tensor, rank: int, offset: int, apply: Callable) -> None:
        with self._member.counted("communicating_s"):
            effect = self._write(values.detach(), rank, offset, apply)
            self._clock.perform(self._member.me, f"a {what} to rank {self._memories[rank].owner.rank}", effect)

    def _write(self, values: Tensor, rank: int, offset: int, apply: Callable) -> Iterator[float]:
        """Effect of a put or accumulate: reserve the links, and apply both halves at their times."""
        memory, path = self._memories[rank], self._member.path_to(rank)
        n, half, duration_s = values.numel(), values.numel() // 2, path.duration_s(values.nbytes)
        start_s, _ = path.out.reserve(self._clock.now_s, duration_s)
        yield start_s
        enter_s, arrival_s = path.into.reserve(start_s + path.latency_s, duration_s)
        for at_s, first, stop in ((enter_s, 0, half), (arrival_s, half, n)):
            yield at_s
            if first < stop:
                apply(memory.tensor[offset + first : offset + stop], values[first:stop])
                memory.changed(offset + first, offset + stop)
        yield arrival_s + path.latency_s

    def _release(self) -> None:
        super()._release()
        self._memories = []


class VirtualWindow(VirtualMemory, Window):
    """A window of virtual ranks: one memory per rank."""

    def _accumulate(self, values: Tensor, rank: int, offset: int) -> None:
        self._change("accumulate", values, rank, offset, _add)

    def _atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        memory, before = self._memories[rank], list[int]()  # the effect appends the old value
        latency_s, element = self._member.path_to(rank).latency_s, memory.tensor[offset]

        def effect() -> Iterator[float]:
            yield self._clock.now_s + latency_s
            before.append(int(element))
            element.fill_(atomic(what, before[0], *values))
            memory.changed(offset, offset + 1)
            yield self._clock.now_s + latency_s

        with self._member.counted("communicating_s"):
            self._clock.perform(self._member.me, f"a {what} on rank {memory.owner.rank}", effect())
        return before[0]

    def _wait(
        self, predicate: Predicate, rank: int, offset: int, count: int, what: str, limit_s: float | None,
        by: Collection[int],
    ) -> None:  # fmt: skip
        memory = self._memories[rank]
        me, latency_s = self._member.me, self._member.path_to(rank).latency_s
        waiter = Waiter(me, predicate, memory, offset, offset + count)
        waiter.wake = lambda: self._clock.wake(me, self._clock.now_s + latency_s)

        def request() -> Iterator[float]:
            yield self._clock.now_s + latency_s
            memory.watch(waiter)

        try:
            with self._member.counted("waiting_s"):
                limit_s = self._member.failures.deadline_s if limit_s is None else limit_s
                self._clock.block(me, what, limit_s, lambda: self._clock.spawn(request()))
        finally:
            waiter.wake = None
            memory.unwatch(waiter)

    def close(self) -> None:
        self._member.synchronize("close of a window")
        self._release()


class VirtualAttached(VirtualMemory):
    """Existing tensors of virtual ranks, attached for get and put."""

    def close(self) -> None:
        self._member.enter()
        self._release()


class VirtualRankMemory(RankMemory):
    """The `RankMemory` of virtual ranks."""

    can_attach = True

    def __init__(self, member: Member, nodes: Sequence[int]):
        super().__init__(member.rank, nodes)
        self._member = member

    def attach(self, tensor: Tensor) -> Memory:
        check_flat(tensor)
        exposed = self.expose(f"attach of {tensor.numel()} x {tensor.dtype}", tensor)
        return VirtualAttached(self._member, tensor, exposed)

    def expose(self, call: str, local: Tensor) -> list[Exposed]:
        """Collective. Return the memories of all ranks: this one's is `local`. `call` describes the call."""
        group = self._member.group

        def conclude(memories: list[Exposed]) -> tuple[list, float]:
            return [memories] * len(group.members), group.rounds_s()

        return self._member.synchronize(call, Exposed(local, self._member.me), conclude)


# An effect may run in any rank's thread, and only a thread in inference mode may write a tensor that was created in
# inference mode (it may write other tensors, too).
@torch.inference_mode()
def _copy(into: Tensor, values: Tensor) -> None:
    into.copy_(values)


@torch.inference_mode()
def _add(into: Tensor, values: Tensor) -> None:
    addable(into).add_(addable(values).to(into.device))
