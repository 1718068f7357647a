"""Batches that do not fit the model of a user's loop: torch's traceback, and below it one sentence."""

from __future__ import annotations

import pytest

from harness.cases import each
from harness.launch import launch

SCRIPT = """
import torch
from torch import nn

import hpcdist as hd

hd.init()
model = nn.Sequential(nn.Linear(4, 5))
optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
x, y = torch.ones(8, 4), torch.arange(8) % 5
{change}
nn.functional.cross_entropy(model(x), y).backward()
"""


@each(
    "case",
    [
        (
            "x = x[:, :3]",
            "hpcdist: a batch must fit the model and its loss; got input of shape (8, 3), float32, and layer 0, "
            "Linear(in_features=4, out_features=5, bias=True), refuses them: mat1 and mat2 shapes cannot be multiplied "
            "(8x3 and 4x5) (",
            "). Change the data, or the model.",
        ),
        (
            "y = y + 1",
            "hpcdist: a batch must fit the model and its loss; got target of shape (8,), int64 from 1 to 5, outputs of "
            "shape (8, 5), float32, and cross_entropy refuses them: Target 5 is out of bounds (",
            "). Change the data, or the model or the loss; cross entropy takes y of shape (samples), int64, from 0 to "
            "4.",
        ),
        ("raise RuntimeError('mine')", "RuntimeError: mine", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_the_traceback_ends_in_a_sentence(tmp_path, size, case):
    change, start, end = case
    (script := tmp_path / "script.py").write_text(SCRIPT.format(change=change))
    done = launch(size, [script])
    assert done.returncode == 1 and "Traceback (most recent call last):" in done.stderr
    last = [line.partition("] ")[2] if line.startswith("[rank") else line for line in done.stderr.splitlines()]
    assert any(line.startswith(start) and line.endswith(end) for line in last), done.stderr
    assert f"{script}:" in done.stderr or "mine" in done.stderr
