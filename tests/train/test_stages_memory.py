"""Jobs in stages as processes: the memory that each rank takes, and a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from torch import nn

from harness.launch import IMPORTS, launch, started, wait_until
from hpcdist import checkpoint, strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import RankFailedError
from hpcdist.model import FlatModel
from hpcdist.parallel.agreement import Agreement
from hpcdist.records import load_run
from hpcdist.tools.bench.runner import peak_bytes
from hpcdist.train import runs
from hpcdist.train.numerics import require_finite
from train import memory_of_stages, staged, tiny


def test_two_stages_take_half_of_the_memory_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # In a job of its own: the heap of a process that has run other tests gives and takes tens of megabytes.
    job = launch(2, [memory_of_stages.__file__], env=IMPORTS)
    assert job.returncode == 0, job.stderr
    found = json.loads(job.stdout)
    whole = found["whole"]
    if whole is None:
        pytest.skip("the system does not tell the peak of the resident set")
    assert whole > 3 * 108 * 2**20, "parameters, gradients, a copy of the parameters for an evaluation"
    assert [stage / whole for stage in found["stages"]] == pytest.approx([1 / 2] * 2, rel=0.15), found


def test_looks_at_all_parameters_make_no_copy_of_them():
    def body(comm):
        model = FlatModel(nn.Linear(1 << 12, 1 << 12, bias=False))  # 64 MiB
        model.grads[0].fill_(1.0)
        model.gradients.release([True])
        cls = strategies.load("allreduce")
        strategy, agreement = cls(cls.Config(), comm, model), Agreement(comm.split(0))
        looks = {
            "compare": model.mark,
            "check": lambda: require_finite(strategy, comm, 1),
            "clip": lambda: agreement.norm(model.parameters()),
        }
        for look in looks.values():  # the first calls make the heap of this thread larger
            look()
        peaks = {name: peak_bytes(look) for name, look in looks.items()}
        strategy.close()
        agreement.comm.close()
        return model.n_bytes, peaks

    ((n_bytes, peaks),) = run_virtual(body, 1)
    if None in peaks.values():
        pytest.skip("the system does not tell the peak of the resident set")
    assert n_bytes == 1 << 26
    assert all(peak < n_bytes / 2 for peak in peaks.values()), peaks


# --- a rank that is killed in the middle of a run ---------------------------------------------------------------------
# Its last stage leaves a file `pid-N` once it trains.
JOB = tiny.STUCK.replace("tiny", "staged")


def test_a_run_with_a_killed_rank_ends_and_goes_on_on_other_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB.replace("UP_TO", "60"))  # calls of the loss, of a micro-batch each
    settings = ["parallel.stages=2", "checkpoint.every_steps=4", "budget.steps=500", "data.path=digits.h5"]
    arguments = ["-m", "hpcdist", "train", "job.py", *(word for s in settings for word in ("--set", s))]
    with started(2, [*arguments, "--output", "it"], Path("log"), env=IMPORTS) as job:
        wait_until(lambda: len(_steps()) > 1 or job.poll() is not None)
        os.kill(next(int(path.name.split("-")[1]) for path in Path().glob("pid-*")), signal.SIGKILL)
        assert job.wait(timeout=100) != 0, Path("log").read_text()
    assert "rank 1" in Path("log").read_text(), "it is named"
    assert not Path("it/summary.json").exists()

    Path("job.py").write_text(JOB.replace("UP_TO", "10**6"))
    steps = _steps()[-1] + 5
    settings = ("parallel.stages=4", f"budget.steps={steps}", "data.path=digits.h5")

    def go_on(comm):
        return runs.train(comm, Path("job.py"), None, settings, Path("it"), resume=True)[1]

    expected = run_virtual(lambda comm: staged.run(comm, tmp_path / "whole", f"budget.steps={steps}")[0], 1)[0]
    resumed = run_virtual(go_on, 4)[0]
    assert resumed.metrics == pytest.approx(expected.metrics, abs=1e-12) and resumed.stages == 4
    assert resumed.samples == expected.samples, "steps were recorded twice or not at all"
    assert load_run("it").ranks == 2 and load_run("it").last.ranks == 4


def test_where_others_would_go_on_without_a_rank_a_replica_does_not(tmp_path):
    def body(comm):
        made = tiny.trainer(comm, tmp_path, "parallel.stages=2", "strategy=gossip_pull", of=staged.job)
        comm.failures.lost = (2,)  # as fault tolerance finds it where all ranks meet
        with pytest.raises(
            RankFailedError, match="rank 2, stage 0 of replica 1, has died, and the model's other stages"
        ):
            made.run()

    run_virtual(body, 4)


def _steps() -> list[int]:
    """The steps of the checkpoints, in ascending order."""
    newest = checkpoint.latest("it/checkpoints")
    return sorted(int(path.name[5:]) for path in newest.parent.glob("step-????????")) if newest else []
