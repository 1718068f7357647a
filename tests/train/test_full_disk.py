"""A full disk, or a limit on the size of files, while a run writes: one sentence, and nothing half-written is left."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.cases import each
from harness.launch import IMPORTS, find_mpirun, launch
from hpcdist.checkpoint import export
from hpcdist.comm.launch import unlaunched
from hpcdist.data import writer
from hpcdist.errors import ConfigError, OutputError
from hpcdist.records import (
    Evaluation,
    RecordWriter,
    StepRecord,
    append_evaluation,
    load_summary,
    locked,
    read_evaluations,
    read_records,
    record_path,
    write_summary,
)
from study import evidence
from train import tiny

TOO_LARGE = "must be written to its end; got 'File too large'. Make room"


@contextmanager
def file_limit(n_bytes: int) -> Iterator[None]:
    """Meanwhile no file of this process can grow beyond so many bytes; the kernel refuses more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- single files -----------------------------------------------------------------------------------------------------
def test_records_end_with_a_whole_line(tmp_path):
    records = RecordWriter(path := record_path(tmp_path, 0))
    records.write(StepRecord(step=1))
    records.flush()
    for step in range(2, 100):
        records.write(StepRecord(step=step))
    with file_limit(2000), pytest.raises(OutputError, match=f"records-rank0000.jsonl {TOO_LARGE}"):
        records.flush()
    records.close()
    assert [record.step for record in read_records(tmp_path)[0]] == [1]
    with file_limit(path.stat().st_size), pytest.raises(OutputError, match=TOO_LARGE):
        RecordWriter(path, first_step=2)


def test_a_summary_is_the_old_one_or_the_new_one(tmp_path):
    with file_limit(100), pytest.raises(OutputError, match=f"summary.json {TOO_LARGE}"):
        write_summary(tmp_path, evidence.summary())
    assert list(tmp_path.iterdir()) == []
    write_summary(tmp_path, evidence.summary())
    with file_limit(100), pytest.raises(OutputError, match=f"summary.json {TOO_LARGE}"):
        write_summary(tmp_path, evidence.summary(seed=5))
    assert load_summary(tmp_path).seed == 0 and len(list(tmp_path.iterdir())) == 1


def test_evaluations_end_with_a_whole_line(tmp_path):
    first = Evaluation(1, 1, 10, 0.5, {"loss": 1.0})
    append_evaluation(tmp_path, first)
    with file_limit(100), pytest.raises(OutputError, match=f"evaluations.jsonl {TOO_LARGE}"):
        append_evaluation(tmp_path, Evaluation(2, 2, 20, 1.0, {"loss": 0.5}))
    assert read_evaluations(tmp_path) == [first]


@each("name", ["it.pt", "it.safetensors"])
def test_an_exported_model_is_whole_or_not_there(tmp_path, name):
    with file_limit(1000), pytest.raises(OutputError, match=f"{name} {TOO_LARGE}"):
        export({"weight": torch.zeros(1000)}, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@each("compression", [None, "gzip"])
@each("n_bytes", [100, 100_000, 2_300_000])
def test_a_data_set_is_whole_or_not_there(tmp_path, compression, n_bytes):
    """HDF5 itself would end the process with a segmentation fault."""
    x = np.random.default_rng(0).integers(0, 256, (9000, 256), dtype=np.uint8)
    split = writer.Split(len(x), ((x[i : i + 500], np.zeros(500)) for i in range(0, len(x), 500)))
    with file_limit(n_bytes), pytest.raises(OutputError, match=f"it.h5 {TOO_LARGE}"):
        writer.create(tmp_path / "it.h5", {"train": split}, task="regression", compression=compression)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_locked(tmp_path):
    with file_limit(0), pytest.raises(ConfigError, match="--output must be a folder .*File too large"):
        with locked(tmp_path):
            pass
    with locked(tmp_path):
        assert (tmp_path / ".lock").stat().st_size > 5


def test_it_is_an_error_of_its_own():
    assert issubclass(OutputError, OSError) and not issubclass(OutputError, ConfigError)
    assert "got 'some words'" in str(OutputError.of("x", OSError("some words")))


# --- whole runs -------------------------------------------------------------------------------------------------------
LIMITED = """
import dataclasses, resource
from hpcdist import session
from train import tiny

def loss(*arguments):
    if session.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    return tiny.job.loss(*arguments)

job = dataclasses.replace(tiny.job, loss=loss)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny.job.data(Path("digits.h5"))
    return tmp_path


def _words(job: str, *settings: str, output: str = "it") -> list[str]:
    flags = [word for setting in ("data.path=digits.h5", *settings) for word in ("--set", setting)]
    return ["-m", "hpcdist", "train", job, *flags, "--output", output]


needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")


@needs_mpirun
def test_records_that_one_rank_can_not_write_are_told_once_and_end_all(folder):
    """Records of all ranks: see the full disk."""
    Path("limited.py").write_text(LIMITED)
    done = launch(2, _words("limited.py"), env=IMPORTS)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "records in" not in done.stdout
    told = "hpcdist: error: it/records-rank0001.jsonl"
    assert done.stderr.count("hpcdist: error: ") == 1 == done.stderr.count(told), done.stderr
    assert TOO_LARGE in done.stderr and not Path("it/summary.json").exists()
    read_records("it")  # without a warning of a line that was cut short


@needs_mpirun
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a small file system")
def test_a_full_disk_is_told_once_and_ends_all(folder):
    """A file system of 64 KiB, which the job's files and the first records leave room on."""
    Path("it").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "it"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        done = launch(2, _words(str(Path(tiny.__file__)), "epochs=30", output="it/run"), env=IMPORTS)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert done.stderr.count("hpcdist: error: ") == 1 == done.stderr.count("hpcdist: error: it/run/"), done.stderr
        assert "must be written to its end; got 'No space left on device'. Make room" in done.stderr
        assert not Path("it/run/summary.json").exists()
        read_records("it/run")
    finally:
        subprocess.run(["umount", "it"], check=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_goes_to_a_full_disk_is_told_too():
    command, environment = [sys.executable, "-m", "hpcdist", "--version"], {**unlaunched(os.environ), **IMPORTS}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("hpcdist: error: standard output must be written to its end; got 'No space left on d")
