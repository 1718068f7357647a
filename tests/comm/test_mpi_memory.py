"""Windows inside a node where ranks may die: without MPI's own, of which Open MPI warns."""

from __future__ import annotations

import re

from comm.jobs_here import run
from faults.deaths import ULFM, survivable

# Every rank adds to the memory of rank 0 and counts in it, all at the same time, and reads that of its neighbour.
TEXT = """
import torch
import hpcdist as hd

comm = hd.init(deadline_s=60)
assert comm.failures.tolerant
found = []
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.complex64):
    window = comm.window(5 if comm.rank == 0 else 3, dtype)
    window.local[0] = comm.rank
    comm.barrier()
    out = torch.empty(1, dtype=dtype)
    window.get(out, (comm.rank + 1) % comm.size)
    for _ in range(10):
        window.accumulate(torch.ones(2, dtype=dtype), 0, 3)
    comm.barrier()
    found.append(int(out.real) == (comm.rank + 1) % comm.size and int(window.read(0, 4, 1).real) == 10 * comm.size)
words = comm.window(2 if comm.rank == 0 else 0, torch.int64)
for _ in range(100):
    words.fetch_add(1, 0)
words.compare_and_swap(0, comm.rank + 1, 0, 1)
comm.barrier()
counted, first = words.read(0, 0, 2).tolist()
comm.barrier()
words.put(torch.tensor([7]), 0, 1)
words.wait(lambda w: w[0] == 7, rank=0, offset=1, count=1)
print("rank", comm.rank, all(found), counted == 100 * comm.size, 1 <= first <= comm.size)
"""


@survivable
def test_windows_do_the_same_and_nothing_is_warned_of(tmp_path):
    job = run(tmp_path, TEXT, 3, options=ULFM)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} True True True" for rank in range(3)]
    assert "WARNING" not in job.stderr and job.stderr.replace("\0", "").strip() == ""


@survivable
def test_memory_that_can_not_be_mapped_is_named(tmp_path):
    text = TEXT.replace("found = []", "comm.pids[0] = 1 << 29  # as seen from another container\nfound = []")
    job = run(tmp_path, text, 2, options=ULFM)
    assert job.returncode != 0
    assert re.search(r"rank \d can't map the memory of rank \d, which is on the same node \(", job.stderr)
