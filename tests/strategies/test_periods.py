"""local_sgd and diloco: by hand, in bytes, alone, on other ranks; compressed, what is not sent comes later."""

from __future__ import annotations

import pytest
import torch

from harness import worlds
from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.model.flat import FlatModel
from strategies import problem, replicas

pytestmark = pytest.mark.computes

OPTIONS = {
    "threshold": {"density": 0.1},
    "topk": {"ratio": 0.1},
    "dgc": {"ratio": 0.1, "momentum": 0.0, "ramp_steps": 0},
}
every = each("compressor", ["dgc", "onebit", "powersgd", "qsgd", "topk"])
STEPS = 12


def _options(compressor: str, **more) -> dict:
    return {"period": 3, "compression": {"name": compressor, **OPTIONS.get(compressor, {})}, **more}


BY_HAND = [
    ("local_sgd", {"period": 4}),
    ("local_sgd", {"period": 4, "average_optimizer_state": True}),
    ("local_sgd", {"period": 3, "warmup_steps": 5}),
    ("local_sgd", {"period": 6, "node_period": 2}),
    ("local_sgd", {"period": 5, "node_period": 1, "warmup_steps": 3, "average_optimizer_state": True}),
    ("local_sgd", {"period": 4, "overlap": True}),
    ("local_sgd", {"period": 1, "overlap": True}),
    ("local_sgd", {"period": 6, "node_period": 2, "overlap": True, "warmup_steps": 2}),
    ("diloco", {"period": 3}),
    ("diloco", {"period": 3, "nesterov": False}),
    ("diloco", {"period": 2, "outer_lr": 0.4, "outer_momentum": 0.5}),
    ("diloco", {"period": 4, "outer_momentum": 0.0}),
    ("diloco", {"period": 3, "overlap": True}),
]


@each("number", range(len(BY_HAND)))
@pytest.mark.sizes(2, 3)
def test_it_does_what_is_done_by_hand(ranks, number):
    name, options = BY_HAND[number]
    optimizer = ("momentum", "adam")[(number + ranks.size) % 2]
    outer = {"outer_lr": 0.7, "outer_momentum": 0.9} if name == "diloco" else {}
    found = ranks(lambda comm: replicas.train(comm, name, options, optimizer, STEPS)[0], network=replicas.PAIRS)
    values = torch.stack(found, dim=1)
    expected = replicas.by_hand(len(found), optimizer, STEPS, **outer | options)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
    if name == "diloco" and "overlap" not in options:
        equal = [bool((of_step == of_step[0]).all()) for of_step in values]
        assert equal == [step % options["period"] == 0 for step in range(1, STEPS + 1)], "to the bit, and not between"


@each("case", [("local_sgd", {}), ("local_sgd", {"overlap": True}), ("local_sgd", {"warmup_steps": 4}), ("diloco", {})])
@pytest.mark.sizes(2)
def test_bytes_are_those_of_one_all_reduce_per_period(ranks, case):
    """Of a ring, in records without anything out of the ordinary. With overlap some count in the next record."""
    name, options = case
    warmup, late = options.get("warmup_steps", 0), options.get("overlap", False)
    n_bytes = sum(flat.nbytes for flat in FlatModel(problem.model()).params)
    steps = STEPS + late  # so that no exchange is under way at the end
    due = [step <= warmup or (step - warmup) % 3 == 0 for step in range(1, steps + 1)]
    for records in ranks(lambda comm: replicas.train(comm, name, {"period": 3, **options}, "momentum", steps)[1]):
        sent = [record.bytes_sent for record in records]
        flags = 16 * (name == "diloco")  # four bytes for each parameter, once there is an outer momentum
        if flags:
            assert sent == [(n_bytes + flags) * is_due for is_due in due]
        else:
            assert sum(sent) == sum(due) * n_bytes  # 2n(p − 1)/p
            assert late or sent == [n_bytes * is_due for is_due in due]
        assert all((r.event, r.staleness, r.clock) == (None, (0,), r.step) for r in records)


# --- compressed -------------------------------------------------------------------------------------------------------
@every
@each("name", ["local_sgd", "diloco"])
@pytest.mark.sizes(3)
def test_replicas_are_equal_to_the_bit_after_each_exchange(ranks, name, compressor):
    found = ranks(lambda comm: replicas.train(comm, name, _options(compressor), "momentum", STEPS)[0])
    for values in found:
        assert torch.equal(values[2::3], found[0][2::3])
        assert not torch.equal(values[1], found[0][1]) or values is found[0]


