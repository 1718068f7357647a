"""Runs that are taken up, in the middle of a period too, take the same steps to the bit as if they had gone on."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.settings import Named
from strategies import replicas

pytestmark = pytest.mark.computes

STEPS = 10
SPARSE = {"name": "chunk_topk", "ratio": 0.2, "side": 8, "values": "2bit", "decay": 0.9}
# Name, options, and steps after which the run is taken up.
CASES = [
    ("allreduce", {"compression": {"name": "dgc", "ratio": 0.2, "warmup_steps": 7}}, (5,)),
    ("allreduce", {"compression": {"name": "powersgd", "rank": 1, "warmup_steps": 7}}, (5,)),
    *(("allreduce", {"compression": {"name": name, "warmup_steps": 7}}, (5,)) for name in ("qsgd", "terngrad")),
    ("dpsgd", {"compression": {"name": "topk", "ratio": 0.2}}, (5,)),
    ("dpsgd", {"compression": "powersgd", "overlap": False}, (5,)),
    ("dpsgd", {"compression": "qsgd", "consensus_rate": 0.2}, (5,)),
    ("d2", {}, (1, 4)),
    ("gradient_tracking", {}, (1, 4)),
    ("gradient_tracking", {"order": "after"}, (4,)),
    ("slowmo", {"period": 4, "base": Named(name="sgp")}, (3,)),
    ("qg_dsgd", {}, (1, 4)),
    ("local_sgd", {"period": 4, "average_optimizer_state": True}, (3, 5)),
    ("local_sgd", {"period": 4, "overlap": True}, (3, 5)),
    ("local_sgd", {"period": 6, "node_period": 2, "overlap": True}, (3, 5)),
    ("local_sgd", {"period": 3, "compression": "powersgd"}, (4,)),
    ("local_sgd", {"period": 3, "compression": "threshold", "overlap": True}, (4,)),
    ("diloco", {"period": 3}, (2, 7)),
    ("diloco", {"period": 3, "overlap": True}, (2, 3)),
    ("noloco", {"period": 3}, (2, 4)),
    ("slowmo", {"period": 4, "overlap": True}, (3, 4)),
    ("slowmo", {"period": 4, "base": Named(name="dpsgd")}, (3, 4)),
    ("slowmo", {"period": 4, "inner_state": "reset"}, (3,)),
    ("sparse_loco", {"period": 4, "compression": SPARSE}, (3,)),
    ("sparse_loco", {"period": 4, "overlap": True}, (3, 4)),
    ("sparta", {"share": 0.3, "delay": 2}, (1, 4)),
    ("sparta", {"share": 0.3, "selection": "partition", "delay": 3}, (4,)),
    ("streaming_diloco", {"period": 5, "delay": 2}, (3, 5)),
    ("streaming_diloco", {"period": 5, "delay": 2, "merge": "shift"}, (3, 4)),
    ("streaming_diloco", {"period": 4, "delay": 1, "compression": {"name": "e3m0", "error_feedback": True}}, (3, 5)),
    ("streaming_diloco", {"period": 5, "merge": "eager", "compression": "e3m0"}, (3, 8)),
]
COMPRESSED = ("compression.name=topk", "compression.ratio=0.1")
ONE_WORKER = {"softsync": (), "downpour": ("n_push=2", "n_fetch=3"), "eamsgd": ("period=2",)}  # order is no matter
# Jobs, of what the session and files add: name, options, and the step of the checkpoint.
RESUMED = [
    ("async_diloco", ("period=3", "grace_s=1e9"), 6),
    ("dion", ("fraction=0.5",), 6),
    *((name, ("servers=3", *COMPRESSED, *options), 7) for name, options in ONE_WORKER.items()),
    ("hardsync", ("fan_in=2", *COMPRESSED), 7),
    ("local_sgd", ("period=5", "average_optimizer_state=true", "node_period=3"), 7),
    ("onebit_adam", ("warmup_steps=4",), 6),
    ("zero_one_adam", ("variance_steps=4", "local_steps=2"), 7),
    ("zero_one_adam", ("variance_steps=9", "full_steps=2"), 6),
]


@each("case", CASES)
@pytest.mark.sizes(4)
def test_a_run_taken_up_ends_on_the_same_bits(ranks, case):
    name, options, places = case
    options = {"fragment_layers": 1, **options} if name == "streaming_diloco" else options
    optimizer = "momentum" if name in ("d2", "gradient_tracking", "qg_dsgd") else "adam"

    def body(comm):
        return replicas.places_where_it_differs(comm, name, options, optimizer, places, STEPS)

    assert ranks(body, network=replicas.PAIRS) == [[]] * ranks.size


@pytest.mark.parametrize("case", RESUMED, ids=str)
@pytest.mark.sizes(4)
def test_a_resumed_job_ends_where_the_uninterrupted_one_ends(ranks, shared_tmp_path, case):
    name, options, at = case

    def body(comm):
        return replicas.same_when_resumed(comm, shared_tmp_path, name, options, at)

    assert all(ranks(body, network=replicas.PAIRS))


# --- with other options -----------------------------------------------------------------------------------------------
CODED = [
    ("allreduce", {}, "sgd"), ("local_sgd", {"period": 2}, "sgd"), ("dpsgd", {"consensus_rate": 0.2}, "sgd"),
    ("streaming_diloco", {"period": 2}, "sgd"), ("onebit_adam", {"warmup_steps": 3}, "adam"),
    ("zero_one_adam", {"variance_steps": 3}, "adam"),
]  # fmt: skip


@each("case", CODED)
@each("compressors", [("topk", "qsgd"), ("onebit", "powersgd"), ("qsgd", "topk"), ("powersgd", "threshold")])
def test_a_run_goes_on_with_another_compressor(case, compressors):
    (name, options, optimizer), (before, after) = case, compressors

    def body(comm):
        made = replicas.taken_up(comm, name, {**options, "compression": before}, 5, {"compression": after}, optimizer)
        *_, again, local = made
        return replicas.go(again, local, range(5, 9))[0][-1]

    assert all(params.isfinite().all() for params in run_virtual(body, 4))


def test_compressed_averaging_goes_on_in_another_graph():
    """The ranks meet: what the neighbours have sent before is weighted as the new graph has it."""

    def body(comm):
        options = {"compression": {"name": "topk", "ratio": 0.5}, "consensus_rate": 0.4, "overlap": False}
        *_, again, local = replicas.taken_up(comm, "dpsgd", options, 5, {"topology": "complete"})
        for group in local.param_groups:
            group["lr"] = 0.0
        return [again.model.params[0].clone(), *replicas.go(again, local, range(5, 65))[0]]

    found = torch.stack([torch.stack(of_rank) for of_rank in run_virtual(body, 4)])
    mean = found[:, 0].mean(dim=0)
    assert (found[:, 0] - mean).abs().max() > 0.01
    torch.testing.assert_close(found[:, -1], mean.expand(4, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", [("2", "none", 7 * 48), ("none", "2", 359 + 2 * 80), ("2", "3", 7 * 48)], ids=str)
def test_a_tree_of_aggregators_goes_on_with_another_fan_in(tmp_path, case):
    """A worker that was an aggregator has the learning rate of the others; the samples before are not seen again."""
    before, after = (f"fan_in={value}" for value in case[:2])

    def body(comm):
        return replicas.resumed(comm, tmp_path, "hardsync", (before, *COMPRESSED), 7, (after,))

    whole, again = run_virtual(body, 6)[0]
    assert whole.samples - again.samples == case[2] and again.metrics["accuracy"] > 0.3


def test_ranks_that_become_active_or_passive_start_from_the_consensus(tmp_path):
    """A passive rank's parameters contain what others have averaged in since its last step, if it becomes active too.

    The resumed run has no step left: it ends with the consensus of the checkpoint.
    """
    (tmp_path / "star.txt").write_text("1 0\n1 2\n1 3\n")  # rank 3 is active, and passive by default
    graph = (f"topology.path={tmp_path / 'star.txt'}", "topology.name=graph")

    def body(comm):
        return replicas.resumed(comm, tmp_path, "adpsgd", (), 12, graph)

    whole, again = run_virtual(body, 4)[0]
    assert again.sha256 == whole.sha256


def test_a_longer_period_holds_from_the_checkpoint_on(tmp_path):
    def body(comm):
        return replicas.resumed(comm, tmp_path, "async_diloco", ("period=1",), 6, ("period=1000",))

    whole, again = run_virtual(body, 3)[0]
    assert again.bytes_per_step < 0.6 * whole.bytes_per_step


def test_dion_goes_on_with_the_rank_of_another_fraction():
    def body(comm):
        strategy, _, again, local = replicas.taken_up(comm, "dion", {"fraction": 1.0}, 3, {"fraction": 0.5})
        replicas.go(again, local, range(3, 6))
        return [[len(basis) for basis in each.basis.values()] for each in (strategy, again)]

    assert run_virtual(body, 2)[0] == [[6, 2], [3, 1]]
