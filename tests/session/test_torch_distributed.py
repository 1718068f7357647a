"""torch.distributed after `init`: libraries that ask it find the ranks."""

from __future__ import annotations

import os

import pytest

import hpcdist as hd
from comm.jobs_here import run
from faults.deaths import ULFM, survivable
from harness.launch import find_mpirun
from hpcdist.comm.virtual import run_virtual
from hpcdist.session.world import _hint

KNOWN = """
import os
import psutil, torch, torch.distributed as dist
import hpcdist as hd

comm = hd.init(deadline_s=60)
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (comm.rank, 2, "hpcdist")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
assert [os.environ[name] for name in names] == [str(comm.rank), "2", str(comm.rank), "2"]
assert int(os.environ["MASTER_PORT"]) and os.environ["MASTER_ADDR"] == "127.0.0.1"
listening = [own.laddr.ip for own in psutil.Process().net_connections("inet") if own.status == "LISTEN"
             and own.laddr.port == int(os.environ["MASTER_PORT"])]
assert listening == ["127.0.0.1"] * (comm.rank == 0), "torch's store asks nobody for a secret"
for backend in (None, "gloo"):
    group, found = dist.new_group([0, 1], backend=backend), torch.ones(2)
    dist.all_reduce(found, group=group)
    assert hd.init() is comm and found.tolist() == [2, 2] and dist.get_backend(group) == (backend or "hpcdist")
assert hd.device_mesh(1).size() == 1 and dist.get_world_size() == 1
"""
OWN = """
import os
import torch.distributed as dist
import hpcdist as hd

rank, folder = int(os.environ["OMPI_COMM_WORLD_RANK"]), os.environ["HOME"]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=1 - rank, world_size=2)
own = dist.group.WORLD
hd.init()
assert dist.group.WORLD is own and "RANK" not in os.environ
dist.destroy_process_group()
"""
GLOO = """
import torch.distributed as dist
import hpcdist as hd

comm = hd.init(torch_distributed="gloo")
assert dist.get_backend() == "gloo"
dist.monitored_barrier()
hd.device_mesh(2)
assert dist.get_backend() == "gloo"
"""
NONE = """
import os
import torch.distributed as dist
import hpcdist as hd

hd.init(torch_distributed=False)
assert not dist.is_initialized() and "RANK" not in os.environ
hd.device_mesh(2)
assert dist.get_backend() == "hpcdist"
"""
# What scripts do with a group on Gloo.
PATTERNS = """
import os, tempfile, threading, time
import torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed import checkpoint
from torch.utils.data import DataLoader
import hpcdist as hd

comm = hd.init(deadline_s=60)
world = dist.group.WORLD

def refused(call, text):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)

refused(dist.monitored_barrier, "monitored_barrier is only implemented for GLOO backend")
world.monitored_barrier(timedelta(seconds=30))

# A checkpoint is written by a thread, with collective calls of its own group, while the loop makes others.
(folder,) = hd.broadcast([tempfile.mkdtemp() if comm.rank == 0 else ""])
state = {"x": torch.arange(4.0)}
saved = checkpoint.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
counted = torch.ones(1)
for _ in range(50):
    dist.all_reduce(counted, dist.ReduceOp.AVG)
saved.result()
found = {"x": torch.zeros(4)}
checkpoint.load(found, checkpoint_id=folder)
assert torch.equal(found["x"], state["x"]) and counted.item() == 1

# Threads, each with a group, and several with one: calls of these are alike.
groups, sums = [dist.new_group() for _ in range(3)], []
def add(group):
    for n in range(200):
        own = torch.full((n + 1,), comm.rank + 1.0)
        dist.all_reduce(own, group=group)
        assert own.eq(3).all()
    sums.append(own)
threads = [threading.Thread(target=add, args=[group]) for group in groups]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert len(sums) == 3
def count():
    for _ in range(200):
        own = torch.ones(1)
        dist.all_reduce(own)
        sums.append(own.item())
threads = [threading.Thread(target=count) for _ in range(3)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert sums[3:] == [2.0] * 600

class Asks(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, place):
        inherited = "a process group must not be used once it is in a forked process"
        refused(lambda: dist.all_reduce(torch.ones(1)), inherited)
        refused(lambda: dist.send(torch.ones(1), 1 - comm.rank), inherited)
        return place
assert [int(place) for place in DataLoader(Asks(), num_workers=1)] == [0, 1]

if comm.rank == 0:
    dist.destroy_process_group()  # alone: nobody waits
hd.barrier()
if comm.rank == 1:
    dist.destroy_process_group()
dist.init_process_group("gloo")
dist.all_reduce(counted)
assert counted.item() == 2
dist.destroy_process_group()
"""
ALONE_AT_THE_END = """
import torch.distributed as dist
import hpcdist as hd

if hd.init().rank == 0:
    dist.destroy_process_group()
"""
SERIALIZED = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
import warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
import hpcdist as hd

