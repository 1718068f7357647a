"""Micro-batches that go from stage to stage by other replicas: the same sums of gradients, and every loop on them."""

from __future__ import annotations

import pytest
import torch
from staged import SAMPLES, batches, data, difference, make, mse, pipeline, sgd, values, whole
from torch import nn

import hpcdist as hd
from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError
from hpcdist.parallel.routing import composed
from session import test_pipeline_loop as pipeline_loop

pytestmark = pytest.mark.computes
SCHEDULES = {
    "gpipe": {}, "zero_bubble": {}, "interleaved": {"chunks": 2}, "recompute": {"recompute": True},
}  # fmt: skip


def gradients(comm, routing, schedule, **how):
    """Collective. This rank's gradients of one batch per replica, by name, and the targets that reached its loss."""
    hd.init(comm=comm)
    reached = []

    def loss(outputs, targets):
        reached.append(targets.clone())
        return mse(outputs, targets)

    name = "one_f_one_b" if schedule == "recompute" else schedule
    options = {"micro_batches": 4, "schedule": name, **SCHEDULES.get(schedule, {}), **how}
    model = hd.pipeline(make, loss, stages=2, routing=routing, **options)
    x, y = data().tensors
    of_replica = slice(model.grid.replica * 8, model.grid.replica * 8 + 8)
    before = model.traffic()
    for _ in range(2):  # as two batches of one step
        model.forward_backward(x[of_replica], y[of_replica])
    sent = (model.traffic() - before).bytes_sent
    return {name: parameter.grad for name, parameter in model.named_parameters()}, reached, sent


@each("schedule", SCHEDULES)
@pytest.mark.sizes(4)
def test_the_sums_of_gradients_over_replicas_are_those_of_the_straight_route(ranks, schedule):
    drawn, straight = (ranks(lambda comm, r=way: gradients(comm, r, schedule)) for way in ("random", "straight"))
    differ = 0.0
    for stage in range(2):
        for name in drawn[stage][0]:
            sums = [torch.stack([grads[name] for grads, *_ in found[stage::2]]).sum(0) for found in (drawn, straight)]
            torch.testing.assert_close(*sums, rtol=0, atol=1e-12)
            differ = max(differ, (drawn[stage][0][name] - straight[stage][0][name]).abs().max().item())
    assert differ > 1e-6, "each replica has had micro-batches of others"


@pytest.mark.sizes(6)
def test_every_stage_gets_exactly_one_micro_batch_of_each_number(ranks):
    found = ranks(lambda comm: gradients(comm, "random", "one_f_one_b"))
    own = [reached for _, reached, _ in found[1::2]]  # of the last stage's ranks
    _, y = data().tensors
    for number in range(8):
        part = number % 4
        arrived = sorted(targets[number].tolist() for targets in own)
        assert arrived == sorted(y[i * 8 + 2 * part : i * 8 + 2 * part + 2].tolist() for i in range(len(own)))
    assert any(torch.equal(own[0][part], own[0][4 + part]) is False for part in range(4)), "each batch has other routes"


@pytest.mark.sizes(4)
def test_only_targets_and_one_number_for_each_replica_are_sent_beside(ranks):
    """Bytes of a rank, but for the descriptions of shapes, which are sent once."""
    drawn, straight = (ranks(lambda comm, r=way: gradients(comm, r, "gpipe")) for way in ("random", "straight"))
    extra = [one - other for (*_, one), (*_, other) in zip(drawn, straight, strict=True)]
    targets = 2 * 8 * 2 * 8  # batches, samples, elements, bytes
    assert all(more >= 0 for more in extra) and targets <= extra[1] < targets + 1000


def trained(comm, **options):
    return pipeline_loop.trained(comm, 2, **{"micro_batches": 4, "routing": "random", "seed": 5} | options)


@each("samples", [SAMPLES, SAMPLES + 3, SAMPLES + 1])  # the last batch is smaller, or of no sample on one replica
@pytest.mark.sizes(4)
def test_with_allreduce_it_trains_as_one_process(ranks, samples):
    found = ranks(lambda comm: trained(comm, samples=samples, overlap="on"))
    expected, losses = pipeline_loop.alone(samples=samples)
    assert difference(whole([part for part, _ in found]), expected) <= 1e-12
    if samples == SAMPLES:
        assert [sum(of_step) / 4 for of_step in zip(*(own for _, own in found))] == pytest.approx(losses, abs=1e-12)


