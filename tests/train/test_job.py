"""Job files: what they must define."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from pathlib import Path

import pytest
import torch

from harness.cases import each
from hpcdist.config.files import imported_from_same_folder, load_function, neighbours
from hpcdist.config.job import JobConfig
from hpcdist.errors import ConfigError
from hpcdist.train import accuracy, load_job, squared_error
from hpcdist.train.job import create_data, prepare_data
from train import tiny


@each(
    "case",
    [
        ("none.py", None, "job must be a Python file; got .*none.py, which does not exist"),
        ("ends.py", "import sys\nsys.exit(0)\n", "ends.py must not end the process while it is imported; got .*0"),
        ("ends.py", "import sys\nsys.exit()\n", "ends.py must not end the process while it is imported; got .*None"),
        ("ends.py", "import sys\nsys.exit('no data')\n", "ends.py must not end the process .*; got .*'no data'"),
        ("job", "job = 3\n", r"a Python file must have a name that ends in .py; got .*job. Rename it"),
        (
            "train.py",
            "import hpcdist as hd\nhd.init()\n1 / 0",
            r"got .*train.py, a script with its own training loop\. Run",
        ),
        ("empty.py", "job = 3\n", r"job file must define `job = hpcdist.train.Job\(...\)`; got .*empty.py"),
    ],
)
def test_a_file_that_defines_no_job_is_refused(tmp_path, case):
    name, text, message = case
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_job(tmp_path / name)


@each("given", ["mydta.h5", "tinny.h5", "tiny2.h5", "another.h5"])
def test_a_missing_data_file_is_refused_not_made(tmp_path, given):
    job = dataclasses.replace(tiny.job, defaults={"data": {"path": "data/tiny.h5"}})
    (tmp_path / "mydata.h5").touch()
    message = (
        r"data.path must be a file that exists, or data/tiny.h5, which the job creates; got .*, which does not exist"
    )
    for of_job, rule in (
        (job, message),
        (dataclasses.replace(job, data={}), "data.path must be a file that exists; got"),
    ):
        with pytest.raises(ConfigError, match=rule) as refused:
            prepare_data(of_job, JobConfig(data={"path": str(tmp_path / given)}))
        assert not (tmp_path / given).exists()
        if given == "mydta.h5":
            assert "Did you mean 'mydata'?" in str(refused.value)


def test_the_data_file_of_the_job_is_made_in_any_folder(tmp_path):
    made = dataclasses.replace(tiny.job, data=Path.touch, defaults={"data": {"path": "data/tiny.h5"}})
    prepare_data(made, JobConfig(data={"path": str(tmp_path / "new" / "tiny.h5")}))
    assert (tmp_path / "new" / "tiny.h5").exists()


@each(
    "case",
    [
        (
            lambda: None,
            r"data of the job must be a function of the path of the file to write; got another .too many",
        ),
        (
            "o/a.h5",
            r"data of the job must be a .*; got another .'o/a.h5' is not a callable.* defaults={'data': {'path'",
        ),
        (lambda path: (1, 2), r"data of the job must write the file at its argument, .*; got none at .*new.h5"),
    ],
)
def test_a_function_that_writes_no_data_is_refused(tmp_path, case):
    function, message = case
    with pytest.raises(ConfigError, match=message):
        create_data(dataclasses.replace(tiny.job, data=function), tmp_path / "new.h5")


def test_measures():
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(outputs, torch.tensor([1, 1, 1])).tolist() == [1, 0, 1]
    values = squared_error(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[1.0, 4.0], [3.0, 4.0]]))
    assert values.tolist() == [2.0, 12.5] and math.sqrt(values.mean()) > 2


# --- neighbours -------------------------------------------------------------------------------------------------------
WITH_A_NEIGHBOUR = """
from helpers import WORD
from hpcdist.train import Job

def model():
    import later
    return WORD, later.WORD

