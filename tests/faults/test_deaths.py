"""Ranks that are killed: workers are gone on without, a server ends the run, and what is left can be resumed."""

from __future__ import annotations

import re

import pytest

from faults.deaths import AT_ANY_TIME, events, go_on, job, survivable
from hpcdist.records import load_summary, read_records

pytestmark = survivable
AGGREGATOR = ["strategy=hardsync", "strategy.fan_in=2"]  # of 4 ranks 1 is an aggregator, and 2 and 3 push to it alone


def check_goes_on(tmp_path, *options: str, dies: int, at: int) -> None:
    """One of four ranks dies in a step of its own."""
    done = job(tmp_path, 4, *options, deaths={dies: at})
    assert done.returncode == 0, done.stderr
    assert events(tmp_path, 0) == [f"goes on without rank {dies}: it has died"]
    summary = load_summary(tmp_path / "run")
    assert summary.lost_ranks == [dies] and summary.metrics["accuracy"] > 0.5


@pytest.mark.parametrize("options", [["ssp", "strategy.bound=1", "strategy.servers=2"], ["easgd"]], ids=" ".join)
def test_a_killed_worker_is_gone_on_without(tmp_path, options):
    check_goes_on(tmp_path, f"strategy={options[0]}", *options[1:], dies=3, at=10)


def test_what_is_left_saves_a_checkpoint_from_which_as_many_ranks_go_on(tmp_path):
    check_goes_on(tmp_path, "strategy=hardsync", "epochs=2", "checkpoint.every_steps=30", dies=2, at=40)
    assert load_summary(tmp_path / "run").staleness.max == 0
    assert 2 in {len(record.staleness) for record in read_records(tmp_path / "run")[0]}
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000030", "step-00000060"] or len(saved) == 2, saved
    go_on(tmp_path, 3, tmp_path / "run" / "checkpoints" / saved[-1], "strategy=hardsync", "epochs=3")
    assert load_summary(tmp_path / "run").ranks == 3


@pytest.mark.parametrize(
    ("size", "options", "how"),
    [
        (3, ["strategy=parameter_server"], {}),
        (4, AGGREGATOR, {}),
        # In its reply to the first pause of the aggregator, for which the workers wait in a call of all ranks already.
        (4, AGGREGATOR, {"inside": "strategy.server.inbox.reply", "call": 2}),
    ],
    ids=["parameter_server", "aggregator", "workers wait for the aggregator"],
)
def test_a_killed_server_ends_the_run_with_a_message(tmp_path, size, options, how):
    done = job(tmp_path, size, *options, "epochs=2000", "checkpoint.every_steps=20", deaths={0: AT_ANY_TIME}, **how)
    assert done.returncode != 0
    # In a step, or between two steps, where all ranks take part.
    met = (
        ", and its part of the parameters",
        ", and the others can't continue without it",
        "; this call needs all of them",
    )
    assert any(f"rank 0 has died{message}" in done.stderr for message in met), done.stderr
    assert "Resume from the last checkpoint" in done.stderr


def test_a_strategy_that_needs_all_ranks_ends_with_a_message(tmp_path):
    done = job(tmp_path, 3, "strategy=allreduce", "epochs=50", deaths={2: 10})
    assert done.returncode != 0
    assert re.search(r"failed on rank [01]: MPI_ERR_PROC_FAILED.*rank 2 has died; this call needs", done.stderr)
