"""The list of a comparison's runs: names, controls, order, what is left out, what is refused. No run is made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcdist.config.merge import load
from hpcdist.errors import ConfigError
from hpcdist.tools.compare.experiment import Comparison, Sweep, read_budget, read_strategies
from hpcdist.tools.compare.plan import groups, plan, read_strategy, title

DECLARED = Comparison(
    job="jobs/digits.py",
    job_sha256="0",
    strategies=("allreduce", "softsync:splits=4"),
    ranks=(1, 4),
    seeds=3,
    metric="accuracy",
    budget={"samples": 1000},
    evaluations=20,
    settings=("optimizer.lr=0.1",),
)


def planned(declared=DECLARED, rates=None):
    return plan(declared, groups(declared, 16), rates)


def test_strategies_are_split_where_an_option_is_the_former_ones():
    for text, found in {
        "allreduce": ["allreduce"],
        "a, b:x=1,y=2,c": ["a", "b:x=1,y=2", "c"],
        "a:x={name = 'dgc', ratio = 0.1},b": ["a:x={name = 'dgc', ratio = 0.1}", "b"],
        "a:x=[1, 2],y.z=3,mine.py:Mine:k=v": ["a:x=[1, 2],y.z=3", "mine.py:Mine:k=v"],
    }.items():
        assert read_strategies([text]) == tuple(found)
    for text, message in {
        "splits=4": "must be names, each with options as NAME:KEY=VALUE,KEY=VALUE; got 'splits=4' first",
        "softsync,splits=4": "got 'splits=4' after softsync. Put a colon",
        "a,,b": "must be names between commas; got 'a,,b'. Remove the empty one",
    }.items():
        with pytest.raises(ConfigError, match=message):
            read_strategies([text])


def test_a_strategy_has_options_and_a_title():
    assert read_strategy("mine.py:Mine:k=v,l=2") == ("mine.py:Mine", ("k=v", "l=2"))
    assert read_strategy("mine.py:Mine") == ("mine.py:Mine", ())
    assert title("softsync:splits=4,modulation=none") == "softsync (splits 4, modulation none)"
    assert title("mine.py:Mine") == "mine-Mine"


OF_A_COMPARISON = """
softsync-splits=4-r4-s0: softsync (splits 4): strategy=softsync strategy.splits=4
softsync-splits=4-r1-s0: softsync (splits 4): strategy=softsync strategy.splits=4
ddp-r4-s0: ddp:
ddp-r1-s0: ddp:
allreduce-r1-s0: allreduce: strategy=allreduce
allreduce-r4-s0: allreduce: strategy=allreduce
serial-batch=4-averaged-r1-s0: serial, batch 4, averaged iterates: strategy=allreduce batch_size=4 average_iterates=true
serial-batch=4-r1-s0: serial, batch 4: strategy=allreduce batch_size=4
"""
OF_A_SIMULATION = """
serial-batch=2-r1-s0: serial, batch 2: strategy=allreduce batch_size=2
sgp-r2-s0: sgp: strategy=sgp
serial-r1-s0: one rank: strategy=allreduce
serial-batch=2-averaged-r1-s0: serial, batch 2, averaged iterates: strategy=allreduce batch_size=2 average_iterates=true
sgp-r2-s1: sgp: strategy=sgp
serial-r1-s1: one rank: strategy=allreduce
serial-batch=2-averaged-r1-s1: serial, batch 2, averaged iterates: strategy=allreduce batch_size=2 average_iterates=true
serial-batch=2-r1-s1: serial, batch 2: strategy=allreduce batch_size=2
"""
OF_A_SWEEP = """
trial-000-r2-s0: trial 0: epochs=none budget.samples=90 eval_every_samples=4 strategy=allreduce
trial-000-r2-s1: trial 0: epochs=none budget.samples=90 eval_every_samples=4 strategy=allreduce
trial-001-r2-s0: trial 1: epochs=none budget.samples=90 eval_every_samples=4 strategy=allreduce
trial-001-r2-s1: trial 1: epochs=none budget.samples=90 eval_every_samples=4 strategy=allreduce
"""
BARE = replace(DECLARED, budget={}, settings=())
TRIED = Sweep(
    job="a.py", metric="loss", over=("batch_size=8,16",), sampler="grid", ranks=2, seeds=2, budget={"samples": 90}
)


@pytest.mark.parametrize(
    ("experiment", "table"),
    [
        (replace(BARE, seeds=1, baselines=("ddp",)), OF_A_COMPARISON),
        (replace(BARE, seeds=2, strategies=("sgp",), ranks=(2,), virtual={}), OF_A_SIMULATION),
        (TRIED, OF_A_SWEEP),
    ],
    ids=["comparison", "simulation", "sweep"],
)
def test_the_plan_as_a_table(experiment, table):
    """Folder, name and settings of each run, but for the seed, which the folder has.

    A comparison has each strategy and baseline on each number of ranks, and one process with the batch of all of them;
    a simulation one rank, too, which speed-ups are over. Settings of a sweep's trials are drawn when they begin.
    """
    lines = []
    for run in plan(experiment, groups(experiment, 1)):
        assert run.overrides[-1] == f"seed={run.seed}" and run.by_folder == isinstance(experiment, Sweep)
        lines.append(f"{run.folder.removeprefix('runs/')}: {run.name}: {' '.join(run.overrides[:-1])}".strip())
    assert lines == table.split("\n")[1:-1]


def test_a_run_holds_all_its_settings():
    (run,) = [run for run in planned() if run.folder == "runs/softsync-splits=4-r4-s2"]
    assert (run.name, run.kind, run.ranks, run.seed) == ("softsync (splits 4)", "strategy", 4, 2)
    settings = load({"epochs": 16, "strategy": "hardsync"}, None, run.overrides)
    assert settings["strategy"] == {"name": "softsync", "splits": 4}
    assert settings["budget"] == {"samples": 1000} and settings["epochs"] == "none"
    assert (settings["seed"], settings["eval_every_samples"], settings["optimizer"]) == (2, 50, {"lr": 0.1})


def test_a_budget_of_steps_is_evaluated_by_the_samples_of_all_ranks_and_the_users_period_wins():
    declared = replace(DECLARED, budget={"steps": 100})
    every = {group.ranks: load({}, None, group.run(declared, 0).overrides) for group in groups(declared, 16)[:4]}
    assert {ranks: found["eval_every_samples"] for ranks, found in every.items()} == {1: 80, 4: 320}
    declared = replace(declared, settings=("eval_every_samples=7",))
    assert load({}, None, groups(declared, 16)[0].run(declared, 0).overrides)["eval_every_samples"] == 7
    declared = replace(DECLARED, budget={})
    assert set(load({}, None, groups(declared, 16)[0].run(declared, 0).overrides)) == {"optimizer", "seed", "strategy"}


def test_the_order_is_random_within_each_seed_and_always_the_same():
    order = planned()
    assert order == planned() and len(order) == 18 == len({run.folder for run in order})
    by_seed = [{run.name for run in order[i : i + 6]} for i in (0, 6, 12)]
    assert [run.seed for run in order] == sorted(run.seed for run in order) and by_seed[0] == by_seed[1] == by_seed[2]
    assert [run.name for run in order[:6]] != [run.name for run in order[6:12]]


def test_chosen_rates_are_those_of_the_runs_and_controls_share_theirs():
    found = planned(rates={("softsync:splits=4", 4): 0.5, ("serial, batch 64", 1): 0.25})
    rates = {(run.name, run.ranks): load({}, None, run.overrides)["optimizer"]["lr"] for run in found}
    assert rates.pop(("softsync (splits 4)", 4)) == 0.5
    assert {name for (name, _), rate in rates.items() if rate == 0.25} == {
        "serial, batch 64",
        "serial, batch 64, averaged iterates",
    }


def test_budgets_are_read():
    assert read_budget([]) == {}
    assert read_budget(["samples=2000,seconds=1.5"]) == {"samples": 2000, "seconds": 1.5}
    for wrong in ("epochs=2", "samples", "steps=-1", "seconds=nan", "samples=many"):
        with pytest.raises(ConfigError, match="--budget must be samples=N, steps=N or seconds=N, with N above 0"):
            read_budget([wrong])
