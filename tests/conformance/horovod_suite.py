"""Horovod's own tests of its interface for PyTorch, on hpcdist or on Horovod: run by ranks of one MPI job.

    mpirun -n 2 python tests/conformance/horovod_suite.py hpcdist|horovod FOLDER RESULTS [pytest's arguments]

FOLDER has the tests; each rank writes its verdicts to RESULTS/rank.jsonl, one after the other. Horovod gets no Adasum:
it hangs in its own tests of that, where ranks have no GPU.
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

import hpcdist as hd
from hpcdist.hvd.__main__ import install_modules


def provide(of: str) -> None:
    """Let the tests' own helpers find what they import, beside Horovod's interface."""
    hd.init(torch_distributed=False)
    sys.modules["mock"] = mock
    if of == "horovod":
        return
    install_modules()
    for name in ("horovod.runner", "horovod.runner.util", "horovod.runner.util.threads"):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
    sys.modules["horovod.runner.util.threads"].in_thread = in_thread


def in_thread(target, args=(), daemon=True, **_):
    thread = threading.Thread(target=target, args=args, daemon=daemon)
    thread.start()
    return thread


class Verdicts:
    """Notes what becomes of each test."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or not report.passed:
            verdict = [report.nodeid.rpartition("/")[2], report.outcome, str(report.longrepr or "")[-1500:]]
            with self.path.open("a") as file:
                file.write(json.dumps(verdict) + "\n")


def main(of: str, folder: Path, results: Path, more: list[str]) -> None:
    provide(of)
    sys.path.insert(0, str(folder))
    names = ["test_torch.py", "test_adasum_pytorch.py"][: 1 + (of == "hpcdist")]
    # Their tests want to see warnings; their files know nothing of this project's settings.
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    files = [str(folder / name) for name in names]
    pytest.main([*options, *files, *more], plugins=[Verdicts(results / f"{hd.rank()}.jsonl")])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
