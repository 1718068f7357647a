"""Messages of any lengths reach every rank."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.compress.coding.reduction import cut, gather, join

LENGTHS = [[0], [5], [0, 0], [3, 0, 1], [1, 70_000, 2]]


def _messages(rank: int, lengths: list[int]) -> list[torch.Tensor]:
    return [torch.full((length * (rank + 1),), 10 * rank + k, dtype=torch.uint8) for k, length in enumerate(lengths)]


@each("lengths", LENGTHS)
def test_what_was_joined_is_cut_again(lengths):
    messages = _messages(1, lengths)
    joined = join(messages)
    assert len(joined) == sum(map(len, messages)) + 4 * (len(lengths) - 1)
    assert all(torch.equal(a, b) for a, b in zip(cut(joined, len(lengths)), messages, strict=True))


@pytest.mark.sizes(1, 2, 3, 4, 8)
@each("lengths", LENGTHS)
@each("senders", [1, None])
def test_every_rank_gets_the_messages_of_all_senders_in_order(ranks, lengths, senders):
    def body(comm):
        who = range(senders or comm.size)
        sends = comm.rank in who
        before = comm.trace.traffic.bytes_sent
        found = gather(comm, _messages(comm.rank, lengths) if sends else [], len(lengths), who)
        comm.barrier()
        assert len(found) == len(who)
        for source, messages in zip(who, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(messages, _messages(source, lengths), strict=True))
        mine = sum(lengths) * (comm.rank + 1) + 4 * (len(lengths) - 1)
        return comm.trace.traffic.bytes_sent - before == (comm.size - 1) * mine * sends

    assert all(ranks(body))
