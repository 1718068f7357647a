"""The cluster, once for all tests that use it, and `hpcdist slurm` on it.

Where there can be none, they are skipped, or fail if the environment's HPCDIST_CLUSTER is `require`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import jobs, kit
from hpcdist.comm.launch import launched_size

REQUIRED = os.environ.get("HPCDIST_CLUSTER") == "require"
LIMIT_S = 240.0  # of a test: jobs wait for each other where this machine has other work
collect_ignore_glob = ["test_*.py"] if launched_size(os.environ) else []  # they start the ranks themselves


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("time_limit") is None:
            item.add_marker(pytest.mark.time_limit(LIMIT_S))


@contextlib.contextmanager
def made(accounting: bool) -> Iterator[kit.Cluster]:
    if reason := kit.why_not(accounting):
        (pytest.fail if REQUIRED else pytest.skip)(f"no Slurm cluster{' with accounting' * accounting}: {reason}")
    with kit.made(accounting) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[kit.Cluster]:
    """A controller and four nodes under Slurm; see `cluster.kit`."""
    with made(accounting=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def accounted() -> Iterator[kit.Cluster]:
    """Another one, whose accounting remembers the jobs that its controller has forgotten."""
    with made(accounting=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def new_folder(cluster: kit.Cluster) -> Callable[[str], Path]:
    """`new_folder(name)` makes an empty folder that all hosts see."""

    def make(name: str) -> Path:
        names = (name if i == 1 else f"{name}-{i}" for i in itertools.count(1))
        folder = next(path for name in names if not (path := cluster.folder / "work" / name).exists())
        folder.mkdir(parents=True)
        return folder

    return make


@pytest.fixture
def workdir(new_folder: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    """An empty folder that all hosts see."""
    return new_folder(request.node.originalname)


@pytest.fixture(scope="session")
def data(new_folder: Callable[[str], Path]) -> Path:
    """The digits, for the jobs of all tests."""
    path = new_folder("data") / "digits.h5"
    jobs.write_digits(path)
    return path
