"""What an all-reduce sends and how long it takes: formulas against what is counted and simulated."""

from __future__ import annotations

import math

import pytest
import torch

from harness.cases import each
from hpcdist.collectives import available, direct, hierarchical, load, ring
from hpcdist.collectives.base import Algorithm, core_steps, segment_count
from hpcdist.comm.virtual import Network, run_virtual

WITH_COSTS = [name for name in available() if issubclass(load(name), Algorithm)]
POINT_TO_POINT = ["ring", "recursive_doubling", "halving_doubling", "tree"]
LATENCY_S, BYTE_S = 1e-5, 1e-9
NETWORK = Network(LATENCY_S, 1 / BYTE_S)


def traffic(name, n_bytes, size, ranks_per_node=1):
    """Bytes and messages that the busiest rank sends, exactly where `size` divides the length."""
    once, (steps, folded) = (size - 1) * n_bytes // size, core_steps(size)
    if name == "hierarchical":
        segments = segment_count(n_bytes, hierarchical.SEGMENT_BYTES)
        slice_bytes = n_bytes // segments // ranks_per_node
        between = "recursive_doubling" if slice_bytes <= hierarchical.SHORT_BYTES else "ring"
        return tuple(segments * each for each in traffic(between, slice_bytes, size // ranks_per_node))
    return {
        "ring": (2 * once, 2 * (size - 1) * segment_count(n_bytes // size, ring.SEGMENT_BYTES)),
        "native": (2 * once, 2 * (size - 1)),
        "recursive_doubling": ((steps + folded) * n_bytes, steps + folded),
        "halving_doubling": (2 * ((1 << steps) - 1) * n_bytes // (1 << steps) + folded * n_bytes, 2 * steps + folded),
        "tree": ((size - 1).bit_length() * n_bytes, (size - 1).bit_length()),
        "direct": (once, (size - 1) * segment_count(n_bytes // size, direct.SEGMENT_BYTES)),
        "shared_memory": (0, 0),
    }[name]


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
    sent = max(t.bytes_sent for t, _ in results), max(t.messages_sent for t, _ in results)
    return *sent, max(seconds for _, seconds in results)


@each("size", [2, 3, 8, 12])
@each("name", [*POINT_TO_POINT, "native"])
def test_bytes_and_messages_equal_the_formula_where_p_divides_n(name, size):
    count = 16 * size * (1 << size.bit_length())
    assert counted(name, size, count)[:2] == traffic(name, 4 * count, size)


@each("size", [2, 3, 7])
def test_direct_writes_its_share_to_every_other_rank(size):
    bytes_sent, messages = traffic("direct", 4 * 16 * size, size)
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
    bytes_sent, messages = traffic("hierarchical", 4 * count, size, ranks_per_node)
    barriers = (segment_count(4 * count, hierarchical.SEGMENT_BYTES) + 1) * (ranks_per_node - 1).bit_length()
    assert counted("hierarchical", size, count, ranks_per_node)[:2] == (bytes_sent, messages + barriers)
    slice_bytes, steps = 4 * count / ranks_per_node, n_nodes.bit_length() - 1
    if not short:
        assert bytes_sent == 2 * slice_bytes * (n_nodes - 1) / n_nodes  # the table of the literature
    elif n_nodes == 1 << steps:
        assert bytes_sent == slice_bytes * steps


def test_the_closed_forms():
    n, p = 4096, 8
    assert traffic("ring", n, p) == (2 * n * 7 // 8, 14)
    assert traffic("halving_doubling", n, p) == (2 * n * 7 // 8, 6)
    assert traffic("recursive_doubling", n, p) == (3 * n, 3)
    assert traffic("tree", n, p) == (3 * n, 3)
    assert traffic("direct", n, p) == (n * 7 // 8, 7)
    for name in WITH_COSTS:
        assert traffic(name, n, 1) == (0, 0)
        assert load(name).cost(n, 1) == (0, 0, 0)
        assert load(name).cost_s(n, 1, 1.0, 1.0, 1.0) == 0.0
    for n_bytes, messages_of_chunk in ((1 << 20, 1), (2 << 20, 1), (4 << 20, 2), (64 << 20, 32)):  # one per segment
        assert traffic("ring", n_bytes, 2) == (n_bytes, 2 * messages_of_chunk)


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
    whole_s = counted("ring", 5, 100_000)[2]
    monkeypatch.setattr(ring, "SEGMENT_BYTES", 20_000)
    assert traffic("ring", 400_000, 5)[1] == 2 * 4 * 4
    assert counted("ring", 5, 100_000)[:2] == traffic("ring", 400_000, 5)
    assert counted("ring", 5, 100_000)[2] <= whole_s * (1 + 1e-9)


def test_adding_costs_time_too():
    for name in WITH_COSTS:
        cost_s = load(name).cost_s
        assert cost_s(4096, 4, LATENCY_S, BYTE_S, 1e-9, 2) > cost_s(4096, 4, LATENCY_S, BYTE_S, 0.0, 2)


@pytest.mark.sizes(1, 2, 4)
@each("case", [*((name, torch.float32) for name in WITH_COSTS), ("native", torch.bfloat16)])
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
    expected = traffic(name, 4 * count, ranks.size, ranks.size) if ranks.size > 1 else (0, 0)
    assert (sent == expected[0] or dtype == torch.bfloat16) and (messages == expected[1] or name != "native")
