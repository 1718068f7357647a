"""A rank that fails inside a backward pass ends the job within the deadline, by what calls of torch.distributed say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from comm.jobs_here import LIMIT_S
from faults.deaths import ULFM, survivable
from harness.launch import IMPORTS, find_mpirun, launch

pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
SCRIPT = Path(__file__).with_name("backward.py")
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "hpcdist.session")
SAYS = {
    "hangs": "rank 1: not in a call of hpcdist; at ",
    "stops": "rank 1: does not reply: it is stopped, by SIGSTOP or a debugger",
    "ends": "rank 1: in exit on world",
    "calls": "broadcast: float32 (3,), root 0 on rank 1. Check the call on each rank.",
    "raises": "[rank 1] ValueError: labels must be below 10; got 12.",
    "killed": "signal 9",
}
WITH_ULFM = SAYS | {"killed": "rank 1 has died; this call needs all of them."}
FEW = [*(("ddp", how, False) for how in ("hangs", "calls", "raises")), ("ddp", "killed", True)]
FEW += [("fsdp2", "ends", False)]
MORE = [*(("ddp", how, False) for how in ("stops", "killed")), ("plain", "hangs", False), ("fsdp2", "killed", True)]


def cases():
    for case in (*FEW, *MORE):
        wrapped, how, tolerant = case
        marks = [survivable] * tolerant + [pytest.mark.extended] * (case in MORE)
        yield pytest.param(*case, marks=marks, id=f"{wrapped}-{how}{'-ulfm' * tolerant}")


@pytest.mark.parametrize(("wrapped", "how", "tolerant"), list(cases()))
def test_a_rank_that_fails_in_a_backward_pass_is_named_and_the_job_ends(wrapped, how, tolerant):
    start = time.monotonic()
    options = {"options": ULFM * tolerant, "preloaded": PRELOADED * (wrapped != "plain"), "timeout_s": LIMIT_S}
    job = launch(2, [SCRIPT, wrapped, how], env=IMPORTS, **options)
    shown = job.stdout + job.stderr
    assert job.returncode not in (0, 139) and "Segmentation fault" not in shown, shown[-3000:]
    assert (WITH_ULFM if tolerant else SAYS)[how] in shown, shown[-3000:]
    assert time.monotonic() - start < LIMIT_S / 2