job = Job(model=model, loss=None, metrics={}, data=None)
"""


def _folder_of_a_job(folder: Path, word: str) -> Path:
    folder.mkdir()
    (folder / "a.py").write_text(WITH_A_NEIGHBOUR)
    (folder / "helpers.py").write_text(f"WORD = {word!r}\n")
    (folder / "later.py").write_text(f"WORD = 'later ' + {word!r}\n")
    return folder / "a.py"


def test_a_job_imports_its_neighbour_and_leaves_the_path_as_it_was(tmp_path):
    path, other = _folder_of_a_job(tmp_path / "one", "first"), _folder_of_a_job(tmp_path / "two", "second")
    before = list(sys.path)
    for its_path, word in ((path, "first"), (other, "second"), (path, "first")):
        job = load_job(its_path)
        assert sys.path == before
        with neighbours(its_path):  # as in a run
            assert job.model() == (word, f"later {word}"), "not that of another folder"
            assert imported_from_same_folder(its_path) == [its_path.parent / "helpers.py", its_path.parent / "later.py"]
        assert sys.path == before
    alone = _folder_of_a_job(tmp_path / "three", "third")
    (alone.parent / "helpers.py").unlink()
    with pytest.raises(ModuleNotFoundError, match="helpers"):
        load_job(alone)
    assert sys.path == before


def test_a_folder_is_on_the_path_once_until_the_last_of_its_ranks_has_ended(tmp_path, monkeypatch):
    path = _folder_of_a_job(tmp_path / "one", "first")
    monkeypatch.syspath_prepend(str(path.parent))  # the user's own entry
    before = sys.path.copy()
    first, second = neighbours(path), neighbours(path)
    first.__enter__()
    second.__enter__()  # as of another virtual rank
    assert sys.path == [str(path.parent), *before]
    first.__exit__(None, None, None)
    assert sys.path == [str(path.parent), *before] and load_job(path).model() == ("first", "later first")
    second.__exit__(None, None, None)
    assert sys.path == before


def test_a_package_beside_a_job_is_a_neighbour(tmp_path):
    (tmp_path / "tools_of_mine").mkdir()
    (tmp_path / "tools_of_mine" / "__init__.py").touch()
    (tmp_path / "tools_of_mine" / "loss.py").write_text("loss = 3\n")
    (tmp_path / "a.py").write_text(
        "from tools_of_mine.loss import loss\nfrom hpcdist.train import Job\njob = Job(None, loss, {}, None)\n"
    )
    assert load_job(tmp_path / "a.py").loss == 3
    assert {file.name for file in imported_from_same_folder(tmp_path / "a.py")} == {"__init__.py", "loss.py"}


def test_a_module_without_a_file_is_no_neighbour(tmp_path, monkeypatch):
    """torch.distributed.nn makes one, whose __file__ is a name in no folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    made = types.ModuleType("made_by_torch")
    made.__file__ = "<made_by_torch>.py"
    monkeypatch.setitem(sys.modules, "made_by_torch", made)
    assert imported_from_same_folder(tmp_path / "a.py") == []


@each(
    "case",
    [
        ("rate", "schedule.lr_lambda must be path/to/file.py:function to be loaded from a file; got 'rate'."),
        (
            "none.py:rate",
            "schedule.lr_lambda must be in a file that exists; got 'none.py:rate', and there is no none",
        ),
        (
            "rates.py:rat",
            "schedule.lr_lambda must be defined in rates.py, which has rate; got 'rat'. Did you mean",
        ),
        ("rates.py:number", "schedule.lr_lambda must be a function of .*rates.py; got 'number', which is none."),
    ],
)
def test_a_function_that_is_not_there(tmp_path, monkeypatch, case):
    reference, message = case
    monkeypatch.chdir(tmp_path)
    Path("rates.py").write_text("number = 3\ndef rate(step): return step\n")
    with pytest.raises(ConfigError, match=message):
        load_function(reference, "schedule.lr_lambda")


def test_a_file_with_a_function_is_run_again_where_it_has_changed(tmp_path):
    path = tmp_path / "rates.py"
    path.write_text("def rate(step): return step\n")
    first = load_function(f"{path}:rate", "it")
    assert first(4) == 4 and load_function(f"{path}:rate", "it") is first
    path.write_text("def rate(step): return 2 * step\n")
    assert load_function(f"{path}:rate", "it")(4) == 8
