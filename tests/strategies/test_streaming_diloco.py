"""Streaming DiLoCo: by hand, as DiLoCo, in bytes, alone, taken up again; how models are cut into fragments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.cases import each
from hpcdist import strategies
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.synchronous.fragments import cut
from strategies import problem, replicas
from strategies.streaming import NAME, deep, fragments_of, make, train

pytestmark = pytest.mark.computes

STEPS = 14


def by_hand(size, optimizer, steps, *, period, fragment_layers, delay, order="strided", take_up="blend", blend=0.5,
            outer_lr=0.4, outer_momentum=0.9):  # fmt: skip
    """The parameters of all replicas after each step, [step, rank, parameter], and x, [step, parameter]."""
    modules = [deep() for _ in range(size)]
    flats = [FlatModel(module).params[0] for module in modules]
    optimizers = [problem.OPTIMIZERS[optimizer](module.parameters()) for module in modules]
    fragments = fragments_of({"fragment_layers": fragment_layers, "order": order})
    x, velocity, late, values = flats[0].clone(), torch.zeros_like(flats[0]), {}, []
    due = [(number + 1) * period // len(fragments) for number in range(len(fragments))]
    for step in range(1, steps + 1):
        for rank, (module, local) in enumerate(zip(modules, optimizers, strict=True)):
            local.zero_grad()
            replicas.backward(module, rank, size, step - 1)
            local.step()
        for number, places in enumerate(fragments):
            if (step - due[number]) % period == 0:
                late[step + delay, number] = [own[places].clone() for own in flats]
        for number, places in enumerate(fragments):
            if (sent := late.pop((step, number), None)) is None:
                continue
            before = x[places]
            gradient = before - sum(sent) / size
            velocity[places] = outer_momentum * velocity[places] + gradient
            x[places] = before - outer_lr * (gradient + outer_momentum * velocity[places])
            for own, then in zip(flats, sent, strict=True):
                mixed = blend * own[places] + (1 - blend) * x[places]
                own[places] = x[places] + own[places] - then if take_up == "shift" else mixed
        values.append((torch.stack(flats), x.clone()))
    return torch.stack([own for own, _ in values]), torch.stack([common for _, common in values])


BY_HAND = [
    {"period": 5, "fragment_layers": 2, "delay": 1},
    {"period": 5, "fragment_layers": 2, "delay": 1, "order": "sequential"},
    {"period": 6, "fragment_layers": 1, "delay": 3, "blend": 0.25},
    {"period": 4, "fragment_layers": 2, "delay": 0, "blend": 0.0},
    {"period": 5, "fragment_layers": 3, "delay": 4, "take_up": "shift"},
    {"period": 3, "fragment_layers": 5, "delay": 2, "outer_lr": 0.7, "outer_momentum": 0.0},
    {"period": 4, "fragment_layers": 2, "delay": 0, "blend": 0.0, "outer_lr": 1.0, "outer_momentum": 0.0},
]


@each("options", BY_HAND)
@each("optimizer", ["momentum", "adam"])
@pytest.mark.sizes(2, 3)
def test_it_does_what_is_done_by_hand(ranks, options, optimizer):
    found = ranks(lambda comm: train(comm, options, optimizer))
    expected, common = by_hand(len(found), optimizer, STEPS, **options)
    for rank, values in enumerate(found):
        torch.testing.assert_close(torch.stack([own for own, _, _ in values]), expected[:, rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.stack([x for _, x, _ in values]), common, rtol=0, atol=1e-12)
        for (_, *mine), (_, *others) in zip(values, found[0], strict=True):
            assert all(map(torch.equal, mine, others)), "x and the outer momentum, to the bit"


@each("options", [{"delay": 0, "blend": 0.0}, {"delay": 0, "take_up": "shift"}])
@pytest.mark.sizes(1, 2, 3, 4)
def test_with_one_fragment_it_is_diloco_to_the_bit(ranks, options):
    outer = {"period": 3, "outer_lr": 0.7, "outer_momentum": 0.9}

    def body(comm):
        own, _ = replicas.train(comm, NAME, {"fragment_layers": None, **outer, **options}, "adam", STEPS)
        diloco, _ = replicas.train(comm, "diloco", outer, "adam", STEPS)
        late = {"fragment_layers": None, "delay": 1, "take_up": "shift"}
        own_late, _ = replicas.train(comm, NAME, {**outer, **late}, "adam", STEPS)
        overlapped, _ = replicas.train(comm, "diloco", {**outer, "overlap": True}, "adam", STEPS)
        return torch.equal(own, diloco) and torch.equal(own_late, overlapped)

    assert all(ranks(body))


@pytest.mark.sizes(3)
def test_a_fragment_is_equal_on_all_ranks_once_it_is_taken_up_and_no_other_is(ranks):
    options = {"period": 6, "fragment_layers": 2, "delay": 1, "blend": 0.0}
    places = fragments_of(options)
    found = ranks(lambda comm: [own for own, _, _ in train(comm, options, steps=12)])
    for step in range(1, 13):
        for number, of_fragment in enumerate(places):
            same = all(torch.equal(of[step - 1][of_fragment], found[0][step - 1][of_fragment]) for of in found)
            assert same == (step > 1 and (step - 1 - 2 * (number + 1)) % 6 == 0), (step, number)


@pytest.mark.sizes(2)
def test_with_a_blend_of_1_ranks_are_on_their_own(ranks):
    options = {"period": 4, "fragment_layers": 2, "delay": 1, "blend": 1.0}
    for rank, values in enumerate(ranks(lambda comm: train(comm, options))):
        module = deep()
        local = problem.OPTIMIZERS["momentum"](module.parameters())
        for step, (own, *_) in enumerate(values):
            local.zero_grad()
            replicas.backward(module, rank, 2, step)
            local.step()
            assert torch.equal(own, FlatModel(module).params[0])
        assert not torch.equal(values[-1][1], FlatModel(deep()).params[0]), "x moves nevertheless"


@each("fragment_layers", [None, 1, 2])
@pytest.mark.sizes(3, 4)
def test_where_no_rank_moves_nothing_moves(ranks, fragment_layers):
    def body(comm):
        strategy, local = make(comm, {"period": 6, "fragment_layers": fragment_layers, "delay": 0, "blend": 0.0}, "sgd")
        start = strategy.model.params[0].clone()
        for _ in range(12):
            replicas.stay(strategy, local)
        still = torch.equal(strategy.model.params[0], start)
        replicas.end(strategy)
        return still

    assert all(ranks(body))


@each("options", [{"period": 1, "fragment_layers": None}, {"period": 1, "fragment_layers": None, "take_up": "shift"}])
@pytest.mark.sizes(2, 4)
def test_with_a_period_of_1_it_is_synchronous_sgd(ranks, options):
    plain = {"delay": 0, "blend": 0.0, "outer_lr": 1.0, "outer_momentum": 0.0}

    def body(comm):
        own, _ = replicas.train(comm, NAME, {**plain, **options}, "sgd", STEPS)
        synchronous, _ = replicas.train(comm, "allreduce", {}, "sgd", STEPS)
        torch.testing.assert_close(own, synchronous, rtol=0, atol=1e-12)

    ranks(body)


@pytest.mark.sizes(2)
def test_a_blend_of_0_loses_the_steps_of_the_delay(ranks):
    """A constant gradient, plain SGD, outer rate 1: x moves by as many steps as count."""
    options = {"period": 6, "fragment_layers": 2, "delay": 2, "blend": 0.0, "outer_lr": 1.0, "outer_momentum": 0.0}
    places = fragments_of(options)

    def body(comm):
        strategy, local = make(comm, options, "sgd")
        found = []
        for _ in range(18):
            local.zero_grad()
            sum(p.sum() for p in strategy.model.module.parameters()).backward()
            strategy.step(local.step)
            found.append(strategy.common[0].clone())
        replicas.end(strategy)
        return found

    start = FlatModel(deep()).params[0]
    for values in ranks(body):
        for number, of_fragment in enumerate(places):
            first = 2 * (number + 1)
            for turn, at in enumerate((first + 2, first + 8)):
                moved = (start - values[at - 1])[of_fragment] / 0.02
                counted = first + turn * (6 - 2)
                torch.testing.assert_close(moved, torch.full_like(moved, counted), rtol=0, atol=1e-9)


@each("compression", [None, "e3m0"])
@pytest.mark.sizes(2, 3)
def test_bytes_are_those_of_each_fragment_once_in_a_period(ranks, compression):
    options = {"period": 6, "fragment_layers": 2, "delay": 0}
    counts = [len(places) for places in fragments_of(options)]
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


@each("options", [
    {"period": 5, "delay": 2}, {"period": 5, "delay": 2, "take_up": "shift"},
    {"period": 4, "delay": 1, "compression": {"name": "e3m0", "error_feedback": True}},
    {"period": 4, "delay": 1, "compression": "qsgd"},
])  # fmt: skip
@pytest.mark.sizes(1, 3)
def test_a_run_taken_up_while_a_fragment_is_under_way_ends_on_the_same_bits(ranks, options):
    given = {"fragment_layers": 1, **options}
    assert replicas.all_same_when_taken_up(ranks, NAME, given, "adam", (3, 4, 5, 6), STEPS)


@pytest.mark.sizes(3)
def test_a_resumed_job_ends_where_the_uninterrupted_one_ends(ranks, shared_tmp_path):
    options = ("period=5", "delay=2", "fragment_layers=1")
    assert all(ranks(lambda comm: replicas.same_when_resumed(comm, shared_tmp_path, NAME, options, 6)))


@each("compression", ["e3m0", {"name": "e3m0", "error_feedback": True}, "topk"])
@pytest.mark.sizes(4)
def test_compressed_the_common_parameters_are_equal_to_the_bit_and_it_learns(ranks, compression):
    options = {"period": 4, "fragment_layers": 2, "compression": compression}
    found = ranks(lambda comm: [x for _, x, _ in train(comm, options, "adam", 40)])
    for values in found:
        assert all(map(torch.equal, values, found[0]))
    module = deep()
    before = problem.loss(module, range(problem.SAMPLES)).item()
    problem.load(module, [found[0][-1]])
    assert problem.loss(module, range(problem.SAMPLES)).item() < 0.9 * before


# --- fragments, refusals ----------------------------------------------------------------------------------------------
class Blocks(nn.Module):
    def __init__(self, count: int):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(count))
        self.head = nn.Linear(2, 3)


@each("order", ["strided", "sequential"])
def test_layers_are_the_members_of_the_longest_list(order):
    model = FlatModel(Blocks(5))
    names = [name for name, *_ in model.named_slices()]
    found = []
    for fragment in cut(model, 2, order):
        (taken,) = fragment.take([torch.arange(len(model.params[0]))])
        places = set(taken.tolist())
        found.append({name.removesuffix(".weight") for name, _, start, *_ in model.named_slices() if start in places})
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

    assert [len(fragment.take([torch.arange(12)])[0]) for fragment in cut(FlatModel(Two()), 1, "strided")] == [6, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 3, "delay": 3}, "strategy.delay must be less than strategy.period, 3, .* got 3"),
        ({"outer_lr": float("inf")}, "outer_lr must be a finite number; got inf"),
        ({"compression": "dgc"}, "compression of streaming_diloco must remember nothing .* got dgc"),
    ],
)
def test_what_has_no_meaning_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        strategies.load(NAME).Config(**options)


@pytest.mark.sizes(2)
def test_more_fragments_than_steps_in_a_period_are_refused(ranks):
    def body(comm):
        with pytest.raises(ConfigError, match="strategy.period must be at least the number of fragments, 5; got 4"):
            make(comm, {"period": 4, "fragment_layers": 1})

    ranks(body)
