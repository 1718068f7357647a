"""Saving is collective: every rank its state; if one rank fails, all get the error, and nothing is harmed."""

from __future__ import annotations

import os
import re

import pytest
import torch
import xxhash
from states import bits, loaded, refused, short_files, state_of

from hpcdist import __version__
from hpcdist.checkpoint import latest, save, verify
from hpcdist.comm.virtual import run_virtual


@pytest.mark.sizes(1, 3)
def test_every_rank_gets_its_state_back(ranks, shared_tmp_path):
    folder = shared_tmp_path / "deep" / "checkpoints"

    def body(comm):
        meta = {"strategy": "allreduce", "sizes": (1, 2), "told_by": comm.rank}
        path = save(comm, str(folder), 1234, state_of(comm.rank, 1234), meta=meta)
        return str(path), bits(loaded(path))

    for path, everyones in ranks(body):
        assert path == str(folder / "step-00001234")
        assert everyones == bits([state_of(rank, 1234) for rank in range(ranks.size)])
    names = [f"rank-{rank:04d}.{ending}" for rank in range(ranks.size) for ending in ("json", "safetensors")]
    assert sorted(os.listdir(folder / "step-00001234")) == ["manifest.json", *names]
    manifest = verify(folder / "step-00001234")
    assert (manifest.step, manifest.ranks, manifest.version) == (1234, ranks.size, __version__)
    assert manifest.meta == {"strategy": "allreduce", "sizes": (1, 2), "told_by": 0} and sorted(manifest.files) == names
    for name, stamp in manifest.files.items():
        content = (folder / "step-00001234" / name).read_bytes()
        assert stamp == (len(content), f"xxh3_128:{xxhash.xxh3_128(content).hexdigest()}")


@pytest.mark.sizes(1, 2, 4)
def test_what_ranks_have_in_common_is_written_once_in_equal_parts(ranks, shared_tmp_path):
    """By name, type, shape and bytes: stages that several ranks hold, ranks that alone differ, NaNs and zeros."""
    count = 1000

    def of(rank):
        stage = {f"layer {i}": torch.full((count,), rank % 2 + i / 8) for i in range(8)}
        same = {"nan": torch.full((count,), torch.nan), "zeros": torch.zeros(count)}
        minus = {"zeros": -torch.zeros(count)} if rank == 3 else {}
        shaped = {"shape": torch.ones((10, 100) if rank == 1 else (count,))}
        typed = {"type": torch.zeros(count, dtype=torch.int32 if rank == 2 else torch.float32)}
        return stage | same | minus | shaped | typed | {"local": torch.full((count,), float(rank))}

    def body(comm):
        path = save(comm, shared_tmp_path, 1, of(comm.rank))
        comm.barrier()
        return bits(loaded(path)) == bits([of(rank) for rank in range(ranks.size)]), str(path)

    same, path = zip(*ranks(body))
    assert all(same)
    tensors = [os.path.getsize(f"{path[0]}/rank-{rank:04d}.safetensors") for rank in range(ranks.size)]
    different = {1: 13, 2: 2 * 8 + 3 + 2 * 2, 4: 2 * 8 + 4 + 1 + 2 + 2 + 2}[ranks.size]
    assert 0 < sum(tensors) - different * 4 * count < 3000 * ranks.size  # headers
    assert max(tensors) - min(tensors) < 4 * count + 3000


@pytest.mark.sizes(3)
def test_a_state_that_one_rank_cannot_save_is_an_error_on_all_and_harms_nothing(ranks, shared_tmp_path):
    bad = ranks.size - 1

    def body(comm):
        save(comm, shared_tmp_path, 1, state_of(comm.rank, 1))
        kind, message = refused(comm, shared_tmp_path, 2, {"fn": len} if comm.rank == bad else {"a": torch.ones(9)})
        listed = sorted(os.listdir(shared_tmp_path))
        comm.barrier()
        save(comm, shared_tmp_path, 2, state_of(comm.rank, 2))
        return kind, message, listed, bits(loaded(latest(shared_tmp_path))[comm.rank])

    for rank, (kind, message, listed, after) in enumerate(ranks(body)):
        assert kind == "CheckpointError" and listed == ["step-00000001"]
        assert f"step 2 must be saved by all ranks; got on rank {bad}: state['fn'] must be" in message
        assert after == bits(state_of(rank, 2))


