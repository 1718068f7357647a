"""Average pairs of ranks of a bipartite graph, one-sidedly and without a barrier: AD-PSGD.

Ranks of one part are active, ranks of the other passive. A passive rank's parameters are in its window, and change by
additions only. An active rank locks the passive rank while it averages: it reads xⱼ, adds (xᵢ − xⱼ)/2 there, and
subtracts the same from its parameters. The passive rank adds its optimiser's change without a lock: additions are
atomic for each element, so an element is averaged either before or after the change, and no change is lost.
"""

from __future__ import annotations

from typing import Any, final

import networkx as nx
import torch
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field, Named
from hpcdist.errors import ConfigError, RankFailedError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.common.state import Flats, copy_all
from hpcdist.strategies.decentralised.peers import Peers, SamplingConfig
from hpcdist.topology import Topology, make_topology

_FREE = 0  # the lock is free


@final
class ADPSGD(Strategy):
    """Train by asynchronous decentralised parallel SGD: average with a random neighbour, which does not wait.

    Every step of an active rank i: choose at random a neighbour j that no other rank is averaging with, set xᵢ and xⱼ
    to (xᵢ + xⱼ)/2, then run the local optimiser with the gradient at the old xᵢ. If all neighbours are busy, the rank
    does not average in this step. A passive rank computes gradients at a copy of its x, runs the local optimiser, adds
    the change to x, and copies x again; its weight decay reads the old copy. No rank waits for another. An average
    conserves the sum of the pair, so the mean of all x follows the mean of the updates, to rounding, in any order of
    events.

    The topology must have no odd cycle. Rank 0's part is active: with `bipartite` the even ranks. Bytes per step of an
    active rank: one parameter vector fetched, one sent, and two int64; of a passive rank: none. Memory: on a passive
    rank two parameter vectors, on an active rank at most one.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "adpsgd", topology="bipartite")

    Reference: Xiangru Lian, Wei Zhang, Ce Zhang, Ji Liu, "Asynchronous decentralized parallel stochastic gradient
    descent", 2018, algorithm 1 and section 3.3.
    """

    class Config(SamplingConfig):
        topology: Named = Field(Named(name="bipartite"), "graph of the pairs of ranks that average")

    contract = Contract(
        averages="parameters", synchronizes="never", consensus="elsewhere", memory="read by others",
        deaths="others continue",
    )  # fmt: skip

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        topology = make_topology(config.topology, comm)
        if not (topology.static and topology.symmetric):
            raise ConfigError(
                f"topology of adpsgd must be symmetric and the same at every step; got {config.topology.name}. Take "
                "bipartite, a ring or torus of even sides, or a graph of your own."
            )
        _, passive = bipartition(topology)
        super().__init__(config, comm, model, **kwargs)
        self.peers = Peers(comm, self.records)
        self._generator = config.generator(comm, self.state)
        self._passive = comm.rank in passive
        self.saved_role = "passive" if self._passive else "active"
        self._neighbours = [rank for rank in topology.in_neighbours(comm.rank, 0) if rank != comm.rank]
        self._shared = [self.opened(comm.window(p.numel() if self._passive else 0, p.dtype)) for p in model.params]
        # The lock: 1 + the rank that averages here.
        self._holder = self.opened(comm.window(1 if self._passive else 0, torch.int64))
        shared = [window.local for window in self._shared if self._passive]
        self._x = self.state.sharded("shared", tensors=shared, start="parameters", resets=True)  # a passive rank's
        copy_all(self._x, model.params)
        self._before = self.state.scratch([p.clone() for p in model.params if self._passive])  # the last copy of x
        self._fetched = self.state.scratch(
            [torch.empty_like(p, device="cpu") for p in model.params if not self._passive]
        )
        self.state.parameters = lambda: Flats([x.to(p.device) for x, p in zip(self._x, model.params)] or model.params)
        self.state.before_load(comm.barrier)  # no rank still averages with old parameters
        self.state.after_load(lambda: copy_all(self._before, model.params))
        comm.barrier()  # no rank may average before the windows are filled

    def advance(self, update: Update) -> Outcome:
        if self._passive:
            return self._step_shared(update)
        with torch.no_grad():
            self._average()
        return self.gradients.step_alone(update)

    # --- an active rank -------------------------------------------------------------------------------------------
    def _average(self) -> None:
        """Average with the first neighbour, in random order, that is alive and free."""
        for i in torch.randperm(len(self._neighbours), generator=self._generator).tolist():
            if self._neighbours[i] in self.peers.present and self._average_with(self._neighbours[i]):
                return

    def _average_with(self, peer: int) -> bool:
        """Average with `peer`; return False if the peer is busy or has failed."""
        token = self.comm.rank + 1
        try:
            if self._holder.compare_and_swap(_FREE, token, peer) != _FREE:
                return False
            for window, fetched, local in zip(self._shared, self._fetched, self.model.params, strict=True):
                if window.change(_average, peer, local):  # in the peer's memory, if this process maps it
                    continue
                window.get(fetched, peer)
                change = fetched.to(local.device)
                for remote_part, local_part in alongside(change, local):
                    torch.sub(local_part, remote_part, out=remote_part).mul_(0.5)
                window.accumulate(change, peer)
                local.sub_(change)
            self._holder.compare_and_swap(token, _FREE, peer)
        except RankFailedError:
            return False
        return True

    # --- a passive rank -------------------------------------------------------------------------------------------
    def _step_shared(self, update: Update) -> Outcome:
        """Run the local optimiser, add the change to the window, and copy the window's parameters again."""
        outcome = self.gradients.step_alone(update)
        rank = self.comm.rank
        for window, before, local in zip(self._shared, self._before, self.model.params, strict=True):
            if not window.change(_merge_change, rank, local, before):
                window.accumulate(torch.sub(local, before, out=before), rank)  # the loop's changes, too
                window.get(local, rank)
                before.copy_(local)
        self._free_from_the_dead()
        return outcome

    def _free_from_the_dead(self) -> None:
        """Free this rank's lock if the rank that holds it has failed."""
        if len(self.peers.present) < self.comm.size:
            holder = int(self._holder.local[0])
            if holder != _FREE and holder - 1 not in self.peers.present:
                self._holder.compare_and_swap(holder, _FREE, self.comm.rank)

    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. Return the exact means of x and of the buffers; does not change the model."""
        self.comm.barrier()  # no rank is averaging
        return super().consensus()

    def reset_from_model(self) -> None:
        self.comm.barrier()
        super().reset_from_model()
        copy_all(self._before, self.model.params)
        self.comm.barrier()  # no rank may average with old parameters

    def close(self) -> None:
        self._x.clear()  # views of the windows' memory
        self.state.tensors.clear()
        super().close()


def _average(remote: Tensor, local: Tensor) -> None:
    """Set both to their mean."""
    change = torch.sub(local, remote).mul_(0.5)
    remote.add_(change)
    local.sub_(change)


def _merge_change(shared: Tensor, local: Tensor, before: Tensor) -> None:
    """Add the change of `local` since `before` to the shared parameters, and copy them to `local` and `before`."""
    shared.add_(torch.sub(local, before, out=before))
    local.copy_(shared)
    before.copy_(local)


def bipartition(topology: Topology) -> tuple[frozenset[int], frozenset[int]]:
    """Return the active and the passive ranks: neighbours are never both active, or both passive.

    Rank 0 is active, and so are ranks without neighbours. Each rank computes the same sets, without messages.

    Args:
        topology: static and symmetric, so that its neighbours in step 0 are those of all steps.

    Raises:
        ConfigError: the graph has an odd cycle, shown in the message.
    """
    graph = nx.Graph((a, b) for a in range(topology.size) for b in topology.in_neighbours(a, 0) if a != b)
    graph.add_nodes_from(range(topology.size))
    if not nx.is_bipartite(graph):
        odd_cycle = next(cycle for cycle in nx.cycle_basis(graph, min(graph)) if len(cycle) % 2)
        raise ConfigError(
            f"the topology must have no odd cycle; got {'-'.join(map(str, [*odd_cycle, odd_cycle[0]]))}, of "
            f"{len(odd_cycle)} ranks. Take one whose ranks fall into two sides, such as bipartite, or a ring of an "
            "even number."
        )
    # networkx gives color 1 to the first rank of each connected component, 0 to its neighbours and to isolated ranks.
    passive = {rank for rank, color in nx.bipartite.color(graph).items() if color == 0 and graph[rank]}
    return frozenset(set(graph) - passive), frozenset(passive)
