"""The seam of virtual ranks: a communicator on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import overload

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.messages import Messages, check_graph
from hpcdist.comm.neighbourhood import Neighbourhood
from hpcdist.comm.traffic import Traffic
from hpcdist.comm.transfer import ANY, Envelope, Request, check_flat, check_tag
from hpcdist.comm.virtual.arrivals import Message
from hpcdist.comm.virtual.collectives import addable, children, sum_in_rank_order
from hpcdist.comm.virtual.compute import at_least_0, require
from hpcdist.comm.virtual.group import Group
from hpcdist.comm.virtual.member import Member
from hpcdist.comm.virtual.messages import ReceiveRequest, SendRequest
from hpcdist.comm.virtual.window import Exposed, VirtualAttached, VirtualWindow
from hpcdist.comm.window import Memory, Put, Window
from hpcdist.errors import CommunicationError


class VirtualCommunicator(Communicator):
    """The seam on virtual ranks. `deadline_s` counts virtual seconds, and is infinite unless the body sets it.

    No deadline is needed against hanging, as a deadlock is seen at once; and no wait is too long in principle, as
    virtual seconds cost nothing.
    """

    can_attach = True
    library = "virtual ranks"

    def __init__(self, group: Group, rank: int, deadline_s: float = math.inf):
        self.rank, self.size = rank, len(group.members)
        self.living, self.world_ranks = tuple(range(self.size)), tuple(group.members)
        self._group, self._cluster = group, group.cluster
        self._member = Member(group, rank, deadline_s)
        self.clock, self.virtual = self._member.clock, self._cluster.description
        nodes = [self._cluster.wiring.nodes[member] for member in group.members]
        index = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        self.nodes = tuple(index[node] for node in nodes)

    @property
    def deadline_s(self) -> float:
        return self._member.deadline_s

    @deadline_s.setter
    def deadline_s(self, seconds: float) -> None:
        self._member.deadline_s = seconds

    @property
    def traffic(self) -> Traffic:
        return self._member.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self._member.traffic = traffic

    # --- point to point -------------------------------------------------------------------------------------------
    def sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int = 0) -> None:
        self._member.enter()
        self.check_peer(source, "source")
        sending = self.isend(send, dest, tag)
        self.irecv(recv, source, tag).wait()
        sending.wait()

    def isend(self, tensor: Tensor, dest: int, tag: int = 0) -> Request:
        self._member.enter()
        check_flat(tensor)
        self.check_peer(dest, "dest")
        check_tag(tag)
        path = self._member.path_to(dest)
        duration_s = path.duration_s(tensor.nbytes)
        start_s, end_s = path.out.reserve(self.clock.now_s, duration_s)
        message = Message.copy_of(tensor, self.rank, tag)
        self.clock.spawn(self._group.arrivals[dest].carry(message, path, start_s, duration_s))
        self.traffic.sent(tensor.nbytes)
        return SendRequest(self._member, end_s)

    def irecv(self, tensor: Tensor, source: int = ANY, tag: int = ANY) -> Request:
        self._check_receive(source, tag)
        check_flat(tensor)
        return ReceiveRequest(self._member, tensor, source, tag)

    def probe(self, source: int = ANY, tag: int = ANY, *, block: bool = True) -> Envelope | None:
        self._check_receive(source, tag, polling=not block)
        arrivals, awaited = self._member.arrivals, self._member.describe(source, tag)
        with self._member.counted("waiting_s"):
            if block:
                arrivals.await_message(source, tag, awaited, self.deadline_s)
            elif arrivals.find(source, tag) is None:
                self.clock.poll((self, source, tag), awaited)
        message = arrivals.find(source, tag)
        return None if message is None else Envelope(message.source, message.tag, message.data.nbytes)

    def _check_receive(self, source: int, tag: int, *, polling: bool = False) -> None:
        self._member.enter(polling=polling)
        if source != ANY:
            self.check_peer(source, "source")
        if tag != ANY:
            check_tag(tag)

    # --- collective -----------------------------------------------------------------------------------------------
    def allreduce(self, tensor: Tensor) -> None:
        """Collective. Sum `tensor` over all ranks in place, in rank order, rounding to its dtype after each addition.

        Takes the time of a ring, and sends its 2n(p-1)/p bytes in 2(p-1) messages.
        """
        check_flat(tensor)
        own, hops = addable(tensor), 2 * (self.size - 1)

        def conclude(tensors: list[Tensor]) -> tuple[list, float]:
            group = self._group
            seconds = hops * group.latency_s + hops * own.nbytes / self.size / group.bandwidth_bytes_s
            return [sum_in_rank_order(tensors)] * self.size, seconds

        own.copy_(self._member.meet(f"allreduce of {_shape(tensor)}", own, conclude, "communicating_s"))
        self.traffic.sent(hops * own.nbytes // self.size, hops)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Collective. Copy root's `tensor` into everyone's, through a binomial tree."""
        check_flat(tensor)
        self.check_peer(root, "root")
        own = tensor.detach()

        def conclude(tensors: list[Tensor]) -> tuple[list, float]:
            return [tensors[root].clone()] * self.size, self._group.rounds_s(own.nbytes)

        call = f"broadcast of {_shape(tensor)} from root {root}"
        own.copy_(self._member.meet(call, own, conclude, "communicating_s"))
        messages = children(self.rank, root, self.size)
        self.traffic.sent(messages * own.nbytes, messages)

    def exchange(self, data: bytes) -> list[bytes]:
        """Collective. Return every rank's `data` in rank order, passed on around a ring."""

        def conclude(everything: list[bytes]) -> tuple[list, float]:
            longest_s = max(map(len, everything)) / self._group.bandwidth_bytes_s
            return [everything] * self.size, (self.size - 1) * (self._group.latency_s + longest_s)

        everything = self._member.meet("exchange", bytes(data), conclude, "communicating_s")
        self.traffic.sent(len(data) * (self.size - 1), self.size - 1)
        return list(everything)

    def barrier(self) -> None:
        self._member.meet("barrier")

    @overload
    def split(self, color: int, key: int = 0) -> VirtualCommunicator: ...

    @overload
    def split(self, color: int | None, key: int = 0) -> VirtualCommunicator | None: ...

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

        taken = self._member.meet("split", (color, key), conclude)
        if taken is None:
            return None
        return VirtualCommunicator(*taken, self.deadline_s)

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
        return VirtualWindow(self._member, local, self._expose(f"window of {dtype}", local))

    def put_all(self, puts: Iterable[Put]) -> None:
        self._member.enter()
        effects = []
        for window, values, rank, offset in puts:
            effects.append(window.writing(values, rank, offset))
            if rank != self.rank:
                self.traffic.sent(values.nbytes)
        with self._member.counted("communicating_s"):
            self.clock.perform(f"{len(effects)} puts", *effects)

    def attach(self, tensor: Tensor) -> Memory:
        check_flat(tensor)
        return VirtualAttached(self._member, tensor, self._expose(f"attach of {_shape(tensor)}", tensor))

    def _expose(self, call: str, local: Tensor) -> list[Exposed]:
        def conclude(memories: list[Exposed]) -> tuple[list, float]:
            return [memories] * self.size, self._group.rounds_s()

        return self._member.meet(call, Exposed(local, self._member.me), conclude)

    def link(self) -> tuple[float, float]:
        return self._group.latency_s, 1 / self._group.bandwidth_bytes_s

    # --- time and end ---------------------------------------------------------------------------------------------
    def compute(self, share: float = 1.0) -> float:
        self._member.enter()
        world_rank = self._member.me.rank
        seconds = share * self._cluster.compute.draw(world_rank, self._cluster.generators[world_rank])
        require(at_least_0(seconds), "seconds drawn by a compute model", "finite and at least 0", seconds)
        self.clock.advance(self.clock.now_s + seconds)
        return seconds

    def now(self) -> float:
        return self.clock.now_s

    def close(self) -> None:
        self._member.meet("close")
        self._member.closed = True


def _shape(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {tensor.dtype}"
