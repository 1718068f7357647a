"""How real jobs end: ranks that are missing, that fail, that are killed, that leave early, and that just finish."""

from __future__ import annotations

import re

import pytest

from comm.jobs_here import run, run_alone
from faults.deaths import ULFM, survivable
from harness.launch import find_mpirun
from hpcdist.comm.mpi.calls import MESSAGE_S

pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")

START = """
import os, signal, sys, time
import torch
import hpcdist as hd
comm = hd.init()
"""
SOON = START + "hd.init(deadline_s=1)  # from here on: a busy machine may take longer to start\n"

RANK_0_MAY_BE_LATE = "from hpcdist.faults import reporter\nreporter.FIRST_S = reporter.MAX_S = 30\n"


def ends(tmp_path, text, size, start=SOON):
    """Runs a script that must fail; what it wrote on standard error."""
    job = run(tmp_path, start + text, size)
    assert job.returncode != 0, job.stderr
    assert "MPI_ABORT was invoked" not in job.stderr and "application called MPI_Abort" not in job.stderr
    return job.stderr


# --- ranks that are missing, or fail ----------------------------------------------------------------------------------
def test_a_rank_that_never_comes_to_a_collective_is_named_with_its_line(tmp_path):
    """Also in the logs that a script writes."""
    shown = ends(
        tmp_path,
        f"""
import logging
logging.basicConfig(filename=f"{tmp_path}/{{comm.rank}}.log", format="%(levelname)s %(name)s %(message)s")
if comm.rank == 1:
    time.sleep(600)  # a slow disk
comm.allreduce(torch.zeros(1))  # the call
""",
        3,
    )
    assert re.search(r"rank 0 waited [\d.]+ s for every rank in allreduce on world .call \d+., at \S+.py:", shown)
    assert "comm.allreduce(torch.zeros(1))  # the call. The deadline is 1 s. Missing:" in shown
    assert re.search(r"  rank 1: not in a call of hpcdist; at .*script.py:\d+ in <module>: time.sleep\(600\)  #", shown)
    assert "rank 2:" not in shown and shown.count("hpcdist: rank") == 1, "one rank speaks, of the missing one only"
    written = [(tmp_path / f"{rank}.log").read_text() for rank in range(3)]
    assert re.match(
        r"ERROR hpcdist rank 0 waited [\d.]+ s for every rank in allreduce .*Missing:\n  rank 1: ", written[0]
    )
    assert written[1:] == ["", ""]


