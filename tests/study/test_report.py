"""A report: what is read, computed and said of runs made by hand, and what is written."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest

import hpcdist
from harness import browser
from harness.cases import each
from hpcdist import records
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import Evaluation, RecordWriter, StepRecord, append_evaluation, record_path
from hpcdist.registry import catalogue
from hpcdist.tools.machine import timing_warnings
from hpcdist.tools.report import wording, write
from hpcdist.tools.report.analysis import Analysis, analyse
from hpcdist.tools.report.figures.base import COLOURS, ReportTable, line_styles
from hpcdist.tools.report.figures.time import STYLES
from hpcdist.tools.report.results import JobRuns, read_jobs
from hpcdist.tools.report.verdict import judge
from study import evidence

DARK, LIGHT = "#0f1419", "#ffffff"
NOISE = (1.0, 1.3, 0.8, 1.1, 0.9)


def only_job(folder: Path, target: tuple[str, float] | None = None) -> JobRuns:
    (found,) = read_jobs([folder], target)
    return found


def found_in(folder: Path, runs: list[dict], **said: object):
    evidence.write_comparison(folder, runs, **said)
    return analyse(only_job(folder))


def versus(times: float, noise=(1.0, 1.01, 0.99, 1.02, 1.0), accuracy=(0.0,) * 5, **other: object) -> list[dict]:
    """Runs of all-reduce in 12 s, and of another strategy so many `times` sooner, with noise, on five seeds."""
    runs = []
    for seed, (factor, more) in enumerate(zip(noise, accuracy)):
        runs.append({"name": "allreduce", "seed": seed})
        values = (0.5, 0.9, 0.97, 0.98 + more)
        runs.append(
            {"name": "softsync", "strategy": "softsync", "seed": seed, "seconds": 12 / times * factor,
             "accuracy": values, **other}
        )  # fmt: skip
    return runs


def tables(section: str, findings: Analysis) -> list[ReportTable]:
    return [part for part in catalogue("figures").load(section).draw(findings) if isinstance(part, ReportTable)]


# --- reading ----------------------------------------------------------------------------------------------------------
def test_a_run_is_read_with_what_it_had_spent(tmp_path):
    evidence.write_run(tmp_path / "a", ranks=2, seconds=12.0)
    (run,) = only_job(tmp_path).runs
    assert run.curves.evaluations["samples"].tolist() == [60, 120, 180, 240]
    assert run.curves.evaluations["seconds"].tolist() == [3.0, 6.0, 9.0, 12.0]
    assert run.curves.evaluations["bytes"].tolist() == [6000, 12000, 18000, 24000], "1000 per step and rank"
    assert run.curves.losses["loss"].tolist() == pytest.approx([2.0 / step for step in range(1, 13)])
    assert run.curves.losses["seconds"].tolist() == pytest.approx(list(range(1, 13)))
    assert run.curves.losses["samples"].iloc[-1] == 240 and run.curves.losses["bytes"].iloc[5] == 12000
    assert run.curves.times.loc[1].to_dict() == pytest.approx({"computing": 6.0, "communicating": 3.0, "waiting": 1.5})


def test_servers_and_ranks_that_diverge_have_their_place_in_curves(tmp_path):
    with RecordWriter(record_path(tmp_path, 0)) as server:
        for step in range(1, 241):
            server.write(StepRecord(step, bytes_sent=10, waiting_s=0.01))
    for rank in (1, 2):
        with RecordWriter(record_path(tmp_path, rank)) as worker:
            for step in range(1, 121):
                loss = math.nan if rank == 2 and step > 60 else 1.0 * rank
                worker.write(StepRecord(step, samples=10, loss=loss, bytes_fetched=5))
    append_evaluation(tmp_path, Evaluation(60, 1, 1200, 6.0, {"accuracy": 0.5}))
    append_evaluation(tmp_path, Evaluation(120, 2, 2400, 12.0, {"accuracy": 0.75}))
    given = {"strategy": "softsync", "ranks": 3, "seed": 0, "wall_s": 12.0, "sha256": "0" * 64}
    records.write_summary(
        tmp_path, records.summarise(records.read_records(tmp_path), metrics={"accuracy": 0.75}, **given)
    )
    (run,) = only_job(tmp_path).runs
    assert run.curves.evaluations["bytes"].tolist() == [1200 + 600, 2400 + 1200], "a server is as far as its workers"
    assert len(run.curves.losses) == 60 and run.curves.losses["loss"].tolist() == [1.5] * 30 + [1.0] * 30
    assert run.curves.losses[["samples", "seconds"]].iloc[-1].tolist() == [2400, 12.0], "samples without a loss count"
    assert run.curves.times["waiting"].tolist() == pytest.approx([2.4, 0.0, 0.0]) and run.run.batch is None


def test_bytes_of_a_rank_that_is_there_for_a_part_of_the_run_only_are_of_that_part(tmp_path):
    """It died, or the run continued on fewer ranks."""
    evidence.write_run(tmp_path / "a", ranks=2)
    with RecordWriter(record_path(tmp_path / "a", 2)) as worker:
        for step in range(1, 7):
            worker.write(StepRecord(step, samples=10, loss=1.0, bytes_fetched=500))
    (run,) = only_job(tmp_path).runs
    assert run.curves.evaluations["bytes"].tolist() == [6000 + 1500, 12000 + 3000, 18000 + 3000, 24000 + 3000]


def test_runs_that_nobody_planned_are_grouped_by_what_differs(tmp_path):
    for seed in (0, 1):
        evidence.write_run(tmp_path / f"a{seed}", seed=seed)
        for splits in (1, 4):
            evidence.write_run(tmp_path / f"s{splits}{seed}", "softsync", seed=seed, splits=splits)
    evidence.write_run(tmp_path / "v", virtual={"network": {}})
    evidence.write_run(tmp_path / "b", ends=False)
    (tmp_path / "study" / "tuning").mkdir(parents=True)
    (tmp_path / "study" / "comparison.json").write_text("{}")
    evidence.write_run(tmp_path / "study" / "tuning" / "a", seed=1000)
    findings = analyse(only_job(tmp_path))
    assert {group.label: [run.seed for run in group.runs] for group in findings.groups} == {
        "allreduce, 2 ranks": [0, 1, 0],
        "allreduce, 2 ranks, virtual": [0],
        "softsync (splits 1), 2 ranks": [0, 1],
        "softsync (splits 4), 2 ranks": [0, 1],
    }
    assert findings.job.reference == "allreduce" and findings.job.metric == "accuracy"
    assert [one.run.failure for one in findings.failures] == ["has started and not ended"]
    assert [contrast.group.virtual for contrast in findings.contrasts] == [False, False], "never against real time"


def test_arguments_that_say_where_to_write_or_what_the_run_has_anyway_name_no_group(tmp_path):
    for number, strategy in enumerate(("allreduce", "gossip_pull", "softsync") * 2):
        own = {"algo": strategy, "rng": str(number), "out": f"{number}.json", "checkpoint-dir": f"kept/{number}"}
        own |= {"lr": "0.1" if number < 5 else "0.2", "save": str(10 * (number + 1) if strategy == "softsync" else 10)}
        evidence.write_run(tmp_path / str(number), strategy, seed=number, arguments=own)
    evidence.write_run(tmp_path / "6", arguments={"lr": "0.1"})
    names = Counter(result.name for result in only_job(tmp_path).runs)
    of_softsync = ["softsync (lr 0.1, save 30)", "softsync (lr 0.2, save 60)"]
    assert names == {"allreduce (lr 0.1, save 10)": 2, "allreduce (lr 0.1)": 1, "gossip_pull (lr 0.1, save 10)": 2,
                     **dict.fromkeys(of_softsync, 1)}  # fmt: skip


def test_paths_that_a_script_writes_under_names_of_its_own_name_no_group(tmp_path):
    def names(folder, *runs):
        for number, (seed, arguments) in enumerate(runs):
            evidence.write_run(tmp_path / folder / str(number), seed=seed, arguments=arguments)
        return Counter(result.name for result in only_job(tmp_path / folder).runs)

    each_seed = [(seed, {"final": f"{lr}-{seed}.pt", "lr": lr}) for lr in ("0.1", "0.2") for seed in range(3)]
    expected = {"allreduce (lr 0.1)": 3, "allreduce (lr 0.2)": 3}
    assert names("outputs", *each_seed) == expected
    assert names("some without", (3, {"lr": "0.1"}), *each_seed) == expected | {"allreduce (lr 0.1)": 4}
    assert names("started again", each_seed[0], *each_seed) == expected | {"allreduce (lr 0.1)": 4}
    read = [(seed, {"final": f"kept/{data}{seed}", "from": data}) for data in ("a.h5", "b.h5") for seed in (0, 1)]
    assert names("data", *read) == {"allreduce (from a.h5)": 2, "allreduce (from b.h5)": 2}
    one_seed = {"allreduce (final a.pt, from a.h5)": 1, "allreduce (final b.pt, from b.h5)": 1}
    assert names("one seed", *((0, {"final": f"{d}.pt", "from": f"{d}.h5"}) for d in "ab")) == one_seed
    numbers = [(seed, {"lr": f"0.{seed}", "by": f"x{seed}"}) for seed in (1, 2)]
    assert names("no paths", *numbers) == {"allreduce (lr 0.1, by x1)": 1, "allreduce (lr 0.2, by x2)": 1}


def test_each_job_has_names_and_a_reference_of_its_own(tmp_path):
    """Files of one path or of one content are one job; where two jobs' files have one name, their paths name them."""
    for i, splits in enumerate((1, 4)):
        evidence.write_run(tmp_path / f"a{i}", "softsync", splits=splits, job="jobs/digits.py")
    evidence.write_run(tmp_path / "b", "softsync", splits=1, batch=20, job="jobs/letters.py")
    evidence.write_run(tmp_path / "c", splits=1, batch=20, job="jobs/letters.py")
    digits, letters = read_jobs([tmp_path], ("loss", 0.1))
    names = ["softsync (splits 1)", "softsync (splits 4)"]
    assert (digits.name, [one.name for one in digits.runs]) == ("digits", names)
    assert (letters.name, [one.name for one in letters.runs]) == ("letters", ["softsync", "allreduce"])
    frame = hpcdist.read_runs(tmp_path)
    assert frame.groupby("job")["name"].nunique().to_dict() == {"digits": 2, "letters": 2}
    assert not frame["virtual"].any()
    assert (digits.reference, letters.reference, letters.target) == ("softsync (splits 1)", "allreduce", 0.1)

    for i, (path, checksum) in enumerate([("jobs/it.py", "1"), ("it.py", "1"), ("it.py", "2"), ("other/it.py", "3")]):
        evidence.write_run(tmp_path / "same" / str(i), job=path, job_sha256=checksum)
    names = {found.name: len(found.runs) for found in read_jobs([tmp_path / "same"])}
    assert names == {"jobs/it.py": 3, "other/it.py": 1}


