"""What pytest loads: markers, options, the fixture `ranks`, and which tests run where.

Plain `pytest` runs everything on virtual ranks; under a launcher only tests that use ranks run, on the real ones.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import hypothesis
import pytest

from harness import cases
from harness.console import Console
from harness.ranks import RealRanks, VirtualRanks
from harness.time_limit import TimeLimit
from hpcdist.comm.launch import check_world, launched_size

SIZES = (1, 2, 3, 4)
MARKERS = (
    "sizes(*sizes): numbers of ranks, default 1, 2, 3, 4. A real job runs the test on as many of its ranks, the others "
    "wait; without --all, on the smallest and largest number above 1 only",
    "mpi(min_size=1): runs under a launcher only",
    "virtual: uses ranks, but runs on virtual ones only",
    "computes: is about what ranks compute, by communication that other tests examine; on real ranks with --all only, "
    "except where it is marked mpi",
    "extended: adds cases to what other tests show; runs with --all only",
    "alone: measures how long something takes, so that no other test may run beside it",
    "gpu: needs a GPU that torch can use, and is skipped elsewhere unless --gpu-as cpu is given",
    "cluster: uses the fixture of that name, a cluster under Slurm; set by itself",
    "time_limit(seconds): how long the test may take before the run is ended; default --time-limit",
)
REAL = re.compile(r"def \w+\([^)]*\branks\b|mark\.mpi\b")  # what is in a file of tests for real ranks, or beside it
COMPUTES = re.compile(r"^pytestmark = .*\bmark\.computes\b", re.MULTILINE)  # what is in a file that only computes
STARTS = re.compile(r"\b(launch|subprocess|jobs_here|num_workers)\b")  # what is in a file whose tests start processes
JOB = pytest.StashKey()
DESELECTED = pytest.StashKey()

hypothesis.settings.register_profile(  # --hypothesis-profile=search tries other examples each time
    "search", deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
hypothesis.settings.register_profile(
    "plain", parent=hypothesis.settings.get_profile("search"), derandomize=True, database=None
)
hypothesis.settings.register_profile(
    "ranks",  # the same examples on every rank, whatever happens on one of them and however long it takes
    parent=hypothesis.settings.get_profile("plain"),
    report_multiple_bugs=False,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks")
    group.addoption("--grace", type=float, default=5.0, help="seconds after which a failed rank ends the job")
    group.addoption(
        "--all", action="store_true", help="also tests marked extended, and on real ranks those that compute"
    )
    group.addoption("--mutations", type=int, default=12, help="changes of each kind of file that tools read")
    group.addoption("--gpu-as", choices=("cuda", "cpu"), help="device that tests marked gpu use instead of a GPU")
    group.addoption("--time-limit", type=float, default=240.0, help="seconds that a test may take")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    cases.chosen = config.option.keyword.lower()
    console = Console()
    job = _join(config, console) if launched_size(os.environ) else None
    config.stash[JOB] = job
    hypothesis.settings.load_profile("ranks" if job else "plain")

    def end(text: str, status: int) -> None:
        if job:
            job.end(text, status)
        console.write(text)
        os._exit(status)

    if not config.getoption("usepdb"):
        config.pluginmanager.register(TimeLimit(config.getoption("--time-limit"), console, end), "time-limit")


def _join(config: pytest.Config, console: Console):
    """Collective. Joins the ranks of the job."""
    from harness.job import Job  # starts MPI
    from harness.verdict import Verdict

    job = Job(console, config.getoption("--grace"))
    console.label = f"[rank {job.rank}] "
    check_world(job.size, job.library, os.environ)
    config.pluginmanager.register(Verdict(config, job), "verdict")
    if job.rank:
        config.option.xmlpath = None  # one report is enough
    if config.option.basetemp:  # each rank empties its own
        config.option.basetemp = str(Path(config.option.basetemp) / f"rank{job.rank}")
    return job


# --- which tests run where --------------------------------------------------------------------------------------------
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without a test for real ranks, or with the marker or fixture of -m: importing all is slow."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    wanted = [REAL] if config.stash[JOB] else []
    if config.option.markexpr.isidentifier():
        wanted.append(re.compile(rf"mark\.{config.option.markexpr}\b|def \w+\([^)]*\b{config.option.markexpr}\b"))
    paths = [path for path in (collection_path, collection_path.parent / "conftest.py") if path.exists()]
    text = "\n".join(path.read_text() for path in paths)
    if config.stash[JOB] and not config.getoption("--all") and COMPUTES.search(text) and "mark.mpi" not in text:
        return True
    return None if all(pattern.search(text) for pattern in wanted) else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("sizes")
    sizes: Sequence = marker.args if marker else SIZES
    job = metafunc.config.stash[JOB]
    if job:
        marker = metafunc.definition.get_closest_marker("mpi")
        least = marker.kwargs.get("min_size", 1) if marker else 1
        computes = metafunc.definition.get_closest_marker("computes") is not None
        sizes = _real_sizes(least, job.size, sizes, metafunc.config.getoption("--all") and not computes)
    metafunc.parametrize("ranks", sizes, ids=[f"n{n}" for n in sizes], indirect=True)


def _real_sizes(least: int, most: int, sizes: Sequence[int], every: bool) -> list[int]:
    """On how many of its ranks a job of `most` runs a test for these sizes, and for `least` or more."""
    fitting = sorted(size for size in sizes if least <= size <= most)
    several = [size for size in fitting if size > 1]
    return fitting if every or not several else sorted({several[0], several[-1]})


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    job = config.stash[JOB]
    runs = [_runs_real(item) if job else item.get_closest_marker("mpi") is None for item in items]
    if not config.getoption("--all"):
        runs = [here and not _is_more(item, bool(job)) for item, here in zip(items, runs, strict=True)]
    deselected = [item for item, here in zip(items, runs, strict=True) if not here]
    items[:] = [item for item, here in zip(items, runs, strict=True) if here]
    config.stash[DESELECTED] = len(deselected)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
    without_gpu = _why_no_gpu(config) if any(item.get_closest_marker("gpu") for item in items) else ""
    for item in items:
        if without_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=without_gpu))
        marker = item.get_closest_marker("mpi")
        min_size = marker.kwargs.get("min_size", 1) if marker else 1
        if job and job.size < min_size:
            reason = f"needs {min_size} or more ranks; this job has {job.size}"
            item.add_marker(pytest.mark.skip(reason=reason))
    if not job:
        _slow_files_first(config, items)


def _is_more(item: pytest.Item, real: bool) -> bool:
    """Whether a test runs with --all only."""
    computes = real and item.get_closest_marker("computes") is not None and item.get_closest_marker("mpi") is None
    return computes or item.get_closest_marker("extended") is not None


def _slow_files_first(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that start processes, or give their tests more time: begun last, one would keep a single process busy."""
    limits: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("time_limit")
        limit_s = marker.args[0] if marker else config.getoption("--time-limit")
        limits[item.path] = max(limit_s, limits.get(item.path, 0.0))
    items.sort(key=lambda item: (-limits[item.path], not starts_processes(item.path)))


