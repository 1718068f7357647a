"""One rank leaves the loop, or its script: the others end at once, and are told where it is and where they are."""

from __future__ import annotations

import re
import time

import pytest

from comm.jobs_here import run
from harness.launch import find_mpirun

pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")

# The deadline is that of users, 600 s: who waits for it does not end in time.
LOOP = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hpcdist as hd

hd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
strategy = dict(zip(["strategy", "servers"], {strategy!r}.split()))
optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model, **strategy)
loader = hd.shard(DataLoader(TensorDataset(torch.randn(144, 4), torch.randn(144, 1)), 4))
leaves = hd.rank() == hd.size() - 1

def step(x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

"""
EXIT = """
for epoch in range(2):
    for batch, (x, y) in enumerate(loader):
        if leaves and batch == 3:
            sys.exit(0)
        step(x, y)
hd.finish(model)
"""
BREAK = EXIT.replace("sys.exit(0)", "break")
HELD = EXIT.replace("enumerate(loader)", "enumerate(batches := iter(loader))")  # so that it makes no pause
WEIGHS = EXIT.replace(
    "batch == 3:\n            sys.exit(0)", "batch == 3:\n            optimizer.set_batch_weight(len(x))"
)
ALL = r"(?:every rank|rank \d) in "  # of an all-reduce, by the algorithm that was the fastest here
REQUEST = "rank 1 or rank 2 in Window.wait for a request from any worker"
EITHER = "rank 1 or rank 2 in Window.wait for a request or a reply"
SCRIPT_ENDS = r"  rank {last}: in exit on world \(call \d+\) for [\d.]+ s, at the end of its script"


def ends(tmp_path, strategy, text, size):
    """Runs a loop that must fail; what it wrote on standard error."""
    job = run(tmp_path, LOOP.format(strategy=strategy) + text, size)
    assert job.returncode != 0, job.stdout + job.stderr
    return job.stderr


@pytest.mark.parametrize(
    ("strategy", "size", "text", "waits", "missing"),
    [
        ("allreduce", 3, BREAK, ALL, r"  rank 2: in gather on world.* at .*: "),
        ("local_sgd", 2, EXIT, ALL, SCRIPT_ENDS),
        ("hardsync", 3, HELD, REQUEST, SCRIPT_ENDS),
        ("hardsync", 3, WEIGHS, REQUEST, r"  rank 2: in allreduce .*: optimizer.set_batch_weight\("),
        pytest.param("hardsync colocated", 3, HELD, EITHER, SCRIPT_ENDS, marks=pytest.mark.extended),
    ],
)
def test_both_places_are_named(tmp_path, strategy, size, text, waits, missing):
    shown = ends(tmp_path, strategy, text, size)
    first = re.search(rf"rank 0 waited ([\d.]+) s for {waits}.* It would wait forever.", shown)
    assert first is not None, shown
    assert float(first[1]) < 10, "soon, also on a busy machine"
    assert re.search(missing.replace("{last}", str(size - 1)), shown), shown
    assert shown.count("Missing:") == 1, "one rank speaks"


# --- ranks that serve -------------------------------------------------------------------------------------------------
AFTER = """
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
print(loss.item())
"""
COUNTED = """
count = 0
while count < 10:
    for x, y in loader:
        step(x, y)
        count += 1
        if count == 10:
            break
"""
SERVES = r"\[rank 0\] This is a server rank: a loop over hpcdist.shard\(loader\) has no batches here"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (AFTER, r"\[rank 0\] NameError: name 'loss' is not defined\n" + SERVES),
        pytest.param(COUNTED, r"rank 0 waited .* \(it serves\)", marks=pytest.mark.extended),
        pytest.param(COUNTED + "hd.finish(model)", "Rank 0 is a server and takes no step", marks=pytest.mark.extended),
    ],
)
def test_what_fails_on_a_rank_that_serves_says_that_it_serves(tmp_path, text, error):
    assert re.search(error, ends(tmp_path, "hardsync", text, 2))


CALLS = """
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce as sum_of
workers = dist.new_group(range(1, hd.size()))
for x, y in loader:
    step(x, y)
    total = torch.ones(1)
    dist.all_reduce(total, group=workers)
    assert total == hd.allreduce(1, "sum") == hd.size() - 1
    {call}
hd.finish(model)
"""


@pytest.mark.parametrize(
    ("strategy", "call"),
    [
        ("easgd", "dist.all_reduce(total, async_op=True).wait()"),
        ("hardsync", "dist.broadcast(total, 1)"),  # the root's ends without an answer
        pytest.param("hardsync", "dist.new_group([0, 1])", marks=pytest.mark.extended),
        pytest.param("softsync", "sum_of(total, 'sum', dist.group.WORLD) + 1", marks=pytest.mark.extended),
    ],
)
def test_a_call_of_torch_distributed_that_ranks_which_serve_never_make_is_named(tmp_path, strategy, call):
    start = time.monotonic()
    shown = ends(tmp_path, strategy, CALLS.format(call=call), 2)
    assert "calls of torch.distributed must be outside of the training loop if there are server ranks" in shown
    assert re.search(
        r"needs rank 0. Call hpcdist.allreduce, .* dist.new_group\(\[1\]\), created before the loop", shown
    )
    assert "broadcast" in call or re.search(rf"rank 1 is at .*: {re.escape(call)}\n", shown), shown
    assert time.monotonic() - start < 30, "and not after the deadline"


# --- loops and scripts that are right ---------------------------------------------------------------------------------
RIGHT = """
for _ in hd.shard(range(10), split=False):  # a loop without a DataLoader
    step(torch.randn(4, 4), torch.randn(4, 1))
hd.finish(model)
print("served", flush=True)

comm = hd.init()
other = comm.split(0)
queue = other.queue()
if comm.rank == 0:
    work = queue.submit(other.barrier)
    time.sleep(1.5)
else:
    work = queue.submit(lambda: (time.sleep(1.5), other.barrier()))
comm.barrier()
work.wait()
queue.close()
print("not taken for one that waits for ever", flush=True)

optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model, "gossip_pull")
if hd.rank() == 1:
    time.sleep(1)  # the others are in the call, and then at their end, meanwhile
value = hd.broadcast(torch.ones(1) * hd.rank())
for _ in range(5 * (1 + hd.rank())):
    step(torch.randn(4, 4), torch.randn(4, 1))
    time.sleep(0.1)
print("left at another time", flush=True)
"""


def test_what_is_right_ends_well(tmp_path):
    """A range that is shared serves; rank 0's thread waits for slow ones, which compute; ranks end one by one."""
    job = run(tmp_path, LOOP.format(strategy="hardsync") + RIGHT, 3)
    assert job.returncode == 0, job.stderr
    for text in ("served", "not taken for one that waits for ever", "left at another time"):
        assert job.stdout.count(text) == 3, job.stdout
