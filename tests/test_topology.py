"""Weights, spectral gaps and exact averages as theory has them; graphs from files."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import each
from hpcdist import topology
from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.config.settings import Named
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.strategies.adpsgd import bipartition
from hpcdist.tools.topology import adjacency, describe, draw, spectral_gap, steps
from hpcdist.topology import make_topology

pytestmark = pytest.mark.computes
SIZES = st.integers(1, 40)
CLOSE = {"rtol": 0, "atol": 1e-12}
few = settings(max_examples=20, deadline=None)

STAR = "# rank 0 in the middle\n0 1\n0 2  # comment\n\n3 0\n1 0\n"
ONE_WAY = "0 1\n1 2\n2 3\n3 0\n0 2\n"


def make(name: str, size: int, **options):
    return topology.load(name)(size, **options)


def written(folder: Path, text: str) -> Path:
    (folder / "edges.txt").write_text(text)
    return folder / "edges.txt"


def with_options(name: str, size: int, folder: Path):
    """A topology of any name; files hold a path of ranks, there and back."""
    needed = inspect.signature(topology.load(name)).parameters
    if "path" in needed:
        lines = [f"{a} {a + 1}\n{a + 1} {a}" for a in range(size - 1)] + (["0 2"] if size > 2 else [])
        return make(name, size, path=written(folder, "\n".join(lines)))
    if "group" in needed:
        return make(name, size, group=next(group for group in (2, 3, 5, 7, size) if size % group == 0))
    return make(name, size, **({"nodes": tuple(r * r % 3 for r in range(size))} if "nodes" in needed else {}))


# --- every topology ---------------------------------------------------------------------------------------------------
@each("name", topology.available())
@each("size", [1, 2, 3, 4, 5, 8, 12, 25])
def test_weights_are_what_the_topology_says_of_itself(name, size, tmp_path):
    found = with_options(name, size, tmp_path)
    for step in [*steps(found), 1000]:
        w = found.matrix(step)
        assert w.min() >= 0 and w.diagonal().min() > 0
        assert np.allclose(w.sum(axis=0), 1, **CLOSE)
        assert np.allclose(w.sum(axis=1), 1, **CLOSE) or not found.doubly_stochastic
        assert np.array_equal(w, w.T) or not found.symmetric
        assert np.array_equal(w, found.matrix(step + (found.period or 0)))
        for rank in range(size):
            assert found.in_neighbours(rank, step) == {j: w[rank, j] for j in np.flatnonzero(w[rank])}
            assert found.out_neighbours(rank, step) == {i: w[i, rank] for i in np.flatnonzero(w[:, rank])}
            assert list(found.in_neighbours(rank, step)) == sorted(found.in_neighbours(rank, step))
    assert found.static == (found.period == 1)


@each("name", topology.available())
def test_ranks_agree_in_the_end(name, tmp_path):
    """On the mean where W is doubly stochastic; else on it once divided by what push-sum carries along."""
    found = with_options(name, 7, tmp_path)
    x, weight = np.arange(7.0), np.ones(7)
    for step in range(400):
        x, weight = found.matrix(step) @ x, found.matrix(step) @ weight
    assert np.allclose(x / weight, 3, rtol=0, atol=1e-6)
    assert np.allclose(x, 3, rtol=0, atol=1e-6) == found.doubly_stochastic


def test_an_unknown_name_and_a_size_that_is_none():
    with pytest.raises(UnknownNameError, match="topology must be one of bipartite, complete, .*, torus; got 'rign'"):
        topology.load("rign")
    for size in (0, -1, 2.0):
        with pytest.raises(ConfigError, match="size must be an integer of at least 1; got"):
            make("ring", size)


# --- spectral gaps ----------------------------------------------------------------------------------------------------
@few
@given(SIZES)
def test_the_gap_of_the_complete_graph_and_of_a_ring(size):
    assert spectral_gap(make("complete", size)) == 1
    assert np.allclose(make("complete", size).matrix(), 1 / size, **CLOSE)
    expected = 2 / 3 * (1 - math.cos(2 * math.pi / size)) if size >= 3 else 1
    assert spectral_gap(make("ring", size)) == pytest.approx(expected, abs=1e-12)


@few
@given(st.integers(1, 8), st.integers(1, 8))
def test_the_gap_of_a_torus(rows, columns):
    """Its eigenvectors are waves (u, v); along a side of n ranks there are min(n, 3) - 1 neighbours."""

    def wave(u: int, n: int) -> float:
        return (min(n, 3) - 1) * math.cos(2 * math.pi * u / n)

    degree = min(rows, 3) + min(columns, 3) - 2
    waves = [(u, v) for u in range(rows) for v in range(columns)]
    moduli = sorted(abs(1 + wave(u, rows) + wave(v, columns)) / (1 + degree) for u, v in waves)
    found = make("torus", rows * columns, rows=rows)
    assert spectral_gap(found) == pytest.approx(1 - moduli[-2] if len(moduli) > 1 else 1, abs=1e-7)
    if rows == 1:
        assert np.array_equal(found.matrix(), make("ring", columns).matrix())


@few
@given(st.integers(2, 40))
def test_the_gap_of_the_exponential_graph(size):
    """Ying et al. 2021: as bounded, and equal where p is even."""
    bound = 2 / (1 + math.ceil(math.log2(size)))
    gap = spectral_gap(make("exponential", size))
    assert gap == pytest.approx(bound, abs=1e-12) if size % 2 == 0 else gap > bound + 1e-6


@few
@given(SIZES)
def test_the_gap_of_the_one_peer_exponential_graph(size):
    """Circulant matrices commute: wave k is multiplied by (1 + w^(k 2^s))/2 at step s, w the root of unity."""
    found = make("one_peer_exponential", size)
    t = found.period
    moduli = [abs(math.prod(math.cos(math.pi * k * 2**s / size) for s in range(t))) for k in range(1, size)]
    expected = 1 - max(moduli, default=0) ** (1 / t)
    assert spectral_gap(found) == pytest.approx(1 if size & (size - 1) == 0 else expected, abs=1e-9)


@each("size", [2, 3, 5, 16])
def test_random_permutations_contract_as_expected(size):
    draws = [make("random_permutation", 16, seed=seed).matrix(step) for seed in (0, 1) for step in (0, 1)]
    assert len({draw.tobytes() for draw in draws}) == 4, "they differ by step and seed"
    found = make("random_permutation", size, seed=5)
    expected = 1 - math.sqrt((size - 2) / (2 * (size - 1)))
    assert spectral_gap(found) == pytest.approx(expected, abs=1e-12)
    mean = sum(w.T @ w for w in map(found.matrix, range(1000))) / 1000
    assert 1 - math.sqrt(max(np.linalg.eigvalsh(mean)[-2], 0)) == pytest.approx(expected, abs=0.04)


@each("case", [(1, 4), (2, 3), (5, 2), (7, 1), (4, 4)])
def test_the_gap_of_a_hierarchy_is_that_of_a_ring_of_nodes(case):
    nodes, per_node = case
    size = nodes * per_node
    found = make("hierarchical", size, nodes=tuple(rank % nodes for rank in range(size)))
    assert (1 - spectral_gap(found)) ** 2 == pytest.approx(1 - spectral_gap(make("ring", nodes)), abs=1e-9)


# --- what only some do ------------------------------------------------------------------------------------------------
@few
@given(st.integers(2, 40), st.integers(0, 2**40), st.integers(0, 2**40))
def test_random_permutations_are_one_cycle_and_the_same_on_all_ranks(size, seed, step):
    rank, seen = 0, set()
    for _ in range(size):
        found = make("random_permutation", size, seed=seed)  # every rank has an object of its own
        (rank,) = set(found.out_neighbours(rank, step)) - {rank}
        seen.add(rank)
    assert seen == set(range(size)) and rank == 0


@pytest.mark.sizes(3)
def test_ranks_agree_on_what_each_works_out_by_itself(ranks):
    """Whatever the random state of each one, which stays as it is."""

    def body(comm):
        np.random.seed(comm.rank)
        drawn = make("random_permutation", comm.size, seed=3)
        nodes = make("hierarchical", comm.size, nodes=comm.nodes)
        own = [found.in_neighbours(comm.rank, step) for found in (drawn, nodes) for step in range(6)]
        whole = [found.matrix(step) for found in (drawn, nodes) for step in range(6)]
        assert np.random.random() == np.random.RandomState(comm.rank).random()
        return own, whole

    found = ranks(body)
    for step, w in enumerate(found[0][1]):
        for rank, (own, whole) in enumerate(found):
            assert np.array_equal(whole[step], w)
            assert own[step] == {peer: w[rank, peer] for peer in np.flatnonzero(w[rank])}


def test_a_hierarchy_of_unequal_nodes():
    found = make("hierarchical", 5, nodes=(7, 7, 3, 7, 3))
    assert found.in_neighbours(3, 0) == {0: 1 / 3, 1: 1 / 3, 3: 1 / 3} and found.in_neighbours(4, 2) == {2: 0.5, 4: 0.5}
    assert found.in_neighbours(3, 1) == {3: 1.0} and found.in_neighbours(4, 1) == {1: 0.5, 4: 0.5}


@each(
    "case",
    [
        ("torus", {"rows": 4}, "rows must be a divisor of the number of ranks, 6; got 4. Leave it out."),
        ("torus", {"rows": 0}, "rows must be a divisor of the number of ranks, 6; got 0."),
        ("random_permutation", {"seed": -1}, "seed must be at least 0; got -1. NumPy refuses"),
        ("random_groups", {"seed": -1}, "seed must be at least 0; got -1. NumPy refuses"),
        ("random_groups", {"group": 4}, "group must divide the number of ranks, 6; got 4. Change group"),
        ("hierarchical", {"nodes": (0, 1)}, "nodes must have 6 entries, one per rank; got 2. Pass comm.nodes."),
    ],
)
def test_options_that_are_refused(case):
    name, options, message = case
    with pytest.raises(ConfigError, match=message):
        make(name, 6, **options)


# --- the user's own graph ---------------------------------------------------------------------------------------------
def test_weights_of_files(tmp_path):
    """Metropolis and Hastings's; columns of directed graphs sum to one."""
    w = make("graph", 4, path=written(tmp_path, STAR)).matrix()
    quarter, rest, third = 1 / 4, 3 / 4, 1 / 3
    assert np.allclose(w, [[quarter] * 4, [quarter, rest, 0, 0], [quarter, 0, rest, 0], [quarter, 0, 0, rest]], **CLOSE)
    w = make("digraph", 4, path=written(tmp_path, ONE_WAY)).matrix()
    assert np.allclose(w, [[third, 0, 0, 0.5], [third, 0.5, 0, 0], [third, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]], **CLOSE)


