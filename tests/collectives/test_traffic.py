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


@each("size", [2, 3, 5, 8])
@each("name", ["ring", "native"])
def test_time_of_a_ring_is_the_formulas(name, size):
    for count in (size, 1000 * size):
        seconds = counted(name, size, count)[2]
        assert seconds == pytest.approx(load(name).cost_s(4 * count, size, LATENCY_S, BYTE_S))


@each("size", [2, 3, 8, 13])
@each("name", ["recursive_doubling", "halving_doubling", "tree"])
def test_time_of_logarithmic_algorithms_is_the_formulas(name, size):
    count = 1000 * size * (1 << size.bit_length())
    seconds = counted(name, size, count)[2]
    formula_s = load(name).cost_s(4 * count, size, LATENCY_S, BYTE_S)
    if math.log2(size).is_integer():
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


def test_hierarchical_is_faster_than_a_flat_ring_where_nodes_are_far_apart():
    network = Network(1e-4, 1e8, ranks_per_node=4, intra_latency_s=1e-6, intra_bandwidth_bytes_s=1e10)

    def seconds(name, count):
        def body(comm):
            reduce = load(name)(comm)
            comm.barrier()
            start_s = comm.now()
            reduce(torch.ones(count))
            return comm.now() - start_s

        return max(run_virtual(body, 16, network=network))

    assert seconds("hierarchical", 100) < 0.4 * seconds("ring", 100)
    assert seconds("hierarchical", 100_000) < seconds("ring", 100_000)


@pytest.mark.sizes(1, 2, 4)
@each("dtype", [torch.float32, torch.bfloat16])
def test_messages_of_the_librarys_own_are_a_rings_over_any_network(ranks, dtype):
    def body(comm):
        before = comm.trace.traffic.copy()
        load("native")(comm)(torch.ones(100, dtype=dtype))
        return (comm.trace.traffic - before).messages_sent

    assert ranks(body) == [load("native").traffic(400, ranks.size)[1]] * ranks.size


@pytest.mark.sizes(1, 2, 4)
@each("name", WITH_FORMULAS)
def test_bytes_are_the_same_over_any_network(ranks, name):
    count = 4096 * ranks.size

    def body(comm):
        reduce = load(name)(comm)
        before = comm.trace.traffic.copy()
        reduce(torch.ones(count))
        sent = (comm.trace.traffic - before).bytes_sent
        reduce.close()
        return sent

    sent = max(ranks(body, network=Network(LATENCY_S, 1 / BYTE_S, ranks_per_node=ranks.size)))
    expected = load(name).traffic(4 * count, ranks.size, ranks.size)[0] if ranks.size > 1 else 0
    assert sent == expected
