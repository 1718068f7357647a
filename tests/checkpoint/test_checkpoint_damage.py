"""Damage of every kind is noticed, and the message says which file, what, and where an older checkpoint is."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import bits, names, state_of

from hpcdist.checkpoint import latest, load, load_all, read_manifest, save, verify
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import CheckpointError


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        run_virtual(lambda comm, step=step: save(comm, folder, step, state_of(comm.rank, step), meta={"a": "é"}), 2)
    return folder


@pytest.fixture
def folder(two_checkpoints, tmp_path):
    return shutil.copytree(two_checkpoints, tmp_path / "copy")


@settings(max_examples=150)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_noticed(two_checkpoints, data):
    path = two_checkpoints / "step-00000002"
    file = path / data.draw(st.sampled_from(names(path)))
    whole = file.read_bytes()
    position, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    try:
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
        try:
            states = load_all(path)
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


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("rank-0001.safetensors", cut, r"rank-0001.safetensors must be \d+ bytes long; got \d+\."),
        ("rank-0001.safetensors", empty, r"rank-0001.safetensors must be \d+ bytes long; got 0\."),
        ("rank-0001.safetensors", lengthen, r"rank-0001.safetensors must be \d+ bytes long; got \d+\."),
        ("rank-0001.safetensors", Path.unlink, r"rank-0001.safetensors must be readable; got No such file or dir"),
        ("rank-0001.json", cut, r"rank-0001.json must be \d+ bytes long"),
        ("rank-0001.json", Path.unlink, r"rank-0001.json must be readable; got No such file"),
        ("rank-0001.json", into_folder, r"rank-0001.json must be (\d+ bytes long|readable)"),
        ("manifest.json", cut, r"manifest.json must be JSON; got damaged content"),
        ("manifest.json", empty, r"manifest.json must be JSON; got damaged content"),
        ("manifest.json", lengthen, r"manifest.json must be JSON; got damaged content"),
        ("manifest.json", Path.unlink, r"step-00000002 must be a checkpoint, a folder with a manifest.json; got a f"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_with_what_is_wrong_and_an_older_checkpoint(folder, name, damage, message):
    path = folder / "step-00000002"
    damage(path / name)
    for action in (verify, load_all, lambda path: load(path, 1)):
        with pytest.raises(CheckpointError, match=f"{message}.* An older checkpoint is at .*step-00000001.$"):
            action(path)
    if "rank-0001" in name:
        assert bits(load(path, 0)[0]) == bits(state_of(0, 2)), "a rank reads its own files alone"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "must be JSON; got damaged content"),
        (b"[" * 100_000, "must be JSON; got damaged content"),
        (b"[]", "must be the manifest of an hpcdist checkpoint; got other JSON"),
        (b'{"format": "other"}', "must be the manifest of an hpcdist checkpoint; got other JSON"),
        (
            b'{"format": "hpcdist checkpoint", "version": 1, "content": {"hpcdist": "0.1.0"}}',
            "must be of version 2; got 1. Read it with the version of hpcdist that wrote it, 0.1.0;",
        ),
        (b'{"format": "hpcdist checkpoint", "version": 2}', "must match its checksum; got damaged content"),
    ],
)
def test_a_manifest_of_something_else_is_refused(folder, content, message):
    file = folder / "step-00000002" / "manifest.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"manifest.json {message}"):
        read_manifest(file.parent)
    with pytest.raises(CheckpointError, match=f"manifest.json {message}.* An older checkpoint is at"):
        load(file.parent, 0)


def test_an_edited_manifest_is_refused(folder):
    file = folder / "step-00000002" / "manifest.json"
    manifest = json.loads(file.read_text())
    for change in ({"step": 3}, {"ranks": 1}, {"meta": {}}, {"files": {}}):
        file.write_text(json.dumps(manifest | {"content": manifest["content"] | change}))
        with pytest.raises(CheckpointError, match="manifest.json must match its checksum; got damaged content"):
            verify(file.parent)


def test_a_place_that_is_no_checkpoint_is_refused(folder):
    for place, what in ((folder / "absent", "nothing there"), (folder / "step-00000001" / "manifest.json", "a file")):
        with pytest.raises(CheckpointError, match=f"must be a checkpoint, a folder with a manifest.json; got {what}"):
            load(place, 0)
    with pytest.raises(
        CheckpointError, match="a folder without one. It holds checkpoints: give one of them, as latest"
    ):
        load(folder, 0)


def test_the_oldest_checkpoint_has_no_older_one(folder):
    cut(folder / "step-00000001" / "rank-0000.json")
    with pytest.raises(CheckpointError, match=r"rank-0000.json must be \d+ bytes long; got \d+.$"):
        load(folder / "step-00000001", 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_did_not_save_is_refused(folder, rank):
    with pytest.raises(CheckpointError, match=f"rank must be one of the 2 that saved .*; got {rank}. .* with load_all"):
        load(folder / "step-00000002", rank)


def test_a_damaged_latest_checkpoint_is_passed_over_only_when_told(folder):
    path = folder / "step-00000002"
    data = path / "rank-0001.safetensors"
    data.write_bytes(bytes(data.stat().st_size))
    assert latest(folder) == path
    with pytest.raises(
        CheckpointError, match=r"rank-0001.safetensors must have sha256 \w{12}...; got .* An older checkpoint"
    ):
        load(path, 1)
    with pytest.warns(
        UserWarning, match="passed over in favour of step-00000001: .*rank-0001.safetensors must have sha256"
    ):
        assert latest(folder, fallback=True) == folder / "step-00000001"
    (folder / "step-00000001" / "rank-0000.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"must hold a checkpoint that is whole; got 2 damaged. .*step-00000002.*step-00"
    ):
        latest(folder, fallback=True)
    assert latest(folder / "absent", fallback=True) is None


def test_a_whole_latest_checkpoint_is_taken_without_a_word(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(folder, fallback=True) == latest(folder) == folder / "step-00000002"
