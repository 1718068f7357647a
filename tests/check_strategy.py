"""Check a strategy in a file of its author by the tests that hold for every strategy: `hpcdist strategies test`.

Ranks are virtual; then the steps of some real ranks are compared with those of virtual ones.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import traceback
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

import hpcdist as hd
from hpcdist import strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError, HpcdistError
from hpcdist.strategies.synchronous.own_step import OwnStep
from hpcdist.tools.cli import launched_rank
from hpcdist.tools.mpirun import find_launcher, ranks_environment, without_block
from strategies import problem

HERE = Path(__file__).parent
FILES = (
    "strategies/test_every_strategy.py", "strategies/test_state.py", "session/test_session.py",
    "session/test_patterns.py", "session/test_pattern_checkpoints.py", "train/test_loop.py", "test_jobs.py",
)  # fmt: skip
REAL = "strategies/test_real_equals_virtual.py"
RANKS = 2
AVERAGES_BY_HAND = (
    "averaging gradients takes more than a sum: weights of uneven batches, clipping after the average, an agreement\n"
    "        about NaN. OwnStep has all of it, see docs/tutorials/new-strategy.md, 'A step of its own'."
)


class Results:
    """A pytest plugin: prints a line for each test function once its cases have run.

    Args:
        spec: the strategy, `path/to/file.py:Class`.
    """

    def __init__(self, spec: str):
        self._file = Path(spec.rpartition(":")[0])
        self._out, self._left, self._why = sys.stdout, Counter(), {}
        self._told: dict[str, list[str]] = {}  # checks by the mistake that fails them
        self.passed = self.failed = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._left = Counter(item.nodeid.partition("[")[0] for item in session.items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._line(f"failed  {Path(report.nodeid).name} can't be loaded: {_last_line(report.longreprtext)}")
            self.failed += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        check = item.nodeid.partition("[")[0]
        if report.failed:
            size = re.search(r"[\[-]n(\d+)[\]-]", item.name)
            on = f" (on {size[1]} rank{'s' * (size[1] != '1')})" if size else ""
            self._why.setdefault(check, (*self._sentence(call.excinfo), on))
        if report.when == "teardown":
            self._left[check] -= 1
            if not self._left[check]:
                self._tell(check)
        return report

    def _tell(self, check: str) -> None:
        name = check.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        why = self._why.get(check)
        self.passed, self.failed = self.passed + (why is None), self.failed + (why is not None)
        if why is None:
            self._line(f"passed  {name}")
        else:
            text, place, on = why
            same = self._told.setdefault(place or re.sub(r"\d+", "", text), [])
            same.append(name)
            if len(same) == 1:
                self._line(f"FAILED  {name}\n        {text}{place}{on}")

    def pytest_sessionfinish(self) -> None:
        for same in self._told.values():
            if len(same) > 1:
                self._line(f"FAILED  {len(same) - 1} more, by the same mistake as `{same[0]}`")

    def _line(self, text: str) -> None:
        if launched_rank() == 0:
            print(text, file=self._out, flush=True)

    def _sentence(self, excinfo: pytest.ExceptionInfo) -> tuple[str, str]:
        """The error's first line, and where in the author's file it comes from: one mistake."""
        error = excinfo.value
        while isinstance(error, AssertionError) and error.__cause__ is not None:  # of a case in a loop of cases
            error = error.__cause__
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == self._file]
        text = (str(error).strip().splitlines() or [""])[0]
        messages = re.search(r"Expected regex: (.*)\n  Actual message: .(.*?)(\\n|.$)", str(error), re.M)
        if messages:  # of pytest.raises
            text = f"the error must say {messages[1]}; it says {messages[2]!r}"
        if text.startswith("assert "):  # without a message: the condition, and where it stands
            at = next(frame for frame in reversed(frames) if Path(frame.filename).is_relative_to(HERE))
            condition = (at.line or "").removeprefix("assert ").partition("  #")[0]
            where = f"tests/{Path(at.filename).relative_to(HERE)}:{at.lineno}"
            values = text.removeprefix("assert ")
            got = f"got {values}" if not values.startswith(("False", "not True", "(")) else "it does not"
            text = f"it must hold that {condition}; {got}, see {where}"
        kind = "" if isinstance(error, (HpcdistError, AssertionError)) else type(error).__name__
        place = f" [{self._file.name}:{lines[-1]}]" if lines else ""
        return ": ".join(filter(None, [kind, text])), place


def _last_line(text: str) -> str:
    return next((line[2:].strip() for line in reversed(text.splitlines()) if line.startswith("E ")), text)


def check(spec: str, files: tuple[str, ...]) -> tuple[int, int]:
    """How many checks have passed, and how many failed."""
    strategies.available = lambda: ["allreduce", "hardsync", spec]
    file, _, member = spec.rpartition(":")  # -k looks for a part of the name, in which a blank would end a word
    results = Results(spec)
    options = ["--rootdir", str(HERE.parent), "-p", "no:cacheprovider", "-k", f"{Path(file).name}:{member}"]
    with redirect_stdout(io.StringIO()) as said:
        status = pytest.main([*options, *(str(HERE / name) for name in files)], plugins=[results])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(said.getvalue())
        results.failed += 1
    return results.passed, results.failed


def _build(comm: Communicator, spec: str) -> None:
    """Raise ConfigError where the class lacks what no check can do without."""
    hd.init(comm=comm)
    model = torch.nn.Linear(2, 1)
    hd.DistributedOptimizer(problem.local(spec, model.parameters(), lr=0.1), model, strategy=spec)
    hd.finish(model)


def main(spec: str, real: bool) -> int:
    """Show the results; the status is 1 if a check has failed."""
    file, colon, member = spec.rpartition(":")
    if not colon:
        raise ConfigError(
            f"hpcdist strategies test must be given the file and the class of a strategy; got {spec!r}. Write it as "
            "hpcdist strategies test my.py:Mine."
        )
    spec = f"{Path(file).resolve()}:{member}"
    if real:
        return int(check(spec, (REAL,))[1] > 0)
    run_virtual(lambda comm: _build(comm, spec), 1)
    passed, failed = check(spec, FILES)
    try:
        command = [*find_launcher(None, os.environ.get("PATH", "")), str(RANKS), sys.executable, __file__, spec, "real"]
        environment = ranks_environment(os.environ, 1, crowded=True, bound=False)
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        sys.stderr.write(without_block(done.stderr, explained=True).decode(errors="replace"))
        failed_there = done.returncode != 0
        passed, failed = passed + (not failed_there), failed + failed_there
    except ConfigError as error:
        print(f"left out  the same steps on real ranks: {error}")
    cls = strategies.load(spec)
    if failed and cls.contract.replicates and not issubclass(cls, (OwnStep, strategies.load("allreduce"))):
        print(f"note    {AVERAGES_BY_HAND}")
    print(f"{passed} checks passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        sys.exit(main(*sys.argv[1:2] or [""], sys.argv[2:] == ["real"]))
    except HpcdistError as error:
        sys.exit(f"hpcdist: error: {error}")