@functools.cache
def starts_processes(path: Path) -> bool:
    """Whether tests in this file start processes."""
    return STARTS.search(path.read_text()) is not None


def _why_no_gpu(config: pytest.Config) -> str:
    if config.getoption("--gpu-as") == "cpu":
        return ""
    import torch  # slow, and most tests of Slurm's part do without

    return "" if torch.cuda.is_available() else "torch finds no GPU on this machine"


def pytest_itemcollected(item: pytest.Item) -> None:
    if "cluster" in getattr(item, "fixturenames", ()):
        item.add_marker("cluster")


def _runs_real(item: pytest.Item) -> bool:
    uses_ranks = "ranks" in item.fixturenames or item.get_closest_marker("mpi") is not None
    return uses_ranks and item.get_closest_marker("virtual") is None


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    count = config.stash.get(DESELECTED, 0)  # unset where a path is wrong
    where = "in plain pytest only (they use no real ranks)" if config.stash[JOB] else "under mpirun only"
    where += "" if config.getoption("--all") else " or with --all"
    return f"{count} tests deselected that run {where}" if count else ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds the random generators, so that a test draws the same numbers whatever tests have run before.

    The library's command line, which takes half a second to build, is built once.
    """
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if (typer := sys.modules.get("typer.main")) and not hasattr(typer.get_command, "cache_info"):
        build = typer.get_command

        @functools.cache
        def built(app: object) -> object:
            from hpcdist.tools.cli.base import prepare_help

            command = build(app)
            prepare_help(command)  # before a test makes a context of one command alone: click keeps its help option
            return command

        typer.get_command = built


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with nullcontext() if item.config.stash[JOB] or starts_processes(item.path) else on_one_core():
        return (yield)


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keeps the threads of virtual ranks, of which one runs at a time, on a core: a turn would wake another one."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


# --- fixtures ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RealRanks | VirtualRanks:
    """Call it with a body: `results = ranks(lambda comm: ...)`; see RealRanks and VirtualRanks."""
    job = request.config.stash[JOB]
    return RealRanks(job.part(request.param)) if job else VirtualRanks(request.param)


@pytest.fixture
def gpu(request: pytest.FixtureRequest):
    """The GPU of this rank, or of all virtual ranks; several ranks may share one. For tests marked `gpu`."""
    import torch

    if request.config.getoption("--gpu-as") == "cpu":
        return torch.device("cpu")
    job = request.config.stash[JOB]
    return torch.device("cuda", (job.rank if job else 0) % torch.cuda.device_count())


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that is the same for all ranks; `tmp_path` is each rank's own."""
    job = request.config.stash[JOB]
    return Path(job.gather(str(tmp_path))[0]) if job else tmp_path
