"""A study, for tests of what it computes and says: a file of tests names it in STUDY."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from harness import studies
from kit.output import Study


@pytest.fixture
def study(request: pytest.FixtureRequest) -> ModuleType:
    """The module of jobs/studies, which pyproject.toml puts on the path of tests."""
    return importlib.import_module(request.module.STUDY)


@pytest.fixture
def training(request: pytest.FixtureRequest) -> ModuleType:
    """The job of the study, with its loop."""
    return importlib.import_module(f"{request.module.STUDY}_job")


@pytest.fixture(scope="module")
def quick(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a quick run, and what it printed."""
    return studies.quick(request.module.STUDY, tmp_path_factory.mktemp(request.module.STUDY))


@pytest.fixture
def goes_on_alike(
    study: ModuleType,
    quick: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[], None]:
    """Goes on with the finished quick run in this process, without its figures: makes no run again, prints the same."""
    monkeypatch.setattr(Study, "draw", lambda *given: None)
    folder, printed = quick

    def check() -> None:
        before = studies.made(folder)
        study.main(folder, quick=True, workers=1)
        assert studies.made(folder) == before and capsys.readouterr().out == printed

    return check
