"""DeMo: its transform, its serial rule, what leaves the momentum, equal replicas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.compress import Span
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.demo import cosines, transform
from strategies import problem

pytestmark = pytest.mark.computes
SHAPES = [(128, 96), (64,), (7, 11), (3, 4, 5), (1,), (130, 2), (97,)]


def model():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(problem.FEATURES, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def go(comm, options, steps=6, rate=lambda step: 0.05, same=False, decay=0.0, noise=None):
    """Collective. Parameters after each step, and the strategy's momentum Tm after each."""
    module = model()
    local = torch.optim.SGD(module.parameters(), lr=rate(0), weight_decay=decay)
    cls = strategies.load("demo")
    strategy = cls(cls.Config(**options), comm.split(0), FlatModel(module), optimizer=local)
    values, momenta, gradients = [], [], []
    for step in range(steps):
        local.param_groups[0]["lr"] = rate(step)
        local.zero_grad()
        first = step * 8 if same else 8 * (step * comm.size + comm.rank)
        problem.loss(module, [i % problem.SAMPLES for i in range(first, first + 8)]).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in module.parameters()]))
        strategy.step(local.step)
        values.append(strategy.model.params[0].clone())
        momenta.append(strategy._sum.feedbacks[0].residual.clone())
    spans = strategy._spans[0]
    strategy.close()
    return values, momenta, gradients, spans


def cosine(flat, spans, side, back=False):
    flat = flat.clone()
    for span in spans:
        transform(flat[span.start : span.stop], span, side, back=back)
    return flat


# --- the transform ----------------------------------------------------------------------------------------------------
@each("shape", SHAPES)
def test_the_transform_is_orthonormal(shape):
    size = math.prod(shape)
    values = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = [Span(0, size, shape)]
    there = cosine(values, own, 64)
    assert there.norm().item() == pytest.approx(values.norm().item(), rel=1e-12)
    torch.testing.assert_close(cosine(there, own, 64, back=True), values, rtol=0, atol=1e-12)
    if shape == (97,):
        assert torch.equal(there, values), "chunks of one element: the sides of a prime have no other divisor"


def test_it_is_the_cosine_transform():
    """Against its definition, and a constant, which is its first component alone."""
    values = torch.arange(8, dtype=torch.float64)
    expected = [
        math.sqrt((1 if k == 0 else 2) / 8)
        * sum(x * math.cos(math.pi / 8 * (i + 0.5) * k) for i, x in enumerate(values))
        for k in range(8)
    ]
    torch.testing.assert_close(cosines(8) @ values, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    ones = cosine(torch.ones(64, dtype=torch.float64), [Span(0, 64, (8, 8))], 64)
    assert ones[0].item() == pytest.approx(8.0) and ones[1:].abs().max() < 1e-12


# --- the rule ---------------------------------------------------------------------------------------------------------
def serial(gradients, spans, *, keep, momentum, side=64, sign=True, rate=lambda step: 0.05, decay=0.0):
    """The rule on one process with these gradients; parameters after each step."""
    flat = FlatModel(model()).params[0].clone()
    m, values = torch.zeros_like(flat), []
    for step, gradient in enumerate(gradients):
        flat *= 1 - rate(step) * decay
        m = momentum * m + rate(step) * gradient
        there, sent = cosine(m, spans, side), torch.zeros_like(flat)
        for span in spans:  # these parameters are one block each
            chosen = there[span.start : span.stop].abs().topk(min(keep, span.stop - span.start)).indices + span.start
            sent[chosen] = there[chosen]
        m = m - cosine(sent, spans, side, back=True)
        step_by = cosine(sent, spans, side, back=True)
        flat -= rate(step) * step_by.sign() if sign else step_by
        values.append(flat.clone())
    return values


@each("options", [{"keep": 3, "momentum": 0.9}, {"keep": 2, "momentum": 1.0, "sign": False}])
@pytest.mark.sizes(1)
def test_on_one_rank_it_is_the_serial_rule(ranks, options):
    def rate(step):
        return 0.05 / (1 + step)

    ((values, _, gradients, spans),) = ranks(lambda comm: go(comm, {**options, "values": "fp64"}, rate=rate, decay=0.1))
    expected = serial(gradients, spans, rate=rate, decay=0.1, **options)
    for own, other in zip(values, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)
    plain = FlatModel(model()).params[0].clone()
    for step, gradient in enumerate(gradients):
        plain -= rate(step) * (gradient + 0.1 * plain)
    assert not torch.allclose(values[-1], plain, rtol=0, atol=1e-3), "not SGD, on one rank either"


@each("combine", ["senders", "ranks"])
@pytest.mark.sizes(2, 4)
def test_replicas_are_equal_and_momenta_differ(ranks, combine):
    found = ranks(lambda comm: go(comm, {"keep": 2, "combine": combine}))
    for values, *_ in found:
        assert all(torch.equal(own, other) for own, other in zip(values, found[0][0], strict=True))
    assert (found[0][1][-1] - found[1][1][-1]).abs().max() > 1e-6


@each("name", ["demo", "onebit_adam"])
@pytest.mark.sizes(2)
def test_gradients_stay_what_they_were_for_a_loop_that_looks_after_the_step(ranks, name):
    def body(comm):
        module = model()
        local = problem.local(name, module.parameters(), lr=0.01)
        cls = strategies.load(name)
        options = {"warmup_steps": 1} if name == "onebit_adam" else {}
        strategy = cls(cls.Config(**options), comm.split(0), FlatModel(module), optimizer=local)
        same = []
        for _ in range(3):
            local.zero_grad()
            problem.loss(module, range(8 * comm.rank, 8 * comm.rank + 8)).backward()
            before = [p.grad.clone() for p in module.parameters()]
            strategy.step(local.step)
            same.append(all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), before, strict=True)))
        strategy.close()
        return same[1:]  # in a warm-up they are the mean

    assert ranks(body) == [[True, True]] * 2