@each("name", ["graph", "digraph"])
@each(
    "case",
    [
        ("0 1\n1 2 3\n", r"edges.txt, line 2 must be two ranks from 0 to 3; got '1 2 3'. Write 'a b' for each edge."),
        ("# a\n\n0 4 # b\n", r"edges.txt, line 3 must be two ranks from 0 to 3; got '0 4'."),
        ("0 -1\n", r"line 1 must be two ranks from 0 to 3; got '0 -1'."),
        ("0 x\n", r"line 1 must be two ranks from 0 to 3; got '0 x'."),
        ("0\n", r"line 1 must be two ranks from 0 to 3; got '0'."),
        ("0 1\n2 2\n", r"line 2 must connect two different ranks; got '2 2'. Remove it"),
        ("0 1\n1 0\n2 3\n3 2\n", r"must connect all 4 ranks; got no path from rank 0 to .*rank 2. Add it."),
        ("", r"must connect all 4 ranks; got no path from rank 0 to .*rank 1. Add it."),
        (None, r"path must be a text file with an edge per line; got .*edges.txt: .*No such file"),
        (b"\xff\xfe", r"path must be a text file with an edge per line; got .*edges.txt: .*can't decode"),
    ],
)
def test_files_that_are_refused(name, case, tmp_path):
    (text, message), path = case, tmp_path / "edges.txt"
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        make(name, 4, path=path)


