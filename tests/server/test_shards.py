"""Shards: a partition of all parameters, of equal bytes, that may cut through a parameter."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcdist.server.shards import Shard, cut

dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
groups = st.lists(st.tuples(st.integers(0, 40), dtypes), min_size=1, max_size=4).map(
    lambda found: [torch.zeros(length, dtype=dtype) for length, dtype in found]
)


@given(groups, st.integers(1, 9))
def test_every_element_is_in_exactly_one_shard(tensors, count):
    shards = cut(tensors, count)
    assert len(shards) == count
    for i, shard in enumerate(shards):
        for part in shard.of(tensors):
            part += i + 1
    for group, tensor in enumerate(tensors):
        expected = [i + 1 for i, shard in enumerate(shards) for _ in range(*shard.ranges[group])]
        assert tensor.tolist() == expected, "not once each, or not in the order of the shards"


@given(groups, st.integers(1, 9))
def test_they_have_equal_bytes_but_for_two_elements(tensors, count):
    sizes = [sum(part.nbytes for part in shard.of(tensors)) for shard in cut(tensors, count)]
    assert max(sizes) - min(sizes) <= 2 * max(tensor.itemsize for tensor in tensors)


@given(groups, st.integers(1, 9))
def test_one_shard_is_everything_and_parts_are_views(tensors, count):
    assert cut(tensors, 1) == [Shard(tuple((0, tensor.numel()) for tensor in tensors))]
    for shard in cut(tensors, count):
        for part, tensor, (start, _) in zip(shard.of(tensors), tensors, shard.ranges, strict=True):
            assert part.numel() == 0 or part.data_ptr() == tensor[start:].data_ptr()


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(1, 12))
def test_what_lies_outside_of_a_run_that_a_shard_cuts(first, length, start, run):
    shard = Shard(((0, 3), (first, first + length)))
    inside = set(range(first, first + length)) & set(range(start, start + run))
    outside = [(group, set(range(a, b))) for group, a, b in shard.outside(1, start, start + run)]
    assert shard.overlaps(1, start, start + run) == bool(inside)
    if not inside:
        assert outside == []
    else:
        assert all(group == 1 and elements for group, elements in outside)
        assert set().union(inside, *(e for _, e in outside)) == set(range(start, start + run))
        assert sum(len(e) for _, e in outside) + len(inside) == run
