"""Lightning's Trainer and Fabric, on real ranks, beside what Lightning does by itself in one process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import hpcdist.lightning
from harness.cases import each
from harness.launch import IMPORTS, launch
from harness.pages import blocks
from hpcdist import errors
from hpcdist.errors import ConfigError

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "lightning.md"
ROWS = {  # of the page's table, and what is tried for each
    "`accumulate_grad_batches`, `GradientAccumulationScheduler`": ["accumulation", "scheduler"],
    "`gradient_clip_val`, by norm and by value": ["clipping", "by_value"],
    "`max_steps`, `max_time`, `limit_train_batches`, `overfit_batches`": ["max_steps", "max_time", "limit", "overfit"],
    "`val_check_interval`, within an epoch and across epochs": ["within", "across"],
    "`EarlyStopping`, `StochasticWeightAveraging`, `BackboneFinetuning`": ["stopped", "swa", "unfrozen"],
    "`ModelCheckpoint(monitor=..., save_top_k=...)`, `ckpt_path=\"best\"`": ["best"],
    "Schedules by steps and epochs, `ReduceLROnPlateau`, `LearningRateMonitor`": ["epochs", "plateau", "monitored"],
    "`trainer.estimated_stepping_batches`, for a schedule": ["one_cycle"],
    "Manual optimisation, several optimizers": ["gan"],
    "LBFGS": ["lbfgs"],
    "`sync_batchnorm=True`": ["synced"],
    "`self.log` in steps, torchmetrics in training": ["measured"],
    "Several training loaders, `CombinedLoader`": ["min_size", "max_size", "cycled", "longest"],
    "Several validation loaders": ["validations"],
    "`Trainer.test` and `Trainer.validate` alone": ["tested"],
    "`Trainer.predict`, `BasePredictionWriter`": ["predicted"],
    "Samplers and batch samplers of one's own, `drop_last`, `num_workers`": ["sampler", "batch_sampler", "processes"],
    "`LightningDataModule`, `reload_dataloaders_every_n_epochs`, a second `fit`": ["module", "reloaded", "twice"],
    "An `IterableDataset` for validation": ["streamed"],
    "Fabric's `no_backward_sync`, `clip_gradients`, `save` and `load`": ["fabric"],
    "Fabric's loaders: `drop_last`, batch samplers, an `IterableDataset`": [
        "fabric_drops", "fabric_batches", "fabric_streams",
    ],
}  # fmt: skip
TRIED = ("cycled", "measured", "predicted", "best", "one_cycle")  # in each run of the tests; the others by --all
SAME = ("epochs", "accumulation", "clipping", "gan", "fabric")
MORE = ("steps", "max_steps", "stops", "within", "early")

LACKS = "lightning is not installed: pip install -e '.[lightning]'"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason=LACKS),
    pytest.mark.time_limit(400),
]


def trained(size, folder, *cases):
    """What each rank found, by case."""
    found = {}
    words = [HERE / "by_lightning_patterns.py", folder, *cases]
    done = launch(size, words, env=IMPORTS, timeout_s=380, preloaded=("torchmetrics", "lightning.pytorch"))
    for line in done.stdout.splitlines():
        if line.startswith("["):
            rank, case, value = json.loads(line)
            found.setdefault(case, {})[rank] = value
    assert done.returncode == 0, done.stderr[-4000:]
    return {case: [ranks[rank] for rank in sorted(ranks)] for case, ranks in found.items()}


def beside_plain(strategy, cases):
    return [f"{name}:{case}" for case in cases for name in ("plain", strategy)]


def require_plain(found, strategy, cases):
    """Raises unless the strategy has come to what Lightning does in one process."""
    for case in cases:
        for own in found[f"{strategy}:{case}"]:
            require_near(own, found[f"plain:{case}"][0])


def require_near(found, reference):
    """Raises unless parameters, steps, rates and what was logged are the same."""
    assert found["values"] == pytest.approx(reference["values"], rel=1e-11, abs=1e-12)
    for name in {"steps", "rates", "logged"} & set(reference):
        assert found[name] == pytest.approx(reference[name], rel=1e-9, abs=1e-9), name


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All that is tried on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    script = next(block.code for block in blocks(PAGE.read_text()) if block.code.startswith("# train.py"))
    (folder / "train.py").write_text(script)
    others = ["gossip_pull:epochs", "local_sgd:gan", "allreduce:resume", "allreduce:page"]
    cases = (*beside_plain("allreduce", SAME + TRIED), *others, "allreduce:environment", "allreduce:refused")
    return trained(2, folder, *cases)


@each("case", SAME + TRIED)
def test_allreduce_trains_as_one_process_does(found, case):
    require_plain(found, "allreduce", [case])


@each("run", ["gossip_pull:epochs", "local_sgd:gan"])
def test_other_strategies_end_with_one_model_and_the_same_schedule(found, run):
    one, other = found[run]
    assert one == other
    assert one.get("rates") == found[f"plain:{run.partition(':')[2]}"][0].get("rates")


def test_a_checkpoint_is_the_consensus_and_goes_on(found):
    for own in found["allreduce:resume"]:
        assert own["consensus"] and own["values"] == pytest.approx(own["whole"], abs=1e-12)
        assert own["files"] == [".ckpt", ".ckpt"]


def test_fabric_saves_what_the_ranks_stand_for(found):
    assert all(own["alike"] for own in found["allreduce:fabric"])


def test_the_script_of_the_page_trains_and_speaks_once(found):
    assert sum(own["said"].count("accuracy 0.9") for own in found["allreduce:page"]) == 1


def test_lightning_is_imported_on_first_use(tmp_path):
    done = launch(1, ["-c", "import sys, hpcdist.lightning\nassert 'lightning' not in sys.modules"], env=IMPORTS)
    assert done.returncode == 0, done.stderr


def test_the_environment_tells_the_ranks(found):
    first, second = found["allreduce:environment"]
    assert first["ranks"] == [0, 0, 0, 2] and second["ranks"] == [1, 1, 0, 2]
    assert first["main"] == second["main"] and not first["starts"]


@each(
    "case",
    [
        ("portions", "ConfigError: strategy must compute gradients of whole batches with Lightning; got sandblaster"),
        (
            "devices",
            "ConfigError: devices must be 'auto', or the number of ranks on this node, 2, which mpirun or srun",
        ),
        ("samples", "ConfigError: data of an evaluation must have a sample for each of 2 ranks, which log the"),
        ("module", "ConfigError: strategy must be used by a Trainer; got no LightningModule. Call trainer.fit(model)."),
        ("stranger", "ConfigError: optimizer must have parameters of a model that was passed to fabric.setup or"),
        ("name", "AttributeError: module 'hpcdist.lightning' has no attribute 'strategy'"),
        ("stream", "ConfigError: data for training must be a map-style data set with Lightning, whose loop must know"),
        (
            "uneven",
            "ConfigError: a training loader must have the same number of batches on each rank with Lightning, whose",
        ),
        ("weights", "ConfigError: several training loaders must distribute the samples of each step equally, as"),
        ("left", "ConfigError: a training must have ended before the next one starts; got one that an exception has"),
    ],
)
def test_what_is_refused(found, case):
    name, message = case
    assert all(own[name].startswith(message) for own in found["allreduce:refused"]), found["allreduce:refused"]


def test_a_missing_package_is_told(monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="hpcdist.lightning must have the packages of the extra lightning; got no"):
        _ = hpcdist.lightning.HpcdistStrategy


# --- servers ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Two workers and a server."""
    cases = beside_plain("hardsync", ("epochs", "clipping", "early", "within"))
    return trained(3, tmp_path_factory.mktemp("three"), *cases, "parameter_server:resume", "hardsync:resume")


