"""SparseLoCo: by hand, as DiLoCo where all is sent, in bytes."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.compress import Feedback, load, spans
from strategies import replicas

pytestmark = pytest.mark.computes

NAME = "sparse_loco"
STEPS = 13


def sparse(**options):
    return {"name": "chunk_topk", "ratio": 0.2, "side": 8, "values": "fp64", "decay": 1.0, **options}


def by_hand(size, *, period, compression, outer_lr=1.0, combine="ranks"):
    """The parameters of all replicas after each step."""
    hand, values = replicas.ByHand(size, "adam"), []
    x = hand.params[0].clone()
    (of_model,) = spans(hand.models[0])
    cls = load(compression["name"])
    config = cls.Config(**{key: value for key, value in compression.items() if key != "name"})
    coders = [Feedback(cls(config, len(x), of_model), x) for _ in range(size)]
    for step in range(1, STEPS + 1):
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
    return torch.stack(values)


@each("options", [
    {"period": 3, "compression": sparse(decay=0.9)},
    {"period": 2, "compression": sparse(decay=0.5, values="2bit"), "outer_lr": 0.7},
    {"period": 4, "compression": sparse(), "combine": "senders"},
    {"period": 3, "compression": {"name": "topk", "ratio": 0.1, "values": "fp64"}, "outer_lr": 0.8},
])  # fmt: skip
@pytest.mark.sizes(2, 3)
def test_it_does_what_is_done_by_hand(ranks, options):
    found = ranks(lambda comm: replicas.train(comm, NAME, options, "adam", STEPS)[0])
    expected = by_hand(len(found), **options)
    torch.testing.assert_close(torch.stack(found, dim=1), expected, rtol=0, atol=1e-12)
    for step in range(options["period"] - 1, STEPS, options["period"]):
        assert all(torch.equal(values[step], found[0][step]) for values in found)


@pytest.mark.sizes(1, 3)
def test_where_all_is_sent_it_is_diloco_without_momentum(ranks):
    whole, outer, everything = {"period": 3, "outer_lr": 0.8}, {"outer_momentum": 0.0}, sparse(ratio=1.0, decay=0.9)

    def body(comm):
        own, _ = replicas.train(comm, NAME, {**whole, "compression": everything}, "adam", STEPS)
        same, _ = replicas.train(comm, "diloco", {**whole, **outer, "compression": everything}, "adam", STEPS)
        plain, _ = replicas.train(comm, "diloco", {**whole, **outer}, "adam", STEPS)
        assert torch.equal(own, same)
        torch.testing.assert_close(own, plain, rtol=0, atol=1e-12)

    ranks(body)


@pytest.mark.sizes(2)
def test_bytes_are_those_of_the_messages(ranks):
    def body(comm):
        _, records = replicas.train(comm, NAME, {"period": 3}, "adam", 6)
        _, dense = replicas.train(comm, "diloco", {"period": 3}, "adam", 6)
        return [record.bytes_sent for record in records], [record.bytes_sent for record in dense]

    for sent, dense in ranks(body):
        assert [n > 0 for n in sent] == [False, False, True] * 2 and max(sent) < max(dense) / 4
