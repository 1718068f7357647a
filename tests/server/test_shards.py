"""Shards: a partition of all parameters, of equal bytes, or of whole parameters as evenly as these allow."""

from __future__ import annotations

from itertools import accumulate, combinations_with_replacement, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import each
from hpcdist.compress import Span
from hpcdist.strategies.server.placement import Shard, create_shards

dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
groups = st.lists(st.tuples(st.integers(0, 40), dtypes), min_size=1, max_size=4).map(
    lambda found: [torch.zeros(length, dtype=dtype) for length, dtype in found]
)


@given(groups, st.integers(1, 9))
def test_every_element_is_in_exactly_one_shard(tensors, count):
    shards = create_shards(tensors, count)
    assert len(shards) == count
    for i, shard in enumerate(shards):
        for part in shard.of(tensors):
            part += i + 1
    for group, tensor in enumerate(tensors):
        expected = [i + 1 for i, shard in enumerate(shards) for _ in range(*shard.ranges[group])]
        assert tensor.tolist() == expected, "not once each, or not in the order of the shards"


@given(groups, st.integers(1, 9))
def test_they_have_equal_bytes_but_for_two_elements(tensors, count):
    sizes = [sum(part.nbytes for part in shard.of(tensors)) for shard in create_shards(tensors, count)]
    assert max(sizes) - min(sizes) <= 2 * max(tensor.itemsize for tensor in tensors)


@given(groups, st.integers(1, 9))
def test_one_shard_is_everything_and_parts_are_views(tensors, count):
    assert create_shards(tensors, 1) == [Shard(tuple((0, tensor.numel()) for tensor in tensors))]
    for shard in create_shards(tensors, count):
        for part, tensor, (start, _) in zip(shard.of(tensors), tensors, shard.ranges, strict=True):
            assert part.numel() == 0 or part.data_ptr() == tensor[start:].data_ptr()


# --- whole parameters -------------------------------------------------------------------------------------------------
def _parameters(sizes, dtype):
    """A flat tensor of parameters of so many elements, and where they lie."""
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return torch.zeros(ends[-1], dtype=dtype), [Span(a, b, (b - a,)) for a, b in pairwise(ends)]


models = st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=3), dtypes), min_size=1, max_size=3).map(
    lambda groups: list(zip(*[_parameters(*group) for group in groups], strict=True))
)


def _sizes(tensors, spans):
    return [(span.stop - span.start) * t.itemsize for t, own in zip(tensors, spans, strict=True) for span in own]


@given(models, st.integers(1, 6))
def test_shards_of_whole_parameters_hold_each_once_and_cut_none(model, count):
    tensors, spans = model
    shards = create_shards(tensors, count, spans)
    assert len(shards) == count
    for i, shard in enumerate(shards):
        for part in shard.of(tensors):
            part += i + 1
    seen = []
    for tensor, own in zip(tensors, spans, strict=True):
        assert (tensor > 0).all()
        for span in own:
            assert len(tensor[span.start : span.stop].unique()) <= 1, "a parameter is cut"
        seen += tensor.tolist()
    assert seen == sorted(seen), "not in the order of the shards"


@given(models, st.integers(1, 6))
def test_the_largest_shard_is_as_small_as_whole_parameters_allow(model, count):
    tensors, spans = model
    sizes = _sizes(tensors, spans)
    found = [sum(part.nbytes for part in shard.of(tensors)) for shard in create_shards(tensors, count, spans)]
    ways = combinations_with_replacement(range(len(sizes) + 1), count - 1)
    least = min(max(sum(sizes[a:b]) for a, b in zip((0, *way), (*way, len(sizes)))) for way in ways)
    assert max(found) == least


@each("case", [
    ([9, 1, 1, 1], 3, [9, 2, 1]),  # the last one is not left empty
    ([1, 1, 1, 9], 3, [2, 1, 9]),
    ([5, 5, 5, 5, 5], 2, [15, 10]),
    ([4, 7], 4, [4, 7, 0, 0]),
    ([3], 1, [3]),
    ([], 2, [0, 0]),
])  # fmt: skip
def test_no_shard_is_empty_while_there_are_parameters(case):
    sizes, count, expected = case
    tensor, spans = _parameters(sizes, torch.float32)
    assert [b - a for ((a, b),) in (shard.ranges for shard in create_shards([tensor], count, [spans]))] == expected


def test_thousands_of_parameters_are_cut_in_no_time():
    sizes = [1 + i % 1000 * 997 for i in range(5000)]
    spans = [[Span(stop - size, stop, (size,)) for stop, size in zip(accumulate(sizes), sizes)]]
    tensor = torch.empty(sum(sizes), dtype=torch.int8, device="meta")
    parts = [b - a for ((a, b),) in (shard.ranges for shard in create_shards([tensor], 64, spans))]
    assert sum(parts) == sum(sizes) and max(parts) - min(parts) < 4 * max(sizes)


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
