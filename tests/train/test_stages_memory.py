"""The memory that each rank takes to train a model in stages, beside a rank that trains the whole one."""

from __future__ import annotations

import json

import pytest

from harness.launch import IMPORTS, launch
from train import memory_of_stages


def test_memory_falls_as_the_number_of_stages_grows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # In a job of its own: the heap of a process that has run other tests gives and takes tens of megabytes.
    job = launch(2, [memory_of_stages.__file__], env=IMPORTS)
    assert job.returncode == 0, job.stderr
    found = json.loads(job.stdout)
    whole = found["whole"]
    if whole is None:
        pytest.skip("the system does not tell the peak of the resident set")
    assert whole > 3 * 48 * 2**20, "parameters, gradients, a copy of the parameters for an evaluation"
    assert [stage / whole for stage in found["stages"]] == pytest.approx([1 / 2, 1 / 2], rel=0.15), found
