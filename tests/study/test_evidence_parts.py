"""jobs/evidence.sh: its commands are accepted, and made once; docs/tables.py: what it makes of their runs."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import typer

from harness import pages
from hpcdist.tools import cli
from study import evidence

ROOT = Path(__file__).parents[2]
DRAWN = ("folders", "way-", "family-")  # diagrams, for which nothing is measured
FAKE = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$(dirname "$0")/log"
[[ "$*" != *"${FAILS:-nothing fails}"* ]]
"""


def script(*options: str, root: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", root / "jobs" / "evidence.sh", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env})


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs")
    import tables

    return tables


# --- the commands -----------------------------------------------------------------------------------------------------
def test_rates_are_those_that_a_search_has_found(tmp_path):
    """Printed as options, of each strategy as it was given, a shell's letters included."""
    found = {"allreduce": 0.006, 'dion:others=["0.*"],rate=3': 0.012}
    tuning = {"chosen": [{"name": name, "ranks": 4, "rate": rate} for name, rate in found.items()]}
    (tmp_path / "comparison.json").write_text(json.dumps({"tuning": tuning}))
    function = re.search(r"^found_rates\(\).*?^}\n", (ROOT / "jobs" / "evidence.sh").read_text(), re.M | re.S)
    shown = subprocess.run(["bash", "-c", f"{function[0]} found_rates {tmp_path}"], capture_output=True, text=True)
    assert shown.stdout.split() == [word for name, rate in found.items() for word in ("--rate", f"{name}={rate}")]
    (tmp_path / "comparison.json").write_text(json.dumps({"tuning": None}))
    shown = subprocess.run(["bash", "-c", f"{function[0]} found_rates {tmp_path}"], capture_output=True, text=True)
    assert (shown.stdout.split(), shown.returncode) == ([], 0)


@pytest.mark.extended
def test_every_command_is_accepted(tmp_path, monkeypatch, tables):
    monkeypatch.chdir(tmp_path)
    Path("jobs").symlink_to(ROOT / "jobs")
    Path("data").mkdir()
    Path("data", "fashion-mnist.h5").touch()  # it is there, and nobody reads it
    whole, quick = ([shlex.split(line) for line in _commands(*options)] for options in ([], ["--quick"]))
    assert len(whole) == len(quick) > 20
    for words in quick:
        _parse_command(words, tables)
    checked = []
    for words in whole:
        _parse_command(words, tables)
        kind = [word for flag, word in zip(["", *words], words) if flag not in VARIED and "batch_size=" not in word]
        if _has_settings(words) and kind not in checked:
            checked.append(kind)
            pages._run_command(words)  # as it checks them itself before it begins: on virtual ranks


# What varies between the runs of one experiment: clusters, and how long runs are.
VARIED = ("--network", "--compute", "--ranks", "--budget", "--evaluations", "--output")


def _has_settings(words: list[str]) -> bool:
    return words[1] in ("simulate", "compare") or "train" in words[:5]


def _commands(*options: str) -> list[str]:
    """List what the script runs, without rates that earlier runs have found."""
    return [re.sub(r"\$\(found_rates [^)]*\)", "", line) for line in script("--print", *options).stdout.splitlines()]


def _parse_command(words: list[str], tables) -> None:
    words = words[words.index("python") :] if "python" in words else words  # without what starts its ranks
    if words[0] == "python" and words[1].startswith("jobs/studies/"):
        _parse(importlib.import_module(Path(words[1]).stem).main, words[2:])
    elif words[0] == "python":
        assert words[1] == "docs/tables.py" and words[2] in tables.TABLES
        _parse(tables.main, words[2:])
    else:
        command, rest = typer.main.get_command(cli.app), words[words.index("hpcdist") + 1 :]
        while getattr(command, "commands", None):
            command, rest = command.commands[rest[0]], rest[1:]
        if "--json" in rest:  # the script makes its folder
            Path(rest[rest.index("--json") + 1]).parent.mkdir(parents=True, exist_ok=True)
        command.make_context("hpcdist", rest)


def _parse(main, arguments: list[str]) -> None:
    app = typer.Typer()
    app.command()(main)
    typer.main.get_command(app).make_context("main", arguments)


def test_every_table_of_the_documentation_has_a_part():
    rows = [line.split() for line in script("--list").stdout.splitlines()[1:]]
    behind = {table for row in rows for table in row[-1].split(",")}
    kept = {path.stem for path in ROOT.glob("docs/data/*.csv") if not path.stem.startswith(DRAWN)}
    assert kept - behind == set()
    assert all(int(row[1]) > 0 for row in rows), "minutes"


def test_what_is_done_is_not_done_again(tmp_path):
    (tmp_path / "jobs").mkdir()
    for name in ("evidence.sh", "setup.sh"):
        shutil.copy(ROOT / "jobs" / name, tmp_path / "jobs")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("hpcdist", "python", "mpirun"):
        (programs / name).write_text(FAKE)
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def made(*options: str, status: int = 0, **env: str) -> list[str]:
        (programs / "log").write_text("")
        done = script(*options, root=tmp_path, PATH=path, **env)
        assert done.returncode == status, done.stderr
        return [line.split(" --output ")[-1].split()[0] for line in (programs / "log").read_text().splitlines()]

    parts = ("--only", "gossip", "--only", "regression")
    even, late, uneven = (f"runs/evidence/gossip/{name}" for name in ("jitter", "straggler", "exponential"))
    assert made(*parts, status=1, FAILS="straggler") == [even, late, "runs/evidence/regression"], "others continue"
    assert made(*parts) == [late, uneven, "python"], "the last one makes the table"
    assert made(*parts) == []
    complete = [line.split()[0] for line in script("--list", root=tmp_path).stdout.splitlines() if "complete" in line]
    assert complete == ["gossip", "regression"]
    assert made("--quick", "--only", "regression") == ["runs/evidence-quick/regression"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "gosip"], "--only must be one of rates compression modulation .* digits; got 'gosip'"),
        (["--only"], "--only must be one of .*; got ''"),
        (["--slow"], "options are --quick, --only NAME, --list and --print; got --slow"),
    ],
)
def test_an_option_that_there_is_not_is_refused(options, message):
    done = script(*options)
    assert done.returncode == 1 and re.search(message, done.stderr)


