"""Slots of ranks on several nodes: what each node sees of the rows of the others, and notes that differ somewhere."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.collectives.calls.across_nodes import PACKET_BYTES, SlotsAcrossNodes, slots_across_nodes

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(3, 4)]
# Nodes of the ranks: one each, block by block, in turn, and with different numbers of ranks.
PLACES = {2: [(0, 1)], 3: [(0, 1, 2), (0, 1, 0)], 4: [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 1, 0), (0, 1, 0, 2)]}


def on_nodes(ranks, nodes, work):
    def body(comm):
        apart = comm.apart(nodes=nodes)
        slots = slots_across_nodes(apart)
        assert isinstance(slots, SlotsAcrossNodes) and slots.size == comm.size
        result = work(apart, slots)
        slots.close()
        apart.close()
        return result

    return ranks(body)


@each("count", [1, 2048, PACKET_BYTES // 4])  # 4 bytes each; the last ones travel after the note
def test_rows_of_all_ranks_or_of_one_are_seen_on_all_nodes(ranks, count):
    def work(comm, slots):
        seen = []
        for call in range(70):  # more than the places that rows have
            place = slots.row_buffers(torch.int32, count)[slots.calls]
            place.rows[comm.rank].fill_(1000 * comm.rank + call)
            assert slots.synchronize(call, place.gathered)
            seen.append(place.table[:, [0, -1]].tolist())
        for source in range(comm.size):  # of which alone the row is shown
            place = slots.row_buffers(torch.int32, count)[slots.calls]
            if comm.rank == source:
                place.rows[source].fill_(7 + source)
            assert slots.synchronize(1, place.gathered._replace(source=source))
            seen.append(place.rows[source][[0, -1]].tolist())
        return seen

    expected = [[[1000 * rank + call] * 2 for rank in range(ranks.size)] for call in range(70)]
    expected += [[7 + source] * 2 for source in range(ranks.size)]
    for nodes in PLACES[ranks.size]:
        assert on_nodes(ranks, nodes, work) == [expected] * ranks.size


def test_a_note_that_differs_on_any_rank_is_seen_by_all_whatever_each_has_shown(ranks):
    def work(comm, slots):
        found = []
        for odd in range(comm.size):
            for count in (0, 3, 300, PACKET_BYTES):
                mine = count if comm.rank == odd else 5
                place = slots.row_buffers(torch.uint8, mine)[slots.calls]
                found.append(slots.synchronize(mine + 1, place.gathered if mine else None))
                found.append(slots.synchronize(0))
        return found

    for nodes in PLACES[ranks.size]:
        assert on_nodes(ranks, nodes, work) == [[False, True] * 4 * ranks.size] * ranks.size


@pytest.mark.sizes(2)
def test_there_are_none_in_a_node_of_virtual_ranks_or_where_memory_cannot_be_mapped(ranks, monkeypatch):
    assert ranks(slots_across_nodes) == [None] * 2

    def without_mpi(comm):
        apart = comm.apart()
        with monkeypatch.context() as patched:
            patched.setattr(apart.failures, "tolerant", True)
            return slots_across_nodes(apart)

    assert ranks(without_mpi) == [None] * 2
