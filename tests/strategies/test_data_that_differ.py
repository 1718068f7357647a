"""D², gradient tracking, quasi-global momentum: where ranks' data differ, as the published rules, taken up again."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.config import Named
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.decentralised.mixing import Mixing
from hpcdist.topology import load as load_topology
from strategies import replicas

pytestmark = pytest.mark.computes

STEPS, WIDTH, RATE = 12, 3, 0.1
RINGS = {"topology": Named(name="ring")}


class Point(nn.Module):
    """x, of which each rank's loss is ½‖x − b‖² with b of its own."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))


def targets(size: int) -> torch.Tensor:
    return torch.randn(size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


def descend(
    comm,
    name,
    options,
    steps,
    *,
    momentum=0.0,
    nesterov=False,
    decay=0.0,
    rate=lambda step: RATE,
    noise=0.0,
    until=math.inf,
):
    """Collective. x after each step, shape (steps, WIDTH), and the strategy, open; from `until` on no gradients."""
    module = Point()
    local = torch.optim.SGD(module.parameters(), lr=RATE, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    cls = strategies.load(name)
    strategy = cls(cls.Config(**options), comm.split(0), FlatModel(module), optimizer=local)
    strategy.records.start()
    generator, target, found = torch.Generator().manual_seed(comm.rank), targets(comm.size)[comm.rank], []
    for step in range(steps):
        local.param_groups[0]["lr"] = rate(step)
        drawn = noise * torch.randn(WIDTH, dtype=torch.float64, generator=generator)
        module.x.grad = (module.x.detach() - target + drawn) * (step < until)
        strategy.step(local.step)
        found.append(module.x.detach().clone())
    return torch.stack(found), strategy


def run(comm, *args, **options):
    found, strategy = descend(comm, *args, **options)
    strategy.close()
    return found


def matrix(topology: str, size: int, step: int = 0, lazy: bool = False) -> torch.Tensor:
    weights = load_topology(topology)(size).matrix(step)
    return torch.from_numpy((weights + np.eye(size)) / 2 if lazy else weights)


# --- by hand ----------------------------------------------------------------------------------------------------------
def d2_by_hand(b, steps, weights, rate):
    x, before, gradients, values = torch.zeros_like(b), None, None, []
    for step in range(steps):
        now = x - b
        if before is None or not rate(step - 1):
            after = weights @ (x - rate(step) * now)
        else:
            last = (before - x) / rate(step - 1) + now - gradients
            after = weights @ (x - rate(step) * last)
        before, gradients, x = x, now, after
        values.append(x)
    return torch.stack(values)


def tracking_by_hand(b, steps, weights_of, order):
    x, y, gradients, values = torch.zeros_like(b), torch.zeros_like(b), torch.zeros_like(b), []
    for step in range(steps):
        weights, now = weights_of(step), x - b
        if order == "before":
            y = weights @ y + now - gradients
            x = weights @ x - RATE * y
        else:
            y = y + now - gradients
            x, y = weights @ (x - RATE * y), weights @ y
        gradients = now
        values.append(x)
    return torch.stack(values)


def qg_by_hand(b, steps, weights_of, momentum, nesterov, decay, memory):
    x, kept, values = torch.zeros_like(b), torch.zeros_like(b), []
    for step in range(steps):
        gradient = x - b + decay * x
        m = momentum * kept + gradient
        after = weights_of(step) @ (x - RATE * (gradient + momentum * m if nesterov else m))
        kept = memory * kept + (1 - memory) * (x - after) / RATE
        x = after
        values.append(x)
    return torch.stack(values)


def same(found, expected):
    torch.testing.assert_close(torch.stack(found, dim=1), expected, rtol=0, atol=1e-12)


@each("topology", ["ring", "complete"])
@each("course", ["constant", "falls", "rests"])
@pytest.mark.sizes(2, 5)
def test_d2_does_what_is_done_by_hand(ranks, topology, course):
    def rate(step):
        falling = RATE / (1 + step // 3) if course == "falls" else RATE
        return 0.0 if course == "rests" and step in (0, 5, 6) else falling

    found = ranks(lambda comm: run(comm, "d2", {"topology": Named(name=topology), "lazy": True}, STEPS, rate=rate))
    size = len(found)
    same(found, d2_by_hand(targets(size), STEPS, matrix(topology, size, lazy=True), rate))


@each("topology", ["ring", "one_peer_exponential", "complete"])
@each("order", ["before", "after"])
@pytest.mark.sizes(2, 4)
def test_gradient_tracking_does_what_is_done_by_hand(ranks, topology, order):
    options = {"topology": Named(name=topology), "order": order}
    found = ranks(lambda comm: run(comm, "gradient_tracking", options, STEPS))
    size = len(found)
    same(found, tracking_by_hand(targets(size), STEPS, partial(matrix, topology, size), order))


@each("case", [(0.9, True, 0.0, 0.9), (0.5, False, 0.01, 0.7), (0.0, False, 0.0, 0.9), (0.9, True, 0.1, 0.0)])
@each("topology", ["ring", "one_peer_exponential"])
@pytest.mark.sizes(2, 4)
def test_quasi_global_momentum_does_what_is_done_by_hand(ranks, topology, case):
    momentum, nesterov, decay, memory = case
    options = {"topology": Named(name=topology), "memory": memory}
    sgd = {"momentum": momentum, "nesterov": nesterov, "decay": decay}
    found = ranks(lambda comm: run(comm, "qg_dsgd", options, STEPS, **sgd))
    size = len(found)
    same(found, qg_by_hand(targets(size), STEPS, partial(matrix, topology, size), momentum, nesterov, decay, memory))


# --- what they are for ------------------------------------------------------------------------------------------------
def test_dpsgd_ends_apart_and_the_others_at_the_optimum_of_all():
    """dpsgd tends to (I − W + ηI)⁻¹ηb; the others to the mean of b on every rank."""
    size, weights = 6, matrix("ring", 6)
    b = targets(size)
    biased = torch.linalg.solve(torch.eye(size, dtype=torch.float64) * (1 + RATE) - weights, RATE * b)
    found = run_virtual(lambda comm: run(comm, "dpsgd", {**RINGS, "overlap": False}, 600), size)
    torch.testing.assert_close(torch.stack(found)[:, -1], biased, rtol=0, atol=1e-10)
    assert (biased - b.mean(dim=0)).abs().max() > 0.1
    for name, options in (
        ("d2", RINGS),
        ("gradient_tracking", {**RINGS, "order": "after"}),
        ("gradient_tracking", RINGS),
    ):
        found = run_virtual(lambda comm, n=name, o=options: run(comm, n, o, 600), size)
        expected = b.mean(dim=0).expand(size, -1)
        torch.testing.assert_close(torch.stack(found)[:, -1], expected, rtol=0, atol=1e-10)


@each("topology", ["ring", "complete"])
@each("name", ["d2", "gradient_tracking", "qg_dsgd"])
@pytest.mark.sizes(4)
def test_the_mean_follows_the_mean_of_the_steps(ranks, name, topology):
    """Gradients of ½‖x − b‖² are linear, so that the means of x are those of one process on the mean of b."""
    found = ranks(lambda comm: run(comm, name, {"topology": Named(name=topology)}, STEPS))
    mean, x, values = targets(len(found)).mean(dim=0), torch.zeros(WIDTH, dtype=torch.float64), []
    for _ in range(STEPS):
        x = x - RATE * (x - mean)
        values.append(x)
    torch.testing.assert_close(torch.stack(found).mean(dim=0), torch.stack(values), rtol=0, atol=1e-12)


@pytest.mark.sizes(2, 4)
def test_on_a_complete_graph_they_are_synchronous_sgd_where_they_should_be(ranks):
    complete = {"topology": Named(name="complete")}

    def body(comm):
        (d2, after, before), plain = (
            (
                [run(comm, "d2", {**complete, "lazy": False}, STEPS)]
                + [run(comm, "gradient_tracking", {**complete, "order": order}, STEPS) for order in ("after", "before")]
            ),
            run(comm, "allreduce", {}, STEPS),
        )
        torch.testing.assert_close(d2, plain, rtol=0, atol=1e-12)
        torch.testing.assert_close(after, plain, rtol=0, atol=1e-12)
        assert (before - plain).abs().max() > 1e-3

    ranks(body)


@pytest.mark.sizes(3)
def test_quasi_global_momentum_of_equal_replicas_is_a_recursion_of_its_own(ranks):
    """On a complete graph m̂ ← (μ + (1 − μ)β)m̂ + (1 − μ)ḡ, which is not heavy-ball."""
    momentum, memory = 0.8, 0.6
    options = {"topology": Named(name="complete"), "memory": memory}
    found = ranks(lambda comm: run(comm, "qg_dsgd", options, STEPS, momentum=momentum))
    mean, x, kept = targets(len(found)).mean(dim=0), torch.zeros(WIDTH, dtype=torch.float64), 0.0
    for step in range(STEPS):
        gradient = x - mean
        x = x - RATE * (momentum * kept + gradient)
        kept = (memory + (1 - memory) * momentum) * kept + (1 - memory) * gradient
        for values in found:
            torch.testing.assert_close(values[step], x, rtol=0, atol=1e-12)


@pytest.mark.sizes(4)
def test_without_momentum_qg_is_dpsgd_that_steps_first_to_the_bit(ranks):
    found = ranks(lambda comm: run(comm, "qg_dsgd", RINGS, STEPS))
    size, b = len(found), targets(len(found))
    ring, x = load_topology("ring")(size), [torch.zeros(WIDTH, dtype=torch.float64) for _ in range(size)]
    for step in range(STEPS):
        stepped = [own.add(own - target, alpha=-RATE) for own, target in zip(x, b, strict=True)]
        for rank in range(size):
            weights = ring.in_neighbours(rank, step)
            x[rank], whole = stepped[rank].clone(), weights.pop(rank)
            for peer, weight in weights.items():
                whole += weight
                x[rank].lerp_(stepped[peer], weight / whole)
            assert torch.equal(found[rank][step], x[rank])


@each("topology", ["ring", "one_peer_exponential"])
@each("order", ["before", "after"])
@pytest.mark.sizes(4)
def test_the_sum_of_what_is_tracked_is_that_of_the_gradients(ranks, topology, order):
    options = {"topology": Named(name=topology), "order": order}

    def body(comm, steps):
        _, strategy = descend(comm, "gradient_tracking", options, steps, noise=1.0)
        tracked, last = strategy._tracked[0].clone(), strategy._before[0].clone()
        strategy.close()
        return tracked, last

    for steps in range(1, STEPS):
        found = ranks(lambda comm, n=steps: body(comm, n))
        torch.testing.assert_close(sum(y for y, _ in found), sum(g for _, g in found), rtol=0, atol=1e-12)


def test_tracking_has_more_noise_where_data_do_not_differ():
    """y carries the noise of two batches: the spread around the optimum is larger than dpsgd's."""

    def spread(name):
        def body(comm):
            return run(comm, name, RINGS, 400, noise=1.0)[100:]

        values = torch.stack(run_virtual(body, 8))
        centred = values - values.mean(dim=1, keepdim=True)
        return centred.pow(2).mean().item()

    assert spread("gradient_tracking") > 1.1 * spread("dpsgd")


def test_ranks_that_do_not_mix_track_their_own_gradient(monkeypatch):
    """With W = I."""
    init = Mixing.__init__
    monkeypatch.setattr(Mixing, "__init__", lambda self, *args, **options: init(self, *args, **options, kept=1.0))
    found, x = run_virtual(lambda comm: run(comm, "gradient_tracking", RINGS, STEPS), 3), torch.zeros_like(targets(3))
    for step in range(STEPS):
        x = x - RATE * (x - targets(3))
        torch.testing.assert_close(torch.stack(found)[:, step], x, rtol=0, atol=1e-12)


@each("case", [(-0.4, True), (-0.3, False)])
def test_d2_diverges_below_minus_a_third_even_without_gradients(monkeypatch, case):
    """Two ranks that mix by W of eigenvalues 1 and λ, apart after their first step, without gradients from then on."""
    eigenvalue, diverges = case
    init = Mixing.__init__

    def mixing(self, *args, **options):
        init(self, *args, **{**options, "kept": eigenvalue})

    with monkeypatch.context() as patched:
        patched.setattr(Mixing, "__init__", mixing)
        found = run_virtual(lambda comm: run(comm, "d2", RINGS, 400, until=1), 2)
    apart = (found[0] - found[1]).abs().max(dim=1).values
    assert apart[-1] > 1e3 * apart[0] if diverges else apart[-1] < 1e-3 * apart[0]


def test_a_rate_of_0_leaves_the_momentum():
    def body(comm):
        found, strategy = descend(comm, "qg_dsgd", RINGS, 2, momentum=0.9, rate=lambda step: 0.0)
        momentum = strategy._momentum[0].clone()
        strategy.close()
        return found, momentum

    for found, momentum in run_virtual(body, 2):
        assert not momentum.any() and not found.any()


# --- bytes, checkpoints, refusals -------------------------------------------------------------------------------------
@each("case", [("d2", 1), ("gradient_tracking", 2), ("qg_dsgd", 1)])
def test_bytes_are_so_many_vectors_to_each_neighbour(case):
    name, vectors = case

    def body(comm):
        _, records = replicas.train(comm, name, {"topology": Named(name="ring")}, "momentum", 4)
        return [record.bytes_sent for record in records]

    for sent in run_virtual(body, 5):
        assert len(set(sent[1:])) == 1 and sent[1] % (2 * vectors) == 0
    dpsgd = run_virtual(lambda comm: replicas.train(comm, "dpsgd", {"overlap": False}, "momentum", 4)[1], 5)
    flags = 2 * 2 * 4 * 8 if name == "gradient_tracking" else 0  # two for each of four parameters, to two neighbours
    assert sent[1] == vectors * dpsgd[0][1].bytes_sent + flags


@each("case", [("d2", {}), ("gradient_tracking", {}), ("gradient_tracking", {"order": "after"}), ("qg_dsgd", {})])
@pytest.mark.sizes(1, 3)
def test_a_run_taken_up_ends_on_the_same_bits(ranks, case):
    name, options = case
    assert replicas.all_same_when_taken_up(ranks, name, options, "momentum", (1, 4), STEPS)


@each("name", ["d2", "gradient_tracking", "qg_dsgd"])
@pytest.mark.sizes(3)
def test_a_resumed_job_ends_where_the_uninterrupted_one_ends(ranks, shared_tmp_path, name):
    assert all(ranks(lambda comm: replicas.same_when_resumed(comm, shared_tmp_path / name, name, (), 6)))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("d2", {"topology": Named(name="exponential")}, "topology of d2 must be symmetric, .* got exponential"),
        ("d2", {"lazy": False}, r"no eigenvalue of −1/3 or less in W; got ring of 4 ranks, with -0\.333\. Set"),
    ],
)  # fmt: skip
def test_graphs_that_break_a_rule_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        run_virtual(lambda comm: replicas.train(comm, name, options, "sgd", 1), 4)


@each("name", ["gradient_tracking", "qg_dsgd"])
def test_graphs_that_find_no_mean_are_refused(name, tmp_path):
    (tmp_path / "arcs").write_text("0 1\n1 2\n2 3\n3 0\n0 2\n")
    options = {"topology": Named(name="digraph", path=str(tmp_path / "arcs"))}
    with pytest.raises(ConfigError, match=f"strategy.topology of {name} must be doubly stochastic; got digraph"):
        run_virtual(lambda comm: replicas.train(comm, name, options, "sgd", 1), 4)


def test_an_optimiser_whose_momentum_is_another_is_refused():
    with pytest.raises(ConfigError, match="optimiser of qg_dsgd must be torch.optim.SGD without dampening; got Adam"):
        run_virtual(lambda comm: replicas.train(comm, "qg_dsgd", {}, "adam", 1), 2)
