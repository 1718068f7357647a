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
from hpcdist.compress import Span, spans
from hpcdist.compress.coding.blocks import Blocks
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.demo import cosines, transform
from strategies import problem

pytestmark = pytest.mark.computes
STEPS = 6
SHAPES = [(128, 96), (64,), (7, 11), (3, 4, 5), (1,), (130, 2), (97,)]


def go(comm, options, *, rate, decay):
    """Collective. Parameters after each step, the strategy's momentum Tm after each, the gradients, and the spans."""
    module = problem.model()
    local = torch.optim.SGD(module.parameters(), lr=rate(0), weight_decay=decay)
    strategy = problem.make(comm, "demo", module, local, **options)
    values, momenta, gradients = [], [], []
    for step in range(STEPS):
        local.param_groups[0]["lr"] = rate(step)
        local.zero_grad()
        first = 8 * (step * comm.size + comm.rank)
        problem.loss(module, [i % problem.SAMPLES for i in range(first, first + 8)]).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in module.parameters()]))
        strategy.step(local.step)
        values.append(strategy.model.params[0].clone())
        momenta.append(strategy._sum.feedbacks[0].residual.clone())
    own = spans(strategy.model)[0]
    strategy.close()
    return values, momenta, gradients, own


def cosine(flat, own, side, back=False):
    flat = flat.clone()
    for span in own:
        blocks = Blocks.of(span, side).view(flat[span.start : span.stop])
        blocks.copy_(transform(blocks, back=back))
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
def by_hand(gradients, spans, *, keep, momentum, side=64, sign=True, rate, decay, combine="ranks"):
    """The rule in one process with the gradients of each rank and step; parameters and momenta after each step."""
    flat = FlatModel(problem.model()).params[0].clone()
    ms, found = [torch.zeros_like(flat) for _ in gradients], []
    for step in range(STEPS):
        flat *= 1 - rate(step) * decay
        sent = torch.zeros(len(ms), len(flat), dtype=torch.float64)
        for rank, m in enumerate(ms):
            there = cosine(momentum * m + rate(step) * gradients[rank][step], spans, side)
            for span in spans:  # these parameters are one block each
                part = there[span.start : span.stop]
                chosen = part.abs().topk(min(keep, len(part))).indices + span.start
                sent[rank, chosen] = there[chosen]
            ms[rank] = cosine(there - sent[rank], spans, side, back=True)
        having = (sent != 0).sum(dim=0).clamp(min=1) if combine == "senders" else len(ms)
        step_by = cosine(sent.sum(dim=0) / having, spans, side, back=True)
        flat -= rate(step) * step_by.sign() if sign else step_by
        found.append((flat.clone(), list(ms)))
    return found


@each("options", [
    {"keep": 3, "momentum": 0.9},
    {"keep": 2, "momentum": 1.0, "sign": False, "combine": "ranks"},
    {"keep": 2, "momentum": 0.8, "sign": False, "combine": "senders"},
    {"keep": 4096, "momentum": 0.9},
])  # fmt: skip
@pytest.mark.sizes(1, 3)
def test_it_does_what_is_done_by_hand(ranks, options):
    def rate(step):
        return 0.05 / (1 + step)

    combine = strategies.load("demo").Config().combine
    results = ranks(lambda comm: go(comm, {**options, "values": "fp64"}, rate=rate, decay=0.1))
    gradients, spans = [gradients for *_, gradients, _ in results], results[0][3]
    expected = by_hand(gradients, spans, rate=rate, decay=0.1, **{"combine": combine, **options})
    for rank, (values, momenta, *_) in enumerate(results):
        for step, (own, ms) in enumerate(expected):
            assert torch.equal(values[step], results[0][0][step]), "replicas are equal"
            torch.testing.assert_close(values[step], own, rtol=0, atol=1e-12)
            torch.testing.assert_close(momenta[step], cosine(ms[rank], spans, 64), rtol=0, atol=1e-12)


@each("name", ["demo", "onebit_adam"])
@pytest.mark.sizes(2)
def test_gradients_stay_what_they_were_for_a_loop_that_looks_after_the_step(ranks, name):
    def body(comm):
        module = problem.model()
        local = problem.local(name, module.parameters(), lr=0.01)
        options = {"warmup_steps": 1} if name == "onebit_adam" else {}
        strategy = problem.make(comm, name, module, local, **options)
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


@pytest.mark.sizes(2)
def test_bytes_are_those_of_the_components(ranks):
    def body(comm):
        module = nn.Linear(128, 128, bias=False)
        local = torch.optim.SGD(module.parameters(), lr=0.1)
        strategy = problem.make(comm, "demo", module, local)
        module(torch.randn(4, 128)).square().mean().backward()
        before = strategy.calls.comm.trace.traffic.bytes_sent
        strategy.step(local.step)
        sent = strategy.calls.comm.trace.traffic.bytes_sent - before
        strategy.close()
        return sent

    components = 4 * 32  # blocks of 64 × 64
    for sent in ranks(body):
        assert 4 * components < sent < 6 * components
