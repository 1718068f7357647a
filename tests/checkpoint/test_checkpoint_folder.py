"""The checkpoints that a folder keeps, the latest one, and what else may lie there."""

from __future__ import annotations

import shutil

import pytest
from states import loaded, names, save_alone

from hpcdist.checkpoint import folder as folders
from hpcdist.checkpoint import latest
from hpcdist.errors import CheckpointError


def newest(folder):
    return loaded(latest(folder))[0]


def test_the_last_checkpoints_are_kept(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "absent") is None
    for step in (0, 5, 7, 100_000_000, 999_999_999):
        assert latest(tmp_path) != save_alone(tmp_path, step, step, keep=2) == latest(tmp_path)
    assert names(tmp_path) == ["step-100000000", "step-999999999"]
    save_alone(tmp_path, 1_000_000_000, {}, keep=1)
    assert names(tmp_path) == ["step-1000000000"]
    for step in (1, 2, 3, 4):
        save_alone(tmp_path / "other", step, step, keep=2, best=[9, 1])
    assert names(tmp_path / "other") == ["step-00000001", "step-00000003", "step-00000004"], "and the best"


def test_a_step_saved_again_replaces_the_former(tmp_path):
    for value in (1, 2, 3):
        save_alone(tmp_path, 4, value)
        assert names(tmp_path) == ["step-00000004"] and newest(tmp_path) == value


def test_leftovers_of_crashes_are_removed_and_other_files_stay(tmp_path):
    left = ("step-00000001.tmp-ab", "step-00000001.deleted-cd", "step-00000001.replaced.deleted-ef", "mine", "step-1")
    for name in left:
        (tmp_path / name / "rank-0000.json").mkdir(parents=True)
    (tmp_path / "step-00000009").write_text("a file")
    save_alone(tmp_path, 2, {}, keep=1)
    assert names(tmp_path) == ["mine", "step-00000002", "step-00000009", "step-1"]
    assert latest(tmp_path).name == "step-00000002"


def test_a_replaced_checkpoint_counts_until_the_new_one_is_there(tmp_path):
    save_alone(tmp_path, 3, "former").rename(tmp_path / "step-00000003.replaced")
    assert newest(tmp_path) == "former"
    save_alone(tmp_path, 4, "next", keep=2)
    assert names(tmp_path) == ["step-00000003.replaced", "step-00000004"]
    (tmp_path / "step-00000004").rename(tmp_path / "step-00000004.replaced")
    save_alone(tmp_path, 4, "again", keep=2)
    assert names(tmp_path) == ["step-00000003.replaced", "step-00000004"]
    shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-00000004.replaced")
    save_alone(tmp_path, 4, "and again", keep=1)
    assert names(tmp_path) == ["step-00000004"] and newest(tmp_path) == "and again"


def test_a_run_that_went_back_is_not_mistaken_for_its_former_future(tmp_path):
    for step in (2, 4, 6):
        save_alone(tmp_path, step, "first")
    with pytest.warns(UserWarning, match=r"step-0000000[46] is of a later step than step-00000003, .* It is now .*ab"):
        save_alone(tmp_path, 3, "second", keep=1)
    assert latest(tmp_path).name == "step-00000003"
    abandoned = [name for name in names(tmp_path) if "abandoned" in name]
    assert [name[:13] for name in abandoned] == ["step-00000004", "step-00000006"]
    assert loaded(tmp_path / abandoned[1]) == ["first"]
    save_alone(tmp_path, 4, "second", keep=1)
    assert names(tmp_path) == ["step-00000004", *abandoned]


def test_a_checkpoint_that_cannot_be_removed_is_told(tmp_path):
    with pytest.warns(UserWarning, match="gone could not be removed: .* Delete it by hand"):
        folders.discard(tmp_path / "gone")


@pytest.mark.parametrize("below", ["", "inner"])
def test_a_file_is_no_folder(tmp_path, below):
    (tmp_path / "mine").write_text("")
    with pytest.raises(CheckpointError, match="by all ranks; got .*mine.*, which is a file. Name a folder."):
        save_alone(tmp_path / "mine" / below, 1, {})
