"""Checkpoints in the background have the same bytes, of the moment of the call; errors come with the next call."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from states import bits, loaded, names, short_files, state_of

from comm.jobs_here import run
from harness.launch import find_mpirun
from hpcdist.checkpoint import Saver, latest, save, verify
from hpcdist.checkpoint.tensors import STORED
from hpcdist.comm.virtual import Constant, Network, run_virtual
from hpcdist.errors import CheckpointError
from train import tiny

TOO_LARGE = r"The checkpoint of step 2 must be saved by all ranks; got on rank 1: .*File too large. Is there space"
needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")


def _big(rank: int, step: int) -> dict:
    """A state of which ranks have a part in common."""
    return {
        **state_of(rank, step),
        "shared": [torch.full((2000,), step + i / 8) for i in range(4)],
        "local": torch.full((1000,), float(rank)),
        "array": np.full(100, rank),
        "kinds": [torch.ones(3, 2 * kind.itemsize, dtype=torch.uint8).view(kind) for kind in STORED],
    }


def _spoil(state: dict) -> None:
    """Change all that may be changed in place."""
    for tensor in (state["weight"], state["local"], *state["shared"]):
        tensor.fill_(-1)
    state["array"][:] = -1
    state["data"][1].append("late")


@pytest.mark.sizes(1, 2, 3)
def test_it_has_the_same_bytes_although_the_state_changes_after_the_call(ranks, shared_tmp_path):
    def body(comm):
        plain, background = shared_tmp_path / "plain", shared_tmp_path / "background"
        saver = Saver()
        for step in (1, 2, 3):
            save(comm, plain, step, _big(comm.rank, step))
            state = _big(comm.rank, step)
            path = saver.save(comm, background, step, state, background=True)
            _spoil(state)
        saver.wait()
        assert path.is_dir()
        comm.barrier()  # others may read the folder a moment later
        found = [{file: hashlib.sha256((each / file).read_bytes()).hexdigest() for file in names(each)}
                 for folder in (plain, background) for each in sorted(folder.iterdir())]  # fmt: skip
        saver.close()
        return found, bits(loaded(path)[comm.rank]) == bits(_big(comm.rank, 3))

    for found, same in ranks(body):
        assert found[:3] == found[3:] and same


def test_it_appears_when_all_ranks_have_written_and_the_next_call_waits_for_it(tmp_path):
    """On virtual ranks the thread goes on when its rank waits; a message takes a second."""

    def body(comm):
        saver = Saver()
        path = saver.save(comm, tmp_path, 1, _big(comm.rank, 1), background=True)
        before = path.exists()
        saver.save(comm, tmp_path, 2, _big(comm.rank, 2), background=True)
        after = path.exists(), (tmp_path / "step-00000002").exists()
        saver.close()
        return before, *after, (tmp_path / "step-00000002").exists(), saver.seconds > 1.0

    slow = Network(latency_s=1.0, bandwidth_bytes_s=1e9)
    assert run_virtual(body, 2, network=slow) == [(False, True, False, True, True)] * 2


@pytest.mark.parametrize("ends", ["save", "wait", "close"])
def test_a_full_disk_is_an_error_of_the_next_call_on_all_ranks_and_harms_nothing(tmp_path, ends):
    def body(comm):
        saver = Saver()
        saver.save(comm, tmp_path, 1, state_of(comm.rank, 1), background=True)
        saver.save(comm, tmp_path, 2, {"weight": torch.ones(100_000)} if comm.rank == 1 else {}, background=True)
        with pytest.raises(CheckpointError, match=TOO_LARGE):
            saver.save(comm, tmp_path, 3, {}, background=True) if ends == "save" else getattr(saver, ends)()
        comm.barrier()
        left = names(tmp_path)
        comm.barrier()
        if ends != "close":
            saver.save(comm, tmp_path, 3, state_of(comm.rank, 3), background=True)
            saver.close()
        return left, names(tmp_path)

    with short_files():
        results = run_virtual(body, 3)
    after = ["step-00000001"] if ends == "close" else ["step-00000001", "step-00000003"]
    assert results == [(["step-00000001"], after)] * 3


def test_what_can_not_be_saved_at_all_is_an_error_of_the_call(tmp_path):
    (tmp_path / "taken").write_text("")

    def body(comm):
        saver = Saver()
        with pytest.raises(CheckpointError, match="taken, which is a file. Name a folder."):
            saver.save(comm, tmp_path / "taken", 1, {}, background=True)
        with pytest.raises(CheckpointError, match=r"on rank 1: state\['fn'\] must be"):
            saver.save(comm, tmp_path, 1, {"fn": len} if comm.rank == 1 else {}, background=True)
        saver.close()

    run_virtual(body, 2)


# --- jobs -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["allreduce", "hardsync", "gossip_pull", "diloco"])
def test_a_job_trains_and_resumes_to_the_same_bits_with_and_without(tmp_path, strategy):
    found = {}
    for background in ("true", "false"):
        folder = tmp_path / background
        settings = (f"strategy={strategy}", "checkpoint.every_steps=5", "checkpoint.keep=9", "epochs=2")
        settings = (*settings, f"checkpoint.background={background}")

        def body(comm, folder=folder, settings=settings):
            whole = tiny.run(comm, folder, *settings)
            return whole, sorted((folder / "run" / "checkpoints").iterdir())

        ends = run_virtual(body, 3, compute=Constant(0.1))
        checkpoints = ends[0][1]

        def rest(comm, folder=folder, settings=settings, path=checkpoints[1]):
            return tiny.run(comm, folder / "resumed", *settings, f"data.path={folder}/digits.h5", resume=path)

        tensors = [
            (path / file).read_bytes()
            for path in checkpoints for file in names(path) if file.endswith(".safetensors")
        ]  # fmt: skip
        resumed = run_virtual(rest, 3, compute=Constant(0.1))
        found[background] = [path.name for path in checkpoints], tensors, *map(_bits, ([e for e, _ in ends], resumed))
    assert found["true"] == found["false"]


def _bits(ends):
    return [(summary.sha256, summary.metrics, bits(tensors)) for summary, tensors in ends]


# --- scripts ----------------------------------------------------------------------------------------------------------
LOOP = """
import importlib, os, resource, signal, time
import torch
from torch import nn
import hpcdist as hd

