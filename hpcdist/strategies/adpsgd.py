"""Average in pairs, one-sidedly and without a barrier, across the two sides of a bipartite graph: AD-PSGD.

Ranks on one side are active, those on the other passive. A passive rank's parameters lie in its window, and change by
additions only. An active rank holds a lock of the passive rank while it averages: it reads xⱼ, adds (xᵢ − xⱼ)/2 there
and subtracts as much from its own parameters. The passive rank needs no lock to add the change that its optimiser made:
additions are atomic for each element, so an element is averaged either before or after that change, and no change is
lost.
"""

from __future__ import annotations

from typing import final

import networkx as nx
import torch
from pydantic import Field
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.config import Named
from hpcdist.errors import ConfigError, RankFailedError
from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.common.state import Flats, copy_all
from hpcdist.strategies.decentralised.peers import Peers, PeerSampler, SamplingConfig
from hpcdist.topology import Topology, make_topology

_FREE = 0  # in place of who holds it


@final
class ADPSGD(Strategy):
    """Train by asynchronous decentralised parallel SGD: average with a random neighbour, which does not wait.

    Every step of an active rank i: choose at random a neighbour j that no other rank averages with at the moment, set
    both xᵢ and xⱼ to (xᵢ + xⱼ)/2, then run the local optimiser with the gradient at the old xᵢ. If all neighbours are
    busy, the rank does not average in this step. A passive rank computes its gradients at a copy of its x, runs the
    local optimiser, adds the change to x, and takes a new copy; its weight decay reads the old copy. No rank waits for
    another. An average conserves the sum of the pair, so the mean of all x follows the mean of the updates, to
    rounding, in any order of events.

    The topology must have no odd cycle. Rank 0's side is the active one: with `bipartite` the even ranks. Bytes per
    step of an active rank: one parameter vector fetched and one sent, and two words; of a passive one: none. Memory:
    of a passive rank two parameter vectors, of an active one at most one.

    Reference: Xiangru Lian, Wei Zhang, Ce Zhang, Ji Liu, "Asynchronous decentralized parallel stochastic gradient
    descent", 2018, algorithm 1 and section 3.3.
    """

    class Config(SamplingConfig):
        """Options of adpsgd."""

        topology: Named = Field(Named(name="bipartite"), description="graph of the pairs of ranks that average")

    contract = Contract(
        averages="parameters",
        synchronizes="never",
        consensus="elsewhere",
        memory="read by others",
        deaths="others continue",
    )

    def __init__(self, config: Config, comm, model, **kwargs):
        topology = make_topology(config.topology, comm)
        if not (topology.static and topology.symmetric):
            raise ConfigError(
                f"topology of adpsgd must be symmetric and the same at every step; got {config.topology.name}. Take "
                "bipartite, a ring or torus of even sides, or a graph of your own."
            )
        _, passive = two_sides(topology)
        super().__init__(config, comm, model, **kwargs)
        self.peers = Peers(comm, self.records)
        self.sampler = PeerSampler(comm, self.peers, self.state, config.seed)
        self._passive = comm.rank in passive
        self._neighbours = [rank for rank in topology.in_neighbours(comm.rank, 0) if rank != comm.rank]
        self._shared = [comm.window(p.numel() if self._passive else 0, p.dtype) for p in model.params]
        self._holder = comm.window(1 if self._passive else 0, torch.int64)  # who averages with this rank: 1 + its rank
        shared = [window.local for window in self._shared if self._passive]
        self._x = self.state.sharded("shared", tensors=shared, start="parameters", resets=True)  # a passive rank's
        copy_all(self._x, model.params)
        self._before = self.state.scratch([p.clone() for p in model.params if self._passive])  # the last copy of x
        self._fetched = self.state.scratch(
            [torch.empty_like(p, device="cpu") for p in model.params if not self._passive]
        )
        self.state.parameters = lambda: Flats([x.to(p.device) for x, p in zip(self._x, model.params)] or model.params)
        self.state.before_load(comm.barrier)  # nobody still averages with what was before
        self.state.after_load(lambda: copy_all(self._before, model.params))
        comm.barrier()  # nobody may average with what was there before

    def advance(self, update: Update) -> Outcome:
        if self._passive:
            return self._step_shared(update)
        with torch.no_grad():
            self._average()
        return self.gradients.step_alone(update)

    # --- an active rank -------------------------------------------------------------------------------------------
    def _average(self) -> None:
        """Average with the first neighbour, in random order, that is alive and free."""
        for i in torch.randperm(len(self._neighbours), generator=self.sampler.generator).tolist():
            if self._neighbours[i] in self.peers.present and self._average_with(self._neighbours[i]):
                return

    def _average_with(self, peer: int) -> bool:
        """Average with `peer`; return False if another rank is averaging with it, or it has died."""
        mine = self.comm.rank + 1
        try:
            if self._holder.compare_and_swap(_FREE, mine, peer) != _FREE:
                return False
            for window, fetched, own in zip(self._shared, self._fetched, self.model.params, strict=True):
                if window.change(_average, peer, own):
                    continue
                window.get(fetched, peer)
                change = fetched.to(own.device)
                for theirs, ours in alongside(change, own):
                    _half_way(theirs, ours, out=theirs)
                window.accumulate(change, peer)
                own.sub_(change)
            self._holder.compare_and_swap(mine, _FREE, peer)
        except RankFailedError:
            return False
        return True

    # --- a passive rank -------------------------------------------------------------------------------------------
    def _step_shared(self, update: Update) -> Outcome:
        """Take the local optimiser's step, add the change to the window, and take a new copy of its contents."""
        outcome = self.gradients.step_alone(update)
        rank = self.comm.rank
        for window, before, own in zip(self._shared, self._before, self.model.params, strict=True):
            if not window.change(_take_in, rank, own, before):
                window.accumulate(torch.sub(own, before, out=before), rank)  # the loop's own changes, too
                window.get(own, rank)
                before.copy_(own)
        self._free_from_the_dead()
        return outcome

    def _free_from_the_dead(self) -> None:
        if len(self.peers.present) < self.comm.size:
            holder = int(self._holder.local[0])
            if holder != _FREE and holder - 1 not in self.peers.present:
                self._holder.compare_and_swap(holder, _FREE, self.comm.rank)

    # --- consensus and checkpoints --------------------------------------------------------------------------------
    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. Compute the exact means of x and of the buffers; the model is untouched."""
        self.comm.barrier()  # nobody averages any more
        return super().consensus()

    def reset_from_model(self) -> None:
        self.comm.barrier()
        super().reset_from_model()
        copy_all(self._before, self.model.params)
        self.comm.barrier()  # nobody may average with what was there before

    def close(self) -> None:
        self._x.clear()  # their memory goes
        self.state.tensors.clear()
        for window in (*self._shared, self._holder):
            window.close()


def _half_way(theirs: Tensor, ours: Tensor, out: Tensor | None = None) -> Tensor:
    """Return half the difference: what `theirs` gains in an averaging, and `ours` loses."""
    return torch.sub(ours, theirs, out=out).mul_(0.5)


def _average(theirs: Tensor, ours: Tensor) -> None:
    """Set both to their mean."""
    change = _half_way(theirs, ours)
    theirs.add_(change)
    ours.sub_(change)


def _take_in(shared: Tensor, own: Tensor, before: Tensor) -> None:
    """Add to the shared parameters what has changed since `before`, and take a new copy of them."""
    shared.add_(torch.sub(own, before, out=before))
    own.copy_(shared)
    before.copy_(own)


def two_sides(topology: Topology) -> tuple[frozenset[int], frozenset[int]]:
    """Split the ranks of a bipartite graph into its two sides: neighbours are on different sides.

    Rank 0 is on the first side, and so is a rank without neighbours.

    Args:
        topology: static and symmetric.

    Raises:
        ConfigError: the graph has an odd cycle, which the message names.
    """
    graph = nx.Graph((a, b) for a in range(topology.size) for b in topology.in_neighbours(a, 0) if a != b)
    graph.add_nodes_from(range(topology.size))
    if not nx.is_bipartite(graph):
        odd = next(cycle for cycle in nx.cycle_basis(graph, min(graph)) if len(cycle) % 2)
        raise ConfigError(
            f"the topology must have no odd cycle; got {'-'.join(map(str, [*odd, odd[0]]))}, of {len(odd)} ranks. Take "
            "one whose ranks fall into two sides, such as bipartite, or a ring of an even number."
        )
    second: set[int] = set()
    for part in nx.connected_components(graph):
        first = nx.single_source_shortest_path_length(graph, min(part))
        second |= {rank for rank, distance in first.items() if distance % 2}
    return frozenset(set(graph) - second), frozenset(second)