@each("case", ["epochs", "clipping", "early", "within"])
def test_a_rank_that_serves_follows_the_loop(served, case):
    for own in served[f"hardsync:{case}"]:
        reference = served[f"plain:{case}"][0]
        if case == "clipping":  # torch's own divides by the norm + 1e-6
            assert own["values"] == pytest.approx(reference["values"], abs=1e-4)
        else:
            require_near(own, reference)


@each("strategy", ["hardsync", "parameter_server"])
def test_a_checkpoint_has_the_state_of_servers(served, strategy):
    ranks = served[f"{strategy}:resume"]
    assert all(own["values"] == ranks[0]["values"] and own["consensus"] for own in ranks)
    assert ranks[0]["files"] == [".ckpt", ".ckpt", ".ranks", ".ranks"]
    if strategy == "hardsync":
        assert ranks[0]["values"] == pytest.approx(ranks[0]["whole"], abs=1e-12)


# --- the table of the page --------------------------------------------------------------------------------------------
def test_the_table_of_the_page_has_these_rows():
    _, _, table = PAGE.read_text().partition("## What has been tried")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")]
    assert rows[1:] == list(ROWS)


RESUMED = ("allreduce:resume_within", "local_sgd:resume")
SHUFFLED = (*RESUMED, "allreduce:shuffled", "allreduce:mixed", "gossip_pull:within", "gossip_pull:mixed")


@pytest.mark.extended
def test_each_row_of_the_table_and_rarer_loops(tmp_path):
    cases = [case for row in ROWS.values() for case in row if case not in SAME + TRIED] + list(MORE)
    both = beside_plain("allreduce", [*cases, "gathers", "evaluates"])
    found = trained(2, tmp_path, *both, *SHUFFLED, "gossip_pull:fabric", "local_sgd:accumulation")
    require_plain(found, "allreduce", cases)
    for run in SHUFFLED:
        one, other = found[run]
        assert one["values"] == other["values"]
    for own in sum((found[run] for run in RESUMED), []):
        assert own["consensus"] and own["values"] == pytest.approx(own["whole"], abs=1e-12)
    plain, *_ = found["plain:evaluates"]
    assert sorted(sum((own["outputs"] for own in found["allreduce:evaluates"]), [])) == sorted(plain["outputs"])
    assert all(own["logged"] == pytest.approx(plain["logged"]) for own in found["allreduce:evaluates"])


@pytest.mark.extended
def test_rows_of_the_table_and_rarer_loops_with_servers(tmp_path):
    cases = ("cycled", "max_size", "measured", "best", "swa", "plateau", "synced", "predicted", "validations", "twice")
    cases += ("scheduler", "across", "reloaded", "max_steps", "stops", "unclipped")
    found = trained(3, tmp_path, *beside_plain("hardsync", cases), "hardsync:resume_within")
    require_plain(found, "hardsync", cases)
    for own in found["hardsync:resume_within"]:
        assert own["consensus"] and own["values"] == pytest.approx(own["whole"], abs=1e-12)
