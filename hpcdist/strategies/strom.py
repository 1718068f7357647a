"""Send compressed updates from every rank to every other, without a server, a barrier or a wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import networkx as nx
import torch
from pydantic import Field, model_validator
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import ANY, Request
from hpcdist.compress import CompressionConfig, Feedback, only_used, spans
from hpcdist.compress.coding.reduction import join_messages, split_message
from hpcdist.config import Named
from hpcdist.errors import RankFailedError
from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.common.state import copy_all
from hpcdist.strategies.decentralised.peers import Peers, PeersConfig
from hpcdist.topology import Topology, load, make_topology

_CODED, _WHOLE, _END = 1, 2, 3  # tags; the last message of a period is empty


class _Arriving(NamedTuple):
    """A message on its way."""

    request: Request
    message: Tensor
    source: int
    whole: bool


@dataclass
class _Link:
    """A link to ranks that get the same messages, with the residuals: the part of the updates not sent to them yet."""

    peers: list[int]
    feedbacks: list[Feedback]


class Updates(CompressionConfig):
    """The choice of a compressor for updates."""

    name: str = Field(
        "threshold", description="compressor, see `hpcdist compressors`; none sends everything uncompressed"
    )


@final
class Strom(Strategy):
    """Add every rank's updates, compressed, to the parameters of all ranks, as they arrive.

    Every step: run the local optimiser and compress the change that it made. Apply only the compressed change here and
    send it to all other ranks; keep the rest as a residual, for later messages. Add all messages that have arrived. No
    rank waits for another. At the end of an epoch, and before a checkpoint, ranks wait for all messages: then their
    parameters are equal, except for the order in which floating-point numbers were added.

    With the topology `complete` every rank sends to every other. With any other topology messages go to neighbours
    only, along a spanning tree of its graph; a rank passes the content of a message on to its other neighbours in its
    next message. Each link has a residual of its own, and the parameters of two ranks differ by the residuals of the
    links between them.

    If a rank dies, the others go on; in a tree a new path around the dead rank is used from the end of the period on.

    Each update has the weight 1/p, so that together they make the mean of the ranks' updates, and a learning rate means
    the same as with `allreduce`. With `add_up` each has the weight 1, as in the reference.

    Bytes per rank and step: p − 1 messages, or one per neighbour in the tree; see `hpcdist compressors`. Memory: four
    parameter vectors, and one more per neighbour in a tree.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "strom", compression={"name": "threshold", "density": 0.01})

    Reference: Nikko Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015.
    """

    class Config(PeersConfig):
        """Options of strom."""

        compression: Updates = Field(Updates(), description="how updates are compressed")
        topology: Named = Field(
            Named(name="complete"), description="graph that messages follow, see `hpcdist topology`"
        )
        add_up: bool = Field(False, description="add the updates of all ranks; false averages them")

        @model_validator(mode="after")
        def _trees_hold_what_they_pass_on(self):
            if not self.compression.error_feedback and not load(self.topology.name).complete:
                raise ValueError(
                    "strategy.compression.error_feedback must be true where strategy.topology is not complete, for "
                    "what a rank passes on waits in the residual; got false. Leave it out."
                )
            return self

    config: Config
    contract = Contract(averages="parameters", synchronizes="never", deaths="others continue")

    def __init__(self, config: Config, comm, model, **kwargs):
        super().__init__(config, comm, model, **kwargs)
        self.peers = Peers(comm, self.records)
        # One message goes to all others, so that this rank's parameters change by it, too.
        self._floods = load(config.topology.name).complete
        self._links = self._make_links()
        self._period = 0  # paused so often; every peer says when it has
        self._ended = dict.fromkeys(range(comm.size), 0)
        self._sending: list[Request] = []
        self._arriving: list[_Arriving] = []
        self._old = self.state.scratch([torch.empty_like(flat) for flat in model.params])
        if self._floods:  # on another number of ranks all together have the residuals that the saved ones had
            self.state.feedbacks("link", [each for link in self._links for each in link.feedbacks], "divide")
        else:  # there a tree's links are between other ranks
            self.state.custom("links", self._save_links, self._load_links, lambda: None)

    def _make_links(self) -> list[_Link]:
        comm, alive, choice = self.comm, self.comm.failures.alive, self.config.compression
        if self._floods:
            groups = [[rank for rank in alive if rank != comm.rank]] if len(alive) > 1 else []
        else:
            tree = spanning_tree(make_topology(self.config.topology, comm), alive)
            groups = [[peer] for peer in tree[comm.rank]]
        return [_Link(peers, choice.feedbacks(comm, self.model.params, spans(self.model))) for peers in groups]

    # --- a step ---------------------------------------------------------------------------------------------------
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
        """Send the local optimiser's change of the parameters; they keep the part that is sent."""
        warming = self.steps < self.config.compression.warmup_steps
        silent = warming and self.comm.rank >= (self.config.compression.warmup_ranks or self.comm.size)
        whole = warming and self.config.compression.warmup_ranks is None
        share = 0.0 if silent else 1.0 if self.config.add_up else 1 / len(self.comm.failures.alive)
        tag = _WHOLE if whole else _CODED
        if self._floods:
            (link,) = self._links
            parts = list(zip(link.feedbacks, self.model.params, self._old, strict=True))
            with only_used(link.feedbacks, self.model.gradients.present()):
                messages = [feedback.encode_change_(own, old, share, whole) for feedback, own, old in parts]
            self._send(join_messages(messages), link.peers, tag)
            for (feedback, own, _), message in zip(parts, messages, strict=True):
                feedback.add(message, own, whole)
            return
        for own, old in zip(self.model.params, self._old, strict=True):
            for new, before in alongside(own, old):
                new.sub_(before).mul_(share)
        trained = [slot.tensor.requires_grad for slot in self.model.slots]
        for link in self._links:  # which also passes on what others have sent, so that all but frozen parameters go on
            with only_used(link.feedbacks, trained):
                encoded = zip(link.feedbacks, self.model.params, strict=True)
                messages = [f.encode(change, whole) for f, change in encoded]
            self._send(join_messages(messages), link.peers, tag)
        for own, old in zip(self.model.params, self._old, strict=True):
            own.add_(old)

    # --- messages -------------------------------------------------------------------------------------------------
    def _send(self, message: Tensor, peers: Sequence[int], tag: int) -> None:
        self._sending = [r for r in self._sending if self.peers.survives(r.done) and not r.done()]
        for peer in peers:
            if peer in self.peers.present:
                self.peers.survives(lambda to=peer: self._sending.append(self.comm.isend(message, to, tag)))

    def _add_arrived(self) -> None:
        """Add messages that have come in full; wait for none."""
        while self._start(ANY, block=False):
            pass
        arriving, self._arriving = self._arriving, []
        for each in arriving:
            if self.peers.survives(each.request.done):  # else its sender died while sending it
                if each.request.done():
                    self._add(each)
                else:
                    self._arriving.append(each)

    def _start(self, source: int, block: bool) -> bool:
        """Begin to receive a message; return False if none has come, or its sender has died."""
        try:
            envelope = self.comm.probe(source, block=block)
            if envelope is None:
                return False
            message = torch.empty(envelope.n_bytes, dtype=torch.uint8)
            request = self.comm.irecv(message, envelope.source, envelope.tag)
            if envelope.tag == _END:  # all earlier messages of this source have been begun: none overtakes another
                request.wait()
                self._ended[envelope.source] += 1
            else:
                self._arriving.append(_Arriving(request, message, envelope.source, envelope.tag == _WHOLE))
        except RankFailedError:
            return False
        return True

    def _add(self, arrived: _Arriving) -> None:
        parts = split_message(arrived.message, len(self.model.params))
        for link in self._links:
            for feedback, part, own in zip(link.feedbacks, parts, self.model.params, strict=True):
                # What came from elsewhere is passed on along this link with the next message.
                out = own if arrived.source in link.peers else feedback.residual
                feedback.add(part, out, arrived.whole)

    def pause(self) -> None:
        """Collective. Wait for all messages that the others have sent in this period."""
        self._period += 1
        peers = [peer for link in self._links for peer in link.peers]
        self._send(torch.empty(0, dtype=torch.uint8), peers, _END)
        for peer in peers:
            while peer in self.peers.present and self._ended[peer] < self._period:
                self._start(peer, block=True)
        for each in self._arriving:
            if self.peers.survives(each.request.wait):
                self._add(each)
        for request in self._sending:
            self.peers.survives(request.wait)
        self._sending, self._arriving = [], []

    def shrink(self) -> None:
        alive = self.comm.failures.alive
        super().shrink()
        if self.comm.failures.alive != alive:
            before, self._links = self._links, self._make_links()
            for link in self._links:  # to the same ranks as an old one, or to all that are left: residuals stay
                same = (old.feedbacks for old in before if self._floods or old.peers == link.peers)
                link.feedbacks = next(same, link.feedbacks)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def _save_links(self) -> list[list[dict]]:
        return [[feedback.state_dict() for feedback in link.feedbacks] for link in self._links]

    def _load_links(self, saved: Sequence[Sequence[dict]]) -> None:
        for link, states in zip(self._links, saved):
            for feedback, state in zip(link.feedbacks, states, strict=True):
                feedback.load_state_dict(state)


def spanning_tree(topology: Topology, ranks: Sequence[int] | None = None) -> list[list[int]]:
    """Find a tree that takes a message of any rank to every other exactly once, breadth first from the first rank.

    Args:
        ranks: the ranks in the tree; all by default. Parts of the graph that are cut off because ranks are missing
            are linked to the first rank.

    Returns:
        Each rank's neighbours in the tree, ascending; the same on all ranks.
    """
    ranks = range(topology.size) if ranks is None else ranks
    left = nx.DiGraph()
    left.add_nodes_from(ranks)
    for step in range(topology.period or 1):
        left.add_edges_from((a, b) for a in ranks for b in topology.out_neighbours(a, step) if b in ranks)
    tree = nx.empty_graph(topology.size)
    for root in ranks:
        if root in left:
            links = list(nx.bfs_edges(left, root, sort_neighbors=sorted))
            tree.add_edges_from(links if root == ranks[0] else [(ranks[0], root), *links])
            left.remove_nodes_from([root, *(reached for _, reached in links)])
    return [sorted(tree[rank]) for rank in range(topology.size)]
