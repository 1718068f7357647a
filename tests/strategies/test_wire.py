"""Parameters that travel in half precision: half the bytes, and sums are conserved where they were."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist import strategies
from hpcdist.errors import ConfigError
from strategies import mixed, problem

pytestmark = pytest.mark.computes

NAMES = ["gossip_pull", "gossip_push", "gossip_sync", "sgp"]


def _moved(comm, name, compression) -> int:
    run = problem.train(comm, name, {"compression": compression}, dtype=torch.float32)
    moved = [record.bytes_sent + record.bytes_fetched for record in run.records]
    if name == "gossip_pull":  # a read that was overtaken is made, and counts, once more
        fetching = [n_bytes for n_bytes in moved if n_bytes]
        return len(fetching) * min(fetching)
    return sum(moved)


@each("name", NAMES)
@each("compression", ["fp16", "bf16"])
@pytest.mark.sizes(4)
def test_it_sends_half_and_learns(ranks, name, compression):
    if compression == "fp16":
        problem.learns(ranks, name, {"compression": compression}, epochs=8)

    def body(comm):
        return _moved(comm, name, compression), _moved(comm, name, "none")

    for half, whole in ranks(body):
        # Beside the 296 bytes of the parameters are versions and counts. A slot can't hold every sum of float16: there
        # gossip_push reads the messages that wait.
        most = 0.7 if (name, compression) == ("gossip_push", "fp16") else 0.6
        assert 0.5 * whole <= half < most * whole


@each("options", [{}, {"topology": "ring"}, {"topology": "digraph"}])
@each("name", ["gossip_sync", "sgp"])
@each("compression", ["fp16", "bf16"])
@pytest.mark.sizes(2, 3, 4, 7)
def test_the_mean_is_conserved_although_all_is_rounded(ranks, tmp_path_factory, name, options, compression):
    if name == "gossip_sync" and options:
        options = {}
    folder = tmp_path_factory.mktemp("graphs")

    def body(comm):
        chosen = dict(options)
        if chosen:
            chosen["topology"] = mixed.option(options["topology"], comm.size, folder)
        strategy = mixed.linear(comm, name, compression=compression, **chosen)
        strategy.model.params[0].copy_(mixed.drawn(comm.rank))
        if name == "sgp":
            strategy.load_state({"steps": 0, "x": None, "weight": 1.0})
        before = mixed.drawn(comm.rank)
        for _ in range(20):
            mixed.step_without_samples(strategy)
        (mean,), _ = strategy.consensus()
        own = strategy.model.params[0].clone()
        strategy.close()
        return before, mean, own

    found = ranks(body)
    wanted = torch.stack([before for before, _, _ in found]).mean(dim=0)
    for _, mean, own in found:
        torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(own, wanted, rtol=0, atol=0.5)


@each("name", NAMES)
def test_what_does_not_stand_for_itself_is_refused(name):
    config = strategies.load(name).Config
    with pytest.raises(ConfigError, match="compression must be none, fp16 or bf16 where ranks send .*; got topk"):
        config(compression="topk")
    with pytest.raises(ConfigError, match="compression must be without warmup_steps and error_feedback = false"):
        config(compression={"name": "fp16", "warmup_steps": 4})


def test_what_is_added_in_place_does_not_travel_rounded():
    with pytest.raises(ConfigError, match="must be one of on_nonfinite, seed, topology; got 'compression'"):
        strategies.load("adpsgd").Config(compression="fp16")
