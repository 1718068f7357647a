"""docs/accelerate.md: its script equals one process, and what Accelerate would do twice is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comm.jobs_here import run
from harness import pages
from harness.launch import find_mpirun

pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")

PAGE = Path(__file__).parents[2] / "docs" / "accelerate.md"
(SCRIPT,) = (block.code for block in pages.blocks(PAGE.read_text()) if block.language == "python")
PRELOADED = ("torch._dynamo", "accelerate")
FLOAT64 = "import torch\ntorch.set_default_dtype(torch.float64)\n"


def trained(folder, size, script=SCRIPT):
    folder.mkdir()
    job = run(folder, FLOAT64 + f"import os\nos.chdir({str(folder)!r})\n" + script, size, preloaded=PRELOADED)
    assert job.returncode == 0, job.stderr
    return torch.load(folder / "model.pt"), job.stdout


def test_the_script_equals_one_process(tmp_path):
    (alone, said), (raise_on_all_ranks, said_together) = (trained(tmp_path / str(size), size) for size in (1, 2))
    assert alone.keys() == raise_on_all_ranks.keys() and said == said_together and said.count("of 46") == 3
    for name, value in alone.items():
        torch.testing.assert_close(raise_on_all_ranks[name], value, rtol=0, atol=1e-12)


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["gossip_pull", "hardsync"])
def test_the_script_trains_by_other_strategies(tmp_path, strategy):
    script = SCRIPT.replace('"allreduce"', f'"{strategy}"')
    if strategy == "hardsync":  # whose server clips
        script = script.replace("accelerator.clip_grad_norm_(model.parameters(), 0.5)", "pass")
    model, said = trained(tmp_path / "run", 2, script)
    assert said.count("of 46") == 3 and all(value.isfinite().all() for value in model.values())


@pytest.mark.extended
def test_a_model_that_accelerate_wraps_is_refused_by_name(tmp_path):
    script = "".join(line for line in SCRIPT.splitlines(True) if "prepare_model" not in line)
    three, four = "optimizer, schedule, test_loader", "model, optimizer, schedule, test_loader"
    script = script.replace(f"{three} = accelerator.prepare({three})", f"{four} = accelerator.prepare({four})")
    job = run(tmp_path, script, 2, preloaded=PRELOADED)
    assert job.returncode != 0
    assert "model must not be wrapped in DistributedDataParallel" in job.stderr
    assert "accelerator.prepare_model(model, evaluation_mode=True)" in job.stderr