@pytest.mark.sizes(3, 4)
def test_with_all_components_it_is_signsgd_on_the_mean_or_synchronous_sgd(ranks):
    for sign in (True, False):
        options = {"keep": 4096, "sign": sign, "values": "fp64"}
        found = ranks(lambda comm, o=options: go(comm, o))
        flat = FlatModel(model()).params[0].clone()
        for step in range(6):
            mean = sum(gradients[step] for _, _, gradients, _ in found) / len(found)
            flat -= 0.05 * (mean.sign() if sign else mean)
            assert all(momenta[step].abs().max() < 1e-12 for _, momenta, *_ in found), "nothing stays"
            torch.testing.assert_close(found[0][0][step], flat, rtol=0, atol=1e-12)


@each("strategy", ["demo", "sparse_loco"])
@pytest.mark.sizes(1, 2, 3)
def test_where_all_is_sent_zeros_count_and_so_do_ranks_without_samples(ranks, strategy):
    """Rows of an embedding that no sample of a rank has; and 13 samples, of which the last step has too few."""
    steps = 2
    sent = {"keep": 64, "sign": False, "values": "fp64", "transform": "none"}
    everything = {"name": "chunk_topk", "ratio": 1.0, "values": "fp64"}
    compared = {
        "demo": [("allreduce", {}), ("demo", sent)],
        "sparse_loco": [
            ("diloco", {"period": steps, "outer_lr": 0.5, "outer_momentum": 0.0}),
            ("sparse_loco", {"period": steps, "outer_lr": 0.5, "combine": "senders", "compression": everything}),
        ],
    }[strategy]
    samples = torch.tensor([0, 7, 1, 7, 2, 7, 3, 7, 4, 4, 7, 7, 5])

    def body(comm, name, options):
        hd.init(comm=comm)
        torch.manual_seed(0)
        table = nn.Embedding(8, 4).double()
        local = torch.optim.SGD(table.parameters(), lr=0.1)
        local = hd.DistributedOptimizer(local, table, strategy=name, **options)
        for _ in range(steps):
            for (batch,) in hd.shard(DataLoader(TensorDataset(samples), batch_size=2)):
                local.zero_grad()
                table(batch).square().sum().div(len(batch)).backward()
                local.step()
        hd.finish(table)
        return table.weight.detach().clone()

    (expected, *_), (found, *_) = (ranks(lambda comm, c=case: body(comm, *c)) for case in compared)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.sizes(1, 3, 4)
