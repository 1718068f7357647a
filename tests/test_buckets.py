"""Buckets cut the gradients exactly, and are announced in order, complete, once."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.cases import each
from hpcdist.errors import ConfigError
from hpcdist.model.buckets import Bucket
from hpcdist.model.flat import FlatModel
from strategies import problem

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
tensors = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=12)
few = settings(max_examples=60, deadline=None)


class Bag(nn.Module):
    """Parameters of given sizes and dtypes; the loss uses those in `order`, the last used arriving first."""

    def __init__(self, specs: list[tuple[int, torch.dtype]]):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(n, dtype=dtype)) for n, dtype in specs])

    def forward(self, order: list[int]) -> torch.Tensor:
        total = torch.zeros(())
        for position in order:
            total = total * 0.5 + (self.weights[position] ** 2).sum()
        return total


def announced(model: FlatModel) -> list[int]:
    """The indices of the buckets that are announced from now on, in that order."""
    seen: list[int] = []
    model.gradients.on_bucket = lambda bucket: seen.append(bucket.index)
    return seen


@few
@given(tensors, st.integers(1, 300), st.integers(1, 300))
def test_every_element_is_in_exactly_one_bucket_of_its_cap_from_the_last_parameter_to_the_first(specs, cap, first_cap):
    model = FlatModel(Bag(specs), bucket_bytes=cap, first_bucket_bytes=first_cap)
    buckets, position = model.gradients.buckets, {slot.name: k for k, slot in enumerate(model.slots)}
    group_of = []
    for bucket in buckets:
        within = [position[name] for name in bucket.params]
        assert within == sorted(within, reverse=True)
        (group,) = {model.slots[k].group for k in within}
        first, last = model.slots[within[-1]], model.slots[within[0]]
        part = model.grads[group][first.start : last.stop]
        assert bucket.grads.data_ptr() == part.data_ptr() and len(bucket.grads) == len(part)
        assert len(part) == sum(specs[k][0] for k in within) and bucket.grads.dtype == part.dtype
        group_of.append(group)
    assert sorted(name for bucket in buckets for name in bucket.params) == sorted(position)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    completed_by = [position[bucket.params[-1]] for bucket in buckets]
    assert completed_by == sorted(completed_by, reverse=True)

    size = {slot.name: slot.view(model.grads).nbytes for slot in model.slots}
    for group in range(len(model.grads)):
        mine = [bucket for bucket, own in zip(buckets, group_of, strict=True) if own == group]
        for k, bucket in enumerate(mine):
            limit = min(cap, first_cap) if k == 0 else cap
            n_bytes = sum(size[name] for name in bucket.params)
            assert n_bytes <= limit or len(bucket.params) == 1
            if k + 1 < len(mine):  # closed only because the next parameter would not have fitted
                assert n_bytes + size[mine[k + 1].params[0]] > limit


@few
@given(st.data())
def test_announced_in_order_and_complete_whatever_the_order_of_arrival(data):
    specs = data.draw(st.lists(st.tuples(st.integers(1, 20), st.sampled_from(DTYPES)), min_size=1, max_size=10))
    used = data.draw(st.permutations(range(len(specs))))[: data.draw(st.integers(0, len(specs)))]
    model = FlatModel(Bag(specs), bucket_bytes=data.draw(st.integers(1, 200)))
    complete = [all(int(name.split(".")[1]) in used for name in bucket.params) for bucket in model.gradients.buckets]
    during = ([*complete, False]).index(False)  # those before the first that waits for an unused parameter
    for _ in range(2):
        for grads in model.grads:
            grads.fill_(float("nan"))  # whatever stands in the slice of an unused parameter must not be sent
        seen: list[tuple[int, torch.Tensor]] = []
        model.gradients.on_bucket = lambda bucket, seen=seen: seen.append((bucket.index, bucket.grads.clone()))
        model.module.zero_grad(set_to_none=True)
        model.gradients.announce()
        if used:
            model.module(used).backward()
        assert len(seen) == during
        assert model.gradients.collect(last=True).tolist() == [k in used for k in range(len(specs))]
        assert [index for index, _ in seen] == list(range(len(model.gradients.buckets)))
        assert all(torch.equal(grads, model.gradients.buckets[index].grads) for index, grads in seen)
        assert problem.nonfinite(model) == []


def test_two_passes_before_a_step_announce_once_and_send_the_sum():
    model = FlatModel(Bag([(3, torch.float32)] * 3), bucket_bytes=12)
    seen = announced(model)
    model.gradients.announce(early=False)
    model.module([0, 1]).backward()
    assert seen == []
    model.gradients.announce()
    model.module([1, 2]).backward()
    assert seen == [0, 1]  # the first parameter has only its gradient of the first pass
    assert model.gradients.collect(last=True).all()
    assert seen == [0, 1, 2]
    whole = Bag([(3, torch.float32)] * 3)
    whole.load_state_dict(model.module.state_dict())
    (whole([0, 1]) + whole([1, 2])).backward()
    assert torch.allclose(model.grads[0], torch.cat([p.grad for p in whole.parameters()]))


def test_passes_of_one_step_are_counted():
    module = Bag([(3, torch.float32)] * 3)
    model = FlatModel(module, bucket_bytes=12)
    seen = announced(model)
    for _ in range(2):
        seen.clear()
        module.zero_grad()
        model.gradients.announce(passes=2)
        module([0, 1, 2]).backward()
        assert seen == []
        module([0, 2]).backward()
        assert seen == [0]  # parameter 1 had one gradient; bucket 2 waits its turn behind it
        assert model.gradients.collect(last=True).all() and seen == [0, 1, 2]
        with pytest.raises(ConfigError, match="after its bucket was announced"):
            module([1]).backward()


def test_a_step_after_fewer_passes_than_announced_for_still_sends_everything():
    model = FlatModel(Bag([(3, torch.float32)] * 2), bucket_bytes=12)
    seen = announced(model)
    model.gradients.announce(early=False)  # the epoch ends here, in the middle of an accumulation
    model.module([0, 1]).backward()
    assert model.gradients.collect(last=True).all() and seen == [0, 1]
    assert model.gradients.collect(last=True).all() and seen == [0, 1]


def test_a_gradient_after_its_bucket_was_announced_is_refused():
    model = FlatModel(Bag([(3, torch.float32)] * 2))
    model.gradients.announce()
    model.module([0, 1]).backward()
    with pytest.raises(ConfigError, match=r"one, or accumulation must be set; got a gradient of 'weights.1' after"):
        model.module([0, 1]).backward()
    model.gradients.announce(early=False)
    model.module([0, 1]).backward()
    model.gradients.collect(last=True)
    with pytest.raises(ConfigError, match=r"Set the number of backward passes per step"):
        model.module([0, 1]).backward()
    model.gradients.announce(early=False)
    model.module([0, 1]).backward()


def test_reentrant_checkpointing_brings_a_shared_weight_in_parts():
    """Two checkpointed uses of one weight are two arrivals: fine in one bucket with later ones, refused if sent."""
    first, shared = nn.Linear(3, 3), nn.Linear(3, 3)
    module = nn.Sequential(first, shared)
    x = torch.randn(2, 3)

    def forward() -> torch.Tensor:
        return checkpoint(shared, checkpoint(shared, first(x), use_reentrant=True), use_reentrant=True).sum()

    forward().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    model = FlatModel(module)
    seen = announced(model)
    model.gradients.announce()
    forward().backward()
    assert seen == [0]
    assert all(torch.equal(p.grad, e) for p, e in zip(module.parameters(), expected, strict=True))
    model.close()
    small = FlatModel(module, bucket_bytes=1)
    small.gradients.announce()
    with pytest.raises(ConfigError, match="after its bucket was announced"):
        forward().backward()


def test_an_error_in_the_callback_ends_the_backward_pass():
    model = FlatModel(Bag([(3, torch.float32)]))

    def fail(bucket: Bucket) -> None:
        raise ConnectionError(f"bucket {bucket.index}")

    model.gradients.on_bucket = fail
    model.gradients.announce()
    with pytest.raises(ConnectionError, match="bucket 0"):
        model.module([0]).backward()


def test_of_passes_that_are_joined_the_last_one_completes_buckets():
    model = FlatModel(Bag([(4, torch.float32)] * 2), bucket_bytes=4)
    seen = announced(model)
    model.gradients.announce()
    with model.gradients.joined() as set_more_follow:
        model.module([0, 1]).backward()
        assert not seen
        set_more_follow(False)
        model.module([1]).backward()
        assert seen == [0]
    model.gradients.collect(last=True)
    assert seen == [0, 1]


def test_arrivals_on_several_threads_keep_the_order():
    count, seen = 200, []
    model = FlatModel(Bag([(1, torch.float32)] * count), bucket_bytes=4)

    def slow(bucket: Bucket) -> None:
        time.sleep(0)  # lets another thread run in between, as sending does
        seen.append(bucket.index)

    def pass_back(mine: int) -> None:
        for k in range(mine, count, 4):
            model.module([k]).backward()

    model.gradients.on_bucket = slow
    model.gradients.announce()
    threads = [threading.Thread(target=pass_back, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == list(range(count))


@each("setting", ["bucket_bytes", "first_bucket_bytes"])
@each("value", [0, -5, 1.5, "4", True, None])
def test_caps_are_positive_integers(setting, value):
    module = nn.Linear(2, 2)
    pointer = module.weight.data_ptr()
    with pytest.raises(ConfigError, match=rf"{setting} must be an integer of at least 1; got {value!r}"):
        FlatModel(module, **{setting: value})
    assert module.weight.data_ptr() == pointer  # refused before anything was moved