def test_ways_there_without_a_way_back(tmp_path):
    path = written(tmp_path, "0 1\n1 2\n")
    assert make("graph", 3, path=path).symmetric
    with pytest.raises(ConfigError, match="must connect all 3 ranks; got no path from rank 0 to and from rank"):
        make("digraph", 3, path=path)


# --- description and drawing ------------------------------------------------------------------------------------------
def test_a_description_is_read_from_the_matrices(tmp_path):
    found = describe(make("digraph", 4, path=written(tmp_path, ONE_WAY)))
    assert found["rows sum to 1"] == "no: off by up to 0.333" and found["columns sum to 1"] == "yes"
    assert (found["symmetric"], found["messages per rank and step, at most"]) == ("no", 2)
    assert describe(make("one_peer_exponential", 8))["spectral gap"] == "1.000000 per step, over 3"
    drawn = describe(make("random_permutation", 2))
    assert drawn["spectral gap"] == "1.000000 per step, in the mean square"
    assert drawn["matrices"] == "random at each step"
    assert adjacency(make("one_peer_exponential", 4), 1)[3] == {
        "rank": 3, "own weight": 0.5, "receives from": "1 (0.5)", "sends to": "1 (0.5)",
    }  # fmt: skip


def test_a_picture_has_an_arrow_per_message(tmp_path):
    """A line for what goes both ways; a shaft and a head for what goes one way."""
    draw(with_options("digraph", 5, tmp_path), tmp_path / "it.png")
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "it.png").stat().st_size > 2000

    def strokes(name: str) -> int:
        draw(make(name, 6), tmp_path / "it.svg")
        return (tmp_path / "it.svg").read_text().count("stroke: #1f77b4")

    assert strokes("ring") == 6
    assert strokes("one_peer_exponential") == 3 * 6 * 2


