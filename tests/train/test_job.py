"""Job files: what they must define."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

from harness.cases import each
from hpcdist.config.files import imported_beside, load_function, neighbours
from hpcdist.errors import ConfigError
from hpcdist.train import accuracy, load_job, squared_error
from hpcdist.train.job import make_data
from train import tiny

JOBS = Path(__file__).parents[2] / "jobs"


FILES = sorted(path for path in JOBS.glob("*.py") if "\njob = " in path.read_text())  # the others are studies


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_job_file_defines_a_job_whose_model_and_loss_fit(path):
    job = load_job(path)
    sides = {"digits": 8, "fashion": 28, "mnist": 28}  # of the job's images; the other reads text
    if path.stem in sides:
        inputs, targets = torch.rand(4, 1, sides[path.stem], sides[path.stem]), torch.arange(4)
    else:
        inputs, targets = torch.randint(256, (2, 4, 64), dtype=torch.uint8)
    outputs = job.model()(inputs)
    assert job.loss(outputs, targets).dim() == 0
    for metric in job.metrics.values():
        assert metric.per_sample(outputs, targets).shape == (4,)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="job must be a Python file; got .*none.py, which does not exist"):
        load_job(tmp_path / "none.py")


@each("code", [0, None, "no data today"])
def test_a_file_that_ends_the_process_is_refused(tmp_path, code):
    path = tmp_path / "ends.py"
    path.write_text(f"import sys\nsys.exit({code!r})\n")
    with pytest.raises(ConfigError, match=rf"ends.py must not end the process while it is imported; got .*{code!r}"):
        load_job(path)


def test_a_file_without_suffix_is_refused(tmp_path):
    (tmp_path / "job").write_text("job = 3\n")
    with pytest.raises(ConfigError, match=r"a Python file must have a name that ends in .py; got .*job. Rename it"):
        load_job(tmp_path / "job")


@each("given", ["mydta.h5", "tinny.h5"])
def test_a_misspelt_data_file_is_refused_not_made(tmp_path, given):
    job = dataclasses.replace(tiny.job, defaults={"data": {"path": "data/tiny.h5"}})
    (tmp_path / "mydata.h5").touch()
    with pytest.raises(ConfigError, match=r"data.path must be the name of a file .*Did you mean '(mydata|tiny)'"):
        make_data(job, tmp_path / given)
    assert not (tmp_path / given).exists()
    if given == "mydta.h5":  # a job that has no file of its own
        with pytest.raises(ConfigError, match="Did you mean 'mydata'"):
            make_data(tiny.job, tmp_path / given)


@each("given", ["tiny.h5", "other.h5", "tiny10.h5"])
def test_a_data_file_of_the_jobs_or_a_new_name_is_made(tmp_path, given):
    made = dataclasses.replace(tiny.job, data=Path.touch, defaults={"data": {"path": "data/tiny.h5"}})
    make_data(made, tmp_path / "new" / given)
    assert (tmp_path / "new" / given).exists()


def test_a_file_without_a_job_is_refused(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("job = 3\n")
    with pytest.raises(ConfigError, match=r"job file must define `job = hpcdist.train.Job\(...\)`; got .*empty.py"):
        load_job(path)


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
            assert imported_beside(its_path) == [its_path.parent / "helpers.py", its_path.parent / "later.py"]
        assert sys.path == before


def test_without_its_neighbour_a_job_is_not_loaded(tmp_path):
    path = _folder_of_a_job(tmp_path / "one", "first")
    (path.parent / "helpers.py").unlink()
    before = list(sys.path)
    with pytest.raises(ModuleNotFoundError, match="helpers"):
        load_job(path)
    assert sys.path == before


def test_a_package_beside_a_job_is_a_neighbour(tmp_path):
    (tmp_path / "tools_of_mine").mkdir()
    (tmp_path / "tools_of_mine" / "__init__.py").touch()
    (tmp_path / "tools_of_mine" / "loss.py").write_text("loss = 3\n")
    (tmp_path / "a.py").write_text(
        "from tools_of_mine.loss import loss\nfrom hpcdist.train import Job\njob = Job(None, loss, {}, None)\n"
    )
    assert load_job(tmp_path / "a.py").loss == 3
    assert {file.name for file in imported_beside(tmp_path / "a.py")} == {"__init__.py", "loss.py"}


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("rate", "schedule.lr_lambda must be a function as path/to/file.py:name, or a name in the job's file; got 'ra"),
        ("none.py:rate", "schedule.lr_lambda must be a function as .*; got 'none.py:rate'"),
        ("rates.py:rat", "schedule.lr_lambda must be a function of .*rates.py; got 'rat', which is none. Did you mean"),
        ("rates.py:number", "schedule.lr_lambda must be a function of .*rates.py; got 'number', which is none."),
    ],
)
def test_a_function_that_is_not_there(tmp_path, monkeypatch, reference, message):
    monkeypatch.chdir(tmp_path)
    Path("rates.py").write_text("number = 3\ndef rate(step): return step\n")
    assert load_function("rates.py:rate", "it")(4) == 4
    with pytest.raises(ConfigError, match=message):
        load_function(reference, "schedule.lr_lambda")


def test_a_file_with_a_function_is_run_again_where_it_has_changed(tmp_path):
    path = tmp_path / "rates.py"
    path.write_text("def rate(step): return step\n")
    first = load_function(f"{path}:rate", "it")
    assert load_function(f"{path}:rate", "it") is first
    path.write_text("def rate(step): return 2 * step\n")
    assert load_function(f"{path}:rate", "it")(4) == 8
