"""Scripts that import Horovod run on hpcdist as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from comm.jobs_here import LIMIT_S
from harness.launch import IMPORTS, find_mpirun, launch
from hpcdist.hvd import __main__ as program

pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
FEATURES = Path(__file__).with_name("features.py")
PRELOADED = ("torch._dynamo", "hpcdist.session")

FOUR = ("every_operation_and_dtype", "parts_of_ranks", "process_sets", "ranks_that_have_joined_bring_zeros")


@pytest.mark.parametrize(("size", "names"), [(2, ()), pytest.param(4, FOUR, marks=pytest.mark.extended)])
def test_a_script_that_imports_horovod_does_what_it_should(size, names):
    job = launch(size, ["-m", "hpcdist.hvd", FEATURES, *names], env=IMPORTS, timeout_s=LIMIT_S, preloaded=PRELOADED)
    assert job.returncode == 0, job.stderr[-3000:]
    wanted = set(names) or {"optimizers", "process_sets", "it_ends_and_begins_again"}
    assert wanted <= set(job.stdout.split())


def test_names_that_one_rank_alone_has_are_told_at_the_deadline_and_later_calls_end_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import time
import torch
import hpcdist
import horovod.torch as hvd
hpcdist.init(deadline_s=2)
hvd.init()
start = time.monotonic()
for name in ("epoch 1" if hvd.rank() == 0 else "epoch 2", "later"):
    try:
        hvd.allreduce(torch.ones(1), name=name)
    except hvd.HorovodInternalError as error:
        print(error, time.monotonic() - start > 2, time.monotonic() - start < 60)
""")
    job = launch(2, ["-m", "hpcdist.hvd", script], env=IMPORTS, timeout_s=LIMIT_S)
    text = (
        "a call must be submitted by all ranks, with one name, within 2 s; got rank 0 waits for allreduce of "
        "'epoch 1'; rank 1 waits for allreduce of 'epoch 2'. Use the same name on all ranks, and submit it on each "
        "of them. True True"
    )
    assert job.returncode == 0 and job.stdout.splitlines() == [text] * 4, (job.stdout, job.stderr)


def test_a_script_finds_the_modules_beside_it_and_must_not_start_ranks_itself(tmp_path):
    (tmp_path / "beside.py").write_text("answer = 42\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport beside\nimport horovod\n"
        "print(beside.answer, horovod.__version__, *sys.argv[1:], flush=True)\nhorovod.run(print, np=2)\n"
    )
    job = launch(1, ["-m", "hpcdist.hvd", script, "--epochs", "3"], env=IMPORTS, timeout_s=LIMIT_S)
    assert job.returncode == 1 and job.stdout.split() == ["42", "0.28.1", "--epochs", "3"], job.stderr
    assert "horovod.run must not be called here" in job.stderr


def test_a_script_is_wanted(monkeypatch):
    monkeypatch.setattr("sys.argv", ["hvd"])
    with pytest.raises(SystemExit, match="must be given a script; got none"):
        program.main()
