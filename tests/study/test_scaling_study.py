"""The study of scaling: its quick grid is run as a user would, and its verdicts are held against results made up."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from harness import studies
from hpcdist import strategies
from hpcdist.comm.virtual import ComputeModel, Constant, SlowSteps, run_virtual
from hpcdist.config.merge import load as load_settings
from hpcdist.model.flat import FlatModel
from hpcdist.records import Evaluation, read_evaluations
from hpcdist.tools.simulate.cluster import ClusterConfig
from kit.groups import EndedRun
from kit.output import paragraphs
from study.pretended import ended

STUDY, SMALLER = "scaling", {"gradients": 192}

pytestmark = pytest.mark.time_limit(studies.TIME_LIMIT_S)


@pytest.fixture
def train(study, training, tmp_path):
    """Make a short run of a strategy on so many workers; its curve."""

    def run(strategy: str, servers: int = 0, seed: int = 1, every: int = 16, compute: ComputeModel | None = None):
        group = study.RunGroup(strategy, 3, servers or int(strategy == "easgd"))
        declared = study.at_rate(group.declare(study.Grid(gradients=96, every=every), study.STRAGGLERS), 0.0625)
        settings = load_settings({}, None, (*declared.settings, f"seed={seed}"))
        cluster = ClusterConfig(network=study.NETWORK, compute=study.COMPUTE[study.STRAGGLERS])
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        where = {"network": cluster.links(), "compute": cluster.steps(lambda seconds: seconds)}
        where = where if compute is None else {"compute": compute}
        run_virtual(training.train(settings, folder), declared.ranks, seed=seed, **where)
        return study.curve(ended(read_evaluations(folder)))

    return run


# --- the quick grid ---------------------------------------------------------------------------------------------------
@pytest.mark.extended
def test_the_quick_version(quick, study, written):
    grid, found = study.QUICK, json.loads((quick[0] / "results.json").read_text())
    assert len(found["runs"]) == grid.seeds * len(grid.groups())
    for run in found["runs"]:
        looks = [(look["step"], look["seconds"], look["metrics"]["loss"]) for look in run["curve"]]
        taken, seconds, losses = zip(*looks)
        assert list(taken) == list(range(0, grid.gradients + 1, grid.every)), "the same budget and looks for all"
        assert list(seconds) == sorted(seconds) and seconds[0] == 0 < seconds[-1]
        assert losses[-1] < losses[0] and run["settings"]["seed"] < study.FIRST_SEED
    for group in grid.groups():
        tried = [row for row in found["rates"] if (row["strategy"], row["p"]) == (group.name, group.workers)]
        (at,) = [i for i, row in enumerate(tried) if row[""]]
        assert 0 < at < len(tried) - 1, "better than its neighbours"
        assert tried[at] == min(tried, key=lambda row: (row["s to target"], row["final loss"]))
        used = {run["settings"]["optimizer"]["lr"] for run in found["runs"] if matches(run, group)}
        assert used == {tried[at]["rate"]}
    table, claims = written("loss_time_stragglers_0.8", "target_workers")
    assert len(table) == len(grid.groups()) and len(claims) == 3
    assert {row["strategy"] for row in table} == {*study.OPTIONS, "easgd, 4 servers"}
    assert "NOT RUN" in claims[1], "on so few workers"


def matches(run: dict, group) -> bool:
    strategy, summary = run["settings"]["strategy"], run["summary"]
    found = strategy["name"], summary["workers"], summary["ranks"] - summary["workers"]
    return found == (group.strategy, group.workers, group.servers)


# --- one run ----------------------------------------------------------------------------------------------------------
STRATEGIES = [("easgd", 2), ("gossip_push", 0)]


@pytest.mark.parametrize(("strategy", "servers"), STRATEGIES)
def test_the_same_seed_gives_the_same_run_however_often_it_is_looked_at(train, strategy, servers):
    """Looking takes no virtual time."""
    often, again, seldom = (train(strategy, servers, every=every) for every in (4, 4, 48))
    assert often == again != train(strategy, servers, seed=2, every=4)
    assert often[0] == seldom[0] and often[12] == seldom[1] and often[-1] == seldom[-1]


@pytest.mark.parametrize(("strategy", "servers"), STRATEGIES)
def test_what_is_looked_at_is_the_consensus(training, strategy, servers):
    course = training.Course(0, 1)

    def body(comm):
        torch.manual_seed(3)
        cls = strategies.load(strategy)
        options = {"servers": servers} if servers else {}
        trained = cls(cls.Config(**options), comm, FlatModel(training.module(4)))
        trained.model.params[0].add_(comm.rank)
        course.enter(trained)
        comm.barrier()
        seen = course._consensus(trained)
        assert np.allclose(seen, trained.consensus()[0][0], atol=1e-6)
        assert training.test_loss(seen) > 0
        trained.close()

    run_virtual(body, 4 + servers)


def test_a_slow_worker_takes_fewer_gradients_but_where_all_wait(train):
    class OneSlow(ComputeModel):
        def sample(self, rank, generator):
            return 0.4 if rank == 2 else 0.1

    end_s = {name: train(name, compute=OneSlow())[-1][1] for name in ("allreduce", "gossip_pull")}
    assert end_s["allreduce"] == pytest.approx(96 / 3 * 0.4)
    assert end_s["gossip_pull"] == pytest.approx(96 / (10 + 10 + 2.5), abs=0.4), "gradients per second of all three"


def test_the_gradient_is_autograds(training):
    torch.manual_seed(0)
    model = FlatModel(training.module(8))
    perceptron = training.Perceptron(model, rate=0.1, momentum=0.5)
    x, y, *_ = training.digits()
    perceptron.gradient(x[:5], y[:5])
    written = model.grads[0].clone()
    model.grads[0].zero_()
    nn.functional.cross_entropy(model.module(torch.from_numpy(x[:5])), torch.from_numpy(y[:5])).backward()
    assert torch.allclose(written, model.grads[0], atol=1e-6)

    reference = training.module(8)
    reference.load_state_dict(model.module.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5)
    for parameter, own in zip(reference.parameters(), model.module.parameters()):
        parameter.grad = own.grad.clone()
    for _ in range(2):
        perceptron.update()
        optimizer.step()
    for parameter, own in zip(reference.parameters(), model.module.parameters()):
        assert torch.allclose(parameter, own, atol=1e-6)


def test_the_loss_is_torchs_and_bounded(training):
    torch.manual_seed(0)
    module = training.module(8)
    *_, x, y = training.digits()
    flat = torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).numpy()
    assert len(flat) * 4 == training.model_bytes(8)
    expected = nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y)).item()
    assert training.test_loss(flat) == pytest.approx(expected, rel=1e-5)
    with np.errstate(all="ignore"):
        assert training.test_loss(flat * np.float32("nan")) == training.DIVERGED
        assert training.test_loss(flat * np.float32(1e9)) == training.DIVERGED


def test_some_steps_are_slow():
    draws = [SlowSteps(Constant(1.0), 0.25, 4.0).sample(0, np.random.default_rng(seed)) for seed in range(400)]
    assert set(draws) == {1.0, 4.0} and 60 < draws.count(4.0) < 140


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([2.0, 1.0, 0.5], 1.5), ([2.0, 0.8, 0.9], 1.0), ([2.0, 1.5, 1.2], math.inf), ([2.0, 2.0, 0.8], 2.0)],
)
def test_time_to_the_target(study, losses, expected):
    curve = [(i, float(i), loss) for i, loss in enumerate(losses)]
    assert study.time_to(curve, 0.8 if expected != 1.5 else 0.75) == expected


# --- rates and verdicts -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("power", [-9, -5, 2])
def test_the_best_rate_is_found_wherever_it_lies(study, power):
    made = []

    class Groups:
        def measure(self, group, seeds) -> list[EndedRun]:
            rate = load_settings({}, None, group.settings)["optimizer"]["lr"]
            made.extend((rate, seed) for seed in seeds)
            soon, low = (abs(math.log2(rate) - at) for at in (power, power - 3))
            return [curved([(0, 0.0, 2.0), (1, 1.0 + soon, 0.3), (2, 90.0 + 3 * low, 0.1)]) for _ in seeds]

    grid, group = study.Grid(), study.RunGroup("gossip_pull", 4)
    found = study.tune(Groups(), grid, group)
    assert found["best"] == {0.35: power, 0.2: power - 3}, "each target has its own"
    assert set(range(power - 4, power + 2)) <= set(found["tried"])
    assert len(made) == len(set(made)) == len(found["tried"]) * grid.tuning_seeds, "each once per seed"
    rows = study.rate_rows(group, found)
    assert [(row["target"], row["rate"]) for row in rows if row[""]] == [(0.35, 2.0**power), (0.2, 2.0 ** (power - 3))]


def test_where_no_rate_reaches_the_target_the_lowest_loss_counts(study):
    def curves(seconds, loss):
        return [[(0, 0.0, 2.0), (1, seconds, min(1.0, loss)), (2, 99.0, loss)]]

    def best(tried):
        return min(tried, key=lambda power: study.merit(tried[power], 0.5))

    tried = {-5: curves(9.0, 0.9), -4: curves(9.0, 0.6), -3: curves(9.0, 100.0)}
    assert best(tried) == -4
    assert best({**tried, -2: curves(50.0, 0.45), -1: curves(90.0, 0.3)}) == -2


def curved(looks) -> EndedRun:
    """A run with looks of (gradients, seconds, loss)."""
    return ended([Evaluation(taken, 0, 2 * taken, at_s, {"loss": loss}) for taken, at_s, loss in looks])


def made_up(study, seconds, spread):
    """Results that reach the target after seconds(group), and whose final losses differ by spread(group)."""
    results = study.Results(study.Grid(seeds=3), study.STRAGGLERS, 0.35, {})
    for group in results.grid.groups():
        results.rates[group] = 0.1
        results.runs[group] = [
            curved([(0, 0.0, 2.0), (1, s, results.target), (2, 999.0, 0.1 + spread(group) * seed)])
            for seed, s in enumerate([seconds(group)] * 3)
        ]
    return results


def verdicts(study, seconds, spread) -> list[str]:
    claims = study.claims([made_up(study, seconds, spread)])
    texts = [text.replace("\n", " ") for text in paragraphs(claims)]
    return [next(v for v in ("IN PART", "NOT SHOWN", "SHOWN") if f"{v}. " in text) for text in texts]


def as_published(group) -> float:
    """Asynchronous methods are the faster ones on up to 32 workers, all-reduce on more."""
    return {True: 400, False: 300 if group.workers <= 32 else 500}[group.strategy == "allreduce"] / group.workers


def test_verdicts_follow_the_results(study):
    found = verdicts(study, as_published, lambda group: 0.01 * (group.strategy != "allreduce"))
    assert found == ["SHOWN"] * 3
    found = verdicts(study, lambda group: 1 / as_published(group), lambda group: 0.01 * (group.strategy == "allreduce"))
    assert found == ["NOT SHOWN"] * 3

    def seconds(group):
        return as_published(group) / (2 if (group.strategy, group.workers) == ("gossip_push", 128) else 1)

    found = verdicts(study, seconds, lambda group: 0.01 * (group.workers > 8) * (group.strategy == "allreduce"))
    assert found == ["SHOWN", "IN PART", "IN PART"], "one strategy is not behind"


def test_a_run_that_does_not_reach_the_target_is_told(study):
    results = made_up(study, as_published, lambda group: 0.0)
    group = study.RunGroup("easgd", 128, 1)
    results.runs[group][1] = curved([(0, 0.0, 2.0), (2, 999.0, 1.9)])
    (row,) = [row for row in results.rows() if (row["strategy"], row["p"]) == ("easgd", 128)]
    assert row["reached"] == "2/3"
    assert row["s to target"] == row["faster than on 4"] == row["gradients to target"] == ""
    assert results.ratio(group, study.RunGroup("allreduce", 128)) is None
    whole = [row for row in results.rows() if (row["strategy"], row["p"]) == ("gossip_pull", 32)]
    assert [row["faster than on 4"] for row in whole] == ["8.0 ± 0.0"]
