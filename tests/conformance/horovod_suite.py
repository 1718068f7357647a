"""Horovod's own tests of its interface for PyTorch, on hpcdist: run by ranks of one MPI job.

    mpirun -n 2 python tests/conformance/horovod_suite.py FOLDER RESULTS [pytest's arguments]

FOLDER has the tests; each rank writes its verdicts to RESULTS/rank.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

import hpcdist.hvd as hvd
from hpcdist.hvd.__main__ import stand_in


def provide() -> None:
    """Let the tests' own helpers find what they import, beside Horovod's interface."""
    stand_in()
    for name in ("horovod.runner", "horovod.runner.util", "horovod.runner.util.threads"):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
    sys.modules["horovod.runner.util.threads"].in_thread = in_thread
    sys.modules["mock"] = mock


def in_thread(target, args=(), daemon=True, **_):
    thread = threading.Thread(target=target, args=args, daemon=daemon)
    thread.start()
    return thread


class Verdicts:
    """Notes what becomes of each test."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or not report.passed:
            self.found[report.nodeid.rpartition("::")[2]] = [report.outcome, str(report.longrepr or "")[-1500:]]


def main(folder: Path, results: Path, more: list[str]) -> None:
    provide()
    sys.path.insert(0, str(folder))
    verdicts = Verdicts()
    files = [str(folder / name) for name in ("test_torch.py", "test_adasum_pytorch.py")]
    # Their tests want to see warnings; their files know nothing of this project's settings.
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    pytest.main([*options, *files, *more], plugins=[verdicts])
    hvd.init()
    (results / f"{hvd.rank()}.json").write_text(json.dumps(verdicts.found))
    hvd.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
