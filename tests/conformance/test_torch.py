"""PyTorch's own tests of torch.distributed backends, on the backend hpcdist and on gloo."""

from __future__ import annotations

from collections import Counter

import pytest

from conformance.running import list_tests, run
from harness.launch import find_mpirun

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed"),
]

# Tests of the suite that do not run here, and why.
HERE = {
    "needs torchvision": ["test_SyncBatchNorm_process_group"],
    "needs a GPU, and does not say so": [
        "test_all_to_all_cuda",
        "test_all_to_all_cuda_complex",
        "test_all_to_all_full_group_cuda",
        "test_batch_isend_irecv_op_err",
    ],
    "needs NCCL, and does not say so": ["test_batch_isend_irecv_mixed_backend_err"],
}
DIFFERENT = {
    "a rank that does not come ends the job, with a message that names it, where gloo raises": [
        "test_barrier_timeout_full_group",
        "test_barrier_timeout_global",
    ],
    "torch.distributed.monitored_barrier takes a group of gloo alone; the group's own method is there": [
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
    ],
}
GLOO_HAS_NOT = ["test_all_to_all", "test_all_to_all_complex", "test_all_to_all_full_group"]


def names_of(reasons: dict[str, list[str]]) -> set[str]:
    return {name for names in reasons.values() for name in names}


def states(backend: str, folder, leave_out: set[str]) -> dict[str, str]:
    """The state of each test; what failed, and why, is printed."""
    every = list_tests()
    assert leave_out <= set(every)
    found = run(backend, folder, [name for name in every if name not in leave_out])
    counts = Counter(one["state"] for one in found.values())
    print(f"{backend}: {dict(counts)}, left out: {len(leave_out)}")
    for name, one in found.items():
        if one["state"] == "failed":
            print(name, one["why"][-1500:])
    return {name: one["state"] for name, one in found.items()}


def test_the_backend_passes_what_gloo_passes(tmp_path):
    ours = states("hpcdist", tmp_path, names_of(HERE) | names_of(DIFFERENT))
    theirs = states("gloo", tmp_path, names_of(HERE) | set(GLOO_HAS_NOT))
    assert "failed" not in ours.values()
    passed = {name for name, state in theirs.items() if state == "passed"}
    assert passed - names_of(DIFFERENT) <= {name for name, state in ours.items() if state == "passed"}
    assert len(passed) > 80
