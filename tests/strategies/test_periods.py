"""local_sgd and diloco: by hand, in bytes, alone, taken up again; compressed, what an exchange lacks comes later."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist import compress
from hpcdist.model.flat import FlatModel
from strategies import problem, replicas

pytestmark = pytest.mark.computes

OPTIONS = {
    "threshold": {"density": 0.1},
    "topk": {"ratio": 0.1},
    "dgc": {"ratio": 0.1, "momentum": 0.0, "ramp_steps": 0},
}
averaged = [name for name in compress.available() if compress.load(name).combines == "mean"]
every = each("compressor", averaged)
conserving = each("compressor", [name for name in averaged if compress.load(name).feeds_back])
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


@each("case", BY_HAND)
@each("optimizer", ["momentum", "adam"])
@pytest.mark.sizes(2, 5)
def test_it_does_what_is_done_by_hand(ranks, case, optimizer):
    name, options = case
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
    n_bytes = FlatModel(problem.model()).n_bytes
    steps = STEPS + late  # so that no exchange is under way at the end
    due = [step <= warmup or (step - warmup) % 3 == 0 for step in range(1, steps + 1)]
    for records in ranks(lambda comm: replicas.train(comm, name, {"period": 3, **options}, "momentum", steps)[1]):
        sent = [record.bytes_sent for record in records]
        flags = 16 * (name == "diloco")  # four bytes for each parameter, once there is an outer momentum
        if flags:
            assert sent == [(n_bytes + flags * (step > 2)) * is_due for step, is_due in enumerate(due)]
        else:
            assert sum(sent) == sum(due) * n_bytes  # 2n(p − 1)/p
            assert late or sent == [n_bytes * is_due for is_due in due]
        assert all((r.event, r.staleness, r.clock) == (None, (0,), r.step) for r in records)


# Options, and steps after which a run is taken up again.
TAKEN_UP = [
    ("local_sgd", {"period": 4}, (3, 4, 5)),
    ("local_sgd", {"period": 4, "average_optimizer_state": True}, (3, 4, 5)),
    ("local_sgd", {"period": 4, "overlap": True}, (3, 4, 5)),
    ("local_sgd", {"period": 6, "node_period": 2, "overlap": True}, (3, 5)),
    ("diloco", {"period": 3}, (2, 3, 7)),
    ("diloco", {"period": 3, "overlap": True}, (2, 3)),
    ("diloco", {"period": 3, "outer_momentum": 0.0}, (2, 3)),
    *[
        ("local_sgd", _options(name, overlap=overlap), (4,))
        for name in ("threshold", "powersgd", "qsgd")
        for overlap in (False, True)
    ],
]
RESUMED = [
    ("local_sgd", ["overlap=true"], 5),
    ("local_sgd", ["average_optimizer_state=true", "node_period=3"], 7),
    ("diloco", [], 7),
    ("diloco", ["overlap=true"], 5),
]


@each("case", TAKEN_UP)
@pytest.mark.sizes(1, 4)
def test_a_run_taken_up_inside_a_period_ends_on_the_same_bits(ranks, case):
    name, options, places = case

    def body(comm):
        return [replicas.same_when_taken_up(comm, name, options, "adam", at, STEPS) for at in places]

    assert all(all(same) for same in ranks(body, network=replicas.PAIRS))


@pytest.mark.parametrize("case", RESUMED, ids=str)
@pytest.mark.sizes(3)
def test_a_resumed_job_ends_where_the_uninterrupted_one_ends(ranks, shared_tmp_path, case):
    name, options, at = case

    def body(comm):
        return replicas.same_when_resumed(comm, shared_tmp_path, name, ("period=5", *options), at)

    assert all(ranks(body, network=replicas.PAIRS))


@each("optimizer", problem.OPTIMIZERS)
@each("case", [("local_sgd", {"overlap": True}), ("local_sgd", {"average_optimizer_state": True}), ("diloco", {})])
@pytest.mark.sizes(1)
def test_on_one_rank_it_is_the_plain_optimiser_to_the_bit_and_sends_nothing(ranks, optimizer, case):
    name, options = case
    (run,) = ranks(lambda comm: problem.train(comm, name, {"period": 2, **options}, optimizer=optimizer, samples=80))
    assert torch.equal(run.params[0], problem.serial(1, optimizer=optimizer, samples=80)[0])
    assert sum(record.bytes_sent for record in run.records) == 0


# --- compressed -------------------------------------------------------------------------------------------------------
@every
@each("name", ["local_sgd", "diloco"])
@pytest.mark.sizes(4)
def test_replicas_are_equal_to_the_bit_after_each_exchange(ranks, name, compressor):
    found = ranks(lambda comm: replicas.train(comm, name, _options(compressor), "momentum", STEPS)[0])
    for values in found:
        assert torch.equal(values[2::3], found[0][2::3])
        assert not torch.equal(values[1], found[0][1]) or values is found[0]


@conserving
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
        held = strategy.state().get("compressed.residual", [torch.zeros_like(gone)])[0].clone()
        end = strategy.model.params[0].clone()
        replicas.end(strategy)
        return start, gone, held, end

    found = ranks(body)
    start, _, _, end = found[0]
    wanted = start + sum(gone for _, gone, _, _ in found) / len(found)
    held = sum(held for _, _, held, _ in found) / len(found)
    torch.testing.assert_close(end - held, wanted, rtol=0, atol=1e-12)


@each("case", [*[("local_sgd", name) for name in averaged], ("diloco", "topk"), ("diloco", "bf16")])
@pytest.mark.sizes(4)
def test_it_learns(ranks, case):
    name, compressor = case
    options = _options(compressor) | ({"outer_momentum": 0.5} if name == "diloco" else {})
    problem.learns(ranks, name, options, epochs=8)


@pytest.mark.sizes(2, 4)
def test_bytes_are_those_of_the_messages(ranks):
    def body(comm):
        _, records = replicas.train(comm, "local_sgd", _options("topk"), "sgd", 6)
        return [record.bytes_sent for record in records]

    k = round(0.1 * sum(p.numel() for p in problem.model().parameters()))
    for sent in ranks(body):
        assert [step for step, n_bytes in enumerate(sent) if n_bytes] == [2, 5]
        others = ranks.size - 1  # each gets k values of 4 bytes, and less than that of indices
        assert others * 4 * k < sent[2] < others * 8 * (k + 1)
