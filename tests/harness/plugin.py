"""What pytest loads: markers, options, the fixture `ranks`, and which tests run where.

Plain `pytest` runs everything on virtual ranks; under a launcher only tests that use ranks run, on the real ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

from harness.console import Console
from harness.ranks import RealRanks, VirtualRanks
from harness.time_limit import TimeLimit
from hpcdist.comm.launch import check_world, declared_size

SIZES = (1, 2, 3, 4)
MARKERS = (
    "sizes(*sizes, exact=False): numbers of virtual ranks, default 1, 2, 3, 4. A real job runs the test if it is not "
    "smaller than the smallest; with exact=True, or where there is only one, if its size is one of them",
    "mpi(min_size=1): runs under a launcher only",
    "virtual: uses ranks, but runs on virtual ones only",
    "alone: measures how long something takes, so that no other test may run beside it",
    "cluster: uses the fixture of that name, a cluster under Slurm; set by itself",
    "time_limit(seconds): how long the test may take before the run is ended; default --time-limit",
)
JOB = pytest.StashKey()
DESELECTED = pytest.StashKey()

hypothesis.settings.register_profile(
    "plain", deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
hypothesis.settings.register_profile(
    "ranks",  # the same examples on every rank, whatever happens on one of them and however long it takes
    parent=hypothesis.settings.get_profile("plain"),
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks")
    group.addoption("--grace", type=float, default=5.0, help="seconds after which a failed rank ends the job")
    group.addoption("--time-limit", type=float, default=240.0, help="seconds that a test may take")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    console = Console()
    job = _join(config, console) if declared_size(os.environ) else None
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
    check_world(job.size, job.library, os.environ)
    config.pluginmanager.register(Verdict(config, job), "verdict")
    if config.option.basetemp:  # each rank empties its own
        config.option.basetemp = str(Path(config.option.basetemp) / f"rank{job.rank}")
    return job


# --- which tests run where --------------------------------------------------------------------------------------------
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("sizes")
    sizes = marker.args if marker else SIZES
    job = metafunc.config.stash[JOB]
    if job:
        exact = marker is not None and marker.kwargs.get("exact", False)
        sizes = [pytest.param(job.size, marks=_skip_size(job.size, sizes, exact), id=f"n{job.size}")]
    metafunc.parametrize("ranks", sizes, ids=None if job else [f"n{n}" for n in sizes], indirect=True)


def _skip_size(size: int, sizes: tuple[int, ...], exact: bool) -> list[pytest.MarkDecorator]:
    exact = exact or len(sizes) == 1
    if size in sizes or (not exact and size >= min(sizes)):
        return []
    wanted = " or ".join(map(str, sizes)) if exact else f"{min(sizes)} or more"
    return [pytest.mark.skip(reason=f"needs {wanted} ranks; this job has {size}")]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    job = config.stash[JOB]
    runs = [_runs_real(item) if job else item.get_closest_marker("mpi") is None for item in items]
    deselected = [item for item, here in zip(items, runs, strict=True) if not here]
    items[:] = [item for item, here in zip(items, runs, strict=True) if here]
    config.stash[DESELECTED] = len(deselected)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
    for item in items:
        marker = item.get_closest_marker("mpi")
        min_size = marker.kwargs.get("min_size", 1) if marker else 1
        if job and job.size < min_size:
            reason = f"needs {min_size} or more ranks; this job has {job.size}"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_itemcollected(item: pytest.Item) -> None:
    if "cluster" in getattr(item, "fixturenames", ()):
        item.add_marker("cluster")


def _runs_real(item: pytest.Item) -> bool:
    uses_ranks = "ranks" in item.fixturenames or item.get_closest_marker("mpi") is not None
    return uses_ranks and item.get_closest_marker("virtual") is None


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    count = config.stash[DESELECTED]
    where = "in plain pytest only (they use no real ranks)" if config.stash[JOB] else "under mpirun only"
    return f"{count} tests deselected that run {where}" if count else ""


# --- fixtures ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RealRanks | VirtualRanks:
    """Call it with a body: `results = ranks(lambda comm: ...)`; see RealRanks and VirtualRanks."""
    job = request.config.stash[JOB]
    return RealRanks(job) if job else VirtualRanks(request.param)


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that is the same for all ranks; `tmp_path` is each rank's own."""
    job = request.config.stash[JOB]
    return Path(job.gather(str(tmp_path))[0]) if job else tmp_path
