"""The backend hpcdist of torch.distributed: how groups begin, and what stands on them."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from comm.jobs_here import LIMIT_S
from harness.launch import IMPORTS, find_mpirun, launch, launch_environment
from hpcdist.torch_backend.group import by_device

pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "h5py", "pydantic")
FEATURES = Path(__file__).with_name("features.py")


def mpirun(size: int, *arguments: str | Path, compiler: bool = False) -> subprocess.CompletedProcess:
    """Run Python on ranks; `compiler`: with all of torch, which takes longer to import."""
    return launch(size, arguments, env=IMPORTS, timeout_s=LIMIT_S, preloaded=PRELOADED * compiler)


FOUR = ("tensor_parallel_on_a_mesh_of_two_dimensions", "post_local_sgd", "pipelining", "messages")


@pytest.mark.parametrize(("size", "names"), [(2, ()), pytest.param(4, FOUR, marks=pytest.mark.extended)])
def test_what_stands_on_torch_distributed_does_what_it_does_in_one_process(size, names):
    job = mpirun(size, FEATURES, *names, compiler=True)
    assert job.returncode == 0, job.stderr[-3000:]
    wanted = set(names) or {"ddp", "fsdp2", "pipelining", "messages", "monitored_barrier"}
    assert wanted <= set(job.stdout.split())


SAY = """
def say(text):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, text)
    if dist.get_rank() == 0:
        print(every)
"""
ALONE = (
    SAY
    + """
import sys
import torch.distributed as dist
import hpcdist.torch_backend
assert "mpi4py" not in sys.modules and "hpcdist.collectives" not in sys.modules
dist.init_process_group("hpcdist")
import torch
own = torch.ones(3)
dist.all_reduce(own)
say([dist.get_backend(), dist.get_rank(), dist.get_world_size(), own.tolist(), dist.group.WORLD.group_name])
"""
)


def test_ranks_that_torch_numbers_otherwise_keep_its_numbers():
    text = """
import os
place = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
import torch
import torch.distributed as dist
import hpcdist.torch_backend
dist.init_process_group("cpu:hpcdist", rank=2 - place, world_size=3)
found = [torch.empty(1) for _ in range(3)]
dist.all_gather(found, torch.tensor([float(place)]))
group = dist.new_group([0, 1])
if dist.get_rank() < 2:
    some = [torch.empty(1) for _ in range(2)]
    dist.all_gather(some, torch.tensor([float(place)]), group=group)
    found += some
say([int(one) for one in found])
"""
    job = mpirun(3, "-c", SAY + text)
    assert job.returncode == 0, job.stderr
    assert job.stdout.strip() == "[[2, 1, 0, 2, 1], [2, 1, 0, 2, 1], [2, 1, 0]]"


def test_under_torchrun_it_says_what_to_do():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command, given = [sys.executable, "-c", ALONE], {"stderr": subprocess.PIPE, "text": True}
    with launch_environment({**IMPORTS, **told}, preloaded=PRELOADED) as env:
        ranks = [subprocess.Popen(command, **given, env={**env, "RANK": str(rank)}) for rank in range(2)]
        for rank in ranks:
            _, shown = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode != 0
            assert "must be the launcher's, 2 (torchrun, accelerate launch or their like); got 1" in shown
            assert "hpcdist needs MPI, which that launcher does not start. Run `mpirun -n 2 python " in shown


def test_calls_that_nccl_takes_are_counted_under_the_lock_of_all_calls():
    class Group:
        def __init__(self):
            self._lock, self.counts = threading.Lock(), [0]

        @property
        def _sequence(self):
            return self.counts[-1]

        @_sequence.setter
        def _sequence(self, count):
            assert self._lock.locked()
            self.counts.append(count)

        def on_gpus(self):
            return SimpleNamespace(allreduce=lambda tensors: "by NCCL")

        @by_device
        def allreduce(self, tensors):
            raise AssertionError(tensors)

    group = Group()
    assert [group.allreduce([SimpleNamespace(is_cuda=True)]) for _ in range(2)] == ["by NCCL"] * 2
    assert group.counts == [0, 1, 2] and not group._lock.locked()


REFUSED = {
    "dist.all_to_all_single(torch.ones(3), torch.ones(3))": "output of all_to_all_single must have the same number",
    "dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)": "op of a sparse all_reduce must be SUM; got max",
    "dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG)": "operation 'mean' must have",
    "dist.group.WORLD.allreduce([torch.ones(1)], Odd()).wait()": "op must be a supported ReduceOp; got odd",
}
NO_MEANING = f"""
class Odd:
    asyncOp = False
    class reduceOp:
        op = "odd"
for call, message in {REFUSED!r}.items():
    try:
        exec(call)
    except (ValueError, RuntimeError) as error:
        assert message in str(error), error
    else:
        raise AssertionError(call)
say("refused")
"""
WITH_STRATEGIES = """
import hpcdist as hd
comm = hd.init()
dense = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
rest = torch.nn.Linear(4, 1)
first = torch.optim.SGD(dense.parameters(), lr=0.1)
second = hd.DistributedOptimizer(torch.optim.SGD(rest.parameters(), lr=0.1), rest, strategy="allreduce")
torch.manual_seed(comm.rank)
for _ in range(3):
    first.zero_grad(), second.zero_grad()
    rest(dense(torch.randn(8, 4))).square().mean().backward()
    first.step(), second.step()
