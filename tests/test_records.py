"""Step records, the staleness ledger, summaries, and the checksum of tensors."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import each
from hpcdist.errors import DataError
from hpcdist.records import (
    RecordWriter,
    StepRecord,
    continue_records,
    digest,
    load_summary,
    read_records,
    record_path,
    replace_durably,
    stamp,
    summarise,
    tensor_bytes,
    write_durably,
    write_summary,
)

counts = st.integers(0, 2**53)
seconds = st.floats(0, 1e6)
records = st.builds(
    StepRecord,
    step=counts,
    clock=counts,
    staleness=st.lists(counts, max_size=4).map(tuple),
    samples=counts,
    loss=st.none() | st.floats(),
    bytes_sent=counts,
    messages_sent=counts,
    bytes_fetched=counts,
    messages_fetched=counts,
    computing_s=seconds,
    communicating_s=seconds,
    waiting_s=seconds,
    event=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
RECORD = StepRecord(step=3, clock=9, staleness=(0, 2), samples=32, loss=0.5, bytes_sent=100, event="a checkpoint")
GIVEN = {"strategy": "async", "ranks": 3, "seed": 1, "wall_s": 2.5, "metrics": {"accuracy": 0.97}, "sha256": "a" * 64}


def written(path, *some: StepRecord, **options):
    with RecordWriter(path, **options) as writer:
        for record in some:
            writer.write(record)
    return path


# --- records ----------------------------------------------------------------------------------------------------------
@settings(max_examples=30)
@given(some=st.lists(records, max_size=5))
def test_records_are_read_back_as_written(tmp_path_factory, some):
    folder = tmp_path_factory.mktemp("records")
    written(record_path(folder, 12), *some)
    # repr, because NaN is unlike itself
    assert repr(read_records(folder)) == repr({12: some})


def test_every_rank_has_a_file_and_other_files_are_ignored(tmp_path):
    for rank in (2, 0, 10001):
        written(record_path(tmp_path, rank), replace(RECORD, clock=rank))
    (tmp_path / "records-rank0.jsonl.bak").write_text("other")
    assert sorted(p.name for p in tmp_path.glob("*.jsonl")) == [
        "records-rank0000.jsonl", "records-rank0002.jsonl", "records-rank10001.jsonl",
    ]  # fmt: skip
    assert read_records(tmp_path) == {rank: [replace(RECORD, clock=rank)] for rank in (0, 2, 10001)}
    assert list(read_records(tmp_path)) == [0, 2, 10001]


def test_lines_are_buffered_until_enough_or_late(tmp_path):
    path = record_path(tmp_path / "made", 0)
    writer = RecordWriter(path, flush_s=1e9, flush_records=3)
    sizes = []
    for _ in range(4):
        writer.write(RECORD)
        sizes.append(path.stat().st_size)
    assert sizes[0] == sizes[1] == 0 < sizes[2] == sizes[3]
    writer.flush()
    assert path.read_bytes().count(b"\n") == 4
    writer.write(RECORD)
    writer.close()
    writer.close()
    assert path.read_bytes().count(b"\n") == 5
    eager = RecordWriter(path, flush_s=0.0)
    eager.write(RECORD)
    assert path.read_bytes().count(b"\n") == 7  # with the mark of a restart
    eager.close()


def test_a_restart_supersedes_what_it_repeats_and_deletes_nothing(tmp_path):
    path = record_path(tmp_path, 0)
    written(path, *[StepRecord(step, clock=0) for step in range(1, 8)])
    written(path, *[StepRecord(step, clock=1) for step in (5, 6)], first_step=5)
    expected = [StepRecord(step, clock=int(step > 4)) for step in range(1, 7)]
    assert read_records(tmp_path) == {0: expected}
    assert path.read_bytes().count(b"\n") == 7 + 1 + 2
    written(path, StepRecord(1, clock=2))
    assert read_records(tmp_path) == {0: [StepRecord(1, clock=2)]}


def test_a_restart_on_other_ranks_supersedes_what_each_had_done_after_the_checkpoint(tmp_path):
    """A server's steps are updates; ranks that are there no longer write nothing, but their steps are repeated, too."""
    for rank, steps in enumerate((9, 4, 4)):
        written(record_path(tmp_path, rank), *(StepRecord(step) for step in range(1, steps + 1)))
    for rank in (0, 1):
        continue_records(tmp_path, rank, 2, 4, saved=(7, 3, 3)).close()
    assert [len(of_rank) for of_rank in read_records(tmp_path).values()] == [7, 3, 3]
    continue_records(tmp_path, 0, 1, 3, saved=()).close()
    assert [len(of_rank) for of_rank in read_records(tmp_path).values()] == [2, 2, 2], "a start on the same ranks"
    continue_records(tmp_path, 0, 1, 1, saved=()).close()
    assert not any(read_records(tmp_path).values()), "a start without a checkpoint"