# --- the tables -------------------------------------------------------------------------------------------------------
def runs(name: str, above: float = 0.0, **of: object) -> list[dict]:
    """Runs on five seeds that end with an accuracy so much above 0.98, and some noise."""
    ends = [0.98 + 0.001 * seed + above * (1 + 0.1 * (seed % 2)) for seed in range(5)]
    return [{"name": name, "seed": seed, "accuracy": (0.5, 0.97, end), **of} for seed, end in enumerate(ends)]


def written(tables, name: str, folder: Path) -> list[list[str]]:
    tables.main(name, folder, folder / "table.csv")
    with open(folder / "table.csv", newline="") as file:
        return list(csv.reader(file))


def test_accuracy_stands_beside_the_bytes(tables, tmp_path):
    found = []
    for ranks in (2, 4):
        topk = "allreduce (compression topk, compression.ratio 0.01)"
        found += runs(topk, above=-0.02, bytes_sent=2, ranks=ranks)
        found += runs("allreduce", ranks=ranks)
        found += runs("allreduce (compression fp16)", bytes_sent=500, ranks=ranks)
    evidence.write_comparison(tmp_path, found)
    head, *rows = written(tables, "compression", tmp_path)
    assert head[:4] == ["compression", "bytes fewer, 2 ranks", "accuracy in %, 2 ranks", "minus uncompressed"]
    assert head[4] == "bytes fewer, 4 ranks" and len(head) == 7
    assert [row[:2] for row in rows] == [["`allreduce`", "1"], ["`fp16`", "2"], ["`topk`, ratio 0.01", "500"]]
    assert [row[2] for row in rows] == ["98.20 ± 0.20", "98.20 ± 0.20", "96.12 ± 0.24"]
    assert [row[3] for row in rows] == ["", "+0.00 ± 0.00", "-2.08 ± 0.14*"], "seed by seed, and real"


def test_accuracy_stands_beside_staleness(tables, tmp_path):
    stale = runs("softsync (splits 4)", strategy="softsync", staleness=4)
    evidence.write_comparison(
        tmp_path, [*runs("hardsync", strategy="hardsync"), *stale], reference="softsync (splits 4)"
    )
    rows = written(tables, "modulation", tmp_path)[1:]
    assert rows[0] == ["`hardsync`", "0", "0", "98.20 ± 0.20", ""]
    assert rows[1] == ["`softsync`, splits 4", "4", "4", "98.20 ± 0.20", "+0.00 ± 0.00"]


def test_times_to_the_target_stand_beside_each_other(tables, tmp_path):
    found = [*runs("allreduce"), *runs("gossip_pull", seconds=6.0), *runs("adpsgd", above=-0.5)]
    for run in found[10:]:
        run["accuracy"] = (0.5, 0.6, 0.7)
    for name in tables.CONDITIONS:
        evidence.write_comparison(tmp_path / name, found)
    head, *rows = written(tables, "gossip", tmp_path)
    assert head[1:4] == ["even steps: s to 97 %", "times sooner", "accuracy in %"] and len(head) == 10
    assert [row[1:3] for row in rows] == [["8.00 ± 0.00", ""], ["not reached", ""], ["4.00 ± 0.00", "2.00"]]

    head, *rows = written(tables, "slow-link", tmp_path / "jitter")
    assert head == ["strategy", "s to 97 %", "times sooner", "MB to 97 %", "accuracy in %"]
    assert rows[2] == ["`gossip_pull`", "4.00 ± 0.00", "2.00", "0.016", "98.20 ± 0.20"], "8 steps of 2 ranks, 1 kB each"
    assert rows[1][:4] == ["`adpsgd`", "not reached", "", "not reached"]