@pytest.mark.sizes(4)
def test_each_reason_is_told_with_its_ranks(ranks, shared_tmp_path):
    def body(comm):
        same = refused(comm, shared_tmp_path, 2, {"fn": len})[1]
        return same, refused(comm, shared_tmp_path, 2, [{}, {"odd": len}, {"even": len}, {"odd": len}][comm.rank])[1]

    for same, other in ranks(body):
        assert "all ranks; got state['fn'] must be" in same and "on rank" not in same
        assert "on rank 1, 3: state['odd'] must be" in other and "on rank 2: state['even'] must be" in other


@pytest.mark.sizes(3)
def test_ranks_at_different_steps_are_refused(ranks, shared_tmp_path):
    for kind, message in ranks(lambda comm: refused(comm, shared_tmp_path, 5 + comm.rank, {})):
        assert kind == "MismatchError"
        assert message.startswith(
            f"step must be the same on all ranks; got {list(range(5, 5 + ranks.size))} on ranks 0 to"
        )
    assert latest(shared_tmp_path) is None


@pytest.mark.sizes(3)
def test_a_folder_that_ranks_do_not_share_is_refused(ranks, shared_tmp_path):
    def body(comm):
        own = shared_tmp_path / f"node{comm.rank % 2}"
        own.mkdir(exist_ok=True)
        return refused(comm, own, 1, state_of(comm.rank, 1))

    for kind, message in ranks(body):
        assert kind == "CheckpointError"
        assert re.search(r"rank-0001.\w+ must be visible to rank 0; .* a file system that all ranks share", message)
    assert not list(shared_tmp_path.glob("node*/*"))


@pytest.mark.sizes(3)
def test_bad_arguments_are_refused_on_all_ranks(ranks, shared_tmp_path):
    taken = shared_tmp_path / "taken"
    cases = [
        (shared_tmp_path, -1, {}, "step and keep must be at least 0 and 1; got -1 and 3"),
        (shared_tmp_path, 1, {"keep": 0}, "step and keep must be at least 0 and 1; got 1 and 0"),
        (shared_tmp_path, 1, {"meta": {"a": [torch.ones(1)]}}, r"meta\['a'\]\[0\] must not be a tensor or array; got"),
        (shared_tmp_path, 1, {"meta": {"a": len}}, r"meta\['a'\] must be None, a bool"),
        (taken, 1, {}, "which is a file. Name a folder."),
    ]
    taken.write_text("")
    results = ranks(lambda comm: [refused(comm, folder, step, {}, **options) for folder, step, options, _ in cases])
    for of_rank in results:
        for (kind, message), (*_, expected) in zip(of_rank, cases, strict=True):
            assert kind == "CheckpointError" and re.search(expected, message), message
    assert os.listdir(shared_tmp_path) == ["taken"]


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path):
    """The limit on the length of files stands for the disk: the write fails half-way, with an OSError."""
    big = {"weight": torch.ones(100_000)}

    def body(comm):
        save(comm, tmp_path, 1, state_of(comm.rank, 1))
        return refused(comm, tmp_path, 2, big if comm.rank == 1 else {})

    with short_files():
        results = run_virtual(body, 3)
    for kind, message in results:
        assert kind == "CheckpointError"
        assert "got on rank 1: [Errno 27] File too large. Is there space, and may you read and write there?" in message
    assert os.listdir(tmp_path) == ["step-00000001"]
