"""What a report says in its headline of tables made by hand, and that all of its parts say the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from harness.cases import each
from hpcdist.tools import cli
from hpcdist.tools.report import table, write
from hpcdist.tools.report.analysis import Analysis, analyse
from hpcdist.tools.report.page import numbers
from hpcdist.tools.report.results import read_jobs
from hpcdist.tools.report.verdict import judge
from hpcdist.tools.statistics import MIN_SEEDS
from study import evidence

NOISE = (1.0, 1.01, 0.99, 1.02, 1.0)


def kind(name: str, ends: tuple[float, ...], seconds: float = 12.0, first: int = 0, **more: object) -> list[dict]:
    """Runs of one kind: a seed for each accuracy at the end, at which the target of 97 % may be met; about as long."""
    return [
        {"name": name, "seed": first + seed, "accuracy": (0.5, end), "seconds": seconds * NOISE[seed], **more}
        for seed, end in enumerate(ends)
    ]


def even(runs: list[dict], seconds: float) -> list[dict]:
    return [{**run, "seconds": seconds} for run in runs]


ONE = {"ranks": 1, "batch": 20}
SERIAL = {**ONE, "kind": "serial"}
FIVE, THREE, TWO = (0.98, 0.981, 0.979, 0.98, 0.982), (0.98, 0.981, 0.979), (0.98, 0.981)
REFERENCE = kind("allreduce", FIVE)
NOISY = [{**run, "seconds": seconds} for run, seconds in zip(REFERENCE, (9.0, 14.0, 11.0, 16.0, 10.0))]
NO_NOISE = "no difference from `allreduce` can be told from noise"
NO_OTHER = "no other difference from `allreduce` can be told from noise"
NONE = NO_OTHER.replace("other ", "")
FEW = "nothing here is a result"
# Runs; what the comparison says of itself; parts of the headline, and what must not be in it.
TABLES: dict[str, tuple[list[dict], dict, tuple[str, ...], tuple[str, ...]]] = {
    "one misses the target in all seeds": (
        kind("allreduce", THREE) + kind("softsync", (0.914, 0.915, 0.913)), {},
        ("`allreduce` reached 97 % in all seeds; `softsync` in 0 of 3 seeds (final accuracy 91.4 %)", "did"),
        (NO_NOISE,),
    ),
    "the reference misses it": (
        kind("allreduce", (0.9, 0.91, 0.92)) + kind("softsync", THREE), {},
        ("`softsync` reached 97 % in all seeds; `allreduce` in 0 of 3 seeds (final accuracy 91 %).",),
        ("Nothing beats",),
    ),
    "one misses it in some seeds": (
        kind("allreduce", THREE) + kind("softsync", (0.969, 0.981, 0.979)), {},
        ("`allreduce` reached 97 % in all seeds; `softsync` in 2 of 3 seeds (final accuracy 97.63 %).", NO_OTHER), (),
    ),
    "all miss it": (
        kind("allreduce", (0.9, 0.91, 0.92)) + kind("softsync", (0.91, 0.9, 0.92)), {},
        ("No run reached 97 %.", NONE), ("in all seeds",),
    ),
    "many miss it": (
        [run for i in range(6) for run in kind(f"s{i}", (0.9, 0.91, 0.92))] + kind("allreduce", THREE), {},
        ("`allreduce` reached 97 % in all seeds; 6 groups of runs did not.", "all groups compared"), (),
    ),
    "one rank beats eight": (
        kind("allreduce", (0.97, 0.971), 12.0, **ONE) + kind("allreduce", (0.86, 0.861), 12.0, ranks=8), {},
        ("`allreduce` on 1 rank was the first of all that reached 97 % (final accuracy 97.05 %); `allreduce` on 8 "
         "ranks did in 0 of 2 seeds (final accuracy 86.05 %).",), ("interval", "nothing to compare"),
    ),
    "one process beats all": (
        REFERENCE + kind("softsync", FIVE, 8.0) + kind("serial", FIVE, 4.0, **SERIAL), {},
        ("`serial` on 1 rank was the first of all that reached 97 %: 2 times sooner", "`softsync` reached"), (),
    ),
    "one process beats what misses the target": (
        kind("allreduce", (0.9, 0.91, 0.92)) + kind("serial", THREE, 40.0, **SERIAL), {},
        ("`serial` on 1 rank was the first of all that reached 97 %", "`allreduce` on 2 ranks did in 0 of 3 seeds"), (),
    ),
    "one process is slower": (
        REFERENCE + kind("softsync", FIVE, 8.0) + kind("serial", FIVE, 40.0, **SERIAL), {},
        ("`softsync` reached 97 % 1.5 times sooner",), ("serial",),
    ),
    "one process is hardly faster": (
        REFERENCE + kind("softsync", FIVE) + kind("serial", FIVE, 11.6, **SERIAL), {}, (NO_NOISE,), ("serial",),
    ),
    "one seed": (
        REFERENCE[:1] + kind("softsync", (0.98,), 6.0), {},
        ("Each comparison has one seed", FEW, "`softsync` was the fastest"), ("interval",),
    ),
    "two seeds": (
        REFERENCE[:2] + kind("softsync", TWO, 6.0), {}, ("Each comparison has fewer than 3 seeds", FEW), ("interval",),
    ),
    "two seeds that differ by the same": (
        kind("allreduce", (0.972, 0.974)) + kind("softsync", (0.9803, 0.9823)), {},
        ("Each comparison has fewer than 3 seeds", FEW), ("interval", "+0.83"),
    ),
    "two seeds against five": (
        REFERENCE + kind("softsync", TWO, 6.0), {}, ("Each comparison has fewer than 3 seeds", FEW), ("interval",),
    ),
    "two seeds, of which one process is first": (
        REFERENCE[:2] + kind("softsync", TWO, 8.0) + kind("serial", TWO, 4.0, **SERIAL), {},
        ("`serial` on 1 rank was the first of all that reached 97 %: 2 times sooner (fewer than 3 seeds", FEW),
        ("interval",),
    ),
    "ties": (
        NOISY + [{**run, "name": "softsync"} for run in reversed(NOISY)], {}, (NO_NOISE, "With 5 seeds"), ("sooner",),
    ),
    "equal values": (
        even(kind("allreduce", (0.98,) * 3), 12.0) + even(kind("softsync", (0.98,) * 3), 12.0), {},
        ("With 3 seeds", NO_NOISE, "in time or in accuracy."), (),
    ),
    "times that a rule computes": (
        even(kind("allreduce", (0.98,) * 3), 12.0) + even(kind("softsync", (0.98,) * 3), 6.0), {},
        ("`softsync` reached 97 % 2 times sooner (95 % interval 2 to 2) than `allreduce`", "the same seed by seed"), (),
    ),
    "a ratio that is small": (
        REFERENCE + [{**run, "name": "softsync", "seconds": run["seconds"] / 1.03 * (1 + 0.001 * i)}
                     for i, run in enumerate(REFERENCE)], {},
        ("Nothing reached 97 % 1.1 times sooner or later than `allreduce`.", NO_OTHER), ("1.03",),
    ),
    "a ratio that is small, and worse": (
        REFERENCE + [{**run, "name": "softsync", "seconds": run["seconds"] / 1.03 * (1 + 0.001 * i),
                      "accuracy": (0.5, 0.971)} for i, run in enumerate(REFERENCE)], {},
        ("Nothing beats `allreduce`",), ("1.03", "depends"),
    ),
    "a winner": (
        REFERENCE + kind("softsync", FIVE, 8.0), {}, ("`softsync` reached 97 % 1.5 times sooner (95",), ("Nothing",),
    ),
    "a loser": (
        REFERENCE + kind("softsync", FIVE, 24.0), {}, ("Nothing beats `allreduce` (final accuracy 98.04 %): all",), (),
    ),
    "a baseline that wins": (REFERENCE + kind("ddp", FIVE, 8.0, kind="baseline"), {},
                             ("A baseline wins. The baseline `ddp` reached",), ()),
    "faster and worse": (
        REFERENCE + kind("softsync", (0.971, 0.972, 0.97, 0.971, 0.973), 6.0), {},
        ("It depends: `softsync` reached 97 % 2 times sooner", "a difference of −0.9 points (95 % interval"), (),
    ),
    "other seeds": (
        REFERENCE + kind("softsync", FIVE, 6.0, first=10), {}, ("`softsync` reached 97 % 2 times sooner",), (),
    ),
    "missing runs": (
        REFERENCE + [{**run, "made": False} for run in kind("softsync", FIVE)], {},
        ("There is nothing to compare: only runs of `allreduce` have ended.",), (NO_NOISE,),
    ),
    "interrupted runs": (
        REFERENCE + kind("softsync", FIVE[:3], 6.0) + [{"name": "softsync", "seed": i, "ends": False} for i in (3, 4)],
        {}, ("`allreduce` reached 97 % in all seeds; `softsync` in 3 of 5 seeds", NO_OTHER), ("2 times",),
    ),
    "runs that have not begun": (
        REFERENCE[:3] + [{**run, "made": False} for run in REFERENCE[3:]] + kind("softsync", (0.5,) * 3), {},
        ("`allreduce` reached 97 % in all runs so far; `softsync` in 0 of 3 seeds",), ("all seeds",),
    ),
    "no run that ended": ([{"name": "allreduce", "ends": False}], {}, ("No run has ended: there is nothing to",), ()),
    "the reference alone": (REFERENCE, {}, ("There is nothing to compare",), ()),
    "shares of one": (
        kind("allreduce", (1.0,) * 3) + kind("softsync", (1.0, 0.99, 1.0), 6.0), {},
        ("`softsync` reached 97 % 2 times",), (),
    ),
    "shares of zero": (
        kind("allreduce", (0.0,) * 3) + kind("softsync", (0.0, 0.0, 0.01)), {}, ("No run reached 97 %.", NONE), (),
    ),
    "no target": (
        REFERENCE + kind("softsync", FIVE, 6.0), {"target": None},
        ("trained on as many samples 2 times sooner (95",), ("97 %",),
    ),
    "a loss": (
        REFERENCE + kind("softsync", (0.96, 0.961, 0.959, 0.96, 0.962)),
        {"metric": "loss", "higher_is_better": False, "target": 0.03},
        ("`allreduce` reached 0.03 in all seeds; `softsync` in 0 of 5 seeds (final loss 0.0396)", "did"), (),
    ),
    "a run that diverges": (
        REFERENCE + kind("softsync", (math.nan, *FIVE[1:]), 6.0), {},
        ("`allreduce` reached 97 % in all seeds; `softsync` in 4 of 5 seeds",), (NO_NOISE,),
    ),
    "virtual beside real ranks": (
        REFERENCE + kind("allreduce", FIVE, 3.0, virtual={"network": {}}) + kind("softsync", FIVE, 8.0), {},
        ("`softsync` on 2 ranks reached 97 % 1.5 times sooner",), ("virtual",),
    ),
}  # fmt: skip


def judged(folder: Path, name: str) -> Analysis:
    runs, said, _, _ = TABLES[name]
    evidence.write_comparison(folder, runs, **said)
    (job,) = read_jobs([folder])
    return analyse(job)


def test_a_headline_begins_with_the_caveat_and_says_each_fact_once(tmp_path):
    runs = kind("allreduce", TWO, 4.0, **ONE) + kind("softsync", TWO, 6.0, **ONE)
    evidence.write_comparison(tmp_path, runs + kind("allreduce", (0.98, 0.9)) + kind("softsync", (0.9, 0.91)))
    (job,) = read_jobs([tmp_path])
    assert judge(analyse(job)).headline == (
        "Each comparison has fewer than 3 seeds, too few to estimate noise: nothing here is a result. `allreduce` on 1 "
        "rank was the first of all that reached 97 % (final accuracy 98.05 %); `allreduce` on 2 ranks did in 1 of 2 "
        "seeds (final accuracy 94 %). `softsync` on 1 rank reached 97 % in all seeds; `softsync` on 2 ranks in 0 of 2 "
        "seeds (final accuracy 90.5 %)."
    )


def shared(folder: Path) -> Path:
    """On one rank softsync shares the run of allreduce."""
    runs = [{"name": name, "ranks": ranks, "strategy": name, "made": (name, ranks) != ("softsync", 1)}
            for name in ("allreduce", "softsync") for ranks in (1, 2)]  # fmt: skip
    evidence.write_comparison(folder, runs)
    plan = json.loads((folder / "comparison.json").read_text())
    for run in plan["runs"]:
        run["set"] = [f"strategy={run['name']}"]
    plan["runs"][2] |= {"folder": "runs/0", "set": ["strategy=allreduce"]}
    (folder / "comparison.json").write_text(json.dumps(plan))
    return folder


def test_a_run_that_groups_share_counts_once_and_is_chosen_for_its_own_group(tmp_path, capsys):
    folder = shared(tmp_path / "a")
    assert "3 of 3 ended" in write(folder).read_text()

    def chosen(condition: str) -> list[tuple[str, int]]:
        assert cli._run(["report", str(folder), "--where", condition, "--json"], True) == 0
        return [(row["name"], row["ranks"]) for row in json.loads(capsys.readouterr().out)[0]["rows"]]

    assert chosen("strategy=allreduce") == [("allreduce", 1), ("allreduce", 2)]
    assert chosen("comparison=a") == [("allreduce", 1), ("softsync", 1), ("allreduce", 2), ("softsync", 2)]


def test_serial_controls_stay_beside_the_runs_that_are_chosen(tmp_path, capsys):
    controls = [{**SERIAL, "name": "serial", "seed": seed} for seed in (0, 1, 2)]
    chosen = [{"name": "softsync", "strategy": "softsync", "seed": seed} for seed in (0, 1)]
    evidence.write_comparison(tmp_path, [*kind("allreduce", THREE), *chosen, *controls])
    for condition, names in (
        ("strategy=softsync", {"serial": 2, "softsync": 2}),
        ("strategy=allreduce", {"serial": 3, "allreduce": 3}),
        ("ranks=2", {"serial": 3, "allreduce": 3, "softsync": 2}),
    ):
        assert cli._run(["report", str(tmp_path), "--where", condition, "--json"], True) == 0
        rows = json.loads(capsys.readouterr().out)[0]["rows"]
        assert {row["name"]: row["runs"] for row in rows} == names


def test_a_target_in_percent_is_refused_where_the_metric_is_a_share(tmp_path, capsys):
    evidence.write_run(tmp_path / "a")
    assert cli._run(["report", str(tmp_path), "--target", "accuracy=95"], True) == 1
    said = "--target of accuracy must be a share from 0 to 1; got 95. Write 95 % as accuracy=0.95."
    assert said in capsys.readouterr().err


@each("name", TABLES)
def test_the_headline_of(tmp_path, capsys, name):
    analysis, (_, _, parts, others) = judged(tmp_path / name, name), TABLES[name]
    verdict = judge(analysis)
    said = verdict.headline
    assert "Nothing differs" not in said
    assert [part for part in parts if part not in said] == [] and [part for part in others if part in said] == [], said

    # The same sentence everywhere.
    assert numbers(analysis, verdict)["verdict"].headline == said
    shown = table.tables([analysis])
    assert table.as_data(shown)[0]["verdict"] == said
    table.show(shown)
    assert said in capsys.readouterr().out or len(analysis.groups) == 1

    # No claim below three seeds, no share outside of 0 and 1.
    for one in analysis.contrasts:
        few = min(len(one.group.ended), len(one.reference.ended)) < MIN_SEEDS
        assert not few or (math.isnan(one.p_speedup) and math.isnan(one.p_difference) and one.outcome() == "unknown")
    for group in analysis.groups:
        accuracy = group.mean("metric.accuracy")
        assert accuracy is None or not (accuracy.low < 0 or accuracy.high > 1)
        assert accuracy is None or math.isnan(accuracy.low) == (len(group["metric.accuracy"]) < MIN_SEEDS)


def test_times_that_only_rounding_tells_apart_are_the_same(tmp_path):
    runs = even(kind("allreduce", (0.98, 0.981, 0.979)), 0.3) + even(kind("softsync", (0.98, 0.979, 0.979)), 0.1 + 0.2)
    evidence.write_comparison(tmp_path, runs)
    (job,) = read_jobs([tmp_path])
    (contrast,) = (found := analyse(job)).contrasts
    assert (contrast.speedup.mean, contrast.speedup.p) == (1.0, 1.0) and contrast.outcome() == "tied"
    assert judge(found).reasons[-1].startswith("`softsync` reached 97 % in the same time as `allreduce`; final")


def test_the_page_and_its_numbers_say_the_headline(tmp_path):
    said = judge(judged(tmp_path, "one rank beats eight")).headline
    page = write(tmp_path)
    assert said.replace("`allreduce`", "<code>allreduce</code>") in page.read_text()
    assert said in (page.parent / "runs.json").read_text()


def test_equal_differences_are_doubted_where_the_test_set_is_known(tmp_path):
    """Three seeds that differ by one sample of 120: +0.83 points each time."""
    evidence.write_comparison(
        tmp_path, even(kind("allreduce", (117 / 120,) * 3), 12.0) + even(kind("softsync", (118 / 120,) * 3), 12.0)
    )
    found = {}
    for tested in (None, 120):
        (job,) = read_jobs([tmp_path])
        for one in job.runs:
            one.run.summary.test_samples = tested
        found[tested] = analyse(job)
    assert found[None].contrasts[0].difference.p == 0.0 and found[None].groups[0].final_mean.half == 0
    (contrast,) = found[120].contrasts
    assert contrast.difference.low < 0 < contrast.difference.high and contrast.difference.p == pytest.approx(
        0.41, abs=0.01
    )
    assert contrast.outcome() == "tied" and found[120].groups[0].final_mean.half > 0.02
