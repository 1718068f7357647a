"""SparseLoCo: by hand, as DiLoCo and as sparse SGD, what is sent and kept, taken up again."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist import strategies
from hpcdist.compress import Feedback, load
from hpcdist.errors import ConfigError
from strategies import problem, replicas

pytestmark = pytest.mark.computes

NAME = "sparse_loco"
STEPS = 13


def sparse(**options):
    return {"name": "chunk_topk", "ratio": 0.2, "side": 8, "values": "fp64", "decay": 1.0, **options}


def compressor(options, size, spans):
    options = {key: value for key, value in options.items() if key not in ("name", "error_feedback")}
    cls = load("chunk_topk")
    return cls(cls.Config(**options), size, spans)


def by_hand(size, *, period, compression, outer_lr=1.0, combine="ranks", steps=STEPS):
    """The parameters of all replicas after each step, and what each rank has not sent at the end."""
    from hpcdist.compress import spans

    hand, values = replicas.ByHand(size, "adam"), []
    x = hand.params[0].clone()
    (of_model,) = spans(hand.models[0])
    coders = [Feedback(compressor(compression, len(x), of_model), x) for _ in range(size)]
    for step in range(1, steps + 1):
        hand.steps()
        if step % period == 0:
            sent = torch.zeros(size, len(x), dtype=torch.float64)
            for rank, (coder, own) in enumerate(zip(coders, hand.params, strict=True)):
                coder.add(coder.encode(x - own), sent[rank])
            having = (sent != 0).sum(dim=0).clamp(min=1) if combine == "senders" else size
            x -= outer_lr * sent.sum(dim=0) / having
            for own in hand.params:
                own.copy_(x)
        values.append(torch.stack(hand.params))
    return torch.stack(values), [coder.residual for coder in coders]


@each("options", [
    {"period": 3, "compression": sparse(decay=0.9)},
    {"period": 2, "compression": sparse(decay=0.5, values="2bit"), "outer_lr": 0.7},
    {"period": 4, "compression": sparse(), "combine": "senders"},
])  # fmt: skip
@pytest.mark.sizes(2, 3)
def test_it_does_what_is_done_by_hand(ranks, options):
    found = ranks(lambda comm: replicas.train(comm, NAME, options, "adam", STEPS)[0])
    expected, _ = by_hand(len(found), **options)
    torch.testing.assert_close(torch.stack(found, dim=1), expected, rtol=0, atol=1e-12)
    for step in range(options["period"] - 1, STEPS, options["period"]):
        assert all(torch.equal(values[step], found[0][step]) for values in found)


@pytest.mark.sizes(1, 2, 4)
def test_where_all_is_sent_it_is_diloco_without_momentum(ranks):
    whole, outer = {"period": 3, "outer_lr": 0.8}, {"outer_momentum": 0.0}

    def body(comm):
        strategy, local = replicas.make(comm, NAME, {**whole, "compression": sparse(ratio=1.0, decay=0.9)}, "adam")
        replicas.go(strategy, local, range(STEPS))
        feedbacks = strategy._compressed.feedbacks if strategy._compressed else []
        assert not any(one.residual.any() for one in feedbacks), "nothing is left to be sent"
        replicas.end(strategy)
        everything = sparse(ratio=1.0, decay=0.9)
        own, _ = replicas.train(comm, NAME, {**whole, "compression": everything}, "adam", STEPS)
        same, _ = replicas.train(comm, "diloco", {**whole, **outer, "compression": everything}, "adam", STEPS)
        plain, _ = replicas.train(comm, "diloco", {**whole, **outer}, "adam", STEPS)
        assert torch.equal(own, same)
        torch.testing.assert_close(own, plain, rtol=0, atol=1e-12)

    ranks(body)


@pytest.mark.sizes(2, 3)
def test_without_decay_it_is_diloco_with_that_compressor(ranks):
    def body(comm):
        options = {"period": 3, "outer_lr": 0.8, "compression": {"name": "topk", "ratio": 0.1, "values": "fp64"}}
        own, _ = replicas.train(comm, NAME, options, "adam", STEPS)
        same, _ = replicas.train(comm, "diloco", {**options, "outer_momentum": 0.0}, "adam", STEPS)
        torch.testing.assert_close(own, same, rtol=0, atol=1e-12)

    ranks(body)


@pytest.mark.sizes(2, 4)
def test_with_a_period_of_1_and_sgd_it_is_sparse_sgd_with_error_feedback(ranks):
    def body(comm):
        own, _ = replicas.train(comm, NAME, {"period": 1, "compression": sparse()}, "sgd", STEPS)
        same, _ = replicas.train(comm, "allreduce", {"compression": sparse()}, "sgd", STEPS)
        torch.testing.assert_close(own, same, rtol=0, atol=1e-12)

    ranks(body)


@each("values", ["fp64", "2bit"])
@each("combine", ["ranks", "senders"])
@pytest.mark.sizes(3)
def test_without_decay_nothing_is_lost(ranks, values, combine):
    """A rank's differences are what it has sent and what waits; x moves by the mean of what all ranks have sent."""
    period, rate = 2, 0.5
    options = {"period": period, "outer_lr": rate, "combine": combine, "compression": sparse(values=values)}

    def body(comm):
        strategy, local = replicas.make(comm, NAME, options, "adam")
        start = strategy.common[0].clone()
        differences, encode = torch.zeros_like(start), strategy._compressed.feedbacks[0].encode

        def noted(tensor, whole=False):
            differences.add_(tensor)
            return encode(tensor, whole)

        strategy._compressed.feedbacks[0].encode = noted
        replicas.go(strategy, local, range(6 * period))
        sent = differences - strategy._compressed.feedbacks[0].residual
        moved = strategy.common[0] - start
        replicas.end(strategy)
        return sent, moved

    found = ranks(body)
    mean = sum(sent for sent, _ in found) / len(found)
    differs = (found[0][1] + rate * mean).abs().max()
    assert differs < 1e-12 if combine == "ranks" else differs > 1e-4


