"""Kills processes that save a checkpoint, at one file operation after the other, and checks what they leave behind.

A program of its own, because it forks: `python crash_driver.py FOLDER` prints a line for each scenario.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from states import loaded

from hpcdist.checkpoint import folder as folders
from hpcdist.checkpoint import latest, save, verify
from hpcdist.comm.virtual import run_virtual

CHANGES = {"open", "write", "flush", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"}


class Scenario(NamedTuple):
    name: str
    size: int
    before: Sequence[int]  # steps saved before
    step: int  # the step that is being saved at the crash


SCENARIOS = (
    Scenario("same again", 1, (1, 2), 2),
    Scenario("went back", 1, (1, 2, 3), 2),
    Scenario("two ranks", 2, (1,), 2),
)


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


def save_on_all(folder: Path, size: int, step: int, value: str) -> None:
    run_virtual(lambda comm: save(comm, folder, step, [value, torch.full((99,), comm.rank)], keep=1), size)


def crash_everywhere(folder: Path, scenario: Scenario) -> int:
    """How many calls there were to die at."""
    template, number, survived = folder.with_suffix(".before"), 0, False
    for earlier in scenario.before:
        run_virtual(lambda comm, step=earlier: save(comm, template, step, ["before"], keep=9), scenario.size)
    while not survived:
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        child = os.fork()
        if child == 0:
            die_at(number)
            save_on_all(folder, scenario.size, scenario.step, "new")
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        survived = status == 0
        assert survived or os.WTERMSIG(status) == signal.SIGKILL, f"call {number}: status {status}"
        check(folder, scenario, survived)
    shutil.rmtree(template)
    return number - 1


def check(folder: Path, scenario: Scenario, survived: bool) -> None:
    """Every checkpoint in the folder is whole, the latest is of one save, and saving goes on and tidies up."""
    found = latest(folder)
    values = {state[0] for state in loaded(found)}
    assert len(values) == 1 and values <= {"before", "new"}, values
    assert not survived or (values == {"new"} and folders.step_of(found) == scenario.step), (found, values)
    for path in folders.listing(folder):
        verify(path)
    save_on_all(folder, scenario.size, 100, "after")
    assert {state[0] for state in loaded(latest(folder))} == {"after"}
    left = [path.name for path in folder.iterdir() if "abandoned" not in path.name]
    assert left == ["step-00000100"], left
    assert all(
        re.fullmatch(r"step-\d{8}\.abandoned-\w+", path.name) for path in folder.iterdir() if path.name not in left
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of checkpoints that are abandoned
    for scenario in SCENARIOS:
        print(f"{scenario.name}: {crash_everywhere(Path(sys.argv[1]), scenario)}", flush=True)
