"""local_sgd and diloco with compressed differences: what an exchange lacks comes with a later one."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist import compress
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


@every
@each("name", ["local_sgd", "diloco"])
@pytest.mark.sizes(4)
def test_it_learns(ranks, name, compressor):
    options = _options(compressor) | ({"outer_momentum": 0.5} if name == "diloco" else {})
    problem.learns(ranks, name, options, epochs=8)


@each("compressor", ["threshold", "powersgd", "qsgd"])
@each("overlap", [False, True])
@pytest.mark.sizes(2)
def test_a_run_taken_up_inside_a_period_ends_on_the_same_bits(ranks, compressor, overlap):
    options = _options(compressor, overlap=overlap)
    assert all(ranks(lambda comm: replicas.same_when_taken_up(comm, "local_sgd", options, "momentum", 4, 9)))


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