@pytest.mark.sizes(2)
def test_bytes_are_those_of_the_messages(ranks):
    def body(comm):
        _, records = replicas.train(comm, NAME, {"period": 3}, "adam", 6)
        _, dense = replicas.train(comm, "diloco", {"period": 3}, "adam", 6)
        return [record.bytes_sent for record in records], [record.bytes_sent for record in dense]

    for sent, dense in ranks(body):
        assert [n > 0 for n in sent] == [False, False, True] * 2 and max(sent) < max(dense) / 4


@each("options", [{}, {"compression": sparse(values="2bit", decay=0.9)}, {"overlap": True}])
@pytest.mark.sizes(1, 3)
def test_a_run_taken_up_ends_on_the_same_bits(ranks, options):
    assert replicas.all_same_when_taken_up(ranks, NAME, {"period": 4, **options}, "adam", (3, 4), STEPS)


@pytest.mark.sizes(3)
def test_a_resumed_job_ends_where_the_uninterrupted_one_ends(ranks, shared_tmp_path):
    assert all(ranks(lambda comm: replicas.same_when_resumed(comm, shared_tmp_path, NAME, ("period=4",), 6)))


@pytest.mark.sizes(4)
def test_it_learns(ranks):
    found = ranks(lambda comm: replicas.train(comm, NAME, {"period": 5}, "adam", 100)[0])
    module = problem.model()
    before = problem.loss(module, range(problem.SAMPLES)).item()
    problem.load(module, [found[0][-1]])
    assert problem.loss(module, range(problem.SAMPLES)).item() < 0.8 * before


def test_an_option_of_the_compressor_leaves_the_papers_others():
    cls = strategies.load(NAME)
    for given in ({"ratio": 0.1}, "chunk_topk", {}):
        options = cls.Config(compression=given).compression
        assert options.name == "chunk_topk" and {"values": "2bit", "decay": 0.95}.items() <= options.options.items()
    assert cls.Config(compression={"name": "topk"}).compression.options == {}
    assert cls.Config(compression={"error_feedback": False}).compression.options == {"values": "2bit"}, "nothing fades"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "none"}, "strategy.compression of sparse_loco must be a compressor; got none"),
        ({"compression": "powersgd", "combine": "senders"}, "strategy.combine must be ranks .* senders with powersgd"),
        ({"compression": "qsgd", "combine": "senders"}, "senders with qsgd, of which each message has all. Take chunk"),
        ({"compression": {"error_feedback": False, "decay": 0.9}}, "decay must be left out .* is false, .*; got 0.9"),
        ({"outer_lr": float("inf")}, "outer_lr must be a finite number; got inf. Step of the common parameters"),
    ],
)
def test_what_has_no_meaning_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        strategies.load(NAME).Config(**options)
