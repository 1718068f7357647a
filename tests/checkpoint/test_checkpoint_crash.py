"""A process that dies while it saves leaves a whole checkpoint, wherever it dies.

`python test_checkpoint_crash.py FOLDER now|background STRIDE` forks processes that save, kills each at another one of
its file operations, checks what is left behind, and prints how many operations there were.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from states import loaded

import hpcdist
from hpcdist.checkpoint import Saver, latest, save, verify
from hpcdist.checkpoint import folder as folders
from hpcdist.comm.virtual import run_virtual

CHANGES = {"open", "write", "flush", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"}
SIZE = 2
BEFORE, STEP = (1, 2, 3), 2  # steps saved before, and the one that is being saved again at the crash


@pytest.mark.time_limit(300)  # dozens of processes are forked and killed
@pytest.mark.parametrize("how", [("now", "1"), ("background", "5")])
def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path, how):
    environment = os.environ | {"PYTHONPATH": str(Path(hpcdist.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path / "checkpoints"), *how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert int(done.stdout) > 40


def die_at(number: int) -> None:
    """From now on, counts the calls that may change files; SIGKILL before the one with this number."""
    left = number

    def profile(_, event, function):
        nonlocal left
        if event == "c_call" and function.__name__ in CHANGES:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(profile)
    sys.setprofile(profile)


def save_on_all(folder: Path, step: int, value: str, background: bool = False) -> None:
    """Rank by rank the second tensor differs; the first one both have in common."""

    def body(comm) -> None:
        state = [value, torch.ones(99), torch.full((99,), comm.rank)]
        if background:
            saver = Saver()
            saver.save(comm, folder, step, state, keep=1, background=True)
            saver.close()
        else:
            save(comm, folder, step, state, keep=1)

    run_virtual(body, SIZE)


def crash_everywhere(folder: Path, background: bool, stride: int) -> int:
    """How many calls there were to die at, of which each `stride`-th was tried."""
    template, number, survived = folder.with_suffix(".before"), 0, False
    for earlier in BEFORE:
        run_virtual(lambda comm, step=earlier: save(comm, template, step, ["before"], keep=9), SIZE)
    while not survived:
        number += stride
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        child = os.fork()
        if child == 0:
            die_at(number)
            save_on_all(folder, STEP, "new", background)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        survived = status == 0
        assert survived or os.WTERMSIG(status) == signal.SIGKILL, f"call {number}: status {status}"
        check(folder, survived)
    shutil.rmtree(template)
    return number - stride


def check(folder: Path, survived: bool) -> None:
    """Every checkpoint in the folder is whole, the latest is of one save, and saving goes on and tidies up."""
    found = latest(folder)
    values = {state[0] for state in loaded(found)}
    assert len(values) == 1 and values <= {"before", "new"}, values
    assert not survived or (values == {"new"} and folders.step_of(found) == STEP), (found, values)
    for path in folders.listing(folder):
        verify(path)
    save_on_all(folder, 100, "after")
    assert {state[0] for state in loaded(latest(folder))} == {"after"}
    left = [path.name for path in folder.iterdir() if "abandoned" not in path.name]
    assert left == ["step-00000100"], left
    others = [path.name for path in folder.iterdir() if path.name not in left]
    assert all(re.fullmatch(r"step-\d{8}\.abandoned-\w+", name) for name in others)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of checkpoints that are abandoned
    print(crash_everywhere(Path(sys.argv[1]), sys.argv[2] == "background", int(sys.argv[3])))
