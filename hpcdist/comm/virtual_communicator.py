"""The seam of virtual ranks: a communicator on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.communicator import ANY, Communicator, Envelope, Put, Request, Traffic, Window, check_flat, check_tag
from hpcdist.comm.neighbourhood import Messages, Neighbourhood, check_graph
from hpcdist.comm.virtual_clock import VirtualClock
from hpcdist.comm.virtual_collectives import Meeting, addable, children, rounds, sum_in_rank_order
from hpcdist.comm.virtual_compute import ComputeModel, at_least_0, require
from hpcdist.comm.virtual_messages import Mailbox, Message, ReceiveRequest, SendRequest
from hpcdist.comm.virtual_network import Network, Path, Wiring
from hpcdist.comm.virtual_window import AttachedWindow, Memory, VirtualWindow
from hpcdist.errors import CommunicationError


class Cluster:
    """What all communicators of one run share."""

    def __init__(self, size: int, seed: int, network: Network, compute: ComputeModel):
        self.clock, self.wiring, self.compute = VirtualClock(size, seed), Wiring(network, size), compute
        sequences = (np.random.SeedSequence(seed, spawn_key=(rank, 1)) for rank in range(size))
        self.generators = [np.random.default_rng(sequence) for sequence in sequences]


class Group:
    """What the ranks of one communicator share. `members` are their ranks in the whole run."""

    def __init__(self, cluster: Cluster, members: list[int]):
        self.cluster, self.members = cluster, members
        ranks = [cluster.clock.ranks[member] for member in members]
        self.meeting = Meeting(cluster.clock, ranks)
        self.mailboxes = [Mailbox(rank, cluster.clock) for rank in ranks]
        self.latency_s, self.bandwidth_bytes_s = cluster.wiring.slowest(members)

    def rounds_s(self, n_bytes: int = 0) -> float:
        """log2 p rounds, each of one message of n bytes."""
        return rounds(len(self.members)) * (self.latency_s + n_bytes / self.bandwidth_bytes_s)


class VirtualCommunicator(Communicator):
    """A communicator of virtual ranks. `deadline_s` counts virtual seconds: infinite unless the body sets it.

    No deadline is needed against hanging, as a deadlock is seen at once; and no wait is too long in principle, as
    virtual seconds cost nothing.
    """

    can_attach = True
    library = "virtual ranks"

    def __init__(self, group: Group, rank: int):
        self.rank, self.size = rank, len(group.members)
        self.living = tuple(range(self.size))
        self.traffic, self.deadline_s = Traffic(), math.inf
        self._group, self._cluster = group, group.cluster
        self.clock = group.cluster.clock
        self._me = self.clock.ranks[group.members[rank]]
        nodes = [self._cluster.wiring.nodes[member] for member in group.members]
        index = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        self.nodes = tuple(index[node] for node in nodes)
        self._closed = False

    # --- what every call is made of -------------------------------------------------------------------------------
    def enter(self, *, polling: bool = False) -> None:
        """Every call begins here."""
        self.clock.enter(self._me, polling=polling)
        if self._closed:
            raise CommunicationError("a communicator must not be used once it is closed. Close it after its last use.")

    @contextmanager
    def counted(self, what: str) -> Iterator[None]:
        """Adds the virtual time that passes to `communicating_s` or `waiting_s` of the traffic."""
        start_s = self.clock.now_s
        try:
            yield
        finally:
            setattr(self.traffic, what, getattr(self.traffic, what) + self.clock.now_s - start_s)

    def path_to(self, rank: int) -> Path:
        return self._cluster.wiring.path(self._group.members[self.rank], self._group.members[rank])

    def path_from(self, rank: int) -> Path:
        return self._cluster.wiring.path(self._group.members[rank], self._group.members[self.rank])

    def meet(
        self,
        call: str,
        given: Any = None,
        conclude: Callable[[list], tuple[list, float]] | None = None,
        counted: str = "waiting_s",
    ) -> Any:
        """Collective. See Meeting.meet. By default nothing is taken away, and the time is a barrier's."""
        self.enter()
        if conclude is None:
            conclude = self._barrier
        with self.counted(counted):
            result = self._group.meeting.meet(self.rank, call, given, conclude, self.deadline_s)
        if counted == "waiting_s":
            self.traffic.sent(0, rounds(self.size))
        return result

    def _barrier(self, given: list) -> tuple[list, float]:
        return [None] * self.size, self._group.rounds_s()

    # --- point to point -------------------------------------------------------------------------------------------
    def sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int = 0) -> None:
        self.enter()
        self.check_peer(source, "source")
        sending = self.isend(send, dest, tag)
        self.irecv(recv, source, tag).wait()
        sending.wait()

    def isend(self, tensor: Tensor, dest: int, tag: int = 0) -> Request:
        self.enter()
        check_flat(tensor)
        self.check_peer(dest, "dest")
        check_tag(tag)
        path = self.path_to(dest)
        duration_s = path.duration_s(tensor.nbytes)
        start_s, end_s = path.out.reserve(self.clock.now_s, duration_s)
        message = Message.copy_of(tensor, self.rank, tag)
        self.clock.spawn(self._group.mailboxes[dest].carry(message, path, start_s, duration_s))
        self.traffic.sent(tensor.nbytes)
        return SendRequest(self, end_s)

    def irecv(self, tensor: Tensor, source: int = ANY, tag: int = ANY) -> Request:
        self._check_receive(source, tag)
        check_flat(tensor)
        return ReceiveRequest(self, self._group.mailboxes[self.rank], tensor, source, tag)

    def probe(self, source: int = ANY, tag: int = ANY, *, block: bool = True) -> Envelope | None:
        self._check_receive(source, tag, polling=not block)
        mailbox = self._group.mailboxes[self.rank]
        with self.counted("waiting_s"):
            if block:
                mailbox.await_message(source, tag, self.describe(source, tag), self.deadline_s)
            elif mailbox.find(source, tag) is None:
                self.clock.poll((self, source, tag), self.describe(source, tag))
        message = mailbox.find(source, tag)
        return None if message is None else Envelope(message.source, message.tag, message.data.nbytes)

    def _check_receive(self, source: int, tag: int, *, polling: bool = False) -> None:
        self.enter(polling=polling)
        if source != ANY:
            self.check_peer(source, "source")
        if tag != ANY:
            check_tag(tag)

    # --- collective -----------------------------------------------------------------------------------------------
    def allreduce(self, tensor: Tensor) -> None:
        """Collective. Sums `tensor` over all ranks in place, in rank order, rounding to its dtype after each addition.

        Takes the time of a ring, and sends its 2n(p-1)/p bytes in 2(p-1) messages.
        """
        check_flat(tensor)
        own, hops = addable(tensor), 2 * (self.size - 1)

        def conclude(tensors: list[Tensor]) -> tuple[list, float]:
            group = self._group
            seconds = hops * group.latency_s + hops * own.nbytes / self.size / group.bandwidth_bytes_s
            return [sum_in_rank_order(tensors)] * self.size, seconds

        own.copy_(self.meet(f"allreduce of {_shape(tensor)}", own, conclude, "communicating_s"))
        self.traffic.sent(hops * own.nbytes // self.size, hops)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Collective. Copies root's `tensor` into everyone's, through a binomial tree."""
        check_flat(tensor)
        self.check_peer(root, "root")
        own = tensor.detach()

        def conclude(tensors: list[Tensor]) -> tuple[list, float]:
            return [tensors[root].clone()] * self.size, self._group.rounds_s(own.nbytes)

        own.copy_(self.meet(f"broadcast of {_shape(tensor)} from root {root}", own, conclude, "communicating_s"))
        messages = children(self.rank, root, self.size)
        self.traffic.sent(messages * own.nbytes, messages)

    def exchange(self, data: bytes) -> list[bytes]:
        """Collective. Every rank's `data` in rank order, passed on around a ring."""

        def conclude(everything: list[bytes]) -> tuple[list, float]:
            longest_s = max(map(len, everything)) / self._group.bandwidth_bytes_s
            return [everything] * self.size, (self.size - 1) * (self._group.latency_s + longest_s)

        everything = self.meet("exchange", bytes(data), conclude, "communicating_s")
        self.traffic.sent(len(data) * (self.size - 1), self.size - 1)
        return list(everything)

    def barrier(self) -> None:
        self.meet("barrier")

    def split(self, color: int | None, key: int = 0) -> VirtualCommunicator | None:
        if color is not None and color < 0:
            raise CommunicationError(f"color must be an integer of at least 0, or None; got {color}.")

        def conclude(choices: list[tuple[int | None, int]]) -> tuple[list, float]:
            taken: list[tuple[Group, int] | None] = [None] * self.size
            for chosen in {c for c, _ in choices if c is not None}:
                ranks = sorted((k, r) for r, (c, k) in enumerate(choices) if c == chosen)
                group = Group(self._cluster, [self._group.members[r] for _, r in ranks])
                for new, (_, old) in enumerate(ranks):
                    taken[old] = (group, new)
            return taken, self._group.rounds_s()

        taken = self.meet("split", (color, key), conclude)
        if taken is None:
            return None
        comm = VirtualCommunicator(*taken)
        comm.deadline_s = self.deadline_s
        return comm

    def neighbourhood(self, sources: Sequence[int], destinations: Sequence[int]) -> Neighbourhood:
        check_graph(self, sources, destinations)
        channel = self.split(0)  # where nobody else sends
        channel.traffic = self.traffic
        return Messages(channel, sources, destinations, owned=True)

    def window(self, count: int, dtype: torch.dtype = torch.float32) -> Window:
        if count < 0:
            raise CommunicationError(f"count of a window must be at least 0; got {count}.")
        with torch.inference_mode(False):  # others, in other modes, may write it
            local = torch.zeros(count, dtype=dtype)
        return VirtualWindow(self, local, self._expose(f"window of {dtype}", local))

    def put_all(self, puts: Iterable[Put]) -> None:
        self.enter()
        effects = []
        for window, values, rank, offset in puts:
            effects.append(window.writing(values, rank, offset))
            if rank != self.rank:
                self.traffic.sent(values.nbytes)
        with self.counted("communicating_s"):
            self.clock.perform(f"{len(effects)} puts", *effects)

    def attach(self, tensor: Tensor) -> Window:
        check_flat(tensor)
        return AttachedWindow(self, tensor, self._expose(f"attach of {_shape(tensor)}", tensor))

    def _expose(self, call: str, local: Tensor) -> list[Memory]:
        def conclude(memories: list[Memory]) -> tuple[list, float]:
            return [memories] * self.size, self._group.rounds_s()

        return self.meet(call, Memory(local, self._me), conclude)

    def link(self) -> tuple[float, float]:
        return self._group.latency_s, 1 / self._group.bandwidth_bytes_s

    # --- time and end ---------------------------------------------------------------------------------------------
    def compute(self) -> float:
        self.enter()
        world_rank = self._me.rank
        seconds = self._cluster.compute.draw(world_rank, self._cluster.generators[world_rank])
        require(at_least_0(seconds), "seconds drawn by a compute model", "finite and at least 0", seconds)
        self.clock.advance(self.clock.now_s + seconds)
        return seconds

    def now(self) -> float:
        return self.clock.now_s

    def close(self) -> None:
        self.meet("close")
        self._closed = True

    # --- messages -------------------------------------------------------------------------------------------------
    def describe(self, source: int, tag: int) -> str:
        """The messages that a receive or a probe asks for; ranks by their numbers in the whole run."""
        whom = "any rank" if source == ANY else f"rank {self._group.members[source]}"
        return f"a message from {whom}, {'any tag' if tag == ANY else f'tag {tag}'}"


def _shape(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {tensor.dtype}"
