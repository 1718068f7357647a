"""What CONTRIBUTING.md and the tutorial on two models show is run as it stands there; test_docs.py runs all pages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
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


def test_the_strategy_that_explains_a_step_is_local_sgd_of_one_step(tmp_path):
    page = blocks((ROOT / "docs/how-a-step-runs.md").read_text())
    (code,) = [block.code for block in page if "class AverageParameters" in block.code]
    (tmp_path / "mean.py").write_text(code)

    def body(comm, strategy, **options):
        hd.init(comm=comm)
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy, **options)
        for x in hd.shard(torch.utils.data.DataLoader(torch.arange(44.0).view(11, 4) / 44, batch_size=2)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model.weight.detach()

    shown = run_virtual(partial(body, strategy=f"{tmp_path}/mean.py:AverageParameters"), 3)
    torch.testing.assert_close(shown, run_virtual(partial(body, strategy="local_sgd", period=1), 3))


def _checked(spec: str, status: int = 0) -> tuple[str, str]:
    """What `hpcdist strategies test` writes about a strategy."""
    command = [sys.executable, "-m", "hpcdist", "strategies", "test", spec]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    folder = Path(spec).parent if ":" in spec else None
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


TUTORIAL = [block.code for block in blocks((ROOT / "docs" / "tutorials" / "new-strategy.md").read_text())]
STEP = [block.code for block in blocks((ROOT / "docs" / "how-a-step-runs.md").read_text())]
SHOWN = {  # strategies by the pages that show them
    "AverageParameters": next(code for code in STEP if "class AverageParameters" in code),
    **{
        name: "\n".join(code for code in TUTORIAL if re.search(rf"^class ({name}|RingGossip)\b", code, re.M))
        for name in ("RingGossip", "MeanSign", "SlowRing")
    },
}


@pytest.mark.extended
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("name", ["Averaging", *SHOWN])
def test_strategies_that_the_pages_show_do_all_that_is_asked_of_every_strategy(averaging, tmp_path, name):
    """From a file, by the tests that hold for our own."""
    spec = averaging
    if name in SHOWN:
        (tmp_path / "shown.py").write_text(SHOWN[name])
        spec = f"{tmp_path / 'shown.py'}:{name}"
    out, _ = _checked(spec)
    assert "passed  it learns\n" in out and "passed  a strategy takes the same steps on real and on virtual" in out
    assert int(re.search(r"^(\d+) checks passed, 0 failed$", out, re.M)[1]) > 15


FAILS = """
from hpcdist.strategies.base import Contract, Strategy

class OnOneRank(Strategy):
    \"\"\"Local steps, with an error on one rank.\"\"\"

    contract = Contract(averages="gradients", synchronizes="every step")

    def advance(self, update):
        unknown = f"speling_{len(self.model.slots)}"
        return self.gradients.step_alone(update, **{unknown: 1} if self.comm.rank == 1 else {})

class Unbuilt(OnOneRank):
    def __init__(self, config, comm, model):
        super().__init__(config, comm, model)
"""


@pytest.mark.extended
@pytest.mark.time_limit(900)
def test_checks_that_fail_are_named_with_the_reason(tmp_path):
    (tmp_path / "mine.py").write_text(FAILS)
    out, err = _checked(f"{tmp_path}/mine.py:OnOneRank", status=1)
    assert "passed  an unknown option is refused\n" in out
    mistake = r"TypeError: .*'speling_\d+' \[mine.py:11\]"
    assert re.search(rf"^FAILED  the same loop runs every strategy .*\n +{mistake} \(on 3 ranks\)$", out, re.M), out
    assert len(re.findall(mistake, out)) == 2, "once on virtual ranks, once on real ones"
    assert "note    averaging gradients takes more than a sum" in out and "prterun" not in err
    assert re.search(r"^FAILED  \d+ more, by the same mistake as `the same loop runs every strategy .*`$", out, re.M), (
        out
    )


def test_a_strategy_that_can_not_be_built_is_named_before_any_check(tmp_path):
    (tmp_path / "mine.py").write_text(FAILS)
    out, err = _checked(f"{tmp_path}/mine.py:Unbuilt", status=1)
    assert out == "" and err.startswith("hpcdist: error: __init__ of ") and "Traceback" not in err
    assert "must take the arguments of Strategy's" in err
    _, err = _checked("allreduce", status=1)
    assert err.startswith("hpcdist: error: hpcdist strategies test must be given the file and the class of a strategy;")


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


def test_the_changelog_is_short_and_takes_the_files_of_changes(tmp_path):
    text = (ROOT / "CHANGELOG.md").read_text()
    first = text.split("\n## ")[1]
    headings = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= headings and len(first.splitlines()) <= 60
    settings = (ROOT / "pyproject.toml").read_text().replace('"docs/changes"', f'"{tmp_path / "changes"}"')
    (tmp_path / "pyproject.toml").write_text(settings)
    (tmp_path / "CHANGELOG.md").write_text(text)
    shutil.copytree(ROOT / "docs/changes", tmp_path / "changes")
    (tmp_path / "changes" / "+new.fixed.md").write_text("A hang of `hd.save`.\n")
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9", "--date", "2031-01-31"]
    done = subprocess.run([*command, "--dir", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fixed = done.stdout.partition("### Fixed\n")[2]
    assert "## 9.9 (2031-01-31)" in done.stdout and "\n- A hang of `hd.save`." in fixed
