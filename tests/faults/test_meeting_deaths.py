"""Ranks that are killed where all ranks meet: between two steps, in an evaluation, a checkpoint, the end of the run."""

from __future__ import annotations

import pytest

from faults.deaths import events, job, survivable
from hpcdist import checkpoint
from hpcdist.records import load_summary

pytestmark = survivable
APART = ("leave.enabled=false", "checkpoint.every_s=0")  # ranks meet where the test says, and nowhere else
STEP = 10  # after which the next meeting is looked for


@pytest.mark.parametrize(
    ("name", "inside", "call", "amid_s"),
    [
        ("gossip_pull", "comm.barrier", 1, 0.3),  # at the end of an epoch, as the first one there
        ("gossip_pull", "strategy.shrink", 1, 0.0),  # alive on one communicator, not on the other
        ("gossip_pull", "strategy.comm.allreduce", 1, 0.3),  # in the consensus
        ("gossip_pull", "comm.allreduce", 1, 0.0),  # at the end of an evaluation
        ("parameter_server", "strategy.comm.broadcast", 1, 0.0),  # the server goes on, a worker waits
    ],
)
def test_a_rank_may_die_between_steps(tmp_path, name, inside, call, amid_s):
    options = [f"strategy={name}", "epochs=2", "leave.every_s=0.1"]
    done = job(tmp_path, 3, *options, deaths={1: STEP}, inside=inside, call=call, amid_s=amid_s)
    assert done.returncode == 0, done.stderr
    assert events(tmp_path, 0) == ["goes on without rank 1: it has died"], done.stderr
    summary = load_summary(tmp_path / "run")
    assert summary.lost_ranks == [1]
    assert summary.metrics["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("name", "rank", "inside", "call"),
    [
        ("gossip_push", 0, "hpcdist.checkpoint.save.write_manifest", 1),  # leads, and all have written their parts
        ("gossip_push", 0, "hpcdist.checkpoint.folder.best_of", 1),  # has published it, and told nobody
        ("downpour", 1, "comm.calls.communicate", 8),  # in the middle of telling that all is saved
    ],
)
def test_a_rank_may_die_while_a_checkpoint_is_saved(tmp_path, name, rank, inside, call):
    options = [f"strategy={name}", "epochs=1", "checkpoint.every_steps=15", "checkpoint.keep=3", *APART]
    done = job(tmp_path, 3, *options, deaths={rank: STEP}, inside=inside, call=call)
    assert done.returncode == 0, done.stderr
    assert load_summary(tmp_path / "run").lost_ranks == [rank]
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in saved][:2] == ["step-00000015", "step-00000030"]
    assert {checkpoint.verify(path).ranks for path in saved} == {2}


@pytest.mark.parametrize(
    ("name", "rank", "inside", "lost"),
    [
        ("gossip_sync", 0, "hpcdist.train.log.write_summary", [0]),  # all others wait for it
        ("ssp", 1, "_summarise", [1]),
        ("gossip_push", 1, "strategy.close", []),
    ],
)
def test_a_rank_may_die_at_the_end_of_the_run(tmp_path, name, rank, inside, lost):
    done = job(tmp_path, 3, f"strategy={name}", "epochs=1", deaths={rank: STEP}, inside=inside)
    assert done.returncode == 0, done.stderr
    assert load_summary(tmp_path / "run").lost_ranks == lost


def test_a_rank_that_is_needed_ends_the_run_there_with_a_message(tmp_path):
    options = ["strategy=parameter_server", "strategy.servers=colocated"]
    done = job(tmp_path, 3, *options, deaths={1: STEP}, inside="comm.barrier")
    assert done.returncode != 0 and not (tmp_path / "run" / "summary.json").exists()
    assert "rank 1 has died, and the others can't continue without it. Resume from the last checkpoint." in done.stderr
