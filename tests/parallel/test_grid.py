"""Grids: who is where, whom the communicators connect, and which placements are refused."""

from __future__ import annotations

import pytest
import torch

from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.parallel import Grid


@pytest.mark.sizes(1, 2, 4, 6)
def test_ranks_of_a_replica_are_consecutive_and_stages_connect_replicas(ranks):
    stages = 1 if ranks.size == 1 else 2

    def body(comm):
        grid = Grid(comm, stages)
        inner, outer = torch.tensor([comm.rank]), torch.tensor([comm.rank])
        inner, outer = inner.repeat(grid.stages), outer.repeat(grid.replicas)
        for communicator, row in ((grid.inner, inner), (grid.outer, outer)):
            row.mul_(torch.arange(communicator.size) == communicator.rank)
            communicator.allreduce(row)
        places = (grid.stage, grid.replica) == (grid.inner.rank, grid.outer.rank)
        sizes = (grid.stages, grid.replicas) == (grid.inner.size, grid.outer.size)
        grid.close()
        return places and sizes, inner.tolist(), outer.tolist()

    for rank, (right, inner, outer) in enumerate(ranks(body)):
        assert right
        assert inner == list(range(rank // stages * stages, rank // stages * stages + stages))
        assert outer == list(range(rank % stages, ranks.size, stages))


@pytest.mark.parametrize(
    "stages, message",
    [
        (4, "stages must divide the number of ranks, 6; got 4. Start 4 or 8 ranks"),
        (7, "got 7. Start 7 ranks"),
        (0, "stages must be an integer of at least 1; got 0"),
        (2.0, "stages must be an integer of at least 1; got 2.0"),
    ],
)
def test_stages_divide_the_ranks(stages, message):
    with pytest.raises(ConfigError, match=message):
        run_virtual(lambda comm: Grid(comm, stages), 6)


def on_nodes(ranks_per_node):
    return Network(1e-6, 1e9, ranks_per_node=ranks_per_node)


def test_a_replica_torn_between_nodes_is_refused_by_name():
    message = r"got 1 of 2 replicas on several, the first with rank 2 on virtual node \(node 0\), rank 3 on virtual "
    with pytest.raises(ConfigError, match=message + r"node \(node 1\)\. Start consecutive ranks on one node"):
        run_virtual(lambda comm: Grid(comm, 2), 4, network=on_nodes(3))


def test_a_torn_replica_is_allowed_on_request_and_so_is_a_cluster_without_nodes():
    assert run_virtual(lambda comm: Grid(comm, 2, spread=True).inner.nodes, 4, network=on_nodes(3))[3] == (0, 1)
    assert run_virtual(lambda comm: Grid(comm, 4).replica, 4, network=on_nodes(None)) == [0] * 4
    assert run_virtual(lambda comm: Grid(comm, 2).replica, 4, network=on_nodes(2)) == [0, 0, 1, 1]


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
def test_real_ranks_on_nodes_of_their_own_hold_no_replica_together(ranks):
    def body(comm):
        apart = comm.apart()
        with pytest.raises(ConfigError, match=r"rank 0 on \S+ \(node 0\), rank 1 on \S+ \(node 1\)"):
            Grid(apart, 2)
        Grid(apart, 2, spread=True).close()
        apart.close()

    ranks(body)
