"""Ranks that are killed: workers are gone on without, a server ends the run, and what is left can be resumed."""

from __future__ import annotations

import re

import pytest

from faults.deaths import AT_ANY_TIME, events, go_on, job, survivable
from hpcdist.records import load_summary, read_records

pytestmark = survivable


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["strategy=hardsync"], marks=pytest.mark.extended),
        ["strategy=hardsync", "strategy.servers=2"],
        pytest.param(["strategy=softsync", "strategy.splits=1"], marks=pytest.mark.extended),
        pytest.param(["strategy=parameter_server"], marks=pytest.mark.extended),
        ["strategy=ssp", "strategy.bound=1"],
        ["strategy=downpour"],
        pytest.param(["strategy=easgd"], marks=pytest.mark.extended),
    ],
    ids=" ".join,
)
def test_a_killed_worker_is_gone_on_without(tmp_path, options):
    done = job(tmp_path, 4, *options, deaths={3: 10})
    assert done.returncode == 0, done.stderr
    assert events(tmp_path, 0) == ["goes on without rank 3: it has died"]
    summary = load_summary(tmp_path / "run")
    assert summary.lost_ranks == [3]
    assert summary.metrics["accuracy"] > 0.5
    if options[0] == "strategy=hardsync":
        assert summary.staleness.max == 0
        left = 2 if len(options) == 1 else 1
        assert left in {len(record.staleness) for record in read_records(tmp_path / "run")[0]}


def test_what_is_left_saves_a_checkpoint_from_which_as_many_ranks_go_on(tmp_path):
    done = job(tmp_path, 4, "strategy=hardsync", "epochs=2", "checkpoint.every_steps=30", deaths={2: 40})
    assert done.returncode == 0, done.stderr
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000030", "step-00000060"] or len(saved) == 2, saved
    go_on(tmp_path, 3, tmp_path / "run" / "checkpoints" / saved[-1], "strategy=hardsync", "epochs=3")
    assert load_summary(tmp_path / "run").ranks == 3


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, ["strategy=parameter_server"]),
        (4, ["strategy=hardsync", "strategy.fan_in=2"]),  # rank 1 is an aggregator, and 2 and 3 push to it alone
    ],
    ids=["parameter_server", "aggregator"],
)
def test_a_killed_server_ends_the_run_with_a_message(tmp_path, size, options):
    done = job(tmp_path, size, *options, "epochs=2000", "checkpoint.every_steps=20", deaths={0: AT_ANY_TIME})
    assert done.returncode != 0
    # In a step, or between two steps, where all ranks take part.
    met = ", and its part of the parameters", ", and the others can't go on without it", "; this call needs all of them"
    assert any(f"rank 0 has died{message}" in done.stderr for message in met), done.stderr
    assert "Resume from the last checkpoint" in done.stderr


def test_a_strategy_that_needs_all_ranks_ends_with_a_message(tmp_path):
    done = job(tmp_path, 3, "strategy=allreduce", "epochs=50", deaths={2: 10})
    assert done.returncode != 0
    assert re.search(r"failed on rank [01]: MPI_ERR_PROC_FAILED.*rank 2 has died; this call needs", done.stderr)