def test_a_folder_that_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="folders must hold a finished run"):
        only_job(tmp_path)
    evidence.write_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="--target must name a metric of the runs, accuracy, loss; got rmse"):
        only_job(tmp_path, ("rmse", 1.0))
    (tmp_path / "comparison.json").write_text('{"runs": [], "metric": "accuracy"}')
    with pytest.raises(DataError, match="must be written by `hpcdist compare`; got KeyError"):
        only_job(tmp_path)


def test_runs_of_one_seed_are_all_counted_and_a_target_may_be_lower_than_the_first_value(tmp_path):
    for name in "ab":
        evidence.write_run(tmp_path / name)
    findings = analyse(only_job(tmp_path, ("loss", 0.1)))
    assert not findings.job.higher_is_better
    assert findings.groups[0].seconds_to_target == {(0, 0): 6.0, (0, 1): 6.0}


# --- what is said -----------------------------------------------------------------------------------------------------
def changed(runs: list[dict], places: slice, **changes: object) -> list[dict]:
    """These runs, some of them with other arguments."""
    chosen = range(len(runs))[places]
    return [{**run, **changes} if i in chosen else run for i, run in enumerate(runs)]


LOWER = (-0.005, -0.006, -0.005, -0.004, -0.005)
BUSY = {"cores": {"n0": 1, "n1": 1}, "processors": 2, "load": [1.0, 900.25]}
FAILING = [run for run in versus(1.05, NOISE) if run["name"] == "allreduce"]
FAILING += [{"name": "gossip_pull", "seed": seed, "made": False} for seed in range(5)]
FAILING += [{"name": "ddp", "kind": "baseline", "seed": seed, "accuracy": (0.5, 0.6)} for seed in range(5)]
# Runs, what the comparison says of itself; the beginning of the headline; parts of the reasons; parts of the caveats.
SAID = {
    "a winner": (
        versus(1.5), {},
        "`softsync` reached 97 % 1.49 times sooner (95 % interval 1.47 to 1.52) than `allreduce`; final accuracy 98 % "
        "against 98 %, the same seed by seed.",
        ["`softsync` reached 97 % 1.49 times sooner (95"], ["The metric is measured only at evaluations"],
    ),
    "no target": (
        versus(1.5), {"target": None},
        "`softsync` trained on as many samples 1.49 times sooner (95 % interval", [], ["No target was set"],
    ),
    "noise": (
        versus(1.05, NOISE, (0.001, -0.002, 0.0, 0.002, 0.0)), {},
        "With 5 seeds no difference from `allreduce` can be told from noise, in time or in accuracy.",
        ["`softsync` reached 97 % 1.04 times sooner (within noise: 95 % interval",
         "final accuracy 98.02 % against 98 %, a difference of +0.02 points (within noise: 95 % interval −0.16 to"],
        ["Within noise does not mean equal: the intervals allow for a factor of 1.32 in time and 0.2 points of "
         "accuracy. More seeds narrow them."],
    ),
    "a loser": (
        versus(0.5), {}, "Nothing beats `allreduce` (final accuracy 98 %): all groups compared with it did",
        ["2.01 times later (95 % interval 1.98 to 2.04) than `allreduce`"], [],
    ),
    "another reference": (versus(0.5), {"reference": "softsync"}, "`allreduce` reached", [], []),
    "a baseline that wins": (
        versus(2.0, kind="baseline"), {},
        "A baseline wins. The baseline `softsync` reached 97 % 1.99 times sooner (95 %", [], [],
    ),
    "faster and worse": (
        versus(2.0, accuracy=LOWER), {},
        "It depends: `softsync` reached 97 % 1.99 times sooner (95 % interval 1.96 to 2.02) than `allreduce`; final "
        "accuracy 97.5 % against 98 %, a difference of −0.5 points (95 % interval −0.59 to −0.41).", [], [],
    ),
    "some never reached the target": (
        changed(versus(2.0), slice(1, 6, 4), accuracy=(0.5, 0.9, 0.95, 0.96)), {},
        "`allreduce` reached 97 % in all seeds; `softsync` in 3 of 5 seeds (final accuracy 97.2 %). With 5 seeds no "
        "other difference from `allreduce` can be told from noise, in accuracy.",
        ["`softsync` reached 97 % in 3 of 5 seeds, `allreduce` in 5 of 5 seeds; final accuracy 97.2 % against 98 %"],
        ["`softsync`: 3 of 5 seeds reached 97 %."],
    ),
    "none reached the target": (
        changed(versus(2.0), slice(None), accuracy=(0.5, 0.6)), {},
        "No run reached 97 %. `softsync` trained on as many samples 1.99 times sooner (95 % interval 1.96 to 2.02) "
        "than `allreduce`; final accuracy 60 % against 60 %, the same seed by seed.",
        ["`softsync` trained on as many samples 1.99 times sooner (95"],
        ["`allreduce`: 0 of 5 seeds reached 97 %.", "`softsync`: 0 of 5 seeds reached 97 %.",
         "No run reached the target: times are compared for the same number of samples"],
    ),
    "a target in percent": (
        versus(1.0), {"target": 95.0}, "No run reached 9500 %. Write 95 % as accuracy=0.95.", [], [],
    ),
    "a strategy without a result": (
        FAILING, {},
        "`allreduce` reached 97 % in all seeds; the baseline `ddp` in 0 of 5 seeds (final accuracy 60 %). On as many "
        "ranks nothing beats `allreduce` (final accuracy 98 %): 1 of 2 groups compared with it did significantly "
        "worse. Some could not be tested.", ["`gossip_pull` has no run that ended: nothing can be compared."],
        ["5 runs without a result: listed below, not included in the numbers."],
    ),
    "one seed": (
        versus(2.0)[:2], {}, "Each comparison has one seed, which can't show noise: nothing here is a result. "
        "In this seed `softsync` was the fastest (final accuracy 98 %).",
        ["2 times sooner (fewer than 3 seeds, too few to estimate noise) than `allreduce`; final accuracy 98 %"],
        ["Every group has one seed"],
    ),
    "a winner beside one that is faster and worse": (
        versus(1.5) + [{**run, "name": "gossip_pull"} for run in versus(2.0, accuracy=LOWER)[1::2]], {},
        "`softsync` reached 97 % 1.49 times sooner (95 % interval 1.47 to 1.52) than `allreduce`; final accuracy 98 % "
        "against 98 %, the same seed by seed. `gossip_pull` reached 97 % 1.99 times sooner (95 % interval 1.96 to "
        "2.02) than `allreduce`; final accuracy 97.5 % against 98 %, a difference of −0.5 points", [], [],
    ),
    "two winners": (
        versus(1.5) + [{**run, "name": "gossip_pull"} for run in versus(1.2)[1::2]], {},
        "`softsync` reached 97 % 1.49 times sooner (95 % interval 1.47 to 1.52) than `allreduce`; final accuracy 98 % "
        "against 98 %, the same seed by seed. `gossip_pull` (final accuracy 98 %) beats `allreduce`, too; winners "
        "were not tested against each other.", [], [],
    ),
    "distributing that does not pay": (
        versus(1.5) + [{"name": "serial, batch 20", "kind": "serial", "ranks": 1, "batch": 20, "seed": seed,
                        "seconds": 4.0 + 0.1 * seed, "accuracy": (0.5, 0.6, 0.7, 0.75)} for seed in range(5)], {},
        "`allreduce` and `softsync` reached 97 % in all seeds; `serial, batch 20` in 0 of 5 seeds (final accuracy 75 "
        "%). `softsync` reached 97 % 1.49 times sooner",
        ["Distributing did not pay against one process with the same batch: `allreduce` on 2 ranks trained on as many "
         "samples 2.86 times later (95 % interval 2.73 to 3) than `serial, batch 20`; final accuracy 98 % against 75",
         "`softsync` on 2 ranks was the first of all that reached 97 % (final accuracy 98 %); `serial, batch 20` on 1 "
         "rank did in 0 of 5 seeds (final accuracy 75 %)."], [],
    ),
    "a run that diverged": (
        changed(versus(2.0), slice(1, 2), accuracy=(0.5, 0.97, math.nan, math.nan)), {}, "",
        ["the final accuracy can't be compared: no finite value in 1 of 5 runs of `softsync`."],
        ["`softsync`: 1 of 5 runs ended with no finite accuracy."],
    ),
    "virtual runs": (
        changed(versus(1.5), slice(None), virtual={"network": {"latency_s": 1e-6}}), {},
        "`softsync` reached 97 % 1.49 times sooner", [],
        ["All runs used virtual ranks: their seconds are simulated"],
    ),
    "ranks that shared cores of a busy machine": (
        changed(versus(1.5), slice(None), machine=BUSY), {}, "", [],
        ["n0: The machine was busy: its load average was 900.2, of 2 processors and 1 rank."],
    ),
    "one strategy alone": (
        versus(1.5)[::2], {}, "There is nothing to compare",
        ["`allreduce`: final accuracy 98 %; 5 of 5 seeds reached 97 %, seconds to it: 9 (5 runs)."],
        [],
    ),
}  # fmt: skip


