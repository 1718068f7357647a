"""Damage of every kind is noticed: the message says which file, what, and where an older checkpoint is."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import warnings
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import bits, loaded, names, state_of

from harness.cases import each
from hpcdist.checkpoint import latest, read_manifest, save, verify
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import CheckpointError
from train import tiny


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        run_virtual(lambda comm, step=step: save(comm, folder, step, state_of(comm.rank, step), meta={"a": "é"}), 2)
    return folder


@pytest.fixture
def folder(two_checkpoints, tmp_path):
    return shutil.copytree(two_checkpoints, tmp_path / "copy")


@settings(max_examples=80)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_noticed(two_checkpoints, data):
    path = two_checkpoints / "step-00000002"
    file = path / data.draw(st.sampled_from(names(path)))
    whole = file.read_bytes()
    position, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    try:
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
        try:
            states = loaded(path)
        except CheckpointError as error:
            assert file.name in str(error) and str(error).endswith("An older checkpoint is at " + str(path)[:-1] + "1.")
        else:  # in the manifest's white space or in the case of an escape
            assert file.name == "manifest.json" and bits(states) == bits([state_of(rank, 2) for rank in (0, 1)])
    finally:
        file.write_bytes(whole)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def empty(file):
    file.write_bytes(b"")


def lengthen(file):
    file.write_bytes(file.read_bytes() + b"\0")


def into_folder(file):
    file.unlink()
    file.mkdir()


DAMAGES = [
    ("rank-0001.safetensors", cut, r"must be \d+ bytes long; got \d+\."),
    ("rank-0001.safetensors", empty, r"must be \d+ bytes long; got 0\."),
    ("rank-0001.safetensors", lengthen, r"must be \d+ bytes long; got \d+\."),
    ("rank-0001.safetensors", Path.unlink, "must be readable; got No such file or directory"),
    ("rank-0001.json", cut, r"must be \d+ bytes long"),
    ("rank-0001.json", Path.unlink, "must be readable; got No such file"),
    ("rank-0001.json", into_folder, r"must be (\d+ bytes long|readable)"),
    ("manifest.json", cut, "must be JSON; got damaged content"),
    ("manifest.json", empty, "must be JSON; got damaged content"),
    ("manifest.json", lengthen, "must be JSON; got damaged content"),
    ("manifest.json", Path.unlink, ".*step-00000002 must be a checkpoint, a folder with a manifest.json; got a folder"),
]


@each("damage", DAMAGES)
def test_a_damaged_file_is_named_with_what_is_wrong_and_an_older_checkpoint(two_checkpoints, tmp_path_factory, damage):
    name, change, message = damage
    folder = shutil.copytree(two_checkpoints, tmp_path_factory.mktemp("damaged") / "copy")
    path = folder / "step-00000002"
    change(path / name)
    where = "" if message.startswith(".*") else f"{name} "
    with pytest.raises(CheckpointError, match=f"{where}{message}.* An older checkpoint is at .*step-00000001.$"):
        verify(path)


@each(
    "case",
    [
        (b"\xff\xfe\x00", "must be JSON; got damaged content"),
        (b"[" * 100_000, "must be JSON; got damaged content"),
        (b"[]", "must be the manifest of an hpcdist checkpoint; got other JSON"),
        (b'{"format": "other"}', "must be the manifest of an hpcdist checkpoint; got other JSON"),
        (
            b'{"format": "hpcdist checkpoint", "version": 1, "content": {"hpcdist": "0.1.0"}}',
            "must be of version 2 to 4; got 1. Read it with the version of hpcdist that wrote it, 0.1.0;",
        ),
        (b'{"format": "hpcdist checkpoint", "version": 2}', "must match its checksum; got damaged content"),
    ],
)
def test_a_manifest_of_something_else_is_refused(folder, case):
    content, message = case
    file = folder / "step-00000002" / "manifest.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"manifest.json {message}"):
        read_manifest(file.parent)


def test_an_edited_manifest_is_refused(folder):
    file = folder / "step-00000002" / "manifest.json"
    manifest = json.loads(file.read_text())
    for change in ({"step": 3}, {"ranks": 1}, {"meta": {}}, {"files": {}}):
        file.write_text(json.dumps(manifest | {"content": manifest["content"] | change}))
        with pytest.raises(CheckpointError, match="manifest.json must match its checksum; got damaged content"):
            verify(file.parent)


def test_a_place_that_is_no_checkpoint_is_refused(folder):
    for place, what in (
        (folder / "absent", "nothing there"),
        (folder / "step-00000001" / "manifest.json", "a file"),
        (folder, "a folder without one. It holds checkpoints: pass one of them, as from latest"),
    ):
        with pytest.raises(CheckpointError, match=f"must be a checkpoint, a folder with a manifest.json; got {what}"):
            verify(place)


def test_a_damaged_latest_checkpoint_is_passed_over_only_when_told(folder):
    path = folder / "step-00000002"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(folder, fallback=True) == latest(folder) == path
    data = path / "rank-0001.safetensors"
    data.write_bytes(bytes(data.stat().st_size))
    assert latest(folder) == path
    with pytest.raises(CheckpointError, match=r"rank-0001.safetensors must have xxh3_128:\w{15}...; got .* An older"):
        verify(path)
    message = "skipped in favour of step-00000001: .*rank-0001.safetensors must have xxh3_128:"
    with pytest.warns(UserWarning, match=message):
        assert latest(folder, fallback=True) == folder / "step-00000001"
    cut(folder / "step-00000001" / "rank-0000.json")
    with pytest.raises(CheckpointError, match=r"rank-0000.json must be \d+ bytes long; got \d+.$"):
        verify(folder / "step-00000001")  # and no older one is named
    message = r"must hold a checkpoint that is whole; got 2 damaged. .*step-00000002.*step-00"
    with pytest.raises(CheckpointError, match=message):
        latest(folder, fallback=True)
    assert latest(folder / "absent", fallback=True) is None


# --- by all ranks together --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("saved", "size"), [(3, 3), (5, 2), (2, 3)])
def test_each_file_is_checked_once_and_by_the_rank_that_reads_it(tmp_path, monkeypatch, saved, size):
    (path, *_) = run_virtual(lambda comm: save(comm, tmp_path, 1, state_of(comm.rank, 1)), saved)
    module = sys.modules["hpcdist.checkpoint.load"]
    check, rank_of, checked = module.check_file, {}, defaultdict(list)

    def noted(file, stamp):
        checked[rank_of[threading.get_ident()]].append(file.name)
        check(file, stamp)

    def body(comm):
        rank_of[threading.get_ident()] = comm.rank
        return verify(path, comm)

    monkeypatch.setattr(module, "check_file", noted)
    assert run_virtual(body, size) == [read_manifest(path)] * size
    every = sorted(name for found in checked.values() for name in found)
    assert every == [name for name in names(path) if name != "manifest.json"]
    if saved == size:
        assert checked == {r: [f"rank-{r:04d}.json", f"rank-{r:04d}.safetensors"] for r in range(size)}


@pytest.mark.sizes(3)
def test_damage_is_one_error_on_all_ranks_that_names_the_files(ranks, shared_tmp_path):
    last = ranks.size - 1
    damages = [
        (damage, file) for damage in (cut, Path.unlink) for file in (f"{last:04d}.safetensors", f"{last:04d}.json")
    ]

    def body(comm):
        messages = []
        for number, damage in enumerate([*damages, "manifest", "all"]):
            folder = shared_tmp_path / str(number)
            for step in (1, 2):
                path = save(comm, folder, step, state_of(comm.rank, step))
            if damage == "all":
                cut(path / f"rank-{comm.rank:04d}.json")
            elif comm.rank == 0:
                cut(path / "manifest.json") if damage == "manifest" else damage[0](path / f"rank-{damage[1]}")
            comm.barrier()
            with pytest.raises(CheckpointError) as caught:
                verify(path, comm)
            messages.append(str(caught.value))
        return messages

    for messages in ranks(body):
        for number, text in enumerate(messages):
            assert text.endswith(f"An older checkpoint is at {shared_tmp_path / str(number) / 'step-00000001'}.")
        assert all(text.count(f"rank-{file}") == 1 for (_, file), text in zip(damages, messages))
        assert messages[-2].count("manifest.json must be") == 1
        assert all(f"rank-{rank:04d}.json must be" in messages[-1] for rank in range(ranks.size))


def test_a_run_does_not_resume_from_a_damaged_checkpoint(tmp_path):
    def body(comm, resume=None):
        tiny.run(comm, tmp_path, "epochs=1", "checkpoint.every_steps=4", "checkpoint.keep=1", resume=resume)

    run_virtual(body, 3)
    path = latest(tmp_path / "run" / "checkpoints")
    cut(path / "rank-0001.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-0001.safetensors must be \d+ bytes long; got \d+\."):
        run_virtual(lambda comm: body(comm, path), 2)
