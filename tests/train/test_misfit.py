"""Data that do not fit a job's model or its loss: one sentence, which names shapes, dtypes and values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.cases import each
from harness.launch import launch
from hpcdist.comm.virtual import run_virtual
from hpcdist.data import Split, create
from hpcdist.errors import DataError
from hpcdist.train.runs import train

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpcdist.train import Job, Metric, accuracy

x, y = torch.ones(16, 20), torch.arange(16) % 5
model, loss = lambda: nn.Sequential(nn.Linear(20, 5)), nn.functional.cross_entropy
metrics = {{"accuracy": Metric(accuracy)}}
{change}
data = TensorDataset(x, y)
other = TensorDataset(x, y % 5) if y.dim() == 1 else data
job = Job(
    model=model, loss=loss, metrics=metrics, data={{"train": {train}, "test": data}},
    defaults={{"epochs": 1, "batch_size": 8}},
)
"""
OWN = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(20, 5)

    def forward(self, x):
        {body}

model = Own
"""
GOT_FEATURES = (
    r"^data\['train'\] must fit the model and its loss; got x of shape \(8, 10\), float32, y of shape \(8,\), int64 "
    r"from 0 to 4, and layer 0, Linear\(in_features=20, out_features=5, bias=True\), refuses them: mat1 and mat2 "
    r"shapes cannot be multiplied \(8x10 and 20x5\)\. Change the data, or the model\.\n"
)
GOT_LABELS = (
    r"^data\['train'\] must fit the model and its loss; got y of shape \(16,\), int64 from 3 to 7, outputs of shape "
    r"\(8, 5\), float32, and the loss refuses them: Target . is out of bounds\. Change the data, or the model or the "
    r"loss; cross entropy takes y of shape \(samples\), int64, from 0 to 4\.\n"
)
EMBEDDING = "x = torch.arange(16)[:, None] % 9; model = lambda: nn.Sequential(nn.Embedding(7, 5), nn.Flatten())"
TOKENS = r"int64 from 0 to .*layer 0, Embedding\(7, 5\), refuses them: index out .* ids are integers from 0 to 6\.\n"
MISFITS = {
    "features": ("x = x[:, :10]", GOT_FEATURES),
    "dtype of x": ("x = x.double()", r"x of shape \(8, 20\), float64, .*layer 0, .*Double and Float\. Change the data"),
    "labels outside": ("y = y + 3", GOT_LABELS),
    "dtype of labels": ("y = y.float()", r"expected target dtype to be Long or Byte, but got Float\. .*y of .* int64,"),
    "shape of labels": ("y = y[:, None]", r"y of shape \(8, 1\), .*0D or 1D target tensor expect.*shape \(samples\), "),
    "number of targets": ("loss = nn.MSELoss(); y = torch.ones(16, 4)", r"loss refuses them: The .* or the loss\.\n"),
    "tokens": (EMBEDDING, TOKENS),
    "a view": (OWN.format(body="return x.view(-1, 21)"), r"the model, Own, refuses .*\(.*job\.py:\d+\)\."),
    "a metric": (
        "metrics = {'own': Metric(lambda outputs, y: outputs[:, 7])}",
        r"^data\['test'\] must fit .*the metric own refuses them: index 7 is out of bounds.*job\.py:\d+\)",
    ),
}  # fmt: skip
MISTAKES = {
    "an error of the model's own": ("raise RuntimeError('unhappy')", RuntimeError, "^unhappy\n"),
    "a wrong call": ("return self.inner(x, 3)", TypeError, "takes 2 positional arguments"),
}


def _job(folder: Path, change: str, train: str = "data") -> Path:
    (path := folder / "job.py").write_text(JOB.format(change=change, train=train))
    return path


def _train(job: Path, ranks: int = 1, *settings: str) -> None:
    run_virtual(lambda comm: train(comm, job, overrides=settings, output=job.parent / "run"), ranks)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named(tmp_path, name):
    change, message = MISFITS[name]
    with pytest.raises(DataError, match=message):
        _train(_job(tmp_path, change))


def test_a_file_and_the_data_of_an_evaluation_are_named(tmp_path):
    job = _job(tmp_path, "y = y + 3", train="other")
    with pytest.raises(DataError, match=r"^data\['test'\] must fit .*Target . is out of bounds"):
        _train(job)
    x, y = np.ones((16, 10), np.float32), np.arange(16) % 5
    create(
        tmp_path / "own.h5",
        {"train": Split.of(x, y), "test": Split.of(x, y)},
        task="classification",
        classes=[*"abcde"],
    )
    job = _job(tmp_path, "")
    (tmp_path / "run").rename(tmp_path / "before")
    with pytest.raises(DataError, match=r"^data of .*own\.h5 \(train\) must fit .*\(8, 10\)"):
        _train(job, 1, f"data.path={tmp_path}/own.h5")


def test_labels_of_the_whole_data_set_are_compared_with_the_first_outputs(tmp_path):
    """On a GPU, a label outside the outputs' range would end in a device-side assert in its batch."""
    late = "y[9], y[12] = 7, -3"  # the order of batches is another one; the first may have neither
    with pytest.raises(DataError, match=r"^data\['train'\] must fit .*from -3 to 7,.* loss refuses them: Target "):
        _train(_job(tmp_path, late))
    assert not (tmp_path / "run" / "records-rank0.jsonl").exists()  # before the first step
    x, y = np.ones((16, 20), np.float32), np.arange(16) % 6
    splits = {"train": Split.of(x, y % 5), "test": Split.of(x, y)}
    create(tmp_path / "six.h5", splits, task="classification", classes=[*"abcdef"])
    (tmp_path / "run").rename(tmp_path / "before")
    with pytest.raises(DataError, match=r"^data of .*six\.h5 \(test\) must fit .* from 0 to 5,.* Target 5 is out of"):
        _train(_job(tmp_path, ""), 1, f"data.path={tmp_path}/six.h5")


@pytest.mark.parametrize(
    "change",
    [
        "y[9] = -100",  # ignored
        "loss = lambda outputs, y: (outputs.sum(1) - y).square().mean(); y = y * 9",
        "loss = lambda outputs, y: nn.functional.cross_entropy(outputs, y % 5); y = y + 5",
    ],
)
def test_labels_that_the_loss_takes_are_not_refused(tmp_path, change):
    _train(_job(tmp_path, change))


@each("stages", [1, 2])
def test_a_model_in_stages_names_its_data_too(tmp_path, stages):
    layers = "model = lambda: nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 5))\n"
    for change, message in (
        ("x = x[:, :10]", r"x of shape \(8, 10\).*mat1"),
        ("y = y + 3", "Target . is out of bounds"),
    ):
        folder = tmp_path / f"{change[0]}{stages}"
        folder.mkdir()
        with pytest.raises(DataError, match=rf"^data\['train'\] must fit the model and its loss; got .*{message}"):
            _train(_job(folder, layers + change), 2, *([] if stages == 1 else ["parallel.stages=2"]))


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_the_model_keep_their_traceback(tmp_path, name):
    body, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        _train(_job(tmp_path, OWN.format(body=body)))


def test_real_ranks_say_it_once(tmp_path):
    done = launch(2, ["-m", "hpcdist", "train", _job(tmp_path, "y = y + 3"), "--output", tmp_path / "run"])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("hpcdist: error: data['train'] must fit the model and its loss; got y of shape ") == 1
