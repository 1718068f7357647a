"""The shared parts of a virtual run: the cluster, and the groups of ranks that communicators are made of."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from hpcdist.comm.virtual.arrivals import Arrivals
from hpcdist.comm.virtual.clock import VirtualClock
from hpcdist.comm.virtual.collectives import Gathering, rounds
from hpcdist.comm.virtual.compute import ComputeModel, describe
from hpcdist.comm.virtual.network import Network, Wiring


class Cluster:
    """The clock, the network and the compute model, which all communicators of one run share."""

    def __init__(self, size: int, seed: int, network: Network, compute: ComputeModel):
        self.clock, self.wiring, self.compute = VirtualClock(size, seed), Wiring(network, size), compute
        self.description = {"network": asdict(network), "compute": describe(compute)}
        sequences = (np.random.SeedSequence(seed, spawn_key=(rank, 1)) for rank in range(size))
        self.generators = [np.random.default_rng(sequence) for sequence in sequences]


class Group:
    """The objects that the ranks of one communicator share. `members` are their ranks in the whole run."""

    def __init__(self, cluster: Cluster, members: list[int]):
        self.cluster, self.members = cluster, members
        ranks = [cluster.clock.ranks[member] for member in members]
        self.gathering = Gathering(cluster.clock, ranks)
        self.arrivals = [Arrivals(rank, cluster.clock) for rank in ranks]
        self.latency_s, self.bandwidth_bytes_s = cluster.wiring.slowest(members)

    def rounds_s(self, n_bytes: int = 0) -> float:
        """Compute the seconds of log2 p rounds, each of one message of n bytes."""
        return rounds(len(self.members)) * (self.latency_s + n_bytes / self.bandwidth_bytes_s)
