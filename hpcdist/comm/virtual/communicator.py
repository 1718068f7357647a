"""The communicator of virtual ranks, on the virtual clock, and its call queue: a thread that runs calls meanwhile."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from hpcdist.comm.capabilities import Failures, Platform, Trace
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transfer import Envelope, Request, Traffic, addable, check_flat
from hpcdist.comm.virtual.clock import IDLE, VirtualRank
from hpcdist.comm.virtual.compute import at_least_0, require
from hpcdist.comm.virtual.group import Group, Member, Message, Receive, children, sum_in_rank_order
from hpcdist.comm.virtual.window import VirtualMemory, VirtualRankMemory, VirtualWindow
from hpcdist.comm.window import Put, Window
from hpcdist.comm.work import CallQueue, Task
from hpcdist.errors import CommunicationError


class VirtualCommunicator(Communicator):
    """A communicator of virtual ranks. `deadline_s` counts virtual seconds, and is infinite unless the body sets it.

    Deadlocks are detected immediately, without a deadline, and long waits cost no real time.
    """

    memory: VirtualRankMemory
    mpi = None

    def __init__(self, group: Group, rank: int, deadline_s: float = math.inf, traffic: Traffic | None = None):
        self.rank, self.size = rank, len(group.members)
        self._group, self._cluster = group, group.cluster
        self.nodes = group.nodes
        self.platform = Platform("virtual ranks", group.members, self._cluster.description)
        self.trace = Trace(traffic)
        self.failures = Failures(self.size, deadline_s)
        self._member = Member(group, rank, self.failures, self.trace.traffic)
        self.memory = VirtualRankMemory(self._member, self.nodes)
        self.clock, self._traffic = self._member.clock, self.trace.traffic

    # --- point to point -------------------------------------------------------------------------------------------
    def _isend(self, tensor: Tensor, dest: int, tag: int) -> Request:
        self._member.enter()
        path = self._member.path_to(dest)
        duration_s = path.duration_s(tensor.nbytes)
        start_s, end_s = path.out.reserve(self.clock.now_s, duration_s)
        message = Message(self.rank, tag, tensor.itemsize, tensor.detach().clone().view(torch.uint8))
        self.clock.spawn(self._group.arrivals[dest].carry(message, path, start_s, duration_s))
        self._traffic.sent(tensor.nbytes)
        return SendRequest(self._member, end_s)

    def _irecv(self, tensor: Tensor, source: int, tag: int) -> Request:
        self._member.enter()
        return ReceiveRequest(self._member, tensor, source, tag)

    def _probe(self, source: int, tag: int, block: bool) -> Envelope | None:
        self._member.enter(polling=not block)
        arrivals, awaited = self._member.arrivals, self._member.describe(source, tag)
        with self._member.counted("waiting_s"):
            if arrivals.find(source, tag) is not None:
                pass
            elif block:
                arrivals.block((source, tag), awaited, self.failures.deadline_s)
            else:
                self.clock.poll(self._member.me, (self, source, tag), awaited)
        message = arrivals.find(source, tag)
        return None if message is None else Envelope(message.source, message.tag, message.data.nbytes)

    # --- collective -----------------------------------------------------------------------------------------------
    def allreduce(self, tensor: Tensor) -> None:
        """Collective. Sum `tensor` over all ranks in place, in rank order, with the time and traffic of a ring."""
        check_flat(tensor)
        local, hops = addable(tensor), 2 * (self.size - 1)

        def conclude(tensors: list[Tensor]) -> tuple[list, float]:
            group = self._group
            seconds = hops * group.latency_s + hops * local.nbytes / self.size / group.bandwidth_bytes_s
            return [sum_in_rank_order(tensors)] * self.size, seconds

        local.copy_(self._member.synchronize(f"allreduce of {_shape(tensor)}", local, conclude, "communicating_s"))
        self._traffic.sent(hops * local.nbytes // self.size, hops)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        """Collective. Copy root's `tensor` to all ranks, with the time of a binomial tree."""
        local = tensor.detach()

        def conclude(tensors: list[Tensor]) -> tuple[list, float]:
            return [tensors[root].clone()] * self.size, self._group.rounds_s(local.nbytes)

        call = f"broadcast of {_shape(tensor)} from root {root}"
        local.copy_(self._member.synchronize(call, local, conclude, "communicating_s"))
        messages = children(self.rank, root, self.size)
        self._traffic.sent(messages * local.nbytes, messages)

    def _gather(self, data: bytes) -> list[bytes]:
        """Collective. Gather every rank's `data`, with the time of a ring."""

        def conclude(everything: list[bytes]) -> tuple[list, float]:
            longest_s = max(map(len, everything)) / self._group.bandwidth_bytes_s
            return [everything] * self.size, (self.size - 1) * (self._group.latency_s + longest_s)

        everything = self._member.synchronize("gather", data, conclude, "communicating_s")
        self._traffic.sent(len(data) * (self.size - 1), self.size - 1)
        return everything

    def barrier(self) -> None:
        self._member.synchronize("barrier")

    def _split(self, color: int | None, key: int, traffic: Traffic | None) -> VirtualCommunicator | None:

        def conclude(choices: list[tuple[int | None, int]]) -> tuple[list, float]:
            results: list[tuple[Group, int] | None] = [None] * self.size
            for chosen in {c for c, _ in choices if c is not None}:
                ordered = sorted((k, r) for r, (c, k) in enumerate(choices) if c == chosen)
                group = Group(self._cluster, [self._group.members[r] for _, r in ordered])
                for new, (_, old) in enumerate(ordered):
                    results[old] = (group, new)
            return results, self._group.rounds_s()

        result = self._member.synchronize("split", (color, key), conclude)
        if result is None:
            return None
        group, rank = result
        return VirtualCommunicator(group, rank, self.failures.deadline_s, traffic)

    def _window(self, count: int, dtype: torch.dtype) -> Window:
        with torch.inference_mode(False):  # ranks in other modes may write it
            local = torch.zeros(count, dtype=dtype)
        return VirtualWindow(self._member, local, self.memory.expose(f"window of {dtype}", local))

    def put_all(self, puts: Iterable[Put]) -> None:
        self._member.enter()
        effects = []
        for window, values, rank, offset in puts:
            effects.append(cast(VirtualMemory, window).writing(values, rank, offset))
            if rank != self.rank:
                self._traffic.sent(values.nbytes)
        with self._member.counted("communicating_s"):
            self.clock.perform(self._member.me, f"{len(effects)} puts", *effects)

    def queue(self) -> VirtualQueue:
        return VirtualQueue(self._member)

    # --- time and end ---------------------------------------------------------------------------------------------
    def compute(self, share: float = 1.0) -> float:
        self._member.enter()
        world_rank = self._member.me.rank
        seconds = share * self._cluster.compute.sample(world_rank, self._cluster.generators[world_rank])
        require(at_least_0(seconds), "seconds sampled by a compute model", "finite and at least 0", seconds)
        self.clock.advance(self._member.me, self.clock.now_s + seconds)
        return seconds

    def now(self) -> float:
        return self.clock.now_s

    def close(self) -> None:
        self._member.synchronize("close")
        self._member.closed = True


