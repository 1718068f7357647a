"""The benchmark of torch.distributed's calls: every side is measured, and rows are whole."""

from __future__ import annotations

import json
import subprocess

import pytest
import typer

from comm.jobs_here import LIMIT_S, ROOT
from harness.launch import find_mpirun, launch
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.tools import cli
from hpcdist.tools.bench import torch_calls


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
@pytest.mark.extended
def test_every_side_has_a_row_for_each_call_and_size(tmp_path):
    path = tmp_path / "rows.json"
    words = ["-m", "hpcdist", "bench", "torch", "--sizes", "4096", "--rounds", "1", "--json", str(path)]
    job: subprocess.CompletedProcess = launch(2, words, env={"PYTHONPATH": str(ROOT)}, timeout_s=LIMIT_S, compiler=True)
    assert job.returncode == 0, job.stderr
    rows = json.loads(path.read_text())
    expected = {(call, name) for call in torch_calls.CALLS for name in ("hpcdist", "gloo", "communicator")}
    expected -= {("send", "communicator")}
    expected |= {(step, name) for step in ("ddp", "fsdp2") for name in ("hpcdist", "gloo", "alone")}
    assert {(row["call"], row["name"]) for row in rows} == expected and len(rows) == len(expected)
    for row in rows:
        assert row["median_s"] > 0 and row["ranks"] == 2 and row["speedup"] > 0
        assert (row["over_below"] is None) == (row["call"] == "send")
        assert row["bytes"] == (24_096_040 if row["call"] in ("ddp", "fsdp2") else 4096)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--call", "gossip"], UnknownNameError, "--call must be one of .*; got 'gossip'"),
        (["--sizes", "4"], ConfigError, "ranks of this measurement must be at least 2; got 1"),
    ],
)
def test_what_can_not_be_measured_is_refused(arguments, error, message):
    command = typer.main.get_command(cli.app)
    with pytest.raises(error, match=message):
        command.main(["bench", "torch", *arguments], standalone_mode=False)
