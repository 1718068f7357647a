"""A strategy's topology by name, with its options; the two sides of a bipartite one, and odd cycles."""

from __future__ import annotations

import itertools

import pytest

from hpcdist import topology
from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.config import Named
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.strategies.adpsgd import two_sides
from hpcdist.tools.topology import spectral_gap
from hpcdist.topology import make_topology


def chosen(size: int, ranks_per_node: int | None = None, **option) -> topology.Topology:
    network = Network(0.0, 1e9, ranks_per_node=ranks_per_node)
    return run_virtual(lambda comm: make_topology(Named(**option), comm), size, network=network)[0]


def test_options_reach_the_topology():
    assert chosen(6, name="torus", rows=3).rows == 3 and chosen(6, name="torus").rows == 2
    assert chosen(4, name="random_permutation", seed=7).seed == 7


def test_a_hierarchy_is_that_of_the_ranks_nodes_unless_the_user_says_them():
    assert chosen(4, 2, name="hierarchical").in_neighbours(0, 0) == {0: 0.5, 1: 0.5}
    assert chosen(4, 2, name="hierarchical", nodes=[0, 1, 0, 1]).in_neighbours(0, 0) == {0: 0.5, 2: 0.5}


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"name": "rign"}, UnknownNameError, "topology must be one of bipartite, complete, .*; got 'rign'"),
        ({"name": "torus", "row": 2}, ConfigError, "strategy.topology setting must be one of rows; got 'row'. Did you"),
        ({"name": "torus", "rows": "2"}, ConfigError, "strategy.topology.rows must be an integer; got '2'"),
        ({"name": "graph"}, ConfigError, "strategy.topology.path must be given; got nothing"),
    ],
)
def test_a_choice_that_is_refused(option, error, message):
    with pytest.raises(error, match=message):
        chosen(4, **option)


# --- two sides --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", range(1, 12))
def test_bipartite_has_edges_between_even_and_odd_ranks_only(size):
    found = topology.load("bipartite")(size)
    for rank, peer in itertools.product(range(size), repeat=2):
        assert (peer in found.in_neighbours(rank, 0)) == (rank == peer or (rank - peer) % 2 == 1)
    assert two_sides(found) == (frozenset(range(0, size, 2)), frozenset(range(1, size, 2)))


@pytest.mark.parametrize("size", [2, 4, 6, 7, 8, 9, 12, 25, 128])
def test_the_gap_of_bipartite(size):
    """The Laplacian of a graph between a and b ranks has eigenvalues 0, a, b and a + b."""
    expected = 4 / (size + 2) if size % 2 == 0 else 6 / (size + 3)
    assert spectral_gap(topology.load("bipartite")(size)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("name", "size"), [("ring", 2), ("ring", 4), ("ring", 10), ("torus", 16), ("complete", 2)])
def test_two_sides_have_no_edge_inside(name, size):
    found = topology.load(name)(size)
    sides = two_sides(found)
    assert sides[0] | sides[1] == set(range(size)) and not sides[0] & sides[1] and 0 in sides[0]
    for side in sides:
        assert all(side & set(found.in_neighbours(rank, 0)) == {rank} for rank in side)


@pytest.mark.parametrize(("name", "size"), [("ring", 3), ("ring", 9), ("complete", 4), ("torus", 6), ("torus", 25)])
def test_an_odd_cycle_is_named(name, size):
    found = topology.load(name)(size)
    with pytest.raises(ConfigError, match="the topology must have no odd cycle; got .* ranks. Take one whose") as error:
        two_sides(found)
    cycle = [int(rank) for rank in str(error.value).split("got ")[1].split(",")[0].split("-")]
    assert cycle[0] == cycle[-1] and len(set(cycle)) == len(cycle) - 1 and len(set(cycle)) % 2 == 1
    assert f"of {len(set(cycle))} ranks" in str(error.value)
    assert all(b in found.in_neighbours(a, 0) for a, b in itertools.pairwise(cycle))


def test_an_odd_cycle_far_from_rank_0(tmp_path):
    (tmp_path / "edges").write_text("0 1\n1 2\n2 3\n3 4\n4 5\n5 6\n6 7\n7 3\n")
    with pytest.raises(ConfigError, match=r"no odd cycle; got 4-5-6-7-3-4, of 5 ranks"):
        two_sides(topology.load("graph")(8, path=tmp_path / "edges"))