@each("name", SAID)
def test_what_is_said_of(tmp_path, name):
    runs, said, headline, reasons, caveats = SAID[name]
    verdict = judge(found_in(tmp_path / name, runs, **said))
    assert verdict.headline.startswith(headline), verdict.headline
    assert [text for text in reasons if not any(text in reason for reason in verdict.reasons)] == [], verdict.reasons
    assert [text for text in caveats if not any(text in caveat for caveat in verdict.caveats)] == [], verdict.caveats
    assert "busy" in name or "The machine" not in str(verdict.caveats)
    assert name != "a winner" or "mean equal" not in str(verdict.caveats)
    assert name != "one seed" or "interval" not in verdict.reasons[0]


def test_numbers_behind_what_is_said(tmp_path):
    (contrast,) = found_in(tmp_path / "winner", versus(1.5)).contrasts
    logs = [math.log(1.5 / factor) for factor in (1.0, 1.01, 0.99, 1.02, 1.0)]
    assert contrast.speedup.mean == pytest.approx(math.exp(sum(logs) / 5)) and contrast.speedup.paired
    frame = hpcdist.read_runs(tmp_path / "winner")
    assert len(frame) == 10 and frame.groupby("name")["time_to_target_s"].mean()["allreduce"] == 9.0
    late = found_in(tmp_path / "late", changed(versus(2.0), slice(1, 6, 4), accuracy=(0.5, 0.9, 0.95, 0.96)))
    assert late.contrasts[0].speedup is None, "where not every run has reached the target"
    assert next(row["time_to_target_s"] for row in late.rows if row["name"] == "softsync") is None
    diverged = found_in(tmp_path / "nan", changed(versus(2.0), slice(1, 2), accuracy=(0.5, 0.97, math.nan, math.nan)))
    assert diverged.contrasts[0].difference is None
    found_in(tmp_path / "none", [{"name": "allreduce", "made": False}])
    assert "No run has ended: there is nothing to judge yet." in write(tmp_path / "none").read_text()