def _shape(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {tensor.dtype}"


class SendRequest(Request):
    """A send: complete when the message has left the sender's link, whether or not it has been received."""

    def __init__(self, member: Member, end_s: float):
        self._member, self._end_s = member, end_s

    def done(self) -> bool:
        self._member.enter(polling=True)
        if self._member.clock.now_s < self._end_s:
            with self._member.counted("communicating_s"):
                self._member.clock.poll(self._member.me, self, "the end of a send", self._end_s)
        return self._member.clock.now_s >= self._end_s

    def wait(self) -> None:
        self._member.enter()
        if self._member.clock.now_s < self._end_s:
            with self._member.counted("communicating_s"):
                self._member.clock.advance(self._member.me, self._end_s)


class ReceiveRequest(Request):
    """A receive: `done` or `wait` writes the tensor."""

    def __init__(self, member: Member, tensor: Tensor, source: int, tag: int):
        self._member, self._arrivals = member, member.arrivals
        self._tensor: Tensor | None = tensor.detach()
        self._posted = Receive(source, tag)
        self._arrivals.post(self._posted)

    def done(self) -> bool:
        self._member.enter(polling=True)
        if self._posted.message is None:
            with self._member.counted("communicating_s"):
                self._member.clock.poll(self._member.me, self, self._awaits())
        if self._posted.message is None:
            return False
        self._copy()
        return True

    def wait(self) -> None:
        self._member.enter()
        with self._member.counted("communicating_s"):
            if self._posted.message is None:
                self._arrivals.block(self._posted, self._awaits(), self._member.failures.deadline_s)
        self._copy()

    def _awaits(self) -> str:
        return self._member.describe(self._posted.source, self._posted.tag)

    def _copy(self) -> None:
        """Copy the message into the tensor at the first call; later calls do nothing."""
        message, tensor, self._tensor = self._posted.message, self._tensor, None
        if message is None or tensor is None:
            return
        if message.data.nbytes > tensor.nbytes or message.itemsize != tensor.itemsize:
            raise CommunicationError(
                f"a message must fit the tensor it is received into; got {message.data.nbytes} bytes in elements of "
                f"{message.itemsize} from rank {message.source} with tag {message.tag}, for {tensor.nbytes} bytes in "
                f"elements of {tensor.itemsize}. Lengths and dtypes must agree."
            )
        tensor.view(torch.uint8)[: message.data.nbytes].copy_(message.data)


class VirtualQueue(CallQueue):
    """Runs a communicator's calls in order; see `CallQueue`. `member` is the rank in the communicator's group."""

    def __init__(self, member: Member):
        super().__init__(threaded=member.size > 1)
        self._member, self._waiting = member, deque[Task]()
        self._thread: VirtualRank

    def _start(self) -> None:
        self._thread = self._member.clock.thread(self._member.me.rank, self._run)

    def _event(self) -> threading.Event:
        self._member.enter()
        return VirtualEvent(self._member)

    def _put(self, task: Task) -> None:
        self._waiting.append(task)
        if self._thread.awaits is IDLE:
            self._member.clock.wake(self._thread)

    def _next(self) -> Task:
        while not self._waiting:
            self._member.clock.block(self._thread, IDLE)
        return self._waiting.popleft()


class VirtualEvent(threading.Event):
    """An event for which one thread of a virtual rank waits on the virtual clock."""

    def __init__(self, member: Member):
        super().__init__()
        self._member = member
        self._waits: VirtualRank | None = None

    def set(self) -> None:
        super().set()
        if self._waits is not None:
            self._member.clock.wake(self._waits)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until `set`, at most until the communicator's deadline; `timeout` is ignored."""
        self._member.enter()
        me = self._member.me
        try:
            while not self.is_set():
                self._waits = me
                self._member.clock.block(me, "the end of calls in flight", self._member.failures.deadline_s)
        finally:
            self._waits = None
        return True
