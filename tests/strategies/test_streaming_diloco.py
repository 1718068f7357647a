"""Streaming DiLoCo: by hand, as DiLoCo, in bytes and in time; how models are cut into fragments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from harness.cases import each
from hpcdist.comm.virtual import Constant, Network, run_virtual
from hpcdist.errors import CheckpointError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.synchronous.fragments import split_layers
from strategies import problem, replicas

pytestmark = pytest.mark.computes

NAME = "streaming_diloco"
STEPS, DEEP = 14, 5  # layers


def deep() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [nn.Linear(problem.FEATURES, problem.FEATURES) for _ in range(DEEP - 1)]
        return nn.Sequential(*layers, nn.Linear(problem.FEATURES, 2)).double()


def make(comm, options, optimizer="momentum"):
    module = deep()
    local = problem.OPTIMIZERS[optimizer](module.parameters())
    strategy = problem.make(comm, NAME, module, algorithm="ring", **options)
    strategy.optimizer = local
    strategy.records.start()
    return strategy, local


def train(comm, options, optimizer, steps=STEPS):
    strategy, local = make(comm, options, optimizer)
    found = []
    for step in range(steps):
        replicas.go(strategy, local, range(step, step + 1))
        found.append([strategy.model.params[0].clone(), *(x[0].clone() for x in (strategy.common, strategy.momentum))])
    replicas.end(strategy)
    return found


def fragments_of(layers, order="strided"):
    """The elements of each fragment."""
    model = FlatModel(deep())
    return [one.take([torch.arange(len(model.params[0]))])[0] for one in split_layers(model, layers, order)]


def by_hand(size, optimizer, *, period, fragment_layers, delay=1, order="strided", merge="blend", blend=0.5,
            outer_lr=0.4, outer_momentum=0.9):  # fmt: skip
    """The parameters of all replicas and their x after each step, both as [step, rank, parameter]."""
    modules = [deep() for _ in range(size)]
    flats = [FlatModel(module).params[0] for module in modules]
    optimizers = [problem.OPTIMIZERS[optimizer](module.parameters()) for module in modules]
    fragments = fragments_of(fragment_layers, order)
    xs, velocities = ([start.clone() for start in flats], [torch.zeros_like(start) for start in flats])
    before, late, values = [[torch.zeros(len(places)).double()] * size for places in fragments], {}, []

    def move(rank, places, gradient):
        velocities[rank][places] = outer_momentum * velocities[rank][places] + gradient
        xs[rank][places] -= outer_lr * (gradient + outer_momentum * velocities[rank][places])

    def exchange(number, places):
        """The rules whose exchanges have a period: the mean of the one before, alone or with a new part."""
        now = [x[places] - own[places] for x, own in zip(xs, flats, strict=True)]
        for rank in range(size):
            newer = (now[rank] - before[number][rank]) / size if merge == "eager" else 0.0
            move(rank, places, sum(before[number]) / size + newer)
            flats[rank][places] = xs[rank][places]
        before[number] = now

    for step in range(1, STEPS + 1):
        for rank, (module, local) in enumerate(zip(modules, optimizers, strict=True)):
            local.zero_grad()
            replicas.backward(module, rank, size, step - 1)
            local.step()
        for number, places in enumerate(fragments):
            if (step - (number + 1) * period // len(fragments)) % period == 0:
                if merge in ("delayed", "eager"):
                    exchange(number, places)
                else:
                    late[step + delay, number] = [own[places].clone() for own in flats]
        for number, places in enumerate(fragments):
            if (sent := late.pop((step, number), None)) is not None:
                for rank, (own, then, x) in enumerate(zip(flats, sent, xs, strict=True)):
                    move(rank, places, x[places] - sum(sent) / size)
                    mixed = blend * own[places] + (1 - blend) * x[places]
                    own[places] = x[places] + own[places] - then if merge == "shift" else mixed
        values.append((torch.stack(flats), torch.stack(xs)))
    return tuple(torch.stack(of) for of in zip(*values, strict=True))


@each("options", [
    {"period": 5, "fragment_layers": 2, "delay": 1},
    {"period": 5, "fragment_layers": 2, "delay": 1, "order": "sequential"},
    {"period": 6, "fragment_layers": 1, "delay": 3, "blend": 0.25},
    {"period": 5, "fragment_layers": 3, "delay": 4, "merge": "shift"},
    {"period": 3, "fragment_layers": 5, "delay": 2, "outer_lr": 0.7, "outer_momentum": 0.0},
    *(
        {"merge": merge, **options}
        for merge in ("delayed", "eager")
        for options in (
            {"period": 3, "fragment_layers": 3, "outer_momentum": 0.0},
            {"period": 1, "fragment_layers": None},
        )
    ),
])  # fmt: skip
@pytest.mark.sizes(3)
def test_it_does_what_is_done_by_hand(ranks, options):
    optimizer = "adam" if options["period"] < 5 else "momentum"
    found = ranks(lambda comm: train(comm, options, optimizer))
    expected, common = by_hand(len(found), optimizer, **options)
    for rank, values in enumerate(found):
        torch.testing.assert_close(torch.stack([own for own, _, _ in values]), expected[:, rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.stack([x for _, x, _ in values]), common[:, rank], rtol=0, atol=1e-12)
        for (_, *mine), (_, *others) in zip(values, found[0], strict=True):
            same = options.get("merge") == "eager" or all(map(torch.equal, mine, others))
            assert same, "x and the outer momentum, to the bit"


@each("options", [{"delay": 0, "blend": 0.0}, {"delay": 0, "merge": "shift"}])
@pytest.mark.sizes(1, 3)
def test_with_one_fragment_it_is_diloco_to_the_bit(ranks, options):
    outer = {"period": 3, "outer_lr": 0.7, "outer_momentum": 0.9}

    def body(comm):
        own, _ = replicas.train(comm, NAME, {"fragment_layers": None, **outer, **options}, "adam", STEPS)
        diloco, _ = replicas.train(comm, "diloco", outer, "adam", STEPS)
        late = {"fragment_layers": None, "delay": 1, "merge": "shift"}
        own_late, _ = replicas.train(comm, NAME, {**outer, **late}, "adam", STEPS)
        overlapped, _ = replicas.train(comm, "diloco", {**outer, "overlap": True}, "adam", STEPS)
        return torch.equal(own, diloco) and torch.equal(own_late, overlapped)

    assert all(ranks(body))


@each("compression", [None, "e3m0"])
@pytest.mark.sizes(2, 3)
def test_bytes_are_those_of_each_fragment_once_in_a_period(ranks, compression):
    options = {"period": 6, "fragment_layers": 2, "delay": 0}
    counts = [len(places) for places in fragments_of(2)]
    if compression:
        options["compression"] = compression

    def body(comm):
        strategy, local = make(comm, options)
        _, records = replicas.go(strategy, local, range(12))
        replicas.end(strategy)
        return [record.bytes_sent for record in records], [len(fragment.numbers) for fragment in strategy.fragments]

    found, parameters = zip(*ranks(body), strict=True)
    others, size = len(found) - 1, len(found)
    if compression:  # half a byte each, and one scale of float32 for each fragment
        lengths = [others * (-(-count // 2) + 4) for count in counts]
    else:  # 2n(p − 1)/p
        lengths = [2 * 8 * count * others / size for count in counts]
    lengths = [n + 2 * 4 * count * others / size for n, count in zip(lengths, parameters[0], strict=True)]  # and flags
    for sent in found:
        expected = [0, lengths[0], 0, lengths[1], 0, lengths[2]] * 2
        assert sent == pytest.approx(expected, abs=0 if size == 2 else 40)


@each("compression", [{"name": "e3m0", "error_feedback": True}, "topk"])
@pytest.mark.sizes(3)
def test_compressed_the_common_parameters_are_equal_to_the_bit_and_it_learns(ranks, compression):
    options = {"period": 4, "fragment_layers": 2, "compression": compression}
    found = ranks(lambda comm: [x for _, x, _ in train(comm, options, "adam", 24)])
    for values in found:
        assert all(map(torch.equal, values, found[0]))
    module = deep()
    before = problem.loss(module, range(problem.SAMPLES)).item()
    problem.load(module, [found[0][-1]])
    assert problem.loss(module, range(problem.SAMPLES)).item() < 0.95 * before


@each("options", [
    {"delay": 1, "fragment_layers": 2}, {"delay": 2, "fragment_layers": 2}, {"merge": "eager"},
    {"merge": "delayed", "fragment_layers": 1},
])  # fmt: skip
def test_an_exchange_that_lasts_no_longer_than_it_may_takes_no_time(options):
    """A computation of 0.1 s a step, on a network on which an exchange takes the given seconds at each latency."""

    def seconds(latency_s):
        def body(comm):
            strategy, local = make(comm, {"period": 6, "fragment_layers": None, **options})
            start_s = comm.now()
            replicas.go(strategy, local, range(12))
            taken_s = comm.now() - start_s
            replicas.end(strategy)
            return taken_s

        return max(run_virtual(body, 3, network=Network(latency_s, math.inf), compute=Constant(0.1)))

    free_s = seconds(0.0)
    steps = 6 if "merge" in options else options["delay"]
    exchanges = 5 if options.get("fragment_layers") == 1 else 1  # of fragments, one after the other, in these steps
    lasts = steps * 0.1 / (8 * exchanges)  # a ring of three has four messages, and four of flags
    assert seconds(0.9 * lasts) == pytest.approx(free_s)
    assert seconds(2 * lasts) > free_s + 0.05


# --- fragments --------------------------------------------------------------------------------------------------------
class Blocks(nn.Module):
    def __init__(self, count: int):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(count))
        self.head = nn.Linear(2, 3)


@each("order", ["strided", "sequential"])
def test_layers_are_the_members_of_the_longest_list(order):
    model = FlatModel(Blocks(5))
    names = [slot.name for slot in model.slots]
    found = []
    for fragment in split_layers(model, 2, order):
        (taken,) = fragment.take([torch.arange(len(model.params[0]))])
        places = set(taken.tolist())
        found.append({slot.name.removesuffix(".weight") for slot in model.slots if slot.start in places})
        assert sum(span.stop - span.start for span in fragment.spans[0]) == len(taken)
    layers = [[0, 3], [1, 4], [2]] if order == "strided" else [[0, 1], [2, 3], [4]]
    for names_of, own in zip(found, layers, strict=True):
        blocks = {int(name.split(".")[1]) for name in names_of if name.startswith("blocks")}
        assert blocks == set(own)
        assert ("embed" in names_of) == (0 in own) and any("head" in name for name in names_of) == (4 in own)
    assert len(names) == 23


def test_without_a_list_each_module_is_a_layer():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    assert [len(fragment.take([torch.arange(12)])[0]) for fragment in split_layers(FlatModel(Two()), 1, "strided")] == [
        6,
        6,
    ]


@each("merge", ["shift", "eager"])
def test_a_fragment_in_flight_is_dropped_where_what_was_sent_is_not_saved(merge):
    """A run that blends does not keep it. x stays, and the next exchange has all that the rank has done."""

    def body(comm):
        options = {"period": 4, "delay": 2, "fragment_layers": None, "merge": "blend"}
        strategy, _, again, local = replicas.taken_up(comm, NAME, options, 5, {"delay": 1, "merge": merge})
        assert (strategy.in_flight, again.in_flight) == ({0: 4}, {})
        (x,), (saved,) = again.common, strategy.common
        assert torch.equal(x, saved)
        replicas.go(again, local, range(5, 12))
        return again.model.params[0].isfinite().all().item() and not torch.equal(x, saved)

    assert run_virtual(body, 2) == [True, True]


@each("merge", ["blend", "shift"])
def test_in_other_fragments_a_loaded_exchange_is_merged_with_the_same_result(merge):
    def body(comm):
        options = {"period": 4, "merge": merge, "delay": 2, "fragment_layers": None}
        strategy, local, again, local_again = replicas.taken_up(comm, NAME, options, 5, {"fragment_layers": 1})
        assert (strategy.in_flight, again.in_flight) == ({0: 4}, {0: 4, 1: 4})
        params, expected = (
            replicas.go(which, optimizer, range(5, 6))[0][-1]
            for which, optimizer in ((again, local_again), (strategy, local))
        )
        return torch.equal(params, expected) and torch.equal(again.common[0], strategy.common[0])

    assert run_virtual(body, 2) == [True, True]


def test_a_loaded_exchange_of_a_part_of_a_fragment_is_dropped():
    def body(comm):
        options = {"period": 4, "delay": 2, "fragment_layers": 1}
        strategy, _, again, local = replicas.taken_up(comm, NAME, options, 5, {"fragment_layers": None})
        assert (strategy.in_flight, again.in_flight) == ({1: 4}, {})
        assert torch.equal(again.common[0], strategy.common[0])
        replicas.go(again, local, range(5, 10))
        return again.common[0]

    one, other = run_virtual(body, 2)
    assert torch.equal(one, other) and one.isfinite().all()


@each("merge", ["delayed", "eager"])
def test_it_is_refused_where_the_rank_does_not_have_its_own_change_any_more(merge):
    def body(comm):
        options = {"period": 4, "merge": merge, "fragment_layers": 1}
        with pytest.raises(CheckpointError, match=r"fragment_layers and strategy.order must be those of the check"):
            replicas.taken_up(comm, NAME, options, 3, {"fragment_layers": None})
        *_, again, _ = replicas.taken_up(comm, NAME, options, 5, {"fragment_layers": None})
        return again.in_flight

    assert run_virtual(body, 2) == [{0: 2}, {0: 2}]
