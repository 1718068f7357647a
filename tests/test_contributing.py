"""What CONTRIBUTING.md and README.md show is run as it stands there."""

from __future__ import annotations

import re
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import hpcdist as hd
from hpcdist.comm.virtual import run_virtual
from hpcdist.flat import FlatModel
from hpcdist.strategies import Strategy

ROOT = Path(__file__).parents[1]


def _blocks(name: str) -> list[str]:
    """The Python blocks of a Markdown file."""
    text = (ROOT / name).read_text()
    return [textwrap.dedent(block) for block in re.findall(r"^( *```python\n.*?)^ *```", text, re.M | re.S)]


def _code(block: str) -> str:
    return block.split("\n", 1)[1]


@pytest.fixture
def averaging() -> type[Strategy]:
    """The strategy that CONTRIBUTING.md shows, imported as the file it tells to write."""
    (block,) = [block for block in _blocks("CONTRIBUTING.md") if "class Averaging" in block]
    module = types.ModuleType("hpcdist.strategies.averaging")
    sys.modules[module.__name__] = module
    exec(compile(_code(block), "averaging.py", "exec"), vars(module))
    yield module.Averaging
    del sys.modules[module.__name__]


@pytest.mark.parametrize("period", [1, 3])
def test_the_strategy_in_contributing_averages_parameters(averaging, period):
    def body(comm):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = averaging(averaging.Config(period=period), comm.split(0), FlatModel(model))
        spread = []
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.full((1, 2), float(comm.rank))).sum().backward()
            strategy.step(optimizer.step)
            spread.append([round(v, 5) for v in strategy.model.params[0].tolist()])
        strategy.close()
        return spread

    found = run_virtual(body, 3)
    for step in range(6):
        equal = found[0][step] == found[1][step] == found[2][step]
        assert equal == ((step + 1) % period == 0)


def test_the_loop_in_the_readme_runs():
    (block,) = [block for block in _blocks("README.md") if "DistributedOptimizer" in block]
    x = torch.randn(64, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))

    def body(comm):
        hd.init(comm=comm)
        model = torch.nn.Linear(4, 1)
        names = {
            "model": model,
            "loss_fn": torch.nn.functional.mse_loss,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
            "loader": torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
        }
        exec(compile(_code(block), "README.md", "exec"), names)
        return names["optimizer"].strategy.steps

    assert sum(run_virtual(body, 2)) > 0
