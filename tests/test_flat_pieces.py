"""Parts of flat tensors, one after another."""

from __future__ import annotations

import pytest
import torch

from hpcdist.comm.pieces import CACHED, alongside


@pytest.mark.parametrize("count", [0, 1, CACHED, 2 * CACHED + 3])
def test_operations_on_parts_give_the_bits_of_those_on_the_whole(count):
    own, other = torch.randn(count), torch.randn(count, dtype=torch.float64).float()
    expected = own.clone().add_(other).div_(3)
    parts = list(alongside(own, other))
    for mine, theirs in parts:
        assert len(mine) == len(theirs) <= CACHED
        mine.add_(theirs).div_(3)
    assert torch.equal(own, expected) and sum(len(mine) for mine, _ in parts) == count


def test_tensors_of_other_lengths_are_no_parts_of_each_other():
    with pytest.raises(ValueError, match="zip"):
        list(alongside(torch.zeros(CACHED + 1), torch.zeros(CACHED)))


def test_what_is_on_a_device_stays_whole():
    own, other = torch.zeros(3 * CACHED, device="meta"), torch.zeros(3 * CACHED)
    (parts,) = alongside(own, other)
    assert parts[0] is own and parts[1] is other
