"""Records that are read while they are written, and a rank's sums over blocks of steps."""

from __future__ import annotations

import pytest

from hpcdist.records import RecordTail, RecordWriter, StepRecord, record_path
from hpcdist.tools.watch import series
from hpcdist.tools.watch.series import RankSeries, seconds


def steps(items: list) -> list:
    return [item.step if isinstance(item, StepRecord) else {"restart": item} for item in items]


# --- the reader -------------------------------------------------------------------------------------------------------
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
        assert steps(tail()) == [2]
        assert tail() == []
        file.write('les":4}\n')
    assert steps(tail()) == [3]


def test_a_restart_is_told_where_it_is(tmp_path):
    path = record_path(tmp_path, 0)
    with RecordWriter(path) as writer:
        writer.write(StepRecord(1))
        writer.write(StepRecord(2))
    late = RecordTail(path, from_end=True)
    with RecordWriter(path, first_step=2) as writer:
        writer.write(StepRecord(2))
    assert steps(RecordTail(path)()) == [1, 2, {"restart": 2}, 2]
    assert steps(late()) == [{"restart": 2}, 2]


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
    assert steps(tail()) == [1, 2]
    path.write_bytes(whole + b"no record\n" + second)
    assert tail() == []
    assert steps(tail()) == [2]


def test_another_file_of_the_name_is_read_from_its_beginning(tmp_path):
    path = record_path(tmp_path, 0)
    with RecordWriter(path) as writer:
        for step in (1, 2, 3):
            writer.write(StepRecord(step))
    tail = RecordTail(path)
    tail()
    path.unlink()
    with RecordWriter(path) as writer:
        writer.write(StepRecord(1))
    assert steps(tail()) == [{"restart": 0}, 1]


# --- sums over blocks -------------------------------------------------------------------------------------------------
def record(step: int) -> StepRecord:
    return StepRecord(step, samples=4, loss=float(step), computing_s=2.0, waiting_s=1.0, waited_for={3: 0.5})


def test_blocks_hold_the_sums_of_all_steps_however_many(monkeypatch):
    monkeypatch.setattr(series, "BLOCKS", 8)
    rank = RankSeries()
    for step in range(1, 101):
        rank.add(record(step))
    assert rank.width == 16 and len(rank.blocks) == 7
    assert rank.total["samples"] == 400 and rank.total["loss"] == 5050 and rank.total["for 3"] == 50
    assert rank.blocks[0]["loss"] == sum(range(1, 17)) and seconds(rank.total) == 300
    assert (rank.step, rank.loss) == (100, 100.0)


@pytest.mark.parametrize(("first_step", "left"), [(1, 0), (9, 8), (33, 32), (41, 40), (200, 100)])
def test_a_restart_drops_the_steps_that_are_taken_again(monkeypatch, first_step, left):
    monkeypatch.setattr(series, "BLOCKS", 8)
    rank = RankSeries()
    for step in range(1, 101):
        rank.add(record(step))
    rank.restart(first_step)
    assert rank.total["samples"] == 4 * left
    assert rank.step == (left if left > 100 - series.RECENT else 0)