hd.init()
own = torch.ones(1)
dist.all_reduce(own)
assert dist.get_backend() == "gloo" and own.item() == 2
"""
# As where torch finds GPUs, of which ranks have one each or share one: NCCL itself begins with the first call on one.
GPUS = """
import os
import torch, torch.distributed as dist
import hpcdist as hd

RANK = os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["CUDA_VISIBLE_DEVICES"] = {visible}
torch.cuda.device_count, dist.is_nccl_available = lambda: {count}, lambda: True
comm = hd.init()
assert dist.get_backend() == {backend!r}, dist.get_backend()
own, group, cuda = torch.ones(1), dist.group.WORLD, torch.device("cuda")
dist.all_reduce(own)
assert own.item() == 2

class OnGpu(torch.Tensor):  # says so, and lies on the host, where Gloo takes NCCL's place
    is_cuda = True

def gloo(store, rank, size, options):
    return dist.ProcessGroupGloo(store, rank, size)

gloo.Options = object
register = dist.ProcessGroup._register_backend
def everywhere(pg, device, kind, backend):
    for device in (cuda, torch.device("cpu")):
        register(pg, device, dist.ProcessGroup.BackendType.GLOO, backend)

if "nccl" in dist.get_backend():
    torch.cuda.get_device_capability = lambda device: (0, 0)
    dist.ProcessGroupNCCL, dist.ProcessGroup._register_backend = gloo, everywhere
    before, rank = group._get_sequence_number_for_group(), comm.rank
    def ones(count):
        return torch.ones(count).as_subclass(OnGpu)
    made = [ones(n) for n in (2, 2, 4, 1, 2)]
    dist.all_reduce(made[0])
    dist.broadcast(made[1].fill_(rank), 1)
    dist.all_gather_into_tensor(made[2], ones(2))
    dist.reduce_scatter_tensor(made[3], ones(2))
    dist.all_to_all_single(made[4], ones(2).mul_(rank))
    assert [each.tolist() for each in made] == [[2, 2], [1, 1], [1, 1, 1, 1], [2], [0, 1]]
    assert group._get_sequence_number_for_group() == before + 5
    assert isinstance(group._get_backend(cuda), dist.ProcessGroupGloo)
    works = [dist.isend(ones(1), 1 - rank), dist.irecv(made[3].zero_(), 1 - rank)]
    [work.wait() for work in works]
    assert made[3].tolist() == [1]
    for call in (group._start_coalescing, group._end_coalescing):  # come to the backend, which NCCL's alone can do
        try:
            call(cuda)
        except RuntimeError as error:
            assert "gloo does not implement" in str(error)
        else:
            raise AssertionError(call)
"""
GPUS_OF = {  # what each rank sees, how many, and the backend
    "one each": ('"0,1"', 2, "cpu:hpcdist,cuda:nccl"),
    "one each, which it alone sees": ("RANK", 1, "cpu:hpcdist,cuda:nccl"),
    "one together": ('"0"', 1, "hpcdist"),
}
MORTAL = """
import os, signal
import torch, torch.distributed as dist
import hpcdist as hd

comm, own = hd.init(deadline_s=20), torch.ones(1)
dist.all_reduce(own)
assert dist.get_backend() == "gloo" and own.item() == 3
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(own)
except RuntimeError:
    print("told")
"""
APART = """
import gc, os
import torch, torch.distributed as dist
import hpcdist as hd
from hpcdist.comm.external import torch_distributed

torch_distributed.stack_id = lambda: os.environ["OMPI_COMM_WORLD_RANK"]  # as on two hosts, of which none has an address
torch_distributed.addresses = lambda chosen="": []
"""
BY_MPI = """
comm = hd.init()
own = torch.ones(1)
dist.all_reduce(own, group=dist.new_group())
assert own.item() == 2 and "RANK" in os.environ and "MASTER_ADDR" not in os.environ
gc.collect()
try:
    dist.new_group(backend="gloo")