def test_times_of_real_ranks_stand_beside_those_of_virtual_ones(tables, tmp_path):
    """Of comparisons with batches of their own, by the number of ranks; bytes that differ have their interval."""
    large = [{**run, "batch": 160, "bytes_sent": 1000 + 100 * run["seed"]} for run in runs("sandblaster", ranks=4)]
    virtual = [{**run, "virtual": {"network": "1ms"}} for run in runs("allreduce", ranks=4, seconds=6.0)]
    never = [{**run, "accuracy": (0.5, 0.6)} for run in runs("downpour", ranks=64)]
    for name, found in (("4", virtual), ("4-real", runs("allreduce", ranks=4)), ("4-large", large), ("64", never)):
        evidence.write_comparison(tmp_path / name, found)
    evidence.write_comparison(tmp_path / "2", runs("gossip_pull", seconds=6.0))
    head, *rows = written(tables, "sandblaster", tmp_path)
    assert head == ["ranks", "strategy", "batch of all workers", "s to 97 %", "MB to 97 %"]
    assert rows == [
        ["2 real", "`gossip_pull`", "20", "4.00 ± 0.00", "0.016 ± 0"],
        ["4 virtual", "`allreduce`", "40", "4.00 ± 0.00", "0.032 ± 0"],
        ["4 real", "`sandblaster`", "640", "8.00 ± 0.00", "0.0384 ± 0.00628"],
        ["4 real", "`allreduce`", "40", "8.00 ± 0.00", "0.032 ± 0"],
        ["64 real", "`downpour`", "640", "not reached", "not reached"],
    ]


def test_the_recent_strategies_stand_beside_bytes_and_seconds_on_all_networks(tables, tmp_path):
    evidence.write_comparison(tmp_path / "4-real", runs("allreduce", ranks=4, seconds=36.0))
    for ranks in (4, 16):
        for name in tables.NETWORKS.values():
            found = [*runs("allreduce", ranks=ranks), *runs("diloco (period 20)", strategy="diloco", ranks=ranks)]
            evidence.write_comparison(tmp_path / f"{ranks}-{name}", found)
            for kind, only in (("graphs", "d2"), ("momentum", "qg_dsgd"), ("bits", "onebit_adam"), ("signs", "demo")):
                found = runs(only, strategy=only, ranks=ranks, seconds=8.0 if kind == "signs" else 12.0)
                evidence.write_comparison(tmp_path / f"{ranks}-{name}-{kind}", found)
    head, *rows = written(tables, "recent", tmp_path)
    assert head == ["ranks", "strategy", "bits per byte at the end", "when the quickest ends", "kB per rank and step",
                    "s to 0.97, 100 Mbit/s", "s to 0.97, 1 Gbit/s", "s to 0.97, real ranks"]  # fmt: skip
    names = [
        "`allreduce`",
        "`diloco`, period 20",
        "`d2`",
        "`qg_dsgd`, momentum 0.9",
        "`onebit_adam`, ε = 10⁻⁴",
        "`demo`",
    ]
    assert [row[:2] for row in rows] == [[ranks, name] for ranks in ("4", "16") for name in names]
    assert rows[0][2:] == ["0.982 ± 0.002", "0.970 ± 0.000", "1", "8.00 ± 0.00", "8.00 ± 0.00", "24.00 ± 0.00"]
    assert [row[-1] for row in rows[1:]] == [""] * 11
    assert rows[5][2:4] == ["0.982 ± 0.002"] * 2, "it is the quickest"


def test_accuracies_stand_beside_each_other_by_how_labels_are_dealt_out(tables, tmp_path):
    for kind in ("plain", "momentum"):
        for place, alpha in enumerate(("0.1", "1", "10")):
            found = [*runs("allreduce"), *runs("dpsgd", above=-0.1 / (1 + place), strategy="dpsgd")]
            evidence.write_comparison(tmp_path / f"{kind}-{alpha}", found)
    head, *rows = written(tables, "labels", tmp_path)
    assert head == ["accuracy in %", "α = 0.1", "α = 1", "α = 10"]
    assert [row[0] for row in rows] == ["`allreduce`", "`dpsgd`", "`allreduce`, momentum 0.9", "`dpsgd`, momentum 0.9"]
    assert [row[1:] for row in rows[:2]] == [["98.20 ± 0.20"] * 3, ["87.80 ± 0.71", "93.00 ± 0.39", "94.73 ± 0.30"]]
