"""Mixing with neighbours in memory that a node's ranks share: in place, and by messages, to the same bits."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.config.settings import Named
from hpcdist.strategies.decentralised.mixing import Mixing
from hpcdist.topology import make_topology

COUNTS = (1, 7, 600_001)  # elements: fewer than ranks, and more than a chunk of a slice


def mixed(comm, topology, shares: bool) -> tuple[list[torch.Tensor], int, int]:
    """Collective. The tensors after three steps, and the bytes and messages that a rank counts."""
    own = comm.split(0)
    mixing = Mixing(own, topology, overlap=False, identity_weight=0.25)
    generator = torch.Generator().manual_seed(comm.rank)
    tensors = [torch.randn(count, generator=generator) for count in COUNTS]
    if shares:
        tensors = mixing.share(tensors)
        in_place = comm.size > 1 and comm.mpi is not None and comm.memory.can_attach
        assert all(bool(own.memory.mapped(tensor)) == in_place for tensor in tensors)
    before = own.trace.traffic.copy()
    for step in range(3):
        mixing.mix(tensors, step)
    moved = own.trace.traffic - before
    mixing.close()
    own.close()
    return tensors, moved.bytes_sent, moved.messages_sent


@each("graph", ["ring", "complete", "one_peer_exponential"])
@pytest.mark.sizes(1, 2, 3, 4)
def test_shared_tensors_are_mixed_to_the_bits_of_messages(ranks, graph):
    def body(comm):
        topology = make_topology(Named(name=graph), comm)
        (shared, *counted), (sent, *expected) = (mixed(comm, topology, shares) for shares in (True, False))
        assert counted == expected
        return all(map(torch.equal, shared, sent))

    assert all(ranks(body))