except RuntimeError as error:
    assert "a process group on Gloo or NCCL must have a rendezvous over TCP: rank 0" in str(error), error
else:
    raise AssertionError("gloo")
"""
BY_GLOO = """
comm = hd.init(torch_distributed="gloo")
comm.barrier()
assert not dist.is_initialized() and "RANK" not in os.environ
"""
ENDS = {  # the script, and what is said
    "another value": ("hd.init(torch_distributed='mpi')", "must be True, 'gloo', 'nccl' or False; got 'mpi'"),
    "no GPUs": ("hd.init(torch_distributed='nccl')", "must have NCCL and a separate GPU on every rank; rank 0"),
    "values that differ": (
        "hd.init(torch_distributed='gloo' if int(os.environ['OMPI_COMM_WORLD_RANK']) else True)",
        "versions and settings must be the same on every rank; rank 1 differs from rank 0: torch_distributed",
    ),
    "a monitored barrier": (
        "hd.init(); dist.monitored_barrier()", "call torch.distributed.group.WORLD.monitored_barrier(",
    ),
    "a rank that never comes": (
        "hd.init(deadline_s=2).rank or dist.all_reduce(torch.ones(1)); time.sleep(60)",
        "rank 1: not in a call of hpcdist; at ",
    ),
    "a call that was begun and that others never make": (
        "hd.init(deadline_s=2).rank or dist.all_reduce(torch.ones(1), async_op=True)",
        "rank 1: does not reply: it has ended",
    ),
}  # fmt: skip


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
@pytest.mark.parametrize(
    "script",
    [KNOWN, OWN, GLOO, NONE, PATTERNS, ALONE_AT_THE_END, SERIALIZED],
    ids=["known", "own", "gloo", "none", "patterns", "alone", "serialized"],
)
def test_ranks_are_known_unless_the_script_says_otherwise_and_end_without_a_word(tmp_path, script):
    job = run(tmp_path, script, 2)
    assert job.returncode == 0 and not job.stderr, job.stderr


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
@pytest.mark.parametrize("gpus", GPUS_OF)
def test_tensors_of_gpus_are_nccls_where_each_rank_has_a_gpu_of_its_own(tmp_path, gpus):
    visible, count, backend = GPUS_OF[gpus]
    script = GPUS.replace("{visible}", visible).replace("{count}", str(count)).replace("{backend!r}", repr(backend))
    job = run(tmp_path, script, 2)
    assert job.returncode == 0, job.stderr


@survivable
def test_a_group_that_ranks_may_die_in_is_on_gloo_and_tells_the_others(tmp_path):
    job = run(tmp_path, MORTAL, 3, options=ULFM)
    assert job.returncode == 0 and job.stdout.count("told") == 2, job.stderr


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
@pytest.mark.parametrize(("script", "warned"), [(BY_MPI, 0), (BY_GLOO, 1)])
def test_ranks_that_reach_each_other_by_mpi_only_are_known_and_on_gloo_are_warned(tmp_path, script, warned):
    job = run(tmp_path, APART + script, 2)
    assert job.returncode == 0, job.stderr
    text = "torch.distributed, and libraries that use it, see only one rank: rank 0 must be reached"
    assert job.stderr.count(text) == warned


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
@pytest.mark.parametrize("what", ENDS)
def test_what_the_default_group_can_not_do_ends_the_job_by_name(tmp_path, what):
    script, said = ENDS[what]
    job = run(tmp_path, f"import os, time, torch, torch.distributed as dist, hpcdist as hd\n{script}", 2)
    assert job.returncode != 0 and said in job.stderr, job.stderr


def test_virtual_ranks_start_nothing():
    def body(comm):
        import torch.distributed as dist

        hd.init(comm=comm)
        return dist.is_initialized() or "MASTER_ADDR" in os.environ

    assert run_virtual(body, 2) == [False, False]


def test_an_error_of_webdataset_is_explained():
    """Its `single_node_only`, the default, which saw one rank before the ranks were made known."""
    error = ValueError("you need to add an explicit nodesplitter to your input pipeline for multi-node training")
    assert "nodesplitter=webdataset.split_by_node: each rank then reads different shards" in _hint(error)
    assert _hint(ValueError("another one")) == ""