MEMORY = """
window = comm.window(1)
if comm.rank == 1:
    {does}
else:
    window.wait(lambda words: words[0] > 0, what="the answer", by=(1,))
"""
AWAITED = "window.wait(lambda e: e[0] > 0, what='the answer of rank 1')"
HAS_ENDED = r"  rank {}: in exit on world .*, at the end of its script"
ENDINGS = {  # of ranks: their number, the script, and what it says, whereby deadlines are 1 s or the default
    "in different calls": (
        2, SOON + "comm.barrier() if comm.rank == 1 else comm.broadcast(torch.zeros(1), 1)\ncomm.barrier()",
        [r"rank [01]: in (barrier|broadcast) .*on world \(call \d+\)"],
    ),
    "of a part, named as the launcher names them": (
        3, SOON + """
part = comm.split(0 if comm.rank > 0 else 1)  # ranks 1 and 2 are 0 and 1 of it
if comm.rank == 1:
    part.irecv(torch.zeros(1), 1, 5).wait()
time.sleep(600)
""",
        [r"rank 1 waited [\d.]+ s for rank 2 in irecv on world/0",
         r"Missing:\n  rank 2: not in a call of hpcdist; at .*time.sleep\(600\)"],
    ),
    "that leave early, named on another node than the one where they are waited for": (
        4, START + """
from hpcdist.collectives.calls import Collectives
calls = Collectives(comm.apart(nodes=(0, 0, 1, 1)))
calls.barrier()
if comm.rank == 3:
    sys.exit(0)
calls.barrier()
""",
        [r"rank 2 waited [\d.]+ s for every rank in collective call on .* It would wait forever.",
         r"Missing:\n" + HAS_ENDED.format(3)],
    ),
    "that leave although a message of theirs is awaited": (
        2, START + "comm.irecv(torch.zeros(1), 1).wait() if comm.rank == 0 else sys.exit(0)",
        [r"rank 0 waited [\d.]+ s for rank 1 in irecv on world.* It would wait forever.", HAS_ENDED.format(1)],
    ),
    "that leave without the change that another one waits for": (
        2, START + MEMORY.format(does="sys.exit(0)"),
        [r"rank 0 waited [\d.]+ s for rank 1 in Window.wait for the answer on world.*forever.", HAS_ENDED.format(1)],
    ),
    "that wait for ever": (
        2, SOON + f"""
window = comm.window(1)
if comm.rank == 0:
    try:
        comm.probe(1, 7)
    except hd.errors.DeadlineError as error:
        print("caught:", error, file=sys.stderr)
    {AWAITED}
time.sleep(600)
""",
        ["caught: rank 0: a message from rank 1 on world did not happen within 1 s",
         r"\[rank 0\] .*DeadlineError: rank 0: the answer of rank 1 did not happen within 1 s",
         rf"\[rank 0\]   File .*script.py.*\n\[rank 0\]     {re.escape(AWAITED)}"],
    ),
    "that raise": (
        2, START + "if comm.rank == 1:\n    raise ValueError('no such file')\ncomm.barrier()",
        [r"\[rank 1\] Traceback \(most recent call last\):", r"\[rank 1\] ValueError: no such file"],
    ),
    "whose serving thread fails": (
        2, RANK_0_MAY_BE_LATE + START + """
window = comm.apart("tcp").window(1)
if comm.rank == 0:
    window.comm.memory.server().windows.clear()  # as if the thread had met an error of its own
comm.barrier()
if comm.rank == 0:
    time.sleep(600)
window.get(torch.zeros(1), 0)
""",
        [r"\[rank 0\] KeyError: 1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("ranks_", ENDINGS, ids=lambda name: name.replace(" ", "_"))
def test_a_job_that_can_not_go_on_ends_and_says_why(tmp_path, ranks_):
    size, text, expected = ENDINGS[ranks_]
    shown = ends(tmp_path, text, size, start="")
    for said in expected:
        assert re.search(said, shown), shown
    assert ranks_ != "that raise" or "waited" not in shown
    if "a message" in ranks_:
        waited_s = float(re.search(r"rank 0 waited ([\d.]+) s", shown)[1])
        assert waited_s >= MESSAGE_S, "it has had time to send it"


@survivable
def test_a_rank_that_leaves_early_is_named_where_ranks_outlive_others(tmp_path):
    text = "if comm.rank == 1:\n    sys.exit(0)\ncomm.failures.retry_on_failure(comm.barrier)"
    job = run(tmp_path, START + text, 3, options=ULFM)
    assert job.returncode != 0
    assert re.search(r"rank 0 waited [\d.]+ s for every rank in shrink on world.* It would wait forever.", job.stderr)
    assert re.search(HAS_ENDED.format(1), job.stderr)


ABORT = "print('the reason', file=sys.stderr) if comm.rank else time.sleep(600)\ncomm.abort(87)"
WITHOUT_PMIX = "from hpcdist.comm.mpi import library\nlibrary._PMIX = library.re.compile('no such library')\n"


@pytest.mark.parametrize(
    ("before", "options"),
    [("", ()), (WITHOUT_PMIX, ()), pytest.param("", ULFM, marks=survivable)],
    ids=["as they are", "without PMIx", "outliving others"],
)
def test_the_status_is_told_all_ranks_end_and_little_is_added(tmp_path, before, options):
    job = run(tmp_path, START + before + ABORT, 2, options=options)
    assert job.returncode == 87 and "the reason" in job.stderr
    if not before and not options:
        lines = [line for line in job.stderr.replace("\0", "").splitlines() if line.strip() and line[:3] != "---"]
        assert lines[0] == "the reason" and len(lines) <= 4, "mpirun's own three lines at most"


# --- ranks that just finish -------------------------------------------------------------------------------------------
NOTHING_CLOSED = """
window = comm.window(4)
far = [comm.apart(way).window(4, torch.bfloat16) for way in ("tcp", "rma")]
words = [each.comm.window(1, torch.int64) for each in far]
part = comm.split(comm.rank % 2)
for each, counts in zip(far, words):
    each.accumulate(torch.ones(4, dtype=torch.bfloat16), 0)
    counts.fetch_add(1, 0)
if comm.rank == 0:
    time.sleep(0.3)  # the others are at their end before; they still serve
    for each in far:
        each.get(torch.zeros(4, dtype=torch.bfloat16), comm.size - 1)
print("rank", comm.rank, "is done")
"""


def test_a_script_that_closes_nothing_and_makes_the_last_change_late_ends_with_0(tmp_path):
    late = MEMORY.format(does="time.sleep(1.5)\n    [window.put(torch.ones(1), rank) for rank in (0, 2)]")
    job = run(tmp_path, START + NOTHING_CLOSED + late, 3)
    assert (job.returncode, job.stdout.count("is done")) == (0, 3), job.stderr
    assert "rror" not in job.stderr and "Traceback" not in job.stderr


# --- wrong worlds -----------------------------------------------------------------------------------------------------
def test_a_world_of_one_where_the_launcher_started_two_is_refused(tmp_path):
    job = run_alone(tmp_path, "import os\nos.environ['OMPI_COMM_WORLD_SIZE'] = '2'\n" + START)
    assert job.returncode != 0
    assert "the number of ranks in MPI's world must be the launcher's, 2 (Open MPI's mpirun); got 1" in job.stderr


# --- MPI without threads ----------------------------------------------------------------------------------------------
def test_without_threads_it_warns_and_refuses_windows_across_nodes(tmp_path):
    text = "import mpi4py\nmpi4py.rc.thread_level = 'serialized'\n" + START + "comm.apart('tcp').window(1)"
    job = run(tmp_path, text, 2)
    assert job.returncode != 0
    assert "UserWarning: MPI runs without MPI_THREAD_MULTIPLE, so ranks can't be watched" in job.stderr
    assert "CommunicationError: windows across nodes must have an MPI at MPI_THREAD_MULTIPLE; got level" in job.stderr
