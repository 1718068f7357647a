"""Timelines of real jobs: one from the command line, one of a loop of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.launch import IMPORTS, find_mpirun, launch
from timeline.traces import Trace

pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")

TINY = str(Path(__file__).parents[1] / "train" / "tiny.py")
SETTINGS = ("data.path=digits.h5", "epochs=1", "strategy=allreduce", "strategy.overlap=on", "strategy.algorithm=ring")

LOOP = """
import torch
import hpcdist as hd

hd.init(timeline="mine.json")
hd.init(timeline="mine.json")  # safe to call again
model = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hd.DistributedOptimizer(sgd, model, "gossip_pull", include_self=False)
for x in hd.shard(torch.utils.data.DataLoader(torch.ones(40, 4), batch_size=4)):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


def test_a_job_whose_buckets_are_averaged_beside_the_computation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    done = launch(2, ["-m", "hpcdist", "train", TINY, "--output", "run", "--timeline", *settings], env=IMPORTS)
    assert (done.returncode, done.stderr) == (0, "")
    trace = Trace(tmp_path / "run" / "timeline.json")
    trace.check()
    assert trace.names("thread_name") == {rank: ["main", "collective calls, in the background"] for rank in range(2)}
    error_us = 1e6 * sum(clock["error, s"] for clock in trace.content["otherData"]["clocks"].values())
    arrows = list(trace.arrows())
    assert arrows and all(end["ts"] >= start["ts"] - error_us for start, end in arrows)
    averages, waits = trace.of("average a bucket", 0), trace.of("wait for buckets", 0)
    assert len(averages) >= len(waits) > 0 and {event["tid"] for event in averages} == {1}
    assert not list((tmp_path / "run").glob("timeline-rank*"))


def test_a_loop_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP)
    done = launch(2, ["loop.py"], env=IMPORTS)
    assert (done.returncode, done.stderr) == (0, "")
    trace = Trace(tmp_path / "mine.json")
    trace.check()
    for rank in range(2):
        assert len(trace.of("step 5", rank)) == len(trace.of("step 1", rank)) == 1
        assert len(trace.of("GossipPull", rank)) == 5
        assert {event["args"]["from"] for event in trace.of("get", rank)} == {1 - rank}