def test_a_cut_anywhere_in_the_last_line_loses_that_record_alone(tmp_path):
    path = written(record_path(tmp_path, 0), StepRecord(1), StepRecord(2))
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start + 1, len(whole)):
        path.write_bytes(whole[:end])
        with pytest.warns(UserWarning, match=r"records-rank0000.jsonl:2 ends in the middle of a record"):
            assert read_records(tmp_path) == {0: [StepRecord(1)]}
        written(path, StepRecord(2, clock=5), first_step=2)
        assert read_records(tmp_path) == {0: [StepRecord(1), StepRecord(2, clock=5)]}


@each("length", [10, 70_000, 200_000])
def test_a_long_partial_line_is_dropped_at_a_restart(tmp_path, length):
    path = record_path(tmp_path, 0)
    path.write_bytes(b"x" * length)
    written(path, StepRecord(1))
    assert read_records(tmp_path) == {0: [StepRecord(1)]}
    line = written(record_path(tmp_path / "b", 0), RECORD).read_bytes()
    path.write_bytes(line + b"x" * length)
    written(path, StepRecord(9), first_step=9)
    assert read_records(tmp_path) == {0: [RECORD, StepRecord(9)]}


@each(
    "line",
    [b"", b"garbage", b"\xff\xfe", b"[1]", b"{}", b'{"step":"1"}', b'{"step":1.5}', b'{"step":1,"stp":2}', b'{"step":1',
     b'{"step":1,"staleness":[0.5]}'],
)  # fmt: skip
def test_garbage_before_the_end_is_refused_with_its_line(tmp_path, line):
    (path := record_path(tmp_path, 3)).unlink(missing_ok=True)
    good = written(path, StepRecord(1)).read_bytes()
    path.write_bytes(good + line + b"\n" + good)
    with pytest.raises(DataError, match=r"records-rank0003.jsonl:2 must be a step record; got .* is damaged"):
        read_records(tmp_path)


def test_a_folder_without_records_and_a_hole_in_a_file_are_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match=r"must hold files records-rank\*.jsonl; got none. Give the folder of"):
            read_records(folder)
    os.truncate(written(record_path(tmp_path, 0), StepRecord(1)), 1 << 40)
    told = r"records-rank0000.jsonl:2 must be a step record; got \d+ bytes without a line"
    with pytest.raises(DataError, match=told):
        read_records(tmp_path)
    with pytest.raises(DataError, match=r"records-rank0000.jsonl must have lines; got more than \d+ bytes without"):
        RecordWriter(record_path(tmp_path, 0), first_step=2)


# --- staleness --------------------------------------------------------------------------------------------------------
@settings(max_examples=30)
@given(parts=st.lists(st.lists(st.integers(0, 40), max_size=20), max_size=4))
def test_a_summary_knows_mean_maximum_and_histogram_of_staleness(parts):
    records = {0: [StepRecord(step, staleness=tuple(part)) for step, part in enumerate(parts, 1)]}
    found = summarise(records, workers=1, **GIVEN).staleness
    values = [value for part in parts for value in part]
    assert found.mean == pytest.approx(np.mean(values) if values else 0.0, abs=1e-12)
    assert found.max == max(values, default=0)
    kinds, numbers = np.unique(np.array(values, dtype=int), return_counts=True)
    assert list(found.histogram.items()) == list(zip(kinds.tolist(), numbers.tolist(), strict=True))
    with pytest.raises(DataError, match="got staleness.mean: Input should be greater than or equal to 0, got -0.5"):
        summarise({0: [StepRecord(1, staleness=(0, -1))]}, workers=1, **GIVEN)


