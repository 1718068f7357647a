"""What CONTRIBUTING.md and the tutorial on two models show is run as it stands there; test_docs.py runs all pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hpcdist as hd
from harness.cases import each
from harness.pages import blocks
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.model.flat import FlatModel

ROOT = Path(__file__).parents[1]


@pytest.fixture
def averaging(tmp_path) -> str:
    """The strategy that CONTRIBUTING.md shows, in the file that it tells to write."""
    (code,) = [b.code for b in blocks((ROOT / "CONTRIBUTING.md").read_text()) if "class Averaging" in b.code]
    (tmp_path / "averaging.py").write_text(code)
    return f"{tmp_path / 'averaging.py'}:Averaging"


@each("period", [1, 3])
def test_the_strategy_in_contributing_averages_parameters(averaging, period):
    def body(comm):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cls = strategies.load(averaging)
        strategy = cls(cls.Config(period=period), comm.split(0), FlatModel(model))
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


# What every strategy is asked for: loops as users write them, uneven data, checkpoints, another number of ranks.
ASKED = (
    "strategies/test_every_strategy.py", "session/test_session.py", "session/test_habits.py",
    "session/test_habits_checkpoints.py", "train/test_loop.py", "train/test_finite.py", "test_jobs.py",
    "slurm/test_check.py",
)  # fmt: skip
BESIDE = """
from hpcdist import strategies

found = ["allreduce", "hardsync", {name!r}]
strategies.available = lambda: found
"""


@pytest.mark.extended
def test_the_strategy_in_contributing_does_all_that_is_asked_of_every_strategy(averaging, tmp_path):
    """As it stands on the page, from a file, by the tests that hold for our own."""
    (tmp_path / "beside.py").write_text(BESIDE.format(name=averaging))
    files = [f"tests/{name}" for name in ASKED]
    options = ["-q", "-p", "beside", "-p", "no:cacheprovider", "-k", "averaging.py", "--basetemp", str(tmp_path / "a")]
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    environ = {**os.environ, **path}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    passed = re.search(r"^(\d+) passed, \d+ deselected in", done.stdout, re.M)
    assert done.returncode == 0 and passed and int(passed[1]) > 30, done.stdout[-4000:] + done.stderr[-1000:]


# --- the tutorial on two models ---------------------------------------------------------------------------------------
PAGE = ROOT / "docs" / "tutorials" / "two-models.md"
GAN, ACTOR = [block.code for block in blocks(PAGE.read_text()) if "hd.init()" in block.code]
NOISE = "noise = torch.randn(len(real), 4)"
SCRIPTS = {  # and the names of their models
    # Noise that follows from the sample, in the order of the samples, is the same on any number of ranks.
    "gan": (GAN.replace(NOISE, "noise = torch.cat([real.sin(), real.cos()], 1)"), ("discriminator", "generator")),
    "actor and critic": (ACTOR, ("actor", "critic")),
}


@pytest.fixture
def _in_double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_in_double_precision")
@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_trains_on_ranks_as_in_one_process(name):
    code, models = SCRIPTS[name]
    assert NOISE not in code

    def body(comm):
        hd.init(comm=comm)
        names: dict = {}
        exec(compile(code, str(PAGE), "exec"), names)
        return [p.detach().clone() for model in models for p in names[model].parameters()]

    (alone,) = run_virtual(body, 1)
    for found in run_virtual(body, 2):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)
