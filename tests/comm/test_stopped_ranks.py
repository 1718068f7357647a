"""Ranks that are stopped (SIGSTOP): the others end, and say whom they waited for and at which line each of them is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from comm.jobs_here import run
from faults.deaths import ULFM, survivable
from harness.launch import IMPORTS, find_mpirun, launch
from hpcdist.data import importers

pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")

LOOP = """
import os, signal
import torch
import hpcdist as hd

comm = hd.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()  # torch's first one takes long
optimizer = hd.DistributedOptimizer(optimizer, model, {options})
comm.barrier()
for calls in comm.process.calls_in_use():
    calls.failures.deadline_s = 1  # from here on: a busy machine may take longer to start
data = torch.utils.data.TensorDataset(torch.randn(120, 4), torch.randint(0, 2, (120,)))
for step, (x, y) in enumerate(hd.shard(torch.utils.data.DataLoader(data, batch_size=4))):  # the loop
    if step == 3 and hd.rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()  # the step
"""
IS_STOPPED = r"rank 2: does not reply: it is stopped, by SIGSTOP or a debugger \(process \d+ of this node\)"
THE_LOOP = r"at \S+script.py:\d+ in <module>: for .*# the loop"
THE_STEP = r"at \S+script.py:\d+ in <module>: .*# the step"


def check(job, awaited: str, *places: str) -> None:
    assert job.returncode != 0
    assert re.search(rf"\[rank \d\] \S*DeadlineError: rank \d: {awaited}", job.stderr), job.stderr
    for rank, place in enumerate(places):
        assert re.search(rf"\[rank \d\]   rank {rank}: .*{place}", job.stderr), job.stderr
    assert re.search(IS_STOPPED, job.stderr), job.stderr


def test_who_is_waited_for_is_named_and_the_line_of_each_rank(tmp_path):
    missing = (
        r"a request or a reply from any rank did not happen within 1 s\. Requests are missing of rank 2 "
        r"\(silent for \d+\.\d s\)\. Replies are missing of rank .*2\."
    )
    check(run(tmp_path, LOOP.format(options="'hardsync', servers='colocated'"), 3), missing, THE_STEP, THE_STEP)


@survivable
def test_a_server_that_outlives_ranks_does_not_wait_for_ever(tmp_path):
    """It looks for deaths twice a second: none of these waits is as long as the deadline, all together are."""
    job = run(tmp_path, LOOP.format(options="'hardsync'"), 3, options=ULFM)
    missing = r"a request from any worker .* within 1[\d.]* s\. Requests are missing of rank 2 \(silent for "
    worker = f"in Window.wait for the reply of server rank 0 on world/0.2 .call \\d+. for [\\d.]+ s, {THE_STEP}"
    check(job, missing, THE_LOOP, worker)


JOB = """
import dataclasses, os, signal
import hpcdist as hd
from train import tiny

calls = 0

def loss(outputs, targets):
    global calls
    calls += 1
    if calls == 5:
        for own in hd.init().process.calls_in_use():
            own.failures.deadline_s = 1  # from here on: a busy machine may take longer to start
        if hd.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
    return tiny.job.loss(outputs, targets)

job = dataclasses.replace(tiny.job, loss=loss)
"""


def test_under_the_command_line_it_is_a_line_of_the_training_loop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    importers.load("digits")(None, "digits.h5", test_fraction=0.8)  # not in the ranks' time
    settings = ("data.path=digits.h5", "strategy.algorithm=native")
    sets = [word for setting in settings for word in ("--set", setting)]
    job = launch(2, ["-m", "hpcdist", "train", "job.py", *sets], env=IMPORTS)
    assert job.returncode != 0
    assert re.search(r"rank 0 waited .* .call \d+., at \S+/hpcdist/train/replica.py:\d+ in \w+: ", job.stderr), (
        job.stderr
    )
    assert "rank 1: does not reply: it is stopped" in job.stderr, job.stderr
