"""PyTorch's own tests of torch.distributed backends, on the backend hpcdist."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from comm.jobs_here import ROOT
from harness.launch import find_mpirun, launch

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed"),
]
SUITE = Path(__file__).with_name("torch_suite.py")
# Tests of the suite that do not run here, and why.
LEFT_OUT = {
    "needs torchvision": ["test_SyncBatchNorm_process_group"],
    "needs a GPU, and does not say so": [
        "test_all_to_all_cuda",
        "test_all_to_all_cuda_complex",
        "test_all_to_all_full_group_cuda",
        "test_batch_isend_irecv_op_err",
    ],
    "needs NCCL, and does not say so": ["test_batch_isend_irecv_mixed_backend_err"],
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
PASSES = 95  # tests at least: gloo passes about as many; the other tests are skipped


def test_the_backend_passes_what_gloo_passes(tmp_path):
    """One job runs all; one that fails, or takes too long, ends it, and is the last of the results."""
    results = tmp_path / "results.jsonl"
    skipped = [name for names in LEFT_OUT.values() for name in names]
    forked = ("torch._dynamo", "hpcdist.session")
    job = launch(4, [SUITE, "hpcdist", results, *skipped], env={"PYTHONPATH": str(ROOT)}, preloaded=forked)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    counts = Counter(one["state"] for one in found)
    print(counts)
    assert job.returncode == 0 and not counts["failed"], (found[-1], job.stderr[-3000:])
    assert counts["passed"] >= PASSES and counts["begun"] == counts["passed"] + counts["skipped"]