def test_what_came_was_sent_or_is_in_the_momentum(ranks):
    """β = 1: Σηg = Σsent + m; here summed over the ranks, whose mean message moves the parameters."""
    options = {"keep": 2, "momentum": 1.0, "sign": False, "combine": "ranks", "values": "fp64"}
    found = ranks(lambda comm: go(comm, options))
    start, spans = FlatModel(model()).params[0], found[0][3]
    for step in range(6):
        came = sum(cosine(0.05 * sum(gradients[: step + 1]), spans, 64) for _, _, gradients, _ in found)
        stays = sum(momenta[step] for _, momenta, *_ in found)
        sent = len(found) * cosine(start - found[0][0][step], spans, 64)
        torch.testing.assert_close(came, sent + stays, rtol=0, atol=1e-12)
        assert stays.abs().max() > 1e-6


@pytest.mark.sizes(1)
def test_momentum_fades_by_its_factor_before_a_gradient_comes(ranks):
    """mₜ = βmₜ₋₁ + ηgₜ − sentₜ; one rank receives what it has sent."""
    ((values, momenta, gradients, spans),) = ranks(
        lambda comm: go(comm, {"keep": 2, "momentum": 0.9, "sign": False, "values": "fp64"})
    )
    before, m = FlatModel(model()).params[0], torch.zeros_like(values[0])
    for step, value in enumerate(values):
        sent = cosine(before - value, spans, 64)
        came = 0.05 * cosine(gradients[step], spans, 64)
        torch.testing.assert_close(momenta[step], 0.9 * m + came - sent, rtol=0, atol=1e-12)
        before, m = value, momenta[step]


@pytest.mark.sizes(2, 4)
def test_ranks_with_the_same_batch_train_as_one(ranks):
    found = ranks(lambda comm: go(comm, {"keep": 3}, same=True))
    (alone,) = run_virtual(lambda comm: go(comm, {"keep": 3}, same=True), 1)
    assert all(torch.equal(own, other) for own, other in zip(found[0][0], alone[0], strict=True))


@pytest.mark.sizes(2)
def test_bytes_are_those_of_the_components(ranks):
    def body(comm):
        module = nn.Linear(128, 128, bias=False)
        local = torch.optim.SGD(module.parameters(), lr=0.1)
        cls = strategies.load("demo")
        strategy = cls(cls.Config(), comm.split(0), FlatModel(module), optimizer=local)
        module(torch.randn(4, 128)).square().mean().backward()
        before = strategy.exchanges.channel.trace.traffic.bytes_sent
        strategy.step(local.step)
        sent = strategy.exchanges.channel.trace.traffic.bytes_sent - before
        strategy.close()
        return sent

    components = 4 * 32  # blocks of 64 × 64
    for sent in ranks(body):
        assert 4 * components < sent < 6 * components


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 0.9}, "momentum of the optimiser must be 0 with demo, which makes the step itself; got 0.9"),
        ({"momentum": 0.9, "nesterov": True}, "momentum of the optimiser must be 0"),
        ({"maximize": True}, "maximize of the optimiser must be False with demo"),
    ],
)
def test_settings_that_the_rule_does_not_have_are_refused(settings, message):
    module = model()
    cls = strategies.load("demo")
    local = torch.optim.SGD(module.parameters(), lr=0.1, **settings)
    with pytest.raises(ConfigError, match=message):
        run_virtual(lambda comm: cls(cls.Config(), comm, FlatModel(module), optimizer=local), 1)


def test_complex_parameters_are_refused():
    module = nn.Linear(2, 2, dtype=torch.complex64)
    cls = strategies.load("demo")
    with pytest.raises(ConfigError, match="parameters must be real with demo, .*; got 'weight', which is complex"):
        run_virtual(lambda comm: cls(cls.Config(), comm, FlatModel(module)), 1)


def test_another_optimiser_is_refused():
    module = model()
    cls = strategies.load("demo")
    local = torch.optim.AdamW(module.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="the optimiser of demo must be torch.optim.SGD .*; got AdamW. Take that."):
        run_virtual(lambda comm: cls(cls.Config(), comm, FlatModel(module), optimizer=local), 1)


def test_without_an_optimiser_there_are_no_numbers_to_read():
    def body(comm):
        module = model()
        cls = strategies.load("demo")
        strategy = cls(cls.Config(), comm, FlatModel(module))
        problem.loss(module, range(4)).backward()
        strategy.step(lambda: None)

    with pytest.raises(ConfigError, match="the optimiser of demo must be .*; got none"):
        run_virtual(body, 1)
