"""A study's folder: what is written, shown and listed; its claims and their verdicts."""

from __future__ import annotations

import csv
import json

from matplotlib.figure import Figure

from hpcdist.records import Evaluation
from kit.output import Claim, Study, markdown, paragraphs, verdict
from study.pretended import ended


def test_everything_is_written_and_listed(tmp_path, capsys):
    study = Study(tmp_path / "out")
    study.write_csv("table.csv", study.table("Squares", [{"x": 1, "square": "1"}, {"x": 2, "square": "4"}], ", of two"))
    study.claims(["1. They grow. SHOWN.", "2. They end. NOT SHOWN."])
    study.draw({"empty": Figure()})
    study.end([ended([Evaluation(1, 0, 2, 3.0, {"loss": 4.0})], {"x": x}) for x in (3, 1)], seeds=2)
    shown = capsys.readouterr()
    assert "Squares," in shown.out and "1. They grow. SHOWN.\n\n2. They end." in shown.out
    files = ["table.csv", "claims.txt", "empty.png", "empty.svg", "results.json"]
    assert f"written to {study.folder}: {', '.join(files)}\n" in shown.err
    assert sorted(path.name for path in study.folder.iterdir()) == sorted(files)

    found = json.loads((study.folder / "results.json").read_text())
    assert found["tables"] == {"Squares": [{"x": 1, "square": "1"}, {"x": 2, "square": "4"}]} and found["seeds"] == 2
    assert found["claims"] == ["1. They grow. SHOWN.", "2. They end. NOT SHOWN."]
    assert [run["settings"] for run in found["runs"]] == [{"x": 3}, {"x": 1}]
    assert found["runs"][0]["curve"][0]["metrics"] == {"loss": 4.0}
    with open(study.folder / "table.csv", encoding="utf-8") as file:
        assert [row["square"] for row in csv.DictReader(file)] == ["1", "4"]


def test_a_table_as_markdown():
    assert markdown([{"": "a", "n": 1}, {"": "b", "n": 2}]) == "|  | n |\n| --- | --- |\n| a | 1 |\n| b | 2 |"


def test_a_verdict_is_of_all_parts():
    cases = {"SHOWN": [True, True], "SHOWN IN PART": [True, False], "NOT SHOWN": [False], "NOT RUN": []}
    assert {verdict(parts): parts for parts in cases.values()} == cases


def test_claims_are_numbered_and_fit_on_lines():
    first, second = paragraphs([Claim("It grows.", [True], "From 1 to 2."), Claim("It ends.", [False], "1 " * 100)])
    assert first == "1. It grows. SHOWN. From 1 to 2."
    assert second.startswith("2. It ends. NOT SHOWN. 1 1") and max(map(len, second.splitlines())) <= 120
