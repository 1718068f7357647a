"""Runs that are taken up, in the middle of a period too, take the same steps to the bit as if they had gone on."""

from __future__ import annotations

import pytest

from harness.cases import each
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
