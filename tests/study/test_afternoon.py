"""A report on the folder of an afternoon: comparisons, a simulation, a sweep and single runs, a part each."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import hpcdist
from harness import browser
from harness.cases import each
from hpcdist.comm.virtual.compute import describe
from hpcdist.errors import ConfigError
from hpcdist.tools import cli
from hpcdist.tools.compare.run_all import Runner
from hpcdist.tools.compare.sweep import SweptRuns
from hpcdist.tools.report import write
from hpcdist.tools.report.analysis import analyse
from hpcdist.tools.report.methods import methods
from hpcdist.tools.report.results import read_jobs
from hpcdist.tools.runs.listing import write_tags
from hpcdist.tools.simulate.cluster import _model
from study import evidence
from study.pretended import PretendedRuns
from study.test_sweep import DECLARED

NETWORK = {"latency_s": 2e-5, "bandwidth_bytes_s": 1.25e9, "ranks_per_node": None}
VIRTUAL = {"network": NETWORK, "compute": {"model": "Constant", "seconds": 0.005}}
PARTS = ["digits", "letters", "compare (digits)", "simulate (digits)", "sweep (digits)"]
ENGINE = shutil.which("pdflatex")


def an_afternoon(runs: Path) -> Path:
    """Each comparison has strategies with options that differ, which name no run of another part."""
    for name, changes in {
        "a": {},
        "b": {"splits": 2, "max_staleness": None},
        "c": {"splits": 2, "max_staleness": 3},
    }.items():
        evidence.write_run(runs / name, "softsync" if changes else "allreduce", **changes)
    evidence.write_run(runs / "d", job="jobs/letters.py")
    each_seed = [{"seed": seed, "seconds": 12.0 + seed, "splits": 1} for seed in range(3)]
    evidence.write_comparison(
        runs / "compare",
        [{**run, "name": name, "strategy": name, "batch": 20} for run in each_seed for name in ("allreduce", "easgd")],
    )
    evidence.write_comparison(
        runs / "simulate",
        [{**run, "name": name, "strategy": name, "ranks": 4, "virtual": VIRTUAL}
         for run in each_seed for name in ("allreduce", "dpsgd")],
        virtual={"network": "20us,10Gbit/s"}, target=None,
    )  # fmt: skip
    sweep = SweptRuns(replace(DECLARED, over=("optimizer.lr=0.001..0.128:log:8",)), runs / "sweep")
    sweep.run(Runner(runs / "sweep", PretendedRuns()))
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return an_afternoon(tmp_path_factory.mktemp("afternoon") / "runs")


@pytest.fixture(scope="module")
def page(runs) -> Path:
    return write(runs, runs.parent / "report")


@pytest.fixture
def command(capsys, monkeypatch, runs):
    """Runs a command line where the folder `runs` lies: exit status, standard output, standard error."""
    monkeypatch.chdir(runs.parent)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return cli._run(list(arguments), True), *capsys.readouterr()

    return run


def test_each_part_has_names_and_a_reference_of_its_own(runs, monkeypatch):
    monkeypatch.chdir(runs)
    found = {job.section: {one.name for one in job.runs} for job in read_jobs([Path()])}
    assert list(found) == PARTS
    assert found["digits"] == {"allreduce", "softsync", "softsync (max_staleness 3)"}, "not: null"
    assert found["letters"] == {"allreduce"} and found["compare (digits)"] == {"allreduce", "easgd"}
    assert found["simulate (digits)"] == {"allreduce", "dpsgd"}
    assert sorted(found["sweep (digits)"])[0] == "optimizer.lr=0.001" and len(found["sweep (digits)"]) == 8
    frame = hpcdist.read_runs(".")
    assert frame["comparison"].fillna("").value_counts().to_dict() == {
        "compare": 6, "simulate": 6, "sweep": 8, "": 4,
    }  # fmt: skip


def test_runs_of_several_comparisons_share_a_table_where_their_own_folders_are_named(runs):
    (job,) = read_jobs([runs / "compare" / "runs", runs / "simulate" / "runs"])
    assert job.comparison is None and len(job.runs) == 12 and job.title.endswith("simulate/runs")


def test_the_terminal_has_a_table_and_an_answer_for_each_part(command):
    status, out, err = command("report", "runs")
    assert (status, err) == (0, "")
    titles = [line for line in out.splitlines() if re.search(r": \d+ runs?[;,]", line)]
    assert [title.partition(";")[0] for title in titles] == [
        "digits: 3 runs", "letters: 1 run", "runs/compare: digits: 6 runs",
        "runs/simulate: digits: 6 runs, on virtual ranks", "runs/sweep: digits: 8 runs",
    ]  # fmt: skip
    assert "The best settings: `optimizer.lr` 0.008, with accuracy 90 %." in out and "None" not in out
    assert "With 3 seeds no difference from `allreduce` can be told from noise" in out
    found = json.loads(command("report", "runs", "--json")[1])
    assert [job["comparison"] for job in found] == [None, None, "runs/compare", "runs/simulate", "runs/sweep"]
    assert found[4]["verdict"].startswith("The best settings: ") and "hpcdist [1]" in found[0]["methods"]


def test_a_part_of_the_runs_is_chosen_as_in_their_list(command, runs):
    write_tags(runs / "a", {"good"})
    write_tags(runs / "b", {"good", "old"})
    for options, names in {
        ("--where", "strategy=softsync"): ["digits: 2 runs"],
        ("--where", "strategy=softsync", "--where", "strategy.max_staleness=3"): ["digits: 1 run"],
        ("--where", "comparison=compare"): ["digits: 6 runs"],
        ("--where", "strategy=allreduce"): [
            "digits: 1 run", "letters: 1 run", "runs/compare: digits: 3 runs", "runs/simulate: digits: 3 runs",
        ],
        ("--tag", "good"): ["digits: 2 runs"],
        ("--tag", "good", "--tag", "old"): ["digits: 1 run"],
    }.items():  # fmt: skip
        out = command("report", "runs", *options)[1]
        assert re.findall(r"^(?=.*: \d).*? runs?\b", out, re.M) == names, options
        assert len(json.loads(command("runs", "--json", *options)[1])) == sum(int(name.split()[-2]) for name in names)
    page = command("report", "runs", "--tag", "good", "--output", "chosen")[2]
    assert "written: chosen/index.html" in page and "easgd" not in Path("chosen/index.html").read_text()
    said = "--where and --tag must choose a run; got none in runs."
    assert said in command("report", "runs", "--where", "strategy=sgp")[2]
    assert "--where must be KEY=VALUE; got 'x'." in command("report", "runs", "--where", "x")[2]


def test_a_folder_that_is_not_there_is_named(command, runs):
    said = "FOLDER must be a folder with runs in it; got runs/none, which is not a folder."
    for folders in (["runs/none"], ["runs", "runs/none"]):
        status, out, err = command("report", *folders)
        assert (status, out) == (1, "") and said in err
    with pytest.raises(ConfigError, match="FOLDER must be a folder with runs in it"):
        hpcdist.read_runs(runs / "none")


# --- for a paper ------------------------------------------------------------------------------------------------------
def test_the_methods_name_seeds_budget_network_versions_and_the_citation(runs):
    found = {job.section.rpartition("/")[2]: methods(analyse(job)) for job in read_jobs([runs])}
    text = found["simulate (digits)"]
    assert text.startswith(
        "We trained the job digits with hpcdist [1] by allreduce and dpsgd on 4 ranks, with the seeds 0, 1 and 2 each. "
        "Each run had a budget of 240 samples; the metric is accuracy. Ranks were virtual: the training is real, and "
        "times are those of a simulated cluster whose links have a latency of 20 µs and a bandwidth of 1.25 GB/s; "
        "forward and backward pass of a step take 0.005 s each. Means over seeds have 95 % confidence intervals "
        "by Student's t."
    ), text
    assert "p is corrected for all comparisons by Holm's method." in text and text.endswith(", version 0.1.0.")
    text = found["compare (digits)"]
    assert "Ranks ran on 2 hosts, connected by [network]. The time to the target is the training time at the" in text
    assert "first evaluation with accuracy ≥ 97 %; its means are geometric." in text and "virtual" not in text
    text = found["letters"]
    assert "with the seed 0. The metric is accuracy. Ranks" in text and "intervals" not in text
    assert "with 8 combinations of settings on 2 ranks" in found["sweep (digits)"]


@each("speed", [(float("inf"), "a bandwidth of infinitely many bytes/s"), (1e6, "a bandwidth of 1 MB/s")])
def test_the_network_of_virtual_ranks(speed, tmp_path):
    bandwidth, said = speed
    virtual = {"network": {"latency_s": 0.001, "bandwidth_bytes_s": bandwidth}}
    evidence.write_run(tmp_path / f"{bandwidth}", virtual=virtual)
    (job,) = read_jobs([tmp_path / f"{bandwidth}"])
    assert f"a latency of 1000 µs and {said}." in methods(analyse(job))


def test_the_step_times_of_virtual_ranks(tmp_path):
    """Of every compute model that a simulation may have."""
    models = {
        "5ms": "take 0.005 s each.",
        "jitter:20ms,0.2": "take 0.02 s on average, gamma-distributed with a coefficient of variation of 0.2.",
        "exponential:20ms": "take 0.02 s on average, exponentially distributed.",
        "straggler:1,3,5ms": "take 0.005 s each, 3 times as long on rank 1.",
        "slow:0.1,4,5ms": "take 0.005 s each, of which a share of 0.1 takes 4 times as long.",
        f"replay:{tmp_path / 'replayed'}": f"take the times that were recorded in the run {tmp_path / 'replayed'}.",
        "own": "take the times of a model of this run's own.",
    }
    evidence.write_run(tmp_path / "replayed")
    for number, (text, said) in enumerate(models.items()):
        compute = {"model": "Own"} if text == "own" else describe(_model(text, lambda given: given or 0.0))
        virtual = {"network": {"latency_s": 0.001, "bandwidth_bytes_s": 1e6}, "compute": compute}
        evidence.write_run(tmp_path / "runs" / str(number) / "run", virtual=virtual)
        (job,) = read_jobs([tmp_path / "runs" / str(number)])
        assert f"1 MB/s; forward and backward pass of a step {said}" in methods(analyse(job))


def test_tables_for_latex(command):
    status, out, err = command(
        "report", "runs/simulate", "runs/a", "--latex", "--columns", "name,bytes_per_step,samples_per_s"
    )
    assert (status, err) == (0, "") and out.count(r"\begin{tabular}{lrr}") == 2 and out.count(r"\toprule") == 2
    assert r"dpsgd & 1 kB & 37 $\pm$ 7 \\" in out and r"\caption{digits: 6 runs, on virtual ranks; means and 95" in out
    assert r"95 \% confidence intervals" in out and "We trained the job digits with hpcdist [1] by allreduce" in out
    both = "--json, --csv and --latex must be given one at a time; got several."
    assert both in command("report", "runs", "--latex", "--csv")[2]


def test_a_caption_has_optimisers_rates_and_batches(command, tmp_path):
    for number, rate in enumerate((0.1, 0.01)):
        evidence.write_run(folder := tmp_path / str(number), batch=20 + number)
        run = json.loads((folder / "run.json").read_text())
        run["settings"]["optimizer"] = {"name": "SGD", "lr": rate}
        (folder / "run.json").write_text(json.dumps(run))
    said = "Optimiser: SGD; learning rate: 0.01 and 0.1; samples of a worker's step: 20 and 21.}"
    assert said in command("report", str(tmp_path), "--latex")[1]


@pytest.mark.skipif(ENGINE is None, reason="there is no pdflatex: apt-get install texlive-latex-recommended")
def test_latex_takes_the_tables(command, tmp_path):
    tables = command("report", "runs", "--latex")[1]
    document = r"\documentclass{article}\usepackage{booktabs}\begin{document}" + tables + r"\end{document}"
    (tmp_path / "it.tex").write_text(document)
    subprocess.run([ENGINE, "-halt-on-error", "it.tex"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "it.pdf").read_bytes().startswith(b"%PDF")


# --- the page ---------------------------------------------------------------------------------------------------------
def test_the_page_has_a_part_for_each(page, runs):
    text = page.read_text()
    parts = re.findall(r'<details class="job" name="job"(?: open)?><summary>(?:\S*/)?(.*): \d+ runs?<', text)
    assert parts == PARTS and f"<h1>Runs in {runs}</h1>" in text
    assert text.count("Methods, to copy</h2>") == len(PARTS)
    assert "The best settings: <code>optimizer.lr</code> 0.008" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#|aria-labelledby=")([\w-]+)', text)) <= set(ids)
    figures = {path.name for path in (page.parent / "figures").iterdir()}
    assert {name.rpartition(".")[0] + kind for name in figures for kind in (".svg", ".pdf", ".png")} == figures
    assert all(path.read_bytes().startswith(b"%PDF") for path in (page.parent / "figures").glob("*.pdf"))
    found = json.loads((page.parent / "runs.json").read_text())["jobs"]
    assert [Path(job["comparison"] or "").name for job in found] == ["", "", "compare", "simulate", "sweep"]
    assert len(found[4]["sweep"]["trials"]) == 8 and "sweep" not in found[3]
    with open(page.parent / "runs.csv", encoding="utf-8") as lines:
        assert len(list(csv.DictReader(lines))) == 24


def test_the_page_fits_screens_and_phones_and_prints_whole(page):
    if (program := browser.program()) is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    shown = browser.Browser(program)
    try:
        for width in (390, 1200):
            shown.open(page, width)
            for number in range(len(PARTS)):
                shown.run(f"document.querySelectorAll('.job > summary')[{number}].click()")
                assert shown.run("document.documentElement.scrollWidth <= innerWidth"), (width, number)
        assert shown.complaints == []
        # What is folded on the screen is there on paper.
        shown.call("Emulation.setEmulatedMedia", media="print")
        assert shown.run("[...document.querySelectorAll('.job .headline')].every(node => node.checkVisibility())")
    finally:
        shown.close()