def test_pictures_that_are_refused(tmp_path, monkeypatch):
    for name, message in (
        ("it.pdf", "--output must end in .svg or .png; got .*it.pdf. Rename it."),
        ("none/it.svg", "--output must be a file that can be written; got .*: No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            draw(make("ring", 4), tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    with pytest.raises(ConfigError, match="--output must have the packages of the extra plots; got no module"):
        draw(make("ring", 4), tmp_path / "it.svg")


# --- the choice of a strategy -----------------------------------------------------------------------------------------
def chosen(size: int, ranks_per_node: int | None = None, **option) -> topology.Topology:
    network = Network(0.0, 1e9, ranks_per_node=ranks_per_node)
    return run_virtual(lambda comm: make_topology(Named(**option), comm), size, network=network)[0]


def test_options_reach_the_topology_and_a_hierarchy_is_that_of_the_ranks_nodes_unless_the_user_says_them():
    assert chosen(6, name="torus", rows=3).rows == 3
    assert [chosen(size, name="torus").rows for size in (1, 6, 7, 12, 16)] == [1, 2, 1, 3, 4], "as square as can be"
    assert chosen(4, name="random_permutation", seed=7).seed == 7
    assert chosen(4, 2, name="hierarchical").in_neighbours(0, 0) == {0: 0.5, 1: 0.5}
    assert chosen(4, 2, name="hierarchical", nodes=[0, 1, 0, 1]).in_neighbours(0, 0) == {0: 0.5, 2: 0.5}


@each(
    "case",
    [
        ({"name": "rign"}, UnknownNameError, "topology must be one of bipartite, complete, .*; got 'rign'"),
        ({"name": "torus", "row": 2}, ConfigError, "strategy.topology setting must be one of rows; got 'row'. Did you"),
        ({"name": "torus", "rows": "2"}, ConfigError, "strategy.topology.rows must be an integer; got '2'"),
        ({"name": "graph"}, ConfigError, "strategy.topology.path must be given; got nothing"),
    ],
)
def test_a_choice_that_is_refused(case):
    option, error, message = case
    with pytest.raises(error, match=message):
        chosen(4, **option)


# --- two sides --------------------------------------------------------------------------------------------------------
@each("size", [1, 2, 4, 6, 7, 8, 9, 12, 25])
def test_bipartite_has_edges_between_even_and_odd_ranks_only(size):
    """The Laplacian of a graph between a and b ranks has eigenvalues 0, a, b and a + b."""
    found = make("bipartite", size)
    for rank, peer in itertools.product(range(size), repeat=2):
        assert (peer in found.in_neighbours(rank, 0)) == (rank == peer or (rank - peer) % 2 == 1)
    assert bipartition(found) == (frozenset(range(0, size, 2)), frozenset(range(1, size, 2)))
    if size > 1:
        gap = 4 / (size + 2) if size % 2 == 0 else 6 / (size + 3)
        assert spectral_gap(found) == pytest.approx(gap, abs=1e-9)


@each("case", [("ring", 2), ("ring", 10), ("torus", 16)])
def test_two_sides_have_no_edge_inside(case):
    name, size = case
    found = make(name, size)
    sides = bipartition(found)
    assert sides[0] | sides[1] == set(range(size)) and not sides[0] & sides[1] and 0 in sides[0]
    for side in sides:
        assert all(side & set(found.in_neighbours(rank, 0)) == {rank} for rank in side)


@each("case", [("ring", 3), ("ring", 9), ("torus", 25), ("graph", 8)])
def test_an_odd_cycle_is_named(case, tmp_path):
    name, size = case
    path = written(tmp_path, "0 1\n1 2\n2 3\n3 4\n4 5\n5 6\n6 7\n7 3\n")  # far from rank 0
    found = make(name, size, **({"path": path} if name == "graph" else {}))
    with pytest.raises(ConfigError, match="the topology must have no odd cycle; got .* ranks. Take one whose") as error:
        bipartition(found)
    cycle = [int(rank) for rank in str(error.value).split("got ")[1].split(",")[0].split("-")]
    assert cycle[0] == cycle[-1] and len(set(cycle)) == len(cycle) - 1 and len(set(cycle)) % 2 == 1
    assert f"of {len(set(cycle))} ranks" in str(error.value)
    assert all(b in found.in_neighbours(a, 0) for a, b in itertools.pairwise(cycle))
