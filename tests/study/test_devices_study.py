"""The study of one against two and four devices: its table and its answer, of runs made up."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import typer

from hpcdist.records import Start, start_run, write_summary
from study import evidence

STUDY = "devices"


def compared(output: Path, *runs: tuple, missing: str | None = None) -> Path:
    """The folder of a comparison with runs (name, ranks, seconds, further keys of the summary)."""
    told = []
    for name, ranks, wall_s, more in runs:
        told.append({"name": name, "ranks": ranks, "folder": f"runs/{name}-r{ranks}-s0"})
        folder = output / told[-1]["folder"]
        folder.mkdir(parents=True)
        settings = {"data": {"source": "IDX files fashion-mnist"}}
        start_run(folder, Start(**evidence.start(ranks=ranks, settings=settings)))
        given = {"strategy": name, "ranks": ranks, "samples": 60_000, "wall_s": wall_s, "metrics": {"accuracy": 0.87}}
        write_summary(folder, evidence.summary(**{**given, **more}))
    if missing:
        told.append({"name": missing, "ranks": 2, "folder": f"runs/{missing}-r2-s0"})
    (output / "comparison.json").write_text(json.dumps({"version": 1, "runs": told}))
    return output


@pytest.fixture
def found(study, tmp_path):
    joules = {"energy": {"joules": 2000.0, "sources": {}, "not_measured": None}}
    none = {"energy": {"joules": None, "sources": {}, "not_measured": "no counter"}}
    folder = compared(
        tmp_path,
        ("allreduce", 1, 109.47, {}),
        ("allreduce", 2, 78.61, joules),
        ("allreduce", 4, 80.0, none),
        ("gossip_pull", 2, 40.0, {"samples": 30_000}),
        missing="parameter_server",
    )
    return folder, study.read(folder)


def test_the_table_has_the_percent_of_scaling(study, found):
    one, two, four, gossip = study.rows(found[1], cores=2)
    assert (one["strategy"], one["ranks"], one["s per epoch"], one["samples/s"]) == ("allreduce", 1, "109.5", "548")
    assert (one["% of scaling"], two["% of scaling"]) == ("100.0", "69.6"), "as was reported"
    assert four["% of scaling"] == "34.2 (4 ranks on 2 cores)"
    assert gossip["% of scaling"] == "not measured", "it has not run on one rank"
    assert gossip["s per epoch"] == "80.0", "of all 60,000 images"
    assert [row["W"] for row in (one, two, four)] == ["not measured", "25", "not measured"]
    assert two["accuracy"] == "0.8700"


def test_the_answer_names_the_data_and_stands_beside_what_was_reported(study, found):
    folder, runs = found
    text = " ".join(study.answer(runs, study._source(folder)).split())
    assert text.startswith("Data: IDX files fashion-mnist. Percent of scaling from one rank to two: allreduce 69.6 % (")
    assert text.endswith("Reported on one and two GPUs: 69.63 % (3.65 s and 2.62 s per epoch).")
    assert "no strategy has run on both" in study.answer(runs[:1], "unknown")


def test_the_study_is_one_comparison(study, tmp_path, monkeypatch, capsys):
    commands = []

    def run(command):
        commands.append(command)
        if len(commands) == 2:
            compared(tmp_path, ("allreduce", 1, 60.0, {}), ("allreduce", 2, 40.0, {}))
        return subprocess.CompletedProcess(command, len(commands) % 2)

    monkeypatch.setattr(study.subprocess, "run", run)
    for status in (1, 0):  # the first one fails before there is anything to show
        with pytest.raises(typer.Exit) as ended:
            study.main(
                output=tmp_path, quick=True, ranks="1,2", seeds=1, samples=None, launcher=None, overrides=["a=1"]
            )
        assert ended.value.exit_code == status
    told = " ".join(commands[0][1:])
    assert "hpcdist compare" in told and "--ranks 1,2 --seeds 1 --budget samples=6000" in told
    assert "allreduce,parameter_server:servers=colocated,gossip_pull" in told and told.endswith("--set a=1")
    with pytest.raises(typer.Exit):
        study.main(output=tmp_path, slurm="generic", slurm_set=["time_min=30"], overrides=["a=1"])
    submitted = " ".join(commands[-1])
    assert submitted.endswith("--slurm generic --slurm-set time_min=30 --set a=1") and "--launcher" not in submitted
    assert "75.0" in capsys.readouterr().out
    assert "| allreduce | 2 | 0.8700 | 40.0 | 1500 | 75.0 | not measured |" in (tmp_path / "answer.md").read_text()
