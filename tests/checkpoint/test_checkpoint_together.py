"""The ranks that go on verify a checkpoint together: every file once, and damage is one error on all."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from states import bits, names, state_of

from hpcdist.checkpoint import latest, read, read_manifest, save, verify_together
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import CheckpointError
from train import tiny


@pytest.mark.parametrize(("saved", "size"), [(3, 3), (3, 2), (5, 2), (2, 4), (1, 3), (3, 1)])
def test_each_file_is_checked_once_and_by_the_rank_that_reads_it(tmp_path, monkeypatch, saved, size):
    (path, *_) = run_virtual(lambda comm: save(comm, tmp_path, 1, state_of(comm.rank, 1)), saved)
    module = sys.modules["hpcdist.checkpoint.load"]  # in the package, `load` is the function
    check, rank_of, checked = module.check_file, {}, defaultdict(list)

    def noted(file, stamp):
        checked[rank_of[threading.get_ident()]].append(file.name)
        check(file, stamp)

    def body(comm):
        rank_of[threading.get_ident()] = comm.rank
        return verify_together(comm, path)

    monkeypatch.setattr(module, "check_file", noted)
    assert run_virtual(body, size) == [read_manifest(path)] * size
    every = sorted(name for found in checked.values() for name in found)
    assert every == [name for name in names(path) if name != "manifest.json"]
    if saved == size:
        assert checked == {r: [f"rank-{r:04d}.json", f"rank-{r:04d}.safetensors"] for r in range(size)}
    assert bits([read(path, rank) for rank in range(saved)]) == bits([state_of(rank, 1) for rank in range(saved)])


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [cut, Path.unlink])
@pytest.mark.parametrize("name", ["rank-{last:04d}.safetensors", "rank-{last:04d}.json", "manifest.json"])
def test_damage_is_one_error_on_all_ranks_that_names_the_file(ranks, shared_tmp_path, name, damage):
    name = name.format(last=ranks.size - 1)

    def body(comm):
        for step in (1, 2):
            path = save(comm, shared_tmp_path, step, state_of(comm.rank, step))
        if comm.rank == 0:
            damage(path / name)
        comm.barrier()
        with pytest.raises(CheckpointError) as caught:
            verify_together(comm, path)
        return str(caught.value)

    for text in ranks(body):
        assert text.count(name) == 1 and "step-00000002" in text
        assert text.endswith(f"An older checkpoint is at {shared_tmp_path / 'step-00000001'}.")


@pytest.mark.sizes(2, 4)
def test_damaged_files_of_several_ranks_are_all_named(ranks, shared_tmp_path):
    def body(comm):
        path = save(comm, shared_tmp_path, 1, state_of(comm.rank, 1))
        if comm.rank in (0, 1):
            cut(path / f"rank-{comm.rank:04d}.json")
        comm.barrier()
        with pytest.raises(
            CheckpointError, match=r"rank-0000.json must be \d+ bytes long; got \d+. .*rank-0001.json must be"
        ):
            verify_together(comm, path)
        return True

    assert all(ranks(body))


@pytest.mark.parametrize(("saved", "size"), [(2, 2), (2, 3), (3, 2)])
def test_a_run_does_not_resume_from_a_damaged_checkpoint(tmp_path, saved, size):
    def body(comm, resume=None):
        trainer = tiny.trainer(comm, tmp_path, "epochs=1", "checkpoint.every_steps=4", "checkpoint.keep=1")
        try:
            trainer.run(resume)
        finally:
            trainer.close()

    run_virtual(body, saved)
    path = latest(tmp_path / "run" / "checkpoints")
    cut(path / "rank-0001.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-0001.safetensors must be \d+ bytes long; got \d+\."):
        run_virtual(lambda comm: body(comm, path), size)
