"""PyTorch's own tests of torch.distributed backends, run by ranks of one MPI job.

    mpirun -n 4 python tests/conformance/torch_suite.py BACKEND RESULTS [TEST TO LEAVE OUT ...]

Each test has a default process group of its own. Ranks agree after each test; they end after a test that has failed
on any of them, as its groups may be in disorder. RESULTS gets a line for each test that has begun or ended.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path

SELECTED_AS = "gloo"  # the suite decides at import what a backend of this name can do


def outcome(case: unittest.TestCase, name: str, reasons: dict[int, str]) -> tuple[str, str]:
    """Run a test; tell whether it passed, failed, or was skipped, and why."""
    try:
        getattr(case, name)()
    except unittest.SkipTest as skipped:
        return "skipped", str(skipped)
    except SystemExit as ended:
        return "skipped", reasons.get(ended.code, f"exit {ended.code}")
    except BaseException:
        return "failed", traceback.format_exc()
    return "passed", ""


class Named(str):
    """The name of a backend, which the suite takes for the one that it has been selected as."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other == SELECTED_AS

    def __ne__(self, other: object) -> bool:
        return not self == other


def load(backend: str, folder: str, size: int):
    """Import the suite for a backend; return its module."""
    os.environ.update(BACKEND=SELECTED_AS, WORLD_SIZE=str(size), TEMP_DIR=folder)
    module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    module.BACKEND = Named(backend)
    return module


def main(backend: str, results: Path, skipped: set[str]) -> None:
    """Run all tests but those whose names are in `skipped`."""
    import torch.distributed as dist

    import hpcdist
    import hpcdist.torch_backend
    from hpcdist.comm.external.torch_distributed import rendezvous

    warnings.simplefilter("ignore")
    comm = hpcdist.init(torch_distributed=False, deadline_s=120)
    folder = comm.gather(tempfile.mkdtemp() if comm.rank == 0 else "")[0]
    for inner in ("barrier", "test_dir", "init_dir"):
        Path(folder, inner).mkdir(exist_ok=True)
    module = load(backend, folder, comm.size)
    skips = importlib.import_module("torch.testing._internal.common_distributed").TEST_SKIPS
    reasons = {skip.exit_code: skip.message for skip in skips.values()}
    utils = importlib.import_module("torch.testing._internal.common_utils")

    class Suite(utils.TestCase, module.DistributedTest._DistTestBase):
        rank, world_size, file_name = comm.rank, comm.size, str(Path(folder, "file"))

        @property
        def init_method(self) -> str:
            return f"file://{self.file_name}"

    def say(**said: object) -> None:
        if comm.rank == 0:
            with results.open("a") as file:
                file.write(json.dumps(said) + "\n")

    store = rendezvous(comm).store
    names = sorted(name for name in dir(Suite) if name.startswith("test"))
    assert skipped <= set(names), skipped - set(names)
    for name in names:
        if name in skipped:
            continue
        say(test=name, state="begun")
        start = time.perf_counter()
        limit = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, 60))
        own = dist.PrefixStore(name, store)
        dist.init_process_group(backend, store=own, rank=comm.rank, world_size=comm.size, timeout=limit)
        if comm.rank == 0:
            module.Barrier.init()
        module.Barrier.barrier_id = 0
        comm.barrier()
        case = Suite(name)
        case.setUp()
        state, why = outcome(case, name, reasons)
        found = comm.gather([state, why])
        states = {state for state, _ in found}
        worst = next(state for state in ("failed", "passed", "skipped") if state in states)
        rank, why = next((rank, why) for rank, (state, why) in enumerate(found) if state == worst)
        said = f"rank {rank}: {why}" if worst == "failed" else why
        say(test=name, state=worst, why=said, seconds=round(time.perf_counter() - start, 2))
        if worst == "failed":
            comm.abort(3)
        case.tearDown()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), set(sys.argv[3:]))
