"""The whole scripts of jobs/examples, before (plain PyTorch) and after: launched as users do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launch import IMPORTS, launch, started, wait_until
from hpcdist.records import load_run

EXAMPLES = Path(__file__).parents[2] / "jobs" / "examples"
LIMITS = {"cnn": lambda accuracy: accuracy > 0.85, "tokens": lambda loss: loss < 2.9, "gan": lambda mean: mean < 0.8}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def last(output: str) -> float:
    return float(re.findall(r"^epoch \d+: \w+ ([\d.]+)$", output, re.MULTILINE)[-1])


@pytest.mark.parametrize("name", LIMITS)
def test_a_script_learns_before_and_after(name):
    alone = subprocess.run([sys.executable, EXAMPLES / f"{name}_plain.py"], capture_output=True, text=True)
    assert alone.returncode == 0 and LIMITS[name](last(alone.stdout)), alone.stdout + alone.stderr
    # The GAN, whose figure moves, by a strategy whose result no load of the machine changes.
    strategy = {"cnn": "parameter_server", "tokens": "allreduce", "gan": "local_sgd"}[name]
    folder = ["--folder", "run"] if name == "cnn" else []
    done = launch(3, [EXAMPLES / f"{name}.py", "--strategy", strategy, *folder], env=IMPORTS)
    assert done.returncode == 0 and LIMITS[name](last(done.stdout)), done.stdout + done.stderr
    if name == "cnn":
        assert load_run("run").last.outcome == "ended" and list(Path("run/tensorboard").iterdir())


def test_the_script_with_checkpoints_leaves_on_a_signal_and_goes_on():
    arguments = [EXAMPLES / "cnn.py", "--folder", "run", "--epochs"]
    with started(2, [*arguments, "1000"], Path("log"), env=IMPORTS) as job:
        wait_until(lambda: "epoch 1:" in Path("log").read_text())
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 75, Path("log").read_text()
    epochs = re.findall(r"^epoch (\d+):", Path("log").read_text(), re.MULTILINE)
    done = launch(2, [*arguments, str(int(epochs[-1]) + 4)], env=IMPORTS)
    assert done.returncode == 0, done.stderr
    gone_on = list(map(int, re.findall(r"^epoch (\d+):", done.stdout, re.MULTILINE)))
    assert gone_on[-1] == int(epochs[-1]) + 3 and gone_on[0] - int(epochs[-1]) in (1, 2), "2: it left at an epoch's end"
    assert last(done.stdout) > 0.9