# --- summaries --------------------------------------------------------------------------------------------------------
def test_a_summary_of_a_server_and_two_workers():
    # Each worker fetches 80 bytes and puts 80; the server only waits, and the last batch of rank 2 is short.
    traffic = {"bytes_sent": 80, "messages_sent": 1, "bytes_fetched": 80, "messages_fetched": 2}
    times = {"computing_s": 0.25, "communicating_s": 0.5, "waiting_s": 0.125}
    of_ranks = {
        0: [StepRecord(1, staleness=(0, 1), waiting_s=60.0), StepRecord(2, staleness=(3,), bytes_sent=60)],
        1: [StepRecord(step, samples=10, **traffic, **times) for step in (1, 2)],
        2: [StepRecord(1, samples=4, **traffic, **times), StepRecord(2, event="end of data", waiting_s=1.0)],
    }
    summary = summarise(of_ranks, **GIVEN)
    assert (summary.strategy, summary.ranks, summary.workers, summary.samples) == ("async", 3, 2, 24)
    assert summary.staleness.model_dump() == {"mean": 4 / 3, "max": 3, "histogram": {0: 1, 1: 1, 3: 1}}
    assert summary.bytes_per_step == (3 * 160 + 60) / 3
    assert summary.messages_per_step == 3
    assert summary.seconds.model_dump() == {"computing": 0.375, "communicating": 0.75, "waiting": (3 * 0.125 + 1) / 2}


def test_a_summary_of_steps_without_samples_and_of_a_run_without_records():
    """The last step of an epoch, in which a worker has no sample left: its part of an all-reduce is as long."""
    full, empty = StepRecord(1, samples=8, bytes_sent=90), StepRecord(2, bytes_sent=90)
    ranks = {0: [full, StepRecord(2, samples=8, bytes_sent=90)], 1: [full, empty]}
    assert summarise(ranks, **GIVEN).bytes_per_step == 90
    summary = summarise({0: [], 1: []}, workers=2, **GIVEN)
    assert (summary.workers, summary.samples, summary.bytes_per_step) == (2, 0, 0)
    assert summarise({0: [RECORD], 1: []}, workers=2, **GIVEN).workers == 1
    former = {rank: [full] for rank in range(3)}
    assert summarise(former, workers=2, **GIVEN).workers == 2, "the third is from a start on more ranks"


def test_a_summary_of_a_loop_that_counts_no_samples():
    """All ranks of the loop are workers, and each record is a step, also one without an exchange."""
    alone, together = StepRecord(1, computing_s=2.0), StepRecord(2, bytes_sent=90, messages_sent=4, waiting_s=1.0)
    skipped = StepRecord(3, event="skipped: a gradient was NaN")
    summary = summarise({0: [alone, together, skipped], 1: [alone, together, alone]}, workers=2, **GIVEN)
    assert (summary.samples, summary.workers, summary.skipped) == (0, 2, 1)
    assert (summary.bytes_per_step, summary.messages_per_step) == (30, 4 / 3)
    assert summary.seconds.model_dump() == {"computing": 3.0, "communicating": 0.0, "waiting": 1.0}


def test_a_summary_is_read_back_with_what_was_added_to_it(tmp_path):
    summary = summarise({0: [RECORD]}, **GIVEN | {"metrics": {"loss": math.nan, "rmse": math.inf}}, epochs=[1, 2])
    path = write_summary(tmp_path / "run", summary)
    assert path == tmp_path / "run" / "summary.json"
    for source in (path, path.parent):
        assert repr(load_summary(source)) == repr(summary)
    content = json.loads(path.read_text())
    assert content["epochs"] == [1, 2] and content["staleness"]["histogram"] == {"0": 1, "2": 1}
    write_summary(path.parent, content | {"seed": 5})
    assert load_summary(path).seed == 5
    assert [p.name for p in path.parent.iterdir()] == ["summary.json"]


