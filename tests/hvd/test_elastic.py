"""Elastic training: ranks are killed, and the others end as one process does that trains on the same samples."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from comm.jobs_here import LIMIT_S, ROOT
from faults.deaths import ULFM, survivable
from harness.launch import launch
from hvd.elastic_job import BATCH, EPOCHS, SAMPLES, network, samples

JOB = Path(__file__).with_name("elastic_job.py")
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}


def alone(sizes):
    """One process's parameters, after as many steps of as many ranks as each epoch had."""
    (inputs, targets), net = samples(), network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    steps = iter(sizes)
    for epoch in range(EPOCHS):
        order = list(range(SAMPLES))
        random.Random(epoch).shuffle(order)
        while order:
            size = next(steps)
            per_rank = min(BATCH, -(-len(order) // size))
            rows = (order + order)[: per_rank * size]
            del order[: per_rank * size]
            optimizer.zero_grad()
            F.mse_loss(net(inputs[rows]), targets[rows]).backward()
            optimizer.step()
    assert next(steps, None) is None
    return [one.tolist() for one in net.parameters()]


@survivable
@pytest.mark.parametrize("deaths", [{2: 7}, pytest.param({0: 4, 1: 4}, marks=pytest.mark.extended)])
def test_the_others_go_on_from_the_last_commit(deaths, tmp_path):
    words = ["-m", "hpcdist.hvd", JOB, json.dumps(deaths), tmp_path]
    job = launch(4, words, env=ENVIRONMENT, timeout_s=LIMIT_S, options=ULFM)
    found = {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == set(range(4)) - set(deaths), job.stderr[-3000:]
    for of_rank in found.values():
        sizes = [size for _, size in of_rank["history"]]
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] == of_rank["told"][-1] == len(found)
        for own, expected in zip(of_rank["parameters"], alone(sizes), strict=True):
            assert torch.allclose(torch.tensor(own), torch.tensor(expected), rtol=1e-4, atol=1e-6)


DEAD = """
import os, signal, sys
import torch, hpcdist.hvd as hvd
hvd.init()
hvd.allreduce(torch.ones(1))
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
texts = []
for turn in range(2):  # the second one begins when the exchange has failed
    try:
        hvd.allreduce(torch.ones(1 << 20), name=f"turn {turn}")
    except hvd.HorovodInternalError as error:
        texts.append(str(error))
assert len(texts) == 2 and all("Rank 1 has failed" in text for text in texts), texts
try:
    hvd.shutdown()
    hvd.init(comm=[0, 2])
except ValueError as error:
    assert "comm must be omitted once a rank has failed" in str(error), error
    print("told", flush=True)
"""

ALIKE = """
import torch, hpcdist.hvd as hvd
hvd.init()
state = hvd.elastic.ObjectState(turn=0)

@hvd.elastic.run
def train(state):
    state.turn += 1
    if state.turn == 1:
        raise hvd.HostsUpdatedInterrupt
    hvd.allreduce(torch.ones(2 + hvd.rank()))

try:
    train(state)
except hvd.HorovodInternalError as error:
    print(state.turn, "Mismatched" in str(error), flush=True)
"""


@survivable
def test_calls_after_a_death_fail_with_its_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DEAD)
    job = launch(3, [script], env=ENVIRONMENT, timeout_s=LIMIT_S, options=ULFM)
    assert job.stdout.split() == ["told"] * 2, job.stderr[-3000:]


@survivable
def test_a_call_that_fails_without_a_death_ends_the_training(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ALIKE)
    job = launch(2, [script], env=ENVIRONMENT, timeout_s=LIMIT_S)
    assert job.stdout.split() == ["2", "True"] * 2, job.stderr[-3000:]


def test_a_state_of_another_kind_defines_what_it_does():
    from hpcdist.hvd.elastic import State

    state = State()
    for method in (state.save, state.restore, state.sync):
        with pytest.raises(NotImplementedError):
            method()
