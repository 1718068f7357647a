"""Jobs in stages: the memory that each rank takes, and a rank that has died."""

from __future__ import annotations

import json
import math

import pytest
from torch import nn

from benchmarks.runner import peak_bytes
from harness.launch import IMPORTS, launch
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import RankFailedError
from hpcdist.model import FlatModel
from hpcdist.parallel.agreement import Agreement
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
    assert whole > 3 * 48 * 2**20, "parameters, gradients, a copy of the parameters for an evaluation"
    assert [stage / whole for stage in found["stages"]] == pytest.approx([1 / 2] * 2, rel=0.15), found


def test_looks_at_all_parameters_make_no_copy_of_them():
    def body(comm):
        model = FlatModel(nn.Linear(1 << 12, 1 << 12, bias=False))  # 64 MiB
        model.grads[0].fill_(1.0)
        model.gradients.release([True])
        cls = strategies.load("allreduce")
        strategy, agreement = cls(cls.Config(), comm, model), Agreement(comm.split(0))
        looks = {
            "compare": model.take_snapshot,
            "check": lambda: require_finite(strategy, comm, 1),
            "clip": lambda: agreement.clip([slot.tensor for slot in model.slots], math.inf),
        }
        for look in looks.values():  # the first calls make the heap of this thread larger
            look()
        peaks = {name: peak_bytes(look) for name, look in looks.items()}
        strategy.close()
        agreement.comm.close()
        return model.params[0].nbytes, peaks

    ((n_bytes, peaks),) = run_virtual(body, 1)
    if None in peaks.values():
        pytest.skip("the system does not tell the peak of the resident set")
    assert n_bytes == 1 << 26
    assert all(peak < n_bytes / 2 for peak in peaks.values()), peaks


def test_where_others_would_go_on_without_a_rank_a_replica_does_not(tmp_path):
    def body(comm):
        made = tiny.trainer(comm, tmp_path, "parallel.stages=2", "strategy=gossip_pull", of=staged.job)
        comm.failures.lost = (2,)  # as fault tolerance finds it where all ranks meet
        message = "rank 2, stage 0 of replica 1, has failed, and the model's other stages"
        with pytest.raises(RankFailedError, match=message):
            made.run()

    run_virtual(body, 4)
