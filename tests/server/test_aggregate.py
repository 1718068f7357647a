"""A server's aggregate: sums in the order in which they are added, divided once, applied to its own shard alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.cases import each
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.server.channel import GRADIENT, SUM, ServerRequest
from hpcdist.strategies.server.gradients import Aggregate
from hpcdist.strategies.server.placement import Shard, create_shards

ALL = torch.ones(4, dtype=torch.bool)


def _model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    return module, FlatModel(module)


def _whole(model):
    return Shard(tuple((0, flat.numel()) for flat in model.params))


def _request(model, shard, seed, weight=1.0, used=ALL, clock=0, kind=GRADIENT):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(flat.numel(), generator=generator, dtype=flat.dtype) for flat in model.params]
    clocks = (clock,) if isinstance(clock, int) else clock
    return ServerRequest(1, kind, weight, clocks, [part.clone() for part in shard.of(tensors)], used)


@each("apart", [False, True])
def test_a_weighted_sum_in_the_order_of_addition_is_divided_once(apart):
    module, model = _model()
    local, aggregate = torch.optim.SGD(module.parameters(), lr=1.0), Aggregate(model, _whole(model), apart=apart)
    requests = [_request(model, _whole(model), seed, weight) for seed, weight in enumerate((1.0, 0.7, 1.3))]
    (before,) = [flat.clone() for flat in model.params]
    for request in requests:
        aggregate.add(request)
    assert aggregate.total_weight() == 3.0 and aggregate.clocks == [0, 0, 0]
    (a,), (b,), (c,) = (request.tensors for request in requests)
    expected = before - (a + 0.7 * b + 1.3 * c) / 3.0
    aggregate.apply(local.step, aggregate.total_weight())
    assert torch.equal(model.params[0], expected)
    assert (aggregate.clocks, aggregate.weights, aggregate.used.any().item()) == ([], [], False)
    aggregate.add(requests[1])  # what was applied is gone from the sum
    assert torch.equal(aggregate.sums[0], 0.7 * b)


@each("apart", [False, True])
def test_a_mean_of_float16_may_have_a_sum_beyond_its_range(apart):
    module = nn.Linear(2, 1, bias=False).half()
    model = FlatModel(module)
    local, aggregate = torch.optim.SGD(module.parameters(), lr=1.0), Aggregate(model, _whole(model), apart=apart)
    model.params[0].zero_()
    for _ in range(3):
        gradients = [torch.full((2,), 40_000.0, dtype=torch.float16)]
        aggregate.add(ServerRequest(1, GRADIENT, 1.0, (0,), gradients, torch.tensor([True])))
    aggregate.apply(local.step, aggregate.total_weight())
    assert model.params[0].tolist() == [-40_000.0] * 2


def test_a_sum_of_gradients_is_not_weighted_again():
    _, model = _model()
    aggregate = Aggregate(model, _whole(model), apart=False)
    request = _request(model, _whole(model), 1, weight=2.5, clock=(3, 4), kind=SUM)
    aggregate.add(request)
    assert torch.equal(aggregate.sums[0], request.tensors[0])
    assert (aggregate.total_weight(), aggregate.clocks) == (2.5, [3, 4])


def test_weights_of_one_step_make_a_whole_number():
    _, model = _model()
    aggregate = Aggregate(model, _whole(model), apart=False)
    for seed in range(7):
        aggregate.add(_request(model, _whole(model), seed, weight=7 * 3 / 50 if seed else 7 * 32 / 50))
    assert aggregate.total_weight() == 7.0
    aggregate.add(_request(model, _whole(model), 9, weight=0.4))
    assert aggregate.total_weight() == pytest.approx(7.4, rel=1e-15)


def test_a_parameter_without_a_gradient_is_left_alone():
    module, model = _model()
    local = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)
    aggregate = Aggregate(model, _whole(model), apart=False)
    before = [p.detach().clone() for p in module.parameters()]
    aggregate.add(_request(model, _whole(model), 1, used=torch.tensor([True, False, False, False])))
    aggregate.add(_request(model, _whole(model), 2, used=torch.tensor([False, False, True, False])))
    aggregate.apply(local.step, 2.0)
    same = [torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
    assert same == [False, True, False, True]


@each("count", [2, 5])
@each("apart", [False, True])
def test_a_shard_is_updated_as_in_the_whole_and_the_rest_stays(count, apart):
    """To the bit, in parameters that a border cuts too, step after step."""
    reference, whole = _model()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.1, weight_decay=0.1)
    everything = _whole(whole)
    reference_aggregate = Aggregate(whole, everything, apart=False)
    shards = create_shards(whole.params, count)
    aggregates = []
    for shard in shards:
        module, model = _model()
        local = torch.optim.Adam(module.parameters(), lr=0.1, weight_decay=0.1)
        aggregates.append((Aggregate(model, shard, apart=apart), local, model, model.params[0].clone()))
    for step in range(5):
        reference_aggregate.add(_request(whole, everything, step))
        reference_aggregate.apply(optimizer.step, 1.0)
        for shard, (aggregate, local, model, start) in zip(shards, aggregates, strict=True):
            if apart:
                for grad in model.grads:
                    grad.fill_(17.0)  # the worker's own gradient lies there
            aggregate.add(_request(model, shard, step))
            aggregate.apply(local.step, 1.0)
            ((first, last),) = shard.ranges
            expected = start.clone()
            expected[first:last] = whole.params[0][first:last]
            assert torch.equal(model.params[0], expected)


@each("added", [0, 2])
def test_an_update_under_way_is_taken_up(added):
    module, model = _model()
    aggregate = Aggregate(model, _whole(model), apart=False)
    for seed in range(added):
        aggregate.add(_request(model, _whole(model), seed, weight=0.5 + seed, clock=seed))
    state = aggregate.state_dict()
    other_module, other = _model()
    resumed = Aggregate(other, _whole(other), apart=False)
    resumed.load_state_dict(state)
    for it, its_model, its_module in ((aggregate, model, module), (resumed, other, other_module)):
        it.add(_request(its_model, _whole(its_model), 7, clock=5))
        assert it.clocks == [*range(added), 5]
        it.apply(torch.optim.SGD(its_module.parameters(), lr=0.1).step, it.total_weight())
    assert torch.equal(model.params[0], other.params[0])
