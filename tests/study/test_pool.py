"""Runs spread over processes: each is made once, and what is finished outlives a failure."""

from __future__ import annotations

import json
import os

import pytest
from study import work

from hpcdist.errors import ConfigError, DataError
from hpcdist.study import run_all
from hpcdist.study.pool import read_runs


def test_every_run_is_made_once_in_other_processes_and_comes_in_order(tmp_path):
    path, shown = tmp_path / "new" / "runs.jsonl", []
    wanted = [{"x": x} for x in (3, 1, 2, 3)]
    runs = run_all(work.square, wanted, path, workers=2, show=lambda *numbers: shown.append(numbers))
    assert [run.measured["square"] for run in runs] == [9, 1, 4, 9]
    assert [run.settings for run in runs] == wanted
    assert os.getpid() not in {run.measured["process"] for run in runs}
    assert {run.measured["threads"] for run in runs} == {1}
    assert shown == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert len(path.read_text().splitlines()) == 3

    again = run_all(work.unwanted, wanted, path, workers=2)
    assert again == runs, "read back as they were when they had just been made"


def test_more_runs_are_added_to_those_there(tmp_path):
    path = tmp_path / "runs.jsonl"
    first = run_all(work.square, [{"x": 1}], path, workers=1)
    both = run_all(work.square, [{"x": 2}, {"x": 1}], path, workers=1)
    assert both[1] == first[0] and both[0].measured["square"] == 4
    assert read_runs(path) == [both[1], both[0]]


def test_a_run_that_fails_ends_all_and_keeps_what_had_finished(tmp_path):
    path = tmp_path / "runs.jsonl"
    with pytest.raises(ArithmeticError, match="x is -1"):
        run_all(work.square, [{"x": 5}, {"x": -1}, {"x": 6}], path, workers=1)
    assert read_runs(path)[0].measured["square"] == 25


def test_a_line_that_was_cut_short_is_made_again(tmp_path):
    path = tmp_path / "runs.jsonl"
    whole = json.dumps({"settings": {"x": 1}, "measured": {"square": 1}}) + "\n"
    path.write_text(whole + whole[:20])
    assert [run.settings for run in read_runs(path)] == [{"x": 1}]
    assert path.read_text() == whole


def test_what_can_not_be_is_refused(tmp_path):
    path = tmp_path / "runs.jsonl"
    with pytest.raises(ConfigError, match=r"workers must be at least 1; got 0\. Give as many as there are cores"):
        run_all(work.square, [{"x": 1}], path, workers=0)
    path.write_text('{"step": 1}\n')
    with pytest.raises(DataError, match=r"runs.jsonl must hold one run per line; got another .* Give another folder"):
        run_all(work.square, [{"x": 1}], path, workers=1)
