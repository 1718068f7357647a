"""signSGD: most ranks' sign, counted in pieces."""

from __future__ import annotations

import pytest
import torch

from compress import vectors
from hpcdist.compress import JointCompression, Reduction

pytestmark = pytest.mark.computes

COUNT = 203
SPANS = [vectors.spans_of((COUNT,))]


def given(rank: int, step: int = 0) -> torch.Tensor:
    return vectors.normal(COUNT, 100 * rank + step)


def votes(comm, tensors, **more) -> list[torch.Tensor]:
    """The means that these tensors, one per step, lead to."""
    config = JointCompression.from_mapping({"name": "signsgd", **more})
    reduction = Reduction(comm, config, tensors[:1], SPANS)
    found = []
    for tensor in tensors:
        senders = reduction([out := tensor.clone()])
        found.append(out / senders)
    reduction.close()
    return found


@pytest.mark.sizes(1, 3, 8)
def test_it_is_the_sign_of_the_sum_of_all_ranks_signs(ranks):
    """The paper's definition written out; where the sum is 0, + and − by turns."""
    found = ranks(lambda comm: votes(comm, [given(comm.rank, step) for step in range(3)]))
    for step in range(3):
        total = torch.stack([given(rank, step).sign() for rank in range(len(found))]).sum(dim=0)
        tie = 1.0 if step % 2 == 0 else -1.0
        expected = torch.where(total == 0, tie, total.sign())
        assert all(torch.equal(outcomes[step], expected) for outcomes in found)


@pytest.mark.sizes(3)
def test_a_rank_of_zeros_does_not_vote_and_single_zeros_vote_by_turns(ranks):
    def body(comm):
        mine = torch.zeros(COUNT) if comm.rank == 0 else given(comm.rank).float().clone()
        mine[0] = 0.0
        return votes(comm, [mine] * 4)

    ones, twos = given(1).sign(), given(2).sign()
    for outcomes in ranks(body):
        agreed = ones[1:] == twos[1:]
        assert all(torch.equal(outcome[1:][agreed], ones[1:].float()[agreed]) for outcome in outcomes)
        assert torch.stack(outcomes)[:, 0].tolist() == [1.0, -1.0, 1.0, -1.0]


@pytest.mark.sizes(1, 4)
def test_where_nobody_votes_nothing_moves_and_while_it_warms_up_only_some_ranks_may(ranks):
    def body(comm):
        warming_up = {"warmup_steps": 2, "warmup_ranks": 1}
        return votes(comm, [torch.zeros(COUNT)] * 2), votes(comm, [given(comm.rank)], **warming_up)

    for nothing, (first,) in ranks(body):
        assert not any(outcome.any() for outcome in nothing) and torch.equal(first, given(0).sign())


@pytest.mark.sizes(3, 8)
def test_a_bit_per_element_goes_each_way(ranks):
    count = 80 * ranks.size

    def body(comm):
        config, like = JointCompression.model_validate("signsgd"), torch.ones(count)
        reduction = Reduction(comm, config, [like], [vectors.spans_of((count,))])
        comm.barrier()
        before = comm.trace.traffic.bytes_sent
        reduction([like])
        sent = comm.trace.traffic.bytes_sent - before
        reduction.close()
        return sent

    assert ranks(body) == [2 * (ranks.size - 1) * (10 + 4)] * ranks.size
