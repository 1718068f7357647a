"""A study, for tests of what it computes and says: a file of tests names it in STUDY."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from harness import studies
from kit.output import Study


@pytest.fixture
def study(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of jobs/studies, which pyproject.toml puts on the path of tests; its quick version may be SMALLER."""
    module = importlib.import_module(request.module.STUDY)
    if smaller := getattr(request.module, "SMALLER", None):
        monkeypatch.setattr(module, "QUICK", replace(module.QUICK, **smaller))
    return module


@pytest.fixture
def training(request: pytest.FixtureRequest) -> ModuleType:
    """The job of the study, with its loop."""
    return importlib.import_module(f"{request.module.STUDY}_job")


def _printed(study: ModuleType, folder: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        study.main(folder, quick=True, workers=1)
    return out.getvalue()


@pytest.fixture
def quick(study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """The folder of a quick run, and what it printed: the same when it went on, which made no run again."""
    folder = tmp_path / "quick"
    printed, made = _printed(study, folder), studies.made(folder)
    monkeypatch.setattr(Study, "draw", lambda *given: None)  # figures
    assert _printed(study, folder) == printed and studies.made(folder) == made
    return folder, printed


@pytest.fixture
def written(quick: tuple[Path, str]) -> Callable[..., tuple[list[dict[str, str]], list[str]]]:
    """`written(*figures)`: the rows of a quick run's table, and its claims; its figures are there."""

    def read(*figures: str) -> tuple[list[dict[str, str]], list[str]]:
        folder, printed = quick
        text = (folder / "claims.txt").read_text(encoding="utf-8")
        claims = text.split("\n\n")
        assert text in printed and [claim[:3] for claim in claims] == [f"{n}. " for n in range(1, len(claims) + 1)]
        for name in figures:
            assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
            assert "</svg>" in (folder / f"{name}.svg").read_text()
        with open(folder / "table.csv", encoding="utf-8") as file:
            return list(csv.DictReader(file)), claims

    return read