def test_the_first_on_several_ranks_is_held_against_one_rank(tmp_path):
    runs = []
    for seed in range(3):
        runs += [
            {"name": "allreduce", "ranks": 1, "seed": seed, "seconds": 12.0 + seed},
            {"name": "allreduce", "ranks": 2, "seed": seed, "seconds": 8.0 + seed},
            {"name": "softsync", "strategy": "softsync", "ranks": 1, "seed": seed, "seconds": 14.0},
            {"name": "softsync", "strategy": "softsync", "ranks": 2, "seed": seed, "seconds": 4.0 + seed},
        ]
    findings = found_in(tmp_path / "a", runs)
    assert [contrast.group.label for contrast in findings.contrasts] == ["softsync, 2 ranks"], "none on one rank"
    assert judge(findings).reasons[0] == (
        "`softsync` on 2 ranks was the first of all that reached 97 %: 2.63 times sooner (95 % interval 1.92 to 3.6) "
        "than `allreduce` on 1 rank; final accuracy 98 % against 98 %."
    )
    slower = [dict(run, seconds=40.0) if run["ranks"] == 2 else run for run in runs if run["name"] == "allreduce"]
    found = judge(found_in(tmp_path / "b", slower))
    said = "`allreduce` on 1 rank was the first of all that reached 97 %: 3.08 times sooner"
    assert found.reasons[0].startswith(said) and found.headline == found.reasons[0]
    for run in runs[::2]:  # on one rank
        run["accuracy"] = (0.5, 0.9, 0.97, 0.98) if run["seed"] == 1 else (0.5, 0.6)
    assert judge(found_in(tmp_path / "c", runs)).reasons[0] == (
        "`softsync` on 2 ranks was the first of all that reached 97 % (final accuracy 98 %); `allreduce` on 1 rank did "
        "in 1 of 3 seeds (final accuracy 72.67 %)."
    )


