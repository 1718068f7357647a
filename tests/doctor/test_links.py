"""The network between neighbouring nodes: what is measured, and which node is found to be the slow one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.tools.doctor.base import OK, WARNING, Nodes, Requirements, find_nodes
from hpcdist.tools.doctor.checks import links
from hpcdist.tools.doctor.checks.links import Link, compare, judge, rounds

# What links of one healthy network differ by, and how much worse a bad one is.
FINE_S, FINE_BYTES_S = st.floats(20e-6, 50e-6), st.floats(0.8e9, 1.2e9)
WORSE = st.floats(4, 1000)


def ring(count: int, healthy: list[tuple[float, float]]) -> list[Link]:
    pairs = sorted(pair for part in rounds(count) for pair in part)
    return [Link(*pair, *figures) for pair, figures in zip(pairs, healthy)]


@st.composite
def networks(draw, smallest: int = 3):
    count = draw(st.integers(smallest, 40))
    figures = draw(st.lists(st.tuples(FINE_S, FINE_BYTES_S), min_size=count, max_size=count))
    return count, ring(count, figures)


def worsened(link: Link, factor: float, late: bool) -> Link:
    if late:
        return link._replace(latency_s=link.latency_s * factor + links.LATE_S)
    return link._replace(bandwidth_bytes_s=link.bandwidth_bytes_s / factor)


# --- whom is measured with whom ---------------------------------------------------------------------------------------
@given(st.integers(1, 100))
def test_every_pair_of_neighbours_is_measured_once_and_no_node_twice_at_a_time(count):
    found = rounds(count)
    for pairs in found:
        ends = [node for pair in pairs for node in pair]
        assert len(set(ends)) == len(ends)
    pairs = [frozenset(pair) for part in found for pair in part]
    assert len(set(pairs)) == len(pairs) == (count if count > 2 else count - 1)
    assert set(pairs) == {frozenset((i, (i + 1) % count)) for i in range(count)} - {frozenset((0,))}
    assert len(found) <= max(links.MAX_SEQUENTIAL, 3), "the time does not grow with the number of nodes"


@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_a_network_is_measured_as_it_is(size):
    network = Network(latency_s=2e-4, bandwidth_bytes_s=5e7)

    def body(comm):
        start = comm.now()
        nodes = find_nodes(comm, f"n{comm.rank}")
        return links.measure(comm, nodes, Requirements()), comm.now() - start

    found, seconds = run_virtual(body, size, network=network)[0]
    assert len(found["links"]) == (size if size > 2 else 1)
    for _, _, latency_s, bandwidth_bytes_s in found["links"]:
        assert latency_s == pytest.approx(2e-4, rel=1e-2) and bandwidth_bytes_s == pytest.approx(5e7, rel=0.05)
    assert seconds < len(rounds(size)) * 3 * links.PAIR_S
    nodes = Nodes(tuple(f"n{i}" for i in range(size)), tuple(range(size)))
    assert [finding.status for finding in judge(found, nodes, Requirements())] == [OK]


def test_a_very_slow_network_takes_no_longer():
    def body(comm):
        start = comm.now()
        links.measure(comm, find_nodes(comm, f"n{comm.rank}"), Requirements())
        return comm.now() - start

    slow = Network(latency_s=0.05, bandwidth_bytes_s=1e5)
    assert max(run_virtual(body, 2, network=slow)) < 4 * links.PAIR_S


def test_what_looks_slow_is_measured_again_and_only_that(monkeypatch):
    """As if somebody else had used the links of node 2 the first time."""
    asked = []

    def pair(comm, peer):
        asked.append(frozenset((comm.rank, peer)))
        busy = 2 in asked[-1] and asked.count(asked[-1]) <= 2  # both ends ask
        return 1e-5, 1e7 if busy else 1e9

    monkeypatch.setattr(links, "_pair", pair)
    found = run_virtual(lambda comm: links.measure(comm, find_nodes(comm, f"n{comm.rank}"), Requirements()), 5)[0]
    assert {tuple(row[2:]) for row in found["links"]} == {(1e-5, 1e9)}
    assert sorted(map(asked.count, {frozenset(row[:2]) for row in found["links"]})) == [2, 2, 2, 4, 4]


@pytest.mark.mpi(min_size=2)
def test_real_ranks_are_measured(ranks):
    def body(comm):
        apart = comm.apart()
        found = links.measure(apart, find_nodes(apart, "host"), Requirements())
        apart.close()
        return found

    for _, _, latency_s, bandwidth_bytes_s in ranks(body)[0]["links"]:
        assert 0 < latency_s < 1 and 1e6 < bandwidth_bytes_s < 1e12


# --- who is slow ------------------------------------------------------------------------------------------------------
@given(networks())
def test_on_a_healthy_network_nobody_is(network):
    count, table = network
    assert compare(table, count)[:2] == ({}, [])


@given(networks(), st.data(), WORSE, WORSE, st.booleans())
def test_a_node_with_two_slow_links_is(network, data, one, other, late):
    count, table = network
    node = data.draw(st.integers(0, count - 1))
    factors = iter((one, other))
    table = [worsened(link, next(factors), late) if node in link[:2] else link for link in table]
    found = compare(table, count)
    assert list(found.nodes) == [node] and found.links == []
    assert found.nodes[node] > 2, "how many times as bad"


@given(networks(), st.data(), WORSE, st.booleans())
def test_a_slow_link_is_no_slow_node(network, data, factor, late):
    count, table = network
    at = data.draw(st.integers(0, count - 1))
    table[at] = worsened(table[at], factor, late)
    found = compare(table, count)
    assert found.nodes == {} and found.links == [table[at]]


@given(networks(smallest=5), st.data(), WORSE)
def test_two_slow_nodes_are(network, data, factor):
    count, table = network
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=2))
    bad_links = [link for link in table if bad & set(link[:2])]
    good = {node for link in table if link not in bad_links for node in link[:2]}
    table = [worsened(link, factor, False) if link in bad_links else link for link in table]
    if 2 * len(good) > count:  # most nodes still have a good link; one between two bad ones may have none
        assert list(compare(table, count).nodes) == sorted(set(range(count)) - good) and bad <= set(range(count)) - good


# --- what is said -----------------------------------------------------------------------------------------------------
NODES = Nodes(("n1", "n2", "n3", "n4"), (0, 1, 2, 3))
FAST = (30e-6, 1e9)
ETH = [["eth0", "10.0.0.0/24", 10_000]]


def say(figures: list, nodes: Nodes = NODES, networks: dict | None = None):
    count = len(nodes.names)
    pairs = [(i, (i + 1) % count) for i in range(len(figures))]
    table = [[*pair, *row] for pair, row in zip(pairs, figures)]
    found = {"links": table, "networks": networks or dict.fromkeys(nodes.names, ETH)}
    return list(judge(found, nodes, Requirements()))


def test_the_slow_node_is_named_with_its_links_and_the_median():
    slow, rest = say([FAST, (40e-6, 1e7), (2e-3, 2e7), FAST])
    assert (slow.status, slow.nodes, rest.status) == (WARNING, ("n3",), OK) and slow.weight == pytest.approx(50)
    assert "n3 is slow: to n2 40 µs, 80 Mbit/s, to n4 2000 µs, 160 Mbit/s; the nodes' median is" in slow.text
    assert "30 µs, 8.0 Gbit/s. Exclude it (--exclude=n3)" in slow.text
    assert "slowest n2-n3 40 µs, 80 Mbit/s; fastest common network eth0 10.0.0.0/24 (10000 Mbit/s)" in rest.text


def test_a_slow_link_is_named_with_both_ends():
    slow, _ = say([FAST, (40e-6, 1e7), FAST, FAST])
    assert (slow.status, slow.nodes) == (WARNING, ("n2", "n3"))
    assert slow.text.startswith("the link n2-n3 is slow, but not the links to other neighbours: 40 µs, 80 Mbit/s")


def test_two_nodes_have_nothing_to_compare_with_and_one_has_no_links():
    (fine,) = say([FAST], Nodes(("n1", "n2"), (0, 1)))
    assert fine.status == OK and "n1-n2 30 µs, 8.0 Gbit/s: two nodes have nothing to compare with" in fine.text
    (fine,) = judge({"links": [], "networks": {"n1": ETH}}, Nodes(("n1",), (0, 0)), Requirements())
    assert (fine.status, fine.text) == (OK, "one node (n1): no links to measure")


def test_nodes_without_a_common_network_are_named():
    found = dict.fromkeys(NODES.names, ETH) | {"n4": [["eth0", "10.1.0.0/24", 0]]}
    apart, rest = say([FAST] * 4, networks=found)
    assert (apart.status, apart.nodes) == (WARNING, ("n4",))
    assert apart.text.startswith("n4 shares no network with n1 (10.0.0.0/24): they reach each other through routers")
    assert "fastest common network" not in rest.text