@each(
    "case",
    [
        ({"ranks": 0}, "ranks: Input should be greater than or equal to 1, got 0"),
        ({"sha256": "abc"}, "sha256: String should match pattern"),
        ({"staleness": {"mean": 0.0, "max": 0}}, "staleness.histogram: Field required"),
        ({"seconds": {"computing": 0, "communicating": 0, "waiting": 0, "idle": 0}}, "seconds.idle: Extra inputs"),
    ],
)
def test_a_summary_that_breaks_the_schema_is_refused_and_the_old_one_stays(tmp_path, case):
    change, message = case
    content = summarise({0: [RECORD]}, **GIVEN).model_dump()
    path = write_summary(tmp_path, content)
    before = path.read_bytes()
    with pytest.raises(DataError, match=f"summary must hold the fields of a run's summary; .*{re.escape(message)}"):
        write_summary(tmp_path, content | change)
    assert path.read_bytes() == before
    path.write_text(json.dumps(content | change))
    with pytest.raises(DataError, match=f"summary.json must hold the fields .*{re.escape(message)}"):
        load_summary(tmp_path)


def test_a_missing_field_a_missing_file_and_no_json_are_refused(tmp_path):
    with pytest.raises(DataError, match="summary must hold the fields .* seed: Field required"):
        summarise({}, **{k: v for k, v in GIVEN.items() if k != "seed"})
    with pytest.raises(DataError, match="summary.json must exist; got nothing there. Has the run ended?"):
        load_summary(tmp_path)
    (tmp_path / "summary.json").write_text('{"strategy": "asy')
    with pytest.raises(DataError, match="summary.json must be JSON; got .*. Write it again from the records"):
        load_summary(tmp_path)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(DataError, match="summary.json must hold the fields .* it: "):
        load_summary(tmp_path)


# --- files ------------------------------------------------------------------------------------------------------------
@each("chunks", [[], [b""], [b"ab", b"", np.arange(5, dtype=np.uint8), b"c" * 3_000_000]])
def test_a_file_is_stamped_with_what_was_written(tmp_path, chunks):
    path = tmp_path / str(len(chunks))
    written = write_durably(path, (chunk for chunk in chunks))
    assert path.read_bytes() == b"".join(bytes(chunk) for chunk in chunks)
    with open(path, "rb") as file:
        assert written == stamp(file)
    assert written.bytes == path.stat().st_size
    with pytest.raises(FileExistsError):
        write_durably(path, [b"other"])


def test_a_failed_replacement_leaves_nothing_behind(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        replace_durably(tmp_path / "taken", b"data")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


# --- checksums --------------------------------------------------------------------------------------------------------
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.complex128,
    torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


@each("dtype", DTYPES)
def test_bytes_are_a_view_of_contiguous_memory_of_any_dtype(dtype):
    tensor = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    data = tensor_bytes(tensor)
    assert data.dtype == np.uint8 and data.size == 6 * tensor.element_size()
    assert data.ctypes.data == tensor.data_ptr()
    turned = tensor.t()
    assert bytes(tensor_bytes(turned)) == bytes(tensor_bytes(turned.contiguous())) != bytes(data)
    assert tensor_bytes(tensor[:0]).size == tensor_bytes(torch.from_numpy(np.empty(0))).size == 0
    assert bytes(tensor_bytes(tensor.reshape(-1)[1::9])) == bytes(tensor_bytes(tensor[0, 1]))
    assert tensor_bytes(tensor[0, 0]).size == tensor.element_size()
    assert digest([tensor]) == digest([tensor.clone()]) != digest([turned])


def test_a_digest_tells_order_shape_dtype_and_every_bit_apart():
    one, zero = torch.ones(4), torch.zeros(4)
    flipped = zero.clone()
    flipped.view(torch.int32)[3] = 1
    lazy = torch.tensor([1 + 2j, 3 - 1j])
    different = [
        [], [one], [one, zero], [zero, one], [torch.cat([one, zero])], [one.reshape(2, 2)], [one.half()], [flipped],
        [zero.int()], [one[:0]], [one[:0].reshape(0, 3)], [-zero], [lazy], [lazy.conj()], [lazy.conj().imag],
    ]  # fmt: skip
    assert len({digest(tensors) for tensors in different}) == len(different)
    assert digest([lazy.conj()]) == digest([lazy.conj_physical()])
    assert digest([lazy.conj().imag]) == digest([-lazy.imag])
    parameter = torch.nn.Parameter(one)
    assert digest([parameter]) == digest(iter([one])) and re.fullmatch("[0-9a-f]{64}", digest([]))
