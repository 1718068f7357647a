"""Job files: what they must define."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hpcdist.errors import ConfigError
from hpcdist.train import accuracy, load_job, squared_error

JOBS = Path(__file__).parents[2] / "jobs"


FILES = sorted(path for path in JOBS.glob("*.py") if "\njob = " in path.read_text())  # the others are studies


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_job_file_defines_a_job_whose_model_and_loss_fit(path):
    job = load_job(path)
    model = job.model()
    (weight, *_) = model.parameters()
    x = torch.rand(4, 10) if weight.dim() == 2 else torch.rand(4, 1, 8, 8)
    outputs = model(x)
    targets = torch.arange(4) if outputs.shape[1] > 1 else torch.rand(4, 1)
    assert job.loss(outputs, targets).dim() == 0
    for metric in job.metrics.values():
        assert metric.per_sample(outputs, targets).shape == (4,)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="job must be a Python file; got .*none.py, which does not exist"):
        load_job(tmp_path / "none.py")


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
