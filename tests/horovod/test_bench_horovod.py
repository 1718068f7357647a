"""The benchmark of what scripts written for Horovod do: every side is measured, and rows are whole."""

from __future__ import annotations

import itertools
import json

import pytest
import typer

from benchmarks.horovod_calls import NETWORKS
from comm.jobs_here import LIMIT_S, ROOT
from harness.launch import launch
from hpcdist.errors import ConfigError
from hpcdist.tools import cli


@pytest.mark.extended
@pytest.mark.usefixtures("horovod")
def test_every_side_has_a_row_for_each_call_and_size(tmp_path):
    path = tmp_path / "rows.json"
    words = ["-m", "hpcdist", "bench", "horovod", "--sizes", "4096", "--rounds", "1", "--json", str(path)]
    job = launch(2, words, env={"PYTHONPATH": str(ROOT)}, timeout_s=LIMIT_S, preloaded=("torch._dynamo",))
    assert job.returncode == 0, job.stderr
    rows = json.loads(path.read_text())
    found = {(row["call"], row["name"], row["bytes"]) for row in rows}
    both = {("allreduce", name, 4096) for name in ("hpcdist", "horovod")}
    both |= {("160 tensors", name, 640_000) for name in ("hpcdist", "horovod")}
    sizes = [4 * sum(a * b + b for a, b in itertools.pairwise(widths)) for widths in NETWORKS]
    assert found == both | {("step", name, size) for size in sizes for name in ("hpcdist", "horovod", "alone")}
    for row in rows:
        assert row["median_s"] > 0 and row["ranks"] == 2 and row["speedup"] > 0
        assert (row["over_alone"] is None) == (row["call"] != "step")


def test_one_rank_is_refused():
    command = typer.main.get_command(cli.app)
    with pytest.raises(ConfigError, match="ranks of this measurement must be at least 2; got 1"):
        command.main(["bench", "horovod"], standalone_mode=False)
