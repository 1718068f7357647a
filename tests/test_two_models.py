"""The tutorial on two models: its scripts, as they stand there, train on two ranks as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpcdist as hd
from harness.pages import blocks
from hpcdist.comm.virtual import run_virtual

PAGE = Path(__file__).parents[1] / "docs" / "tutorials" / "two-models.md"
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
