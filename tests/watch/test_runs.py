"""The reader of runs: what it knows of a run from its begin to its end, and of records while they are written."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.errors import DataError
from hpcdist.records import (
    Evaluation,
    RecordTail,
    RecordWriter,
    StepRecord,
    append_evaluation,
    end_run,
    load_summary,
    locked,
    record_path,
    start_run,
    write_summary,
)
from hpcdist.records.run import now
from hpcdist.tools.runs import Run, find_runs, is_done, read_comparison, steps
from hpcdist.tools.runs.listing import read_listed
from study import evidence


def told(items: list) -> list:
    return [item.step if isinstance(item, StepRecord) else {"restart": item} for item in items]


# --- a rank's records -------------------------------------------------------------------------------------------------
def test_only_new_and_whole_records_are_read(tmp_path):
    path = record_path(tmp_path, 0)
    tail = RecordTail(path)
    assert tail() == []
    with RecordWriter(path) as writer:
        writer.write(StepRecord(1, samples=16, loss=float("nan")))
        assert tail() == [], "it is in the writer's memory"
        writer.flush()
        (first,) = tail()
        assert (first.step, first.samples) == (1, 16) and tail() == []
        writer.write(StepRecord(2))
    with open(path, "a") as file:
        file.write('{"step":3,"samp')
        file.flush()
        assert told(tail()) == [2]
        assert tail() == [] and tail.is_cut
        file.write('les":4}\n')
    assert told(tail()) == [3] and not tail.is_cut


def test_a_restart_and_another_file_of_the_name_are_told(tmp_path):
    path = record_path(tmp_path, 0)
    with RecordWriter(path) as writer:
        for step in (1, 2):
            writer.write(StepRecord(step))
    late = RecordTail(path, from_end=True)
    with RecordWriter(path, first_step=2) as writer:
        writer.write(StepRecord(2))
    tail = RecordTail(path)
    assert told(tail()) == [1, 2, {"restart": 2}, 2]
    assert told(late()) == [{"restart": 2}, 2]
    path.unlink()
    with RecordWriter(path) as writer:
        writer.write(StepRecord(1))
    assert told(tail()) == [{"restart": 0}, 1]


def test_a_line_that_is_no_record_yet_is_read_later_or_skipped(tmp_path):
    path = record_path(tmp_path, 0)
    with RecordWriter(path) as writer:
        writer.write(StepRecord(1))
        writer.write(StepRecord(2))
    whole = path.read_bytes()
    first, second = whole.splitlines(keepends=True)
    path.write_bytes(bytes(len(first) - 1) + b"\n" + second)  # as a network file system may show it
    tail = RecordTail(path)
    assert tail() == []
    path.write_bytes(whole)
    assert told(tail()) == [1, 2]
    path.write_bytes(whole + b"no record\n" + second)
    assert tail() == []
    assert told(tail()) == [2]
    with pytest.raises(DataError, match=r"records-rank0000.jsonl:3 must be a step record; got b'no record"):
        _ = Run(tmp_path).records
    assert len(Run(tmp_path, follow=True).records) == 2


def test_evaluations_have_an_order(tmp_path):
    for step in (2, 1):
        append_evaluation(tmp_path, Evaluation(step, 0, 10 * step, 1.0, {}))
    with pytest.raises(DataError, match=r"evaluations.jsonl:2 must be .*\(its step is before that of the line above\)"):
        Run(tmp_path)


# --- steps as a frame -------------------------------------------------------------------------------------------------
def write(folder: Path, last: int, first: int = 0, rank: int = 0) -> None:
    with RecordWriter(record_path(folder, rank), first_step=first) as writer:
        for step in range(max(first, 1), last + 1):
            writer.write(StepRecord(step, clock=step, samples=4, loss=float(step), computing_s=2.0, staleness=(1, 2)))


def test_a_row_is_a_step_or_a_block_of_steps_if_a_long_run_is_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "BLOCKS", 8)
    write(tmp_path, 100)
    write(tmp_path, 5, rank=3)
    records = Run(tmp_path).records
    assert records.groupby("rank").size().to_dict() == {0: 100, 3: 5}
    assert records.iloc[6][["step", "clock", "loss", "gradients", "staleness", "computing_s"]].tolist() == [
        7, 7, 7, 2, 3, 2,
    ]  # fmt: skip
    run = Run(tmp_path, follow=True)
    rank = run.records[run.records["rank"] == 0]
    assert run.steps.widths[0] == 16 and run.steps.widths[3] == 1 and len(rank) == 7
    assert rank["step"].tolist() == list(range(16, 128, 16)) and rank["clock"].tolist()[-2:] == [96, 100]
    assert rank["samples"].sum() == 400 and rank["loss"].iloc[0] == sum(range(1, 17)) and run.loss == (100 + 5) / 2
    write(tmp_path, 7, first=6, rank=3)
    run.update()
    assert run.records["samples"].sum() == 428 and len(run.steps.recent) == 107


def test_a_restart_drops_the_steps_that_are_taken_again(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "BLOCKS", 8)
    for first, left in ((1, 0), (9, 8), (33, 32), (41, 40), (200, 100)):
        folder = tmp_path / str(first)
        folder.mkdir()
        write(folder, 100)
        write(folder, 50, rank=1)
        both = Run(folder, follow=True), Run(folder)
        _ = [run.records for run in both]
        write(folder, 0, first=first)
        for run in both:
            run.update()
            of_rank = run.records[run.records["rank"] == 0]
            assert of_rank["samples"].sum() == 4 * left and run.records["samples"].sum() == 4 * (left + 50)
            assert (run.steps.recent["rank"] == 0).sum() == left
        assert len(Run(folder).records) == left + 50, "read at once"


def test_losses_that_are_not_finite_are_in_no_sum(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "BLOCKS", 1)
    with RecordWriter(record_path(tmp_path, 0)) as writer:
        for step, loss in enumerate((1.0, math.inf, None, 3.0, math.nan), 1):
            writer.write(StepRecord(step, samples=1, loss=loss))
    run = Run(tmp_path, follow=True)
    assert run.records[["records", "loss", "losses"]].values.tolist() == [[5, 4.0, 2]] and math.isnan(run.loss)


# --- a run ------------------------------------------------------------------------------------------------------------
def test_a_run_that_has_ended(tmp_path):
    evidence.write_run(tmp_path, "softsync", seconds=12.0, splits=4)
    run = Run(tmp_path)
    assert (run.state, run.strategy, run.failure, run.damage, run.batch) == ("ended", "softsync", None, None, 10)
    assert run.settings["strategy"]["splits"] == 4 and run.summary.ranks == run.start.ranks == 2 and is_done(tmp_path)
    assert run.metrics["metric.accuracy"].tolist() == [0.5, 0.9, 0.97, 0.98]
    assert run.metrics["seconds"].tolist() == [3.0, 6.0, 9.0, 12.0]
    assert run.records["bytes_sent"].sum() == 24000


def test_reasons_for_no_summary(tmp_path):
    assert Run(tmp_path / "none").failure == "was not started" and Run(tmp_path / "none").state == "waiting"
    evidence.write_run(tmp_path / "begun", ends=False)
    assert (
        Run(tmp_path / "begun").failure == "has started and not ended" and Run(tmp_path / "begun").state == "starting"
    )
    start = json.loads((tmp_path / "begun" / "run.json").read_text())
    (tmp_path / "begun" / "run.json").write_text(json.dumps({**start, "ended": "2026-01-31T12:05:00Z"}))
    run = Run(tmp_path / "begun")
    assert run.failure == "failed, and ended at 2026-01-31T12:05:00Z" and run.state == "dead"
    end_run(tmp_path / "begun", "interrupted", "SIGTERM on rank 0")
    run.update()
    assert run.state == "interrupted" and run.failure.startswith("was interrupted at ")
    assert run.failure.endswith(" (SIGTERM on rank 0); --resume or the same script continues")
    (tmp_path / "begun" / "failure.txt").write_text("exit status 1\nfirst\nsecond\n\nthird\nRuntimeError: no")
    run.update()
    assert run.failure == "failed:\nfirst\nsecond\nthird\nRuntimeError: no" and run.state == "failed"


def test_damaged_files_are_named_and_tried_again_while_the_run_is_followed(tmp_path):
    evidence.write_run(tmp_path)
    whole = {name: (tmp_path / name).read_bytes() for name in ("run.json", "summary.json", "evaluations.jsonl")}
    for name, message in {
        "run.json": "run.json must be what a run was started with",
        "summary.json": "summary.json must be JSON",
        "evaluations.jsonl": "evaluations.jsonl:1 must be an evaluation",
    }.items():
        (tmp_path / name).write_bytes(b"[1\n")
        with pytest.raises(DataError, match=message):
            Run(tmp_path)
        run = Run(tmp_path, follow=True)
        assert message in run.damage and run.state != "ended"
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match=f"{name} must be .*; got .*a named pipe"):
            Run(tmp_path)
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(whole[name])
        run.update()
        assert run.damage is None and run.state == "ended" and len(run.evaluations) == 4
    (tmp_path / "file").touch()
    assert Run(tmp_path / "file").state == "waiting"


def test_a_growing_run_is_read_on(tmp_path):
    run = Run(tmp_path, follow=True)
    assert run.state == "waiting" and run.metrics.empty and run.records.empty and run.loss is None
    write(tmp_path, 3)
    append_evaluation(tmp_path, Evaluation(3, 1, 12, 6.0, {"accuracy": 0.5}))
    run.update()
    assert run.state == "training" and len(run.records) == 3 and run.evaluations[0].step == 3


def test_a_killed_start_takes_no_time_while_the_next_one_is_at_work(tmp_path):
    """Nobody knows when it was killed."""
    evidence.write_run(tmp_path, ends=False)
    first = Run(tmp_path).start
    ended = {"started": "2026-01-31T12:00:00Z", "ended": "2026-01-31T12:05:00Z", "outcome": "interrupted"}
    start_run(tmp_path, first.model_copy(update=ended))
    start_run(tmp_path, first.model_copy(update={"started": now()}))
    with locked(tmp_path):
        listed = read_listed(tmp_path)
    assert listed.state == "running" and 300 <= listed.time_s < 360


def test_a_run_that_goes_on_has_not_ended_and_keeps_its_earlier_summary(tmp_path):
    evidence.write_run(tmp_path)
    followed = Run(tmp_path, follow=True)
    summary = followed.summary
    assert followed.ended
    start_run(tmp_path, followed.start.model_copy(update={"ended": None, "outcome": None}))
    followed.update()
    assert (followed.state, Run(tmp_path).state) == ("training", "training") and not is_done(tmp_path)
    assert load_summary(tmp_path / "summary-1.json") == summary and read_listed(tmp_path).state == "running"
    end_run(tmp_path, "interrupted", "SIGTERM")
    followed.update()
    assert followed.state == Run(tmp_path).state == read_listed(tmp_path).state == "interrupted"
    start_run(tmp_path, followed.start)
    write_summary(tmp_path, summary.model_copy(update={"samples": 480}))
    end_run(tmp_path)
    followed.update()
    assert followed.ended and followed.summary.samples == Run(tmp_path, follow=True).summary.samples == 480
    assert [path.name for path in tmp_path.glob("summary-*")] == ["summary-1.json"]


# --- folders ----------------------------------------------------------------------------------------------------------
def test_runs_are_found_at_any_depth_without_those_of_tuning(tmp_path):
    for name in ("b", "deep/er/a", "study/runs/0", "study/tuning/0"):
        evidence.write_run(tmp_path / name, ends=name != "b")
    (tmp_path / "study" / "comparison.json").write_text('{"runs": []}')
    found = find_runs([tmp_path, tmp_path / "deep"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["b", "deep/er/a", "study/runs/0"]
    assert list(found.values()) == [None, None, tmp_path / "study"] and not find_runs([tmp_path / "none"])
    assert read_comparison(tmp_path) is None and read_comparison(tmp_path / "study") == {"runs": []}
    for text in ("[", "[]", "{}", '{"runs": [{}]}', '{"runs": [{"folder": 1}]}'):
        (tmp_path / "study" / "comparison.json").write_text(text)
        with pytest.raises(DataError, match="must be written by `hpcdist compare`; got"):
            read_comparison(tmp_path / "study")
    for name in ("a\0", "é" * 200):
        (tmp_path / "study" / "comparison.json").write_text(json.dumps({"runs": [{"folder": name}]}))
        with pytest.raises(DataError, match=r"got runs.0.folder: .*no system has a file of that name"):
            read_comparison(tmp_path / "study")
    (tmp_path / "study" / "comparison.json").write_text(text)
    with pytest.raises(DataError, match=r"got runs.0.folder: Input should be a valid string, got 1\. Run it again"):
        read_comparison(tmp_path / "study")


def test_pandas_is_loaded_with_the_first_frame_only():
    code = "import sys, hpcdist, hpcdist.tools.runs as r; r.Run('.'); print('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