def test_times_of_ranks_that_share_cores_or_a_busy_machine_are_doubted():
    for ranks, cores, load, said in (
        *((2, 2, 2.4, []), (1, 1, 1.9, []), (4, 2, 4.3, ["4 ranks shared 2 cores: times would"])),
        *((2, 1, 0.0, ["2 ranks shared 1 core: "]), (1, 2, 2.6, ["The machine was busy: its load average was 2.6"])),
    ):
        found = timing_warnings(ranks, cores, processors=2, load=load)
        assert len(found) == len(said) and all(text.startswith(start) for text, start in zip(found, said)), found


def test_a_page_has_each_job_behind_its_name(tmp_path):
    for name in ("digits", "letters"):
        for strategy in ("allreduce", "softsync"):
            evidence.write_run(tmp_path / name / strategy, strategy, job=f"{name}.py")
    page = write(tmp_path)
    text = page.read_text()
    parts = re.findall(r'<details class="job" name="job"( open)?><summary>(\w+): 2 runs', text)
    assert parts == [(" open", "digits"), ("", "letters")]
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and "softsync (digits)" not in text
    assert [job["job"] for job in json.loads((page.parent / "runs.json").read_text())["jobs"]] == ["digits", "letters"]
    with open(page.parent / "runs.csv", encoding="utf-8") as lines:
        assert [row["job"] for row in csv.DictReader(lines)] == ["digits", "digits", "letters", "letters"]


