"""What an all-reduce sends and how long it takes: the formulas against the counted and the simulated."""

from __future__ import annotations

import math

import pytest
import torch

from harness.cases import each
from hpcdist.collectives import available, hierarchical, load
from hpcdist.collectives.base import Algorithm, segment_count
from hpcdist.comm.virtual import Network, run_virtual

WITH_FORMULAS = [name for name in available() if issubclass(load(name), Algorithm)]
POINT_TO_POINT = ["ring", "recursive_doubling", "halving_doubling", "tree"]
LATENCY_S, BYTE_S = 1e-5, 1e-9
NETWORK = Network(LATENCY_S, 1 / BYTE_S)


def counted(name, size, count, ranks_per_node=1):
    """Bytes and messages that the busiest rank sends, and virtual seconds."""
    network = Network(LATENCY_S, 1 / BYTE_S, ranks_per_node=ranks_per_node)

    def body(comm):
        reduce = load(name)(comm)
        comm.barrier()
        before, start_s = comm.trace.traffic.copy(), comm.now()
        reduce(torch.ones(count))
        return comm.trace.traffic - before, comm.now() - start_s

    results = run_virtual(body, size, network=network)
    traffic = max(t.bytes_sent for t, _ in results), max(t.messages_sent for t, _ in results)
    return *traffic, max(seconds for _, seconds in results)


@each("size", [2, 3, 8, 12])
@each("name", [*POINT_TO_POINT, "native"])
def test_bytes_and_messages_equal_the_formula_where_p_divides_n(name, size):
    count = 16 * size * (1 << size.bit_length())
    assert counted(name, size, count)[:2] == load(name).traffic(4 * count, size)


@each("size", [2, 3, 7])
def test_direct_writes_its_share_to_every_other_rank(size):
    bytes_sent, messages = load("direct").traffic(4 * 16 * size, size)
    synchronisation = 2 * (size - 1).bit_length()  # attach and barrier: empty messages on virtual ranks
    assert counted("direct", size, 16 * size)[:2] == (bytes_sent, messages + synchronisation)


@each("size", [2, 3, 7])
def test_shared_memory_is_read_and_nothing_sent(size):
    def body(comm):
        reduce = load("shared_memory")(comm)
        before = comm.trace.traffic.copy()
        reduce(torch.ones(100))
        return comm.trace.traffic - before

    for spent in run_virtual(body, size, network=NETWORK):
        assert spent.bytes_sent == 0 and spent.messages_sent == (size - 1).bit_length()  # the barrier's are empty
        assert (spent.bytes_fetched, spent.messages_fetched) == (400 * (size - 1), size - 1)


@pytest.mark.parametrize("n_nodes, ranks_per_node", [(1, 3), (2, 1), (2, 2), (3, 2), (4, 3)])
@pytest.mark.parametrize("short", [True, False])
def test_hierarchical_sends_only_slices_across_nodes(ranks_per_node, n_nodes, short, monkeypatch):
    size = ranks_per_node * n_nodes
    if not short:
        monkeypatch.setattr(hierarchical, "SHORT_BYTES", 0)
    monkeypatch.setattr(hierarchical, "SEGMENT_BYTES", 4 * 1152)
    count = 1152 * 12  # 12 segments
    bytes_sent, messages = load("hierarchical").traffic(4 * count, size, ranks_per_node)
    barriers = (segment_count(4 * count, hierarchical.SEGMENT_BYTES) + 1) * (ranks_per_node - 1).bit_length()
    assert counted("hierarchical", size, count, ranks_per_node)[:2] == (bytes_sent, messages + barriers)
    slice_bytes, steps = 4 * count / ranks_per_node, n_nodes.bit_length() - 1
    if not short:
        assert bytes_sent == 2 * slice_bytes * (n_nodes - 1) / n_nodes  # the table of the literature
    elif n_nodes == 1 << steps:
        assert bytes_sent == slice_bytes * steps


def test_the_closed_forms():
    n, p = 4096, 8
    assert load("ring").traffic(n, p) == (2 * n * 7 // 8, 14)
    assert load("halving_doubling").traffic(n, p) == (2 * n * 7 // 8, 6)
    assert load("recursive_doubling").traffic(n, p) == (3 * n, 3)
    assert load("tree").traffic(n, p) == (3 * n, 3)
    assert load("direct").traffic(n, p) == (n * 7 // 8, 7)
    for name in WITH_FORMULAS:
        assert load(name).traffic(n, 1) == (0, 0)
        assert load(name).cost_s(n, 1, 1.0, 1.0, 1.0) == 0.0
    for n_bytes, messages_of_chunk in ((1 << 20, 1), (2 << 20, 1), (4 << 20, 2), (64 << 20, 32)):  # one per segment
        assert load("ring").traffic(n_bytes, 2) == (n_bytes, 2 * messages_of_chunk)


@each("size", [2, 3, 8, 13])
@each("name", [*POINT_TO_POINT, "native"])
def test_the_time_is_the_formulas(name, size):
    for count in (16, 1000 * (1 << size.bit_length())):
        seconds = counted(name, size, count * size)[2]
        formula_s = load(name).cost_s(4 * count * size, size, LATENCY_S, BYTE_S)
        if name in ("ring", "native") or math.log2(size).is_integer():
            assert seconds == pytest.approx(formula_s)
        else:  # ranks that have nothing to fold go ahead of those that have
            assert 0.5 * formula_s <= seconds <= formula_s * (1 + 1e-9)


def test_segments_of_a_ring_overlap_the_steps(monkeypatch):
    """A segment goes on as soon as it is here, so many short ones take no longer than a long one."""
    from hpcdist.collectives import ring

    whole_s = counted("ring", 5, 100_000)[2]
    monkeypatch.setattr(ring, "SEGMENT_BYTES", 20_000)
    assert ring.Ring.traffic(400_000, 5)[1] == 2 * 4 * 4
    assert counted("ring", 5, 100_000)[:2] == ring.Ring.traffic(400_000, 5)
    assert counted("ring", 5, 100_000)[2] <= whole_s * (1 + 1e-9)


def test_adding_costs_time_too():
    for name in WITH_FORMULAS:
        cost_s = load(name).cost_s
        assert cost_s(4096, 4, LATENCY_S, BYTE_S, 1e-9, 2) > cost_s(4096, 4, LATENCY_S, BYTE_S, 0.0, 2)


@pytest.mark.sizes(1, 2, 4)
@each("case", [*((name, torch.float32) for name in WITH_FORMULAS), ("native", torch.bfloat16)])
def test_bytes_are_the_same_over_any_network_and_messages_of_the_librarys_own(ranks, case):
    name, dtype = case
    count = 4096 * ranks.size

    def body(comm):
        reduce = load(name)(comm)
        before = comm.trace.traffic.copy()
        reduce(torch.ones(count, dtype=dtype))
        spent = comm.trace.traffic - before
        reduce.close()
        return spent.bytes_sent, spent.messages_sent

    sent, messages = max(ranks(body, network=Network(LATENCY_S, 1 / BYTE_S, ranks_per_node=ranks.size)))
    expected = load(name).traffic(4 * count, ranks.size, ranks.size) if ranks.size > 1 else (0, 0)
    assert (sent == expected[0] or dtype == torch.bfloat16) and (messages == expected[1] or name != "native")