@every
@pytest.mark.sizes(3)
def test_nothing_of_the_differences_is_lost(ranks, compressor):
    """x after all exchanges and the mean of what was not sent: where the mean of all local updates leads."""

    def body(comm):
        strategy, local = replicas.make(comm, "local_sgd", _options(compressor), "sgd")
        gone = torch.zeros_like(strategy.model.params[0])

        def update():
            before = strategy.model.params[0].clone()
            local.step()
            gone.add_(strategy.model.params[0] - before)

        start = strategy.model.params[0].clone()
        for step in range(STEPS):
            local.zero_grad()
            replicas.backward(strategy.model.module, comm.rank, comm.size, step)
            strategy.step(update)
        held = strategy.state.save().get("compressed.residual", [torch.zeros_like(gone)])[0].clone()
        end = strategy.model.params[0].clone()
        replicas.end(strategy)
        return start, gone, held, end

    found = ranks(body)
    start, _, _, end = found[0]
    wanted = start + sum(gone for _, gone, _, _ in found) / len(found)
    held = sum(held for _, _, held, _ in found) / len(found)
    torch.testing.assert_close(end - held, wanted, rtol=0, atol=1e-12)


# --- taken up again ---------------------------------------------------------------------------------------------------
@each("options", [{}, {"overlap": True}])
@each("after", [1, 2])
@each("at", [3, 4])
def test_another_number_of_ranks_goes_on_with_the_outer_momentum_and_what_was_done_in_the_period(options, after, at):
    """Where no rank moves from then on, both worlds make the same outer steps. One rank alone makes none."""

    def make(comm):
        return replicas.make(comm, "diloco", {"period": 3, **options}, "adam")

    def stay(strategy, local):
        local.param_groups[0]["lr"] = 0.0
        for _ in range(4):
            replicas.stay(strategy, local)
        found = strategy.consensus()[0][0]
        replicas.end(strategy)
        return found

    def save(comm):
        strategy, local = make(comm)
        replicas.go(strategy, local, range(at))
        saved = worlds.saved(strategy)
        return saved, strategy.consensus()[0][0], stay(strategy, local)

    states, means, expected = zip(*run_virtual(save, 3), strict=True)

    def load(comm):
        strategy, local = make(comm)
        worlds.take_up(strategy, states)
        return stay(strategy, local)

    assert (means[0] - expected[0]).abs().max() > 1e-3
    for found in run_virtual(load, after):
        torch.testing.assert_close(found, expected[0] if after > 1 else means[0], rtol=0, atol=1e-12)


@each("overlap", [True, False])
def test_an_exchange_in_flight_is_dropped_where_only_one_of_two_runs_overlaps(overlap):
    """x stays, and the next exchange has all that the rank has done since."""

    def body(comm):
        options = {"period": 3, "overlap": overlap}
        strategy, _, again, local = replicas.taken_up(comm, "local_sgd", options, 3, {"overlap": not overlap})
        assert (strategy.in_flight, again.in_flight) == ({0: 3} if overlap else {}, {})
        assert torch.equal(again.common[0], strategy.common[0])
        return replicas.go(again, local, range(3, 6 + (not overlap)))[0][-1]

    one, other = run_virtual(body, 2)
    assert one.isfinite().all() and other.isfinite().all()
    assert not overlap or torch.equal(one, other)  # after an exchange


# --- memory -----------------------------------------------------------------------------------------------------------
@each("case", [
    ("local_sgd", {}, 1), ("local_sgd", {"overlap": True}, 3), ("diloco", {}, 2), ("diloco", {"overlap": True}, 4),
    ("slowmo", {"base": {"name": "local"}}, 2),
])  # fmt: skip
def test_it_keeps_as_many_vectors_as_its_docstring_says(case):
    name, options, vectors = case

    def body(comm):
        strategy, _ = replicas.make(comm, name, {"period": 2, **options}, "sgd")
        kept = sum(tensor.numel() for tensor in strategy.state.tensors)
        assert ("overlap" in options) != (strategy.mean is strategy.model.params)
        return kept / sum(flat.numel() for flat in strategy.model.params)

    assert run_virtual(body, 2) == [vectors] * 2
