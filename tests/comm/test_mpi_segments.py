"""No job leaves files in shared memory behind, however it ends."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from comm.jobs_here import LIMIT_S, ROOT, run_alone, write
from harness.launch import find_mpirun, started, wait_until

needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")

# Says which segments MPI has made, and then whatever SCRIPT does.
SCRIPT = """
import os, signal, sys, time
from mpi4py import MPI
from hpcdist.comm.mpi.library import loaded_here
from hpcdist.comm.mpi.world import SEGMENT

print(*[f"segment={path}\\n" for path in loaded_here(SEGMENT)], sep="", flush=True)
import torch
import hpcdist as hd

comm = hd.init()
comm.window(1000).put(torch.ones(10), 0)
hd.init(deadline_s=1)  # from here on: a busy machine may take longer to start
print("joined", flush=True)
"""


def segments(text: str) -> set[Path]:
    return {Path(line.partition("=")[2]) for line in text.splitlines() if line.startswith("segment=")}


def gone(text: str) -> bool:
    """Whether all that a job has made is gone, of which there was some."""
    return bool(segments(text)) and not any(path.exists() for path in segments(text))


@needs_mpirun
def test_the_watchdog_ends_a_job_in_which_a_rank_is_stopped(tmp_path):
    log = tmp_path / "log"
    text = """
found = comm.neighbourhood([1 - comm.rank], [1 - comm.rank])
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
found.start(torch.zeros(1), torch.zeros(1)).wait()
"""
    with started(2, [write(tmp_path, SCRIPT + text)], log, env={"PYTHONPATH": str(ROOT)}) as job:
        assert job.wait(LIMIT_S) != 0
    shown = log.read_text(errors="replace")
    assert re.search(r"rank 0 waited [\d.]+ s for rank 1 in irecv on world/0 .call \d+.,", shown), shown
    assert "rank 1: does not reply: it is stopped, by SIGSTOP or a debugger (process " in shown and gone(shown), shown


@needs_mpirun
def test_everything_is_killed_at_once(tmp_path):
    """As a batch system does past the time limit: nobody is left to clear up."""
    log = tmp_path / "log"
    with started(2, [write(tmp_path, SCRIPT + "time.sleep(600)")], log, env={"PYTHONPATH": str(ROOT)}) as job:
        wait_until(lambda: log.read_text().count("joined") == 2 or job.poll() is not None)
        job.send_signal(signal.SIGKILL)
        job.wait(LIMIT_S)
    shown = log.read_text(errors="replace")
    assert shown.count("joined") == 2 and gone(shown), shown


def test_one_rank_without_a_launcher(tmp_path):
    """Open MPI leaves its file behind even of a script that ends well."""
    text = "x = torch.ones(3)\ncomm.allreduce(x)\nprint(x.sum().item(), comm.size, comm.nodes)"
    job = run_alone(tmp_path, SCRIPT + text)
    assert job.returncode == 0 and "3.0 1 (0,)" in job.stdout, job.stderr
    assert not any(path.exists() for path in segments(job.stdout)), job.stdout


MAPS = """\
55d0c0000000-55d0c0001000 r--p 00000000 08:01 1234    /usr/bin/python3.11
7f0000000000-7f0001000000 rw-s 00000000 00:19 11      /dev/shm/sm_segment.node1.1000.5590001.0
7f0001000000-7f0002000000 rw-s 00000000 00:19 11      /dev/shm/sm_segment.node1.1000.5590001.0
7f0002000000-7f0003000000 rw-s 00000000 00:19 12      /dev/shm/vader_segment.node1.1000.5590001.1
7f0003000000-7f0004000000 rw-s 00000000 00:19 13      /dev/shm/mpich_shm_b61bf5e2_0
7f0004000000-7f0005000000 rw-s 00000000 00:19 14      /dev/shm/sm_segment.node1.1000.77.0 (deleted)
7f0005000000-7f0006000000 rw-s 00000000 00:19 15      /dev/shm/torch_4711_0
7f0006000000-7f0007000000 rw-p 00000000 00:00 0
"""


def test_only_segments_that_have_a_name_are_named():
    from hpcdist.comm.mpi.library import loaded
    from hpcdist.comm.mpi.world import SEGMENT

    names = {"sm_segment.node1.1000.5590001.0", "vader_segment.node1.1000.5590001.1", "mpich_shm_b61bf5e2_0"}
    assert {str(path) for path in loaded(MAPS, SEGMENT)} == {f"/dev/shm/{name}" for name in names}