@pytest.mark.sizes(4)
def test_replicas_that_exchange_nothing_train_on_the_samples_of_all(ranks):
    """On its own a replica would see its half alone; here both have learnt from both halves, by the other's stages."""
    options = {"strategy": "local_sgd", "period": 10**6, "epochs": 2}
    drawn, straight = (ranks(lambda comm, r=way: trained(comm, routing=r, **options)) for way in ("random", "straight"))
    spread = [difference(found[0][0], found[2][0]) for found in (drawn, straight)]
    assert spread == [0.0, 0.0], "finish() leaves one model"
    assert difference(drawn[0][0], straight[0][0]) > 1e-6


@pytest.mark.sizes(4)
def test_an_overflow_in_one_replica_skips_the_step_in_all(ranks):
    def body(comm):
        model = pipeline(comm, 2, lambda: make(torch.float32), routing="random")
        hd.DistributedOptimizer(sgd(model.parameters()), model, strategy="noloco", period=100)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        (x, y), *_ = hd.shard(batches(2, dtype=torch.float32))
        found = []
        for factor in (1.0, float("inf") if model.grid.replica == 1 else 1.0, 1.0):
            before = values(model)
            model.step(x * factor, y, scaler=scaler)
            found.append((difference(values(model), before) > 0, scaler.get_scale()))
        hd.finish(model)
        return found

    assert ranks(body) == [[(True, 8.0), (False, 4.0), (True, 4.0)]] * 4


@pytest.mark.sizes(4)
def test_an_evaluation_takes_the_straight_route(ranks):
    def body(comm):
        model = pipeline(comm, 2, routing="random")
        hd.DistributedOptimizer(sgd(model.parameters()), model)
        x, y = data().tensors
        expected = make()(x)
        model.step(x[:8], y[:8])
        model.load_state_dict({name: make().state_dict()[name] for name in model.state_dict()})
        mine = x[model.grid.replica * 4 : model.grid.replica * 4 + 4]
        with torch.no_grad():
            outputs = model(mine)
        hd.finish(model)
        if not model.is_last:
            return outputs is None
        return torch.allclose(outputs, expected[model.grid.replica * 4 :][:4], rtol=0, atol=1e-12)

    assert all(ranks(body))


@pytest.mark.sizes(4)
def test_targets_may_be_a_structure_of_tensors(ranks):
    def body(comm):
        hd.init(comm=comm)

        def loss(outputs, targets):
            first, others = targets["first"], targets["others"]
            assert others[1] is None
            return ((outputs[:, 0] - first) ** 2 + (outputs[:, 1] - others[0]) ** 2).mean()

        model = hd.pipeline(make, loss, stages=2, routing="random")
        x, y = data().tensors
        mine = slice(model.grid.replica * 8, model.grid.replica * 8 + 8)
        found = model.forward_backward(x[mine], {"first": y[mine, 0], "others": [y[mine, 1], None]})
        return found.item(), model.is_last

    found = ranks(body)
    x, y = data().tensors
    expected = ((make()(x[:16]) - y[:16]) ** 2).sum(1).mean().item()
    assert sum(loss for loss, last in found if last) / 2 == pytest.approx(expected, abs=1e-12)


def test_routes_of_all_boundaries_compose():
    generator = torch.Generator().manual_seed(0)
    one, two, three = (torch.stack([torch.randperm(4, generator=generator) for _ in range(3)]).numpy() for _ in "123")
    whole_way = composed([one, two, three])
    for part in range(3):
        assert whole_way[part].tolist() == [three[part][two[part][one[part][i]]] for i in range(4)]


def _cut(**how):
    return lambda comm: (hd.init(comm=comm), hd.pipeline(make, mse, **{"stages": 2} | how))


def _targets_of_words(comm):
    model = pipeline(comm, 2, routing="random")
    x, _ = data().tensors
    model.forward_backward(x[:8], {"kind": "a word"})


REFUSED = {
    "routing must be one of random, straight; got 'Random'. Did you mean 'random'": _cut(routing="Random"),
    "seed of the routing must be at least 0; got -1": _cut(routing="random", seed=-1),
    "routing must be straight where there is one stage.*got random": _cut(routing="random", stages=1),
    "routing must be straight with softsync and these options, whose servers": lambda comm: trained(
        comm, strategy="softsync"
    ),
    "targets must be tensors, and tuples, lists or dicts of them; got str": _targets_of_words,
}


@each("message", REFUSED)
def test_what_has_no_meaning_is_refused(message):
    with pytest.raises(ConfigError, match=message):
        run_virtual(REFUSED[message], 4)


def test_with_one_replica_there_is_nothing_to_draw():
    def body(comm):
        model = pipeline(comm, 2, routing="random")
        return model.routing is None and isinstance(model, nn.Module)

    assert run_virtual(body, 2) == [True, True]
