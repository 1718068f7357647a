"""transformers' Trainer on several ranks: as one process, by every kind of strategy, evaluated, saved and resumed."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from harness import pages
from harness.cases import each
from harness.launch import IMPORTS, launch, launch_environment
from hpcdist.errors import ConfigError

HERE = Path(__file__).parent
pytestmark = pytest.mark.time_limit(400)
PRELOADED = ("torch._dynamo", "transformers.models.gpt2.modeling_gpt2")  # the trainer's pyarrow starts a thread
EXACT = ["epochs", "accumulated", "max_steps", "by_samples", "schedule_free", "models", "resumed"]
REFUSED = {
    "two ways of distributing": r"ConfigError: auto_find_batch_size of TrainingArguments must not be set",
    "distributed twice": r"ConfigError: optimizer must be a plain torch optimiser",
    "other workers": r"resume_from_checkpoint must be a run with the same number of workers.*got one of 2 workers on 1",
    "the plain Trainer": r"Instead of transformers' Trainer use hpcdist.hf.Trainer, with a plain optimizer",
    "a stream": r"train_dataset must have a length if there are server ranks",
}
KINDS = ["allreduce", "gossip_pull", "local_sgd", "softsync"]
BLOCKS = pages.blocks((HERE.parents[1] / "docs" / "hf-trainer.md").read_text())
(PAGE,) = (block.code for block in BLOCKS if "hd.init()" in block.code)
PLAIN = {  # the changes that the page names, taken back
    "import hpcdist as hd\n": "",
    "hd.init()\n": "",
    "from hpcdist.hf import Trainer": "from transformers import Trainer",
    ', strategy="allreduce"': "",
    "hd.size()": "1",
}
EXACTLY = {  # but for the loss, which transformers computes in float32
    "GPT2LMHeadModel(config)": "GPT2LMHeadModel(config).double()",
    "=8 // hd.size()": "=6 // hd.size()",
    "learning_rate=1e-2": "learning_rate=1e-2, adam_epsilon=1e-4",
}


def replaced(text, changes):
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Where one process with the plain Trainer, and three ranks with ours, have written."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "alone").mkdir()
    script = replaced(PAGE, EXACTLY)
    for where, text in ((folder, script), (folder / "alone", replaced(script, PLAIN))):
        (where / "page.py").write_text(text.replace('"trained"', repr(str(where / "page"))))
    with launch_environment(IMPORTS, preloaded=PRELOADED) as env:
        alone = subprocess.Popen([sys.executable, HERE / "alone.py", folder / "alone"], env=env)
        done = launch(3, [HERE / "ranks.py", folder], env=IMPORTS, timeout_s=380, preloaded=PRELOADED)
        assert alone.wait(120) == done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def runs(launched):
    """What one process has found with the plain Trainer, and each of three ranks with ours."""
    plain = {name: json.loads((launched / "alone" / f"{name}.json").read_text()) for name in EXACT}
    return plain, [json.loads((launched / f"rank{rank}.json").read_text()) for rank in range(3)]


def difference(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@each("name", EXACT)
def test_parameters_equal_those_of_one_process_with_the_joint_batches(runs, name):
    """Shuffled, with an uneven last step, a schedule, clipped; accumulated; up to max_steps; by samples or labels."""
    plain, ranks = runs
    tolerance = 1e-7 if name == "by_samples" else 1e-12  # the model's own loss is in float32
    assert all(difference(own[name]["parameters"], plain[name]["parameters"]) < tolerance for own in ranks)


def test_hardsync_equals_one_process_too(runs):
    plain, ranks = runs
    assert all(difference(own["hardsync"]["parameters"], plain["accumulated"]["parameters"]) < 1e-12 for own in ranks)


@each("name", EXACT)
def test_steps_rates_losses_and_norms_are_logged_as_one_process_logs_them(runs, name):
    plain, (main, *_) = runs
    assert len(main[name]["logged"]) == len(plain[name]["logged"])
    for own, expected in zip(main[name]["logged"], plain[name]["logged"]):
        expected = {k: v for k, v in expected.items() if k != "total_flos"}  # which padding tells apart
        assert {k: v for k, v in own.items() if k != "total_flos"} == pytest.approx(expected, rel=1e-6, abs=1e-12)


@each("name", EXACT)
def test_an_evaluation_counts_every_sample_once_and_in_order(runs, name):
    plain, ranks = runs
    for own in ranks:
        assert own[name]["evaluated"] == pytest.approx(plain[name]["evaluated"], rel=1e-6)


@each("kind", KINDS)
def test_all_ranks_end_with_the_model_that_one_of_them_has_saved(runs, kind):
    _, ranks = runs
    of_ranks = [own[f"interrupted {kind}"] for own in ranks]
    assert all(own["whole"] == of_ranks[0]["whole"] == own["saved"] for own in of_ranks)
    assert sum(own["main"] for own in of_ranks) == 1


@each("kind", KINDS)
def test_evaluations_within_epochs_are_of_all_samples(runs, kind):
    plain, ranks = runs
    order = plain["epochs"]["evaluated"]["eval_order"]
    for own in ranks:
        assert [step for step, _ in own[f"interrupted {kind}"]["evaluated"]] == [2, 4, 6, 8]
        assert all(value == order for _, value in own[f"interrupted {kind}"]["evaluated"])


@each("kind", KINDS)
def test_a_resumed_run_goes_on_as_the_whole_one(runs, kind):
    """To the bit where ranks meet in their steps; the others draw peers by time, or servers get gradients by time."""
    _, ranks = runs
    for own in (own[f"interrupted {kind}"] for own in ranks):
        tolerance = 0.1 if kind in ("gossip_pull", "softsync") else 0.0
        assert all(difference(resumed, own["whole"]) <= tolerance for resumed in own["resumed"])


def test_a_stream_is_shared_up_to_max_steps(runs):
    assert all(own["stream"][0] == 4 for own in runs[1])


def test_the_script_of_the_page_trains_as_one_process_does(launched):
    """Both save the model at the end and in each epoch."""
    for at in (".", "checkpoint-6", "checkpoint-18"):
        ours, alone = (load_file(where / "page" / at / "model.safetensors") for where in (launched, launched / "alone"))
        assert all((ours[name] - alone[name]).abs().max() < 1e-4 for name in alone)
    said = [path.read_text().count("'train_loss'") for path in launched.glob("page-*.txt")]
    assert sorted(said) == [0, 0, 1]


# --- refused ----------------------------------------------------------------------------------------------------------
def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("hpcdist.hf")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match="hpcdist.hf must have the packages of the extra hf; got no module trans"):
        importlib.import_module("hpcdist.hf")


@each("name", sorted(REFUSED))
def test_what_can_not_be_exact_is_refused_by_name(runs, name):
    for own in runs[1]:
        assert re.search(REFUSED[name], own["refused"][name]), own["refused"][name]