for param in (*dense.parameters(), *rest.parameters()):
    found = [torch.empty_like(param) for _ in range(2)]
    dist.all_gather(found, param.detach())
    assert torch.equal(*found)
hd.finish(rest)
del dense
say("alike")
"""
DESTROYED = """
world, group, word = dist.group.WORLD, dist.new_group([0, 1]), torch.ones(1)
dist.all_reduce(word, group=group), dist.all_reduce(word, group=group)
dist.destroy_process_group(group)
def refused(call, *texts):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert any(text in str(error) for text in texts), error
    else:
        raise AssertionError(call)
direct = "a process group must not be used once it is destroyed. Use it before that, or create another one."
by_torch = "is not initialized in the world group map"  # in place of the error above, where torch wants to log it
for call in (
    lambda: dist.all_reduce(word, group=group), lambda: dist.all_reduce(word, group=group, async_op=True),
    lambda: dist.broadcast(word, 0, group=group), lambda: dist.barrier(group=group),
    lambda: dist.all_reduce(torch.eye(2).to_sparse(), group=group),
    lambda: dist.send(word, 1 - dist.get_rank(), group=group), lambda: dist.recv(word, group=group),
):
    refused(call, direct, by_torch)
for call in (group.monitored_barrier, group.barrier, lambda: group.allreduce([word]), lambda: group.send([word], 0)):
    refused(call, direct)
assert word.item() == 4 and group.size() == 2 and group.rank() == dist.get_rank()
begun = dist.all_reduce(word, async_op=True)
dist.destroy_process_group()
begun.wait()
refused(lambda: world.allreduce([word]), direct)
refused(lambda: dist.new_group([0, 1]), "Default process group has not been initialized")
dist.init_process_group("hpcdist")
dist.all_reduce(word)
say(word.item())
"""


def test_a_script_starts_sums_trains_beside_strategies_and_destroys_its_groups():
    """Importing it starts no MPI, and a launcher alone tells the ranks; what has no meaning is refused on all ranks."""
    job = mpirun(2, "-c", ALONE + NO_MEANING + WITH_STRATEGIES + DESTROYED, compiler=True)
    assert job.returncode == 0, job.stderr
    known = [["hpcdist", rank, 2, [2.0] * 3, "0"] for rank in range(2)]
    assert job.stdout.splitlines() == [str(known), *(str([said] * 2) for said in ("refused", "alike", 16.0))]


def test_a_compressed_sum_wants_a_group_of_this_backend():
    text = """
import torch.distributed as dist
import hpcdist as hd
from hpcdist.torch_backend.hooks import CompressionState
hd.init(torch_distributed="gloo")
try:
    CompressionState("topk")
except ValueError as error:
    say(str(error))
"""
    job = mpirun(2, "-c", SAY + text)
    assert job.returncode == 0 and job.stdout.count("must be on the backend hpcdist; got a group on gloo") == 2, (
        job.stderr
    )


MEETING = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
import hpcdist.torch_backend
dist.init_process_group("hpcdist", timeout=timedelta(seconds=3))
rank = dist.get_rank()
"""
LEFT_OVER = """
import contextlib
with contextlib.suppress(RuntimeError):
    dist.all_reduce(torch.ones(3 + rank))
works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(1 - rank)]
dist.destroy_process_group()
"""
START = "import hpcdist, hpcdist.torch_backend, torch.distributed as dist\n"
NO_NUMBERS = "a different number from 0 to 1 on each rank; got 0, 0 on"
ENDS = {  # on how many ranks, the script, what is said
    "groups in another order": (
        3,
        MEETING + "[dist.new_group(ranks) for ranks in ([[0, 1], [0, 1, 2]] if rank else [[0, 1, 2], [0, 1]])]",
        "for every rank in the start of a group of ranks 0, 1,",  # one of either group may be the first to say so
    ),
    "a group that one rank does not make": (
        3, MEETING + "rank and dist.new_group([0, 1, 2])", "rank 0: in exit on world",
    ),
    "a call that was begun and never waited for": (2, MEETING + LEFT_OVER, "rank 1 to come to the collective call"),
    "ranks that are known": (
        2, START + "hpcdist.init(); dist.init_process_group('hpcdist')", "hpcdist.init() has created",
    ),
    "one number twice": (2, START + "dist.init_process_group('hpcdist', rank=0, world_size=2)", NO_NUMBERS),
    "one number twice, on gloo": (2, START + "dist.init_process_group('gloo', rank=0, world_size=2)", NO_NUMBERS),
}  # fmt: skip


@pytest.mark.parametrize("what", ENDS)
def test_a_start_that_contradicts_the_ranks_and_what_others_never_do_end_the_job(what):
    size, text, said = ENDS[what]
    job = mpirun(size, "-c", text)
    assert job.returncode != 0 and said in job.stderr, job.stderr
