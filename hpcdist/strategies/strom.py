"""Each rank sends its compressed updates to all others and adds theirs, without servers or waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import networkx as nx
import torch
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import ANY, Communicator, Request
from hpcdist.compress import CompressionConfig, Feedback, only_used, spans
from hpcdist.compress.coding.reduction import join_messages, split_message
from hpcdist.config.settings import Field, Named, joint_rule
from hpcdist.errors import RankFailedError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.common.state import copy_all
from hpcdist.strategies.decentralised.peers import Peers
from hpcdist.topology import Topology, load, make_topology

_CODED, _WHOLE, _END = 1, 2, 3  # tags; the last message of a period is empty


class _Arriving(NamedTuple):
    """A message that is being received."""

    request: Request
    message: Tensor
    source: int
    whole: bool


@dataclass
class _Link:
    """A link to ranks that get the same messages, with its error feedback."""

    peers: list[int]
    feedbacks: list[Feedback]


class Updates(CompressionConfig):
    """The choice of a compressor for updates."""

    name: str = Field("threshold", "compressor, see `hpcdist compressors`; none sends everything uncompressed")


@final
class Strom(Strategy):
    """Add the compressed updates of every rank to the parameters of all ranks, as they arrive.

    Every step: run the local optimiser and compress the change of the parameters. Apply the compressed change here and
    send it to all other ranks; the rest stays in the residual. Add all received messages. No rank waits for another. At
    the end of an epoch, and before a checkpoint, ranks wait for all messages: then their parameters are equal, except
    for the order of floating-point additions.

    With the topology `complete` every rank sends to all others. With any other topology messages go to neighbours along
    a spanning tree of the graph; a rank forwards the content of a message to its other neighbours in its next message.
    Each link has a residual, and the parameters of two ranks differ by the residuals of the links between them.

    If a rank fails, the others continue; a tree is rebuilt without the failed rank at the end of the period.

    Each update has the weight 1/p, so that they sum to the mean of the ranks' updates, and a learning rate has the same
    meaning as with `allreduce`. With `add_up` each update has the weight 1, as in the reference.

    Bytes per rank and step: p − 1 messages, or one per neighbour in the tree; see `hpcdist compressors`. Memory: four
    parameter vectors, and one more per neighbour in a tree.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "strom", compression={"name": "threshold", "density": 0.01})

    Reference: Nikko Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015.
    """

    class Config(Strategy.Config):
        compression: Updates = Field(Updates(), "how updates are compressed")
        topology: Named = Field(Named(name="complete"), "graph of messages, see `hpcdist topology`")
        add_up: bool = Field(False, "add the updates of all ranks; false averages them")

        @joint_rule
        def _trees_hold_what_they_pass_on(self) -> None:
            if not self.compression.error_feedback and not load(self.topology.name).complete:
                raise ValueError(
                    "strategy.compression.error_feedback must be true where strategy.topology is not complete, for "
                    "what a rank passes on waits in the residual; got false. Leave it out."
                )

    config: Config
    contract = Contract(averages="parameters", synchronizes="never", deaths="others continue")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        self.peers = Peers(comm, self.records)
        # On a complete graph one message goes to all peers, and this rank applies that message, too.
        self._sends_to_all = load(config.topology.name).complete
        self._links = self._make_links()
        self._period = 0  # number of periods (epochs, or steps until a checkpoint) that this rank has ended by `pause`
        self._ended = dict.fromkeys(range(comm.size), 0)  # the same of other ranks: their messages _END so far
        self._sending: list[Request] = []
        self._arriving: list[_Arriving] = []
        self._old = self.state.scratch([torch.empty_like(flat) for flat in model.params])
        if self._sends_to_all:  # resharding keeps the sum of all residuals
            self.state.feedbacks("link", [item for link in self._links for item in link.feedbacks], "divide")
        else:  # another number of ranks has other links
            self.state.custom(
                "links", lambda: [[feedback.state_dict() for feedback in link.feedbacks] for link in self._links],
                self._load_links, lambda: None,
            )  # fmt: skip

    def _make_links(self) -> list[_Link]:
        """Create this rank's links: one to all other surviving ranks, or one to each neighbour in a spanning tree."""
        comm, alive, choice = self.comm, self.comm.failures.alive, self.config.compression
        if self._sends_to_all:
            groups = [[rank for rank in alive if rank != comm.rank]] if len(alive) > 1 else []
        else:
            tree = spanning_tree(make_topology(self.config.topology, comm), alive)
            groups = [[peer] for peer in tree[comm.rank]]
        return [_Link(peers, choice.feedbacks(comm, self.model.params, spans(self.model))) for peers in groups]

    def advance(self, update: Update) -> Outcome:
        if not self._links:
            return self.gradients.step_alone(update)
        copy_all(self._old, self.model.params)
        outcome = self.gradients.step_alone(update)
        with torch.no_grad():
            self._send_change()
            self._add_arrived()
        return outcome

    def _send_change(self) -> None:
        """Send the local optimiser's change of the parameters; apply here only the sent part, in a tree all of it."""
        warming = self.steps < self.config.compression.warmup_steps
        idle = warming and self.comm.rank >= (self.config.compression.warmup_ranks or self.comm.size)  # sends zeros
        whole = warming and self.config.compression.warmup_ranks is None
        share = 0.0 if idle else 1.0 if self.config.add_up else 1 / len(self.comm.failures.alive)
        tag = _WHOLE if whole else _CODED
        if self._sends_to_all:
            (link,) = self._links
            triples = list(zip(link.feedbacks, self.model.params, self._old, strict=True))
            with only_used(link.feedbacks, self.model.gradients.present()):
                messages = [feedback.encode_change_(local, old, share, whole) for feedback, local, old in triples]
            self._send(join_messages(messages), link.peers, tag)
            for (feedback, local, _), message in zip(triples, messages, strict=True):
                feedback.add(message, local, whole)
            return
        for local, old in zip(self.model.params, self._old, strict=True):
            for new, before in alongside(local, old):
                new.sub_(before).mul_(share)
        trained = [slot.tensor.requires_grad for slot in self.model.slots]
        for link in self._links:  # residuals contain messages to forward: send all parameters except frozen ones
            with only_used(link.feedbacks, trained):
                encoded = zip(link.feedbacks, self.model.params, strict=True)
                messages = [f.encode(change, whole) for f, change in encoded]
            self._send(join_messages(messages), link.peers, tag)
        for local, old in zip(self.model.params, self._old, strict=True):
            local.add_(old)

    def _send(self, message: Tensor, peers: Sequence[int], tag: int) -> None:
        """Start sending to surviving peers, and forget messages that have arrived or whose receiver has failed."""
        self._sending = [r for r in self._sending if self.peers.survives(r.done) and not r.done()]
        for peer in peers:
            if peer in self.peers.present:
                self.peers.survives(lambda to=peer: self._sending.append(self.comm.isend(message, to, tag)))

    def _add_arrived(self) -> None:
        """Add completely received messages, without waiting."""
        while self._start(ANY, block=False):
            pass
        arriving, self._arriving = self._arriving, []
        for item in arriving:
            if self.peers.survives(item.request.done):  # else the sender failed while sending
                if item.request.done():
                    self._add(item)
                else:
                    self._arriving.append(item)

    def _start(self, source: int, block: bool) -> bool:
        """Start to receive a message; return False if there is none, or its sender has failed."""
        try:
            envelope = self.comm.probe(source, block=block)
            if envelope is None:
                return False
            message = torch.empty(envelope.n_bytes, dtype=torch.uint8)
            request = self.comm.irecv(message, envelope.source, envelope.tag)
            if envelope.tag == _END:  # messages do not overtake: all earlier ones of this source were started
                request.wait()
                self._ended[envelope.source] += 1
            else:
                self._arriving.append(_Arriving(request, message, envelope.source, envelope.tag == _WHOLE))
        except RankFailedError:
            return False
        return True

    def _add(self, arrived: _Arriving) -> None:
        """Add a message to the parameters, and to the residuals of other links, whose next messages forward it."""
        parts = split_message(arrived.message, len(self.model.params))
        for link in self._links:
            for feedback, part, local in zip(link.feedbacks, parts, self.model.params, strict=True):
                out = local if arrived.source in link.peers else feedback.residual
                feedback.add(part, out, arrived.whole)

    def pause(self) -> None:
        """Collective. Receive all messages of this period."""
        self._period += 1
        peers = [peer for link in self._links for peer in link.peers]
        self._send(torch.empty(0, dtype=torch.uint8), peers, _END)
        for peer in peers:
            while peer in self.peers.present and self._ended[peer] < self._period:
                self._start(peer, block=True)
        for item in self._arriving:
            if self.peers.survives(item.request.wait):
                self._add(item)
        for request in self._sending:
            self.peers.survives(request.wait)
        self._sending, self._arriving = [], []

    def shrink(self) -> None:
        alive = self.comm.failures.alive
        super().shrink()
        if self.comm.failures.alive != alive:
            old_links, self._links = self._links, self._make_links()
            for link in self._links:  # keep the residuals of a link to the same ranks, or to all ranks
                same = (old.feedbacks for old in old_links if self._sends_to_all or old.peers == link.peers)
                link.feedbacks = next(same, link.feedbacks)

    def _load_links(self, saved: Sequence[Sequence[dict]]) -> None:
        for link, states in zip(self._links, saved):
            for feedback, state in zip(link.feedbacks, states, strict=True):
                feedback.load_state_dict(state)


def spanning_tree(topology: Topology, ranks: Sequence[int] | None = None) -> list[list[int]]:
    """Return a spanning tree of the topology's graph, breadth first from the first rank.

    Args:
        ranks: the ranks in the tree; default: all. Components that are disconnected without the missing ranks are
            linked to the first rank.

    Returns:
        Each rank's neighbours in the tree, ascending; equal on all ranks.
    """
    ranks = range(topology.size) if ranks is None else ranks
    unreached = nx.DiGraph()
    unreached.add_nodes_from(ranks)
    for step in range(topology.period or 1):
        unreached.add_edges_from((a, b) for a in ranks for b in topology.out_neighbours(a, step) if b in ranks)
    tree = nx.empty_graph(topology.size)
    for root in ranks:
        if root in unreached:
            links = list(nx.bfs_edges(unreached, root, sort_neighbors=sorted))
            tree.add_edges_from(links if root == ranks[0] else [(ranks[0], root), *links])
            unreached.remove_nodes_from([root, *(reached for _, reached in links)])
    return [sorted(tree[rank]) for rank in range(topology.size)]
