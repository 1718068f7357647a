"""jobs/examples with other libraries: on two ranks they end on one process's parameters, to 1e-12 in float64."""

from __future__ import annotations

import json

import pytest

from comm.jobs_here import ROOT, run

pytestmark = pytest.mark.extended

SCRIPT = """
import json, sys
sys.path.insert(0, {examples!r})
import torch
torch.set_default_dtype(torch.float64)
import ignite_digits, peft_lora, pyg_graphs
import hpcdist as hd

found = {{}}
for example in (ignite_digits, peft_lora, pyg_graphs):
    model = example.main(["--epochs", "1", *{arguments}])
    found[example.__name__] = [p.sum().item() for p in model.parameters()]
if hd.is_main():
    print("found", json.dumps(found))
"""


def found(done):
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


def test_examples_with_other_libraries_equal_one_process(tmp_path):
    def script(*arguments):
        return SCRIPT.format(examples=str(ROOT / "jobs" / "examples"), arguments=list(arguments))

    alone = found(run(tmp_path, script("--batch-size", "32"), 1, preloaded=("torch._dynamo",)))
    raise_on_all_ranks = found(run(tmp_path, script("--batch-size", "16"), 2, preloaded=("torch._dynamo",)))
    for name, sums in alone.items():
        assert raise_on_all_ranks[name] == pytest.approx(sums, abs=1e-12), name