def test_what_only_rounding_tells_apart_is_the_same(tmp_path):
    accuracy = [1e-9 * seed for seed in range(5)]
    findings = found_in(tmp_path, versus(2.0, accuracy=accuracy))
    assert findings.contrasts[0].same and "final accuracy 98 % against 98 %, the same seed" in judge(findings).headline
    assert tables("answer", findings)[1].rows[0][4] == "0"
    assert [wording.seconds(value) for value in (2.66e-17, 0.0, 0.004, 61.2)] == ["0 s", "0 s", "0.00400 s", "61.2 s"]
    for number, text in ((3.7e-17, "+0"), (-3.7e-17, "+0"), (0.0123, "+1.2"), (-0.0123, "−1.2")):
        assert wording.gap("accuracy", number, unit=False) == text


def test_strategies_have_colours_of_their_own_before_controls(tmp_path):
    names = ["allreduce", *"uvwxyz"]
    runs = [{"name": name} for name in names] + [{"name": f"serial {i}", "kind": "serial", "ranks": 1} for i in "12"]
    found = line_styles(found_in(tmp_path, runs))
    assert len({found[name].color for name in names}) == 7


def test_comparisons_are_corrected_for_their_number(tmp_path):
    runs = versus(1.07, (1.0, 1.05, 0.95, 1.06, 0.96))
    alone = found_in(tmp_path / "a", runs).contrasts[0]
    assert alone.speedup.p == pytest.approx(0.0446521, rel=1e-5) and alone.p_speedup == 2 * alone.speedup.p
    many = [dict(run, name=f"{run['name']} {i}") for i in range(6) for run in runs[1::2]] + runs[::2]
    findings = found_in(tmp_path / "b", many)
    assert findings.contrasts[0].p_speedup == pytest.approx(12 * alone.speedup.p), "six of times, six of accuracies"
    verdict = judge(findings)
    assert (
        verdict.headline.startswith("With 5 seeds no difference") and "12 comparisons were made" in verdict.caveats[-1]
    )
    assert "(within noise once corrected for the number of comparisons: 95 %" in verdict.reasons[0]


def test_scaling_weak_and_strong(tmp_path):
    runs = []
    for seed in range(2):
        runs += [
            {"name": "allreduce", "ranks": 1, "seed": seed, "seconds": 12.0},
            {"name": "serial, batch 20", "kind": "serial", "ranks": 1, "batch": 20, "seed": seed, "seconds": 18.0},
            {"name": "allreduce", "ranks": 2, "seed": seed, "seconds": 15.0},
        ]
    weak, strong = found_in(tmp_path, runs).scaling
    assert (weak.kind, weak.base.name) == ("weak", "allreduce")
    assert weak.speedup.mean == pytest.approx((12 / 120) / (15 / 240)) and weak.efficiency == pytest.approx(0.8)
    assert (strong.kind, strong.base.name) == ("strong", "serial, batch 20")
    assert strong.speedup.mean == pytest.approx(18 / 15) and strong.efficiency == pytest.approx(0.6), "T1/(2·T2)"


# --- what is written --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    evidence.a_study(folder)
    return write(folder)


