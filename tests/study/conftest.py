"""A study, for tests of what it computes and says: a file of tests names it in STUDY."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from harness import studies


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module that lies in jobs/studies."""
    monkeypatch.syspath_prepend(str(studies.FOLDER))
    return importlib.import_module


@pytest.fixture
def study(request: pytest.FixtureRequest, load: Callable[[str], ModuleType]) -> ModuleType:
    return load(request.module.STUDY)


@pytest.fixture
def training(request: pytest.FixtureRequest, load: Callable[[str], ModuleType]) -> ModuleType:
    """The job of the study, with its loop."""
    return load(f"{request.module.STUDY}_job")


@pytest.fixture(scope="module")
def quick(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a quick run, and what it printed."""
    return studies.quick(request.module.STUDY, tmp_path_factory.mktemp(request.module.STUDY))