hd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 1))
optimizer = hd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.01), model, strategy={strategy!r})

def steps(count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()

def write_as(body):
    draft = importlib.import_module("hpcdist.checkpoint.save")._Draft
    write = draft._write
    draft._write = lambda draft: (body(), write(draft))[1]
"""


@needs_mpirun
@pytest.mark.parametrize("size", [1, 2])
def test_a_script_goes_on_meanwhile_and_its_end_waits(tmp_path, size):
    text = """
write_as(lambda: time.sleep(0.5))
steps(2)
hd.save("there", optimizer=optimizer, background=True, note="first")
begun = time.perf_counter()
steps(2)
assert time.perf_counter() - begun < 0.4 and not os.path.exists("there/step-00000002")
found = hd.load("there", optimizer=optimizer)
assert (found["step"], found["note"]) == (2, "first")
steps(1)
hd.save("there", optimizer=optimizer, background=True, note="last")
steps(1)
"""
    job = run(tmp_path, LOOP.format(strategy="allreduce") + text, size, options=("--wdir", str(tmp_path)))
    assert job.returncode == 0, job.stderr
    assert names(tmp_path / "there") == ["step-00000002", "step-00000003"]
    assert loaded(tmp_path / "there" / "step-00000003")[0]["state"]["note"] == "last"


@needs_mpirun
@pytest.mark.parametrize("end", ["", "hd.finish(model)", "hd.save('there', optimizer=optimizer)"])
def test_a_rank_that_can_not_write_ends_the_script_by_name(tmp_path, end):
    text = """
hd.save("there", optimizer=optimizer)
if hd.rank() == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
steps(1)
hd.save("there", optimizer=optimizer, background=True)
steps(1)
"""
    job = run(tmp_path, LOOP.format(strategy="local_sgd") + text + end, 2, options=("--wdir", str(tmp_path)))
    assert job.returncode != 0
    said = "The checkpoint of step 1 must be saved by all ranks; got on rank 1: [Errno 27] File too large. Is there sp"
    assert said in job.stderr, job.stderr
    assert names(tmp_path / "there") == ["step-00000000"]


@needs_mpirun
def test_a_rank_that_is_killed_before_it_is_there_leaves_the_one_before(tmp_path):
    text = """
hd.save("there", optimizer=optimizer)
steps(3)
write_as(lambda: time.sleep(0.3) if hd.rank() == 0 else os.kill(os.getpid(), signal.SIGKILL))
hd.save("there", optimizer=optimizer, background=True)
steps(100_000)
"""
    job = run(tmp_path, LOOP.format(strategy="gossip_pull") + text, 2, options=("--wdir", str(tmp_path)))
    assert job.returncode != 0 and "signal 9" in job.stderr, job.stderr
    assert latest(tmp_path / "there").name == "step-00000000" and verify(tmp_path / "there" / "step-00000000")
    text = "assert hd.load('there', optimizer=optimizer)['step'] == 0\nhd.save('there', optimizer=optimizer, step=9)"
    job = run(tmp_path, LOOP.format(strategy="gossip_pull") + text, 2, options=("--wdir", str(tmp_path)))
    assert job.returncode == 0 and names(tmp_path / "there") == ["step-00000000", "step-00000009"], job.stderr