def test_the_files_of_a_report(report):
    assert report == report.parents[1] / "report" / "index.html"
    drawn = {path.stem for path in (report.parent / "figures").glob("*.svg")}
    assert drawn == {path.stem for path in (report.parent / "figures").glob("*.png")}
    wanted = {"time-to-target", "accuracy-at-the-end", "accuracy-against-bytes-4-ranks", "loss-against-seconds-2-ranks"}
    wanted |= {"staleness-2-ranks", "time-of-4-ranks", "strong-speed-up", "weak-efficiency", "bytes-per-step"}
    assert wanted <= drawn and "energy" not in drawn
    for path in (report.parent / "figures").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    with open(report.parent / "runs.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 57 and lines[0]["metric.accuracy"] == "0.98" and lines[0]["version.hpcdist"] == "0.1.0"
    (found,) = json.loads((report.parent / "runs.json").read_text())["jobs"]
    assert len(found["runs"]) == 57 and len(found["cells"]) == 11
    assert "`softsync (splits 4)` on 4 ranks reached 97 % 1.49 times sooner" in found["verdict"]["headline"]
    (losses,) = {len(curve["losses"]) for curve in found["curves"].values()} - {0}
    assert losses == evidence.STEPS


def test_the_page_says_it_all_by_itself(report):
    text = report.read_text()
    assert "<script" not in text and not re.findall(r'(?:src|href)="(?!#|data:,|runs\.)[^"]*"', text)
    assert "<code>softsync (splits 4)</code> on 4 ranks reached 97 % 1.49 times sooner" in text
    assert "3 of 6 seeds reached 97 %" in text and "was not started" in text and "has started and not ended" in text
    assert "Not measured: an older version of hpcdist made the run." in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#|aria-labelledby=")([\w-]+)', text)) <= set(ids)
    levels = [int(level) for level in re.findall(r"<h(\d)", text)]
    assert levels[0] == 1 and all(after - before <= 1 for before, after in itertools.pairwise(levels))
    svgs = re.findall(r"<svg.*?</svg>", text, re.S)
    assert svgs and all(part in svg for part in ("<text", "<title", "<desc") for svg in svgs)
    assert not any(part in svg for part in ("DejaVu", "#010203") for svg in svgs)
    assert text.count("<caption") == text.count("<table") and 'scope="col"' in text and 'scope="row"' in text


def test_curves_go_on_with_the_seeds_that_are_left(tmp_path):
    runs = [{"name": "allreduce", "seed": seed, "seconds": seconds} for seed, seconds in enumerate((8.0, 12.0, 16.0))]
    drawn = catalogue("figures").load("curves").draw(found_in(tmp_path, runs))
    figures = {figure.name: figure for figure in drawn if not isinstance(figure, str)}
    figure = figures["accuracy-against-seconds-2-ranks"]
    whole, rest = figure.figure.axes[0].lines[:2]
    assert whole.get_xdata()[-1] == rest.get_xdata()[0] == 8.0, "the shortest run's end"
    assert rest.get_xdata()[-1] == 16.0 and rest.get_ydata()[-1] == 0.98 and rest.get_linestyle() == ":"
    assert "to 0.9422 over 4 to 8 seconds, and with fewer seeds to 0.98 at 16" in figure.alt_text[1]
    assert "it is pale, and the line dotted, after some seeds have ended" in figure.alt_text[0]
    samples = figures["accuracy-against-samples-2-ranks"]
    assert len(samples.figure.axes[0].lines[1].get_xdata()) == 1 and "fewer" not in samples.alt_text[1], "all end alike"


def test_colours_are_seen_on_both_grounds():
    def luminance(text: str) -> float:
        shares = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in {*COLOURS, *(colour for colour, _ in STYLES.values())}:
        for ground in (DARK, LIGHT):
            low, high = sorted((luminance(colour), luminance(ground)))
            assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_energy_is_drawn_where_it_was_measured_and_joules_to_the_target_have_intervals(tmp_path):
    evidence.write_run(tmp_path / "runs" / "a", joules=60.0)
    evidence.write_run(tmp_path / "runs" / "b", "softsync")
    page = write(tmp_path / "runs", tmp_path / "out")
    assert page == tmp_path / "out" / "index.html" and (tmp_path / "out" / "figures" / "energy.svg").exists()
    assert '<td class="number short">60 J</td>' in page.read_text() and "Not measured for softsync" in page.read_text()
    runs = [{"name": "allreduce", "seed": seed, "joules": joules} for seed, joules in enumerate((80.0, 80.0, 104.0))]
    findings = found_in(tmp_path / "a", runs)
    assert [row["joules_to_target"] for row in findings.rows] == [60.0, 60.0, 78.0], "at the third of four looks"
    _, energy, remark = catalogue("figures").load("energy").draw(findings)
    assert energy.heads[3] == "to the target" and energy.rows[0][3] == "66 ± 26 J" and "evaluations" in remark
    assert tables("traffic", findings)[0].rows[0][1:] == ["1 kB", "2", "18 kB"]
    short = found_in(tmp_path / "b", [*runs, {"name": "allreduce", "seed": 3, "accuracy": (0.5, 0.6)}])
    assert tables("energy", short)[0].rows[0][3] == wording.NONE, "one run never met it"


def test_a_package_adds_a_section(tmp_path, monkeypatch):
    (tmp_path / "rates.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "extra-1.dist-info").mkdir()
    (tmp_path / "extra-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1\n")
    (tmp_path / "extra-1.dist-info" / "entry_points.txt").write_text("[hpcdist.figures]\nrates = rates\n")
    evidence.write_run(tmp_path / "runs" / "a")
    page = write(tmp_path / "runs")
    assert (page.parent / "figures" / "rates.svg").exists()
    assert '<h2 id="rates">Learning rates</h2>' in page.read_text() and "They are constant." in page.read_text()


PLUGIN = """
from hpcdist.tools.report.figures.base import ReportFigure, axes_of

TITLE = "Learning rates"


def draw(findings):
    figure, axes = axes_of(2.0)
    axes.plot([1, 2], [0.1, 0.1])
    yield ReportFigure("rates", "Learning rates", ["allreduce: 0.1"], figure)
    yield "They are constant."
"""


def test_figures_are_alike_for_all_users_and_nothing_is_warned_of(tmp_path, recwarn, caplog):
    """Their own settings of matplotlib, and letters that its fonts lack, change nothing on the terminal."""
    evidence.write_run(tmp_path / "runs" / "a", "精度")
    taken = []

    def progress(items, title):
        taken.append((title, len(items)))
        return items

    write(tmp_path / "runs", tmp_path / "one")
    with matplotlib.rc_context({"font.family": "no such font", "axes.facecolor": "red", "font.size": 30}):
        page = write(tmp_path / "runs", tmp_path / "two", progress=progress)
    assert page.read_text().count("精度") > 5 and not recwarn.list and "font" not in caplog.text
    figures = sorted((tmp_path / "one" / "figures").iterdir())
    assert all(figure.read_bytes() == (tmp_path / "two" / "figures" / figure.name).read_bytes() for figure in figures)
    assert taken == [("reading steps", 1), ("drawing", len(figures) // 3)]


def test_long_names_fit_into_figures(tmp_path, recwarn):
    """Else matplotlib warns that its layout was not applied."""
    for i in range(8):
        options = {f"setting_number_{j}_of_the_strategy": f"a value that is long, {i}" for j in range(3)}
        evidence.write_run(tmp_path / str(i), "softsync", staleness=1, **options)
    page = write(tmp_path)
    assert not [str(one.message) for one in recwarn.list] and "constrained_layout" not in page.read_text()


def test_matplotlib_is_asked_for_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="a report must have the packages of the extra plots; got no"):
        write(tmp_path)


# --- the page in a browser: on a phone and on a screen, light and dark ------------------------------------------------
# Elements whose text has too little contrast with the ground behind it, by WCAG's rule.
FAINT = """
(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
  };
  const found = [];
  const kinds = "h1, h2, h3, p, li, dt, dd, th, td, a, summary, code, figcaption, caption";
  for (const node of document.querySelectorAll(kinds)) {
    const ink = rgb(getComputedStyle(node).color);
    const [low, high] = [ink, ground(node)].map(luminance).sort((a, b) => a - b);
    if (node.checkVisibility() && (high + 0.05) / (low + 0.05) < 4.5) found.push(node.outerHTML.slice(0, 80));
  }
  return found;
})()
"""
# Texts of figures that are not folded away: those that are cut off, and the size of the smallest in CSS pixels.
SHOWN = "[...document.querySelectorAll('figure svg text')].filter(node => !node.closest('details:not([open])'))"
CLIPPED = f"""
{SHOWN}.filter(node => {{
  const text = node.getBoundingClientRect(), svg = node.closest("svg").getBoundingClientRect();
  return text.left < svg.left - 1 || text.right > svg.right + 1;
}}).map(node => node.textContent)
"""
SMALLEST = f"""
Math.min(...{SHOWN}.map(node => parseFloat(getComputedStyle(node).fontSize)
  * Math.hypot(node.getScreenCTM().a, node.getScreenCTM().b)))
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    if (program := browser.program()) is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    opened = browser.Browser(program)
    yield opened
    opened.close()


def test_the_page_fits_and_is_readable(report, chromium):
    for width, dark in itertools.product([320, 360, 1280], [False, True]):
        chromium.open(report, width, dark=dark)
        assert chromium.run("document.documentElement.scrollWidth <= innerWidth")
        ground = "rgb(15, 20, 25)" if dark else "rgb(255, 255, 255)"
        assert chromium.run("getComputedStyle(document.body).backgroundColor") == ground
        assert [chromium.run(FAINT), chromium.run(CLIPPED)] == [[], []], (width, dark)
        assert chromium.run(SMALLEST) >= (8.5 if width < 600 else 9)
        assert set(chromium.requests) == {report.resolve().as_uri()} and chromium.complaints == []


def test_the_keyboard_reaches_wide_tables(report, chromium):
    chromium.open(report, 360)
    wide = "[...document.querySelectorAll('.scroll')].findIndex(node => node.scrollWidth > node.clientWidth)"
    number = chromium.run(wide)
    assert number >= 0
    before = f"document.querySelectorAll('.scroll')[{number}].previousElementSibling"
    chromium.run(f"{before}.querySelector('summary').focus()")
    chromium.press("Tab")
    inside = "document.activeElement.classList.contains('scroll')"
    for _ in range(3):
        if not chromium.run(inside):
            chromium.press("Tab")
    assert chromium.run(inside)
    assert chromium.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
