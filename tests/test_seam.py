"""What a strategy's author has to know of the seam, and how often a comparison goes from file to file: counted."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from pathlib import Path

import hpcdist
from hpcdist.comm import communicator
from hpcdist.comm.communicator import (
    Communicator,
    Failures,
    Neighbourhood,
    Platform,
    RankMemory,
    Request,
    Trace,
    Traffic,
    Window,
)
from hpcdist.comm.transfer import Envelope
from hpcdist.comm.window import Put
from hpcdist.tools.compare.functions import simulate

PACKAGE = Path(hpcdist.__file__).parent
PARTS = (Communicator, Trace, Failures, Window, Neighbourhood, Request, Envelope)
VALUES = (Traffic, Put, RankMemory, Platform)  # of which strategies use the first two
NAMES, ALL_NAMES = 55, 94
RETURNS = 15  # to a file of tools/compare that a comparison has left


def members(cls: type) -> set[str]:
    """The public methods and attributes of a class: defined, annotated, or assigned to `self`, here or in a base."""
    found: set[str] = set()
    for one in (one for one in cls.__mro__ if one.__module__.startswith("hpcdist.")):
        found |= {*vars(one), *vars(one).get("__annotations__", {})}
        stored = (node for node in ast.walk(ast.parse(inspect.getsource(one))) if isinstance(node, ast.Attribute))
        found |= {node.attr for node in stored if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}
    return {name for name in found if not name.startswith("_")}


def functions() -> set[str]:
    """The public functions beside the classes, which take a communicator."""
    found = inspect.getmembers(communicator, inspect.isfunction)
    return {name for name, one in found if one.__module__ == communicator.__name__ and not name.startswith("_")}


def met() -> list[str]:
    """The names that an author meets: of a communicator, of what it has and makes, and functions that take one."""
    return sorted([*functions(), *(f"{cls.__name__}.{name}" for cls in PARTS for name in members(cls))])


def exported() -> list[str]:
    """Those and all others: what the module exports, and the fields of the values that its calls take and return."""
    values = [f"{cls.__name__}.{name}" for cls in VALUES for name in members(cls)]
    return sorted({*met(), *values, *communicator.__all__})


def walk(job: Path, output: Path) -> list[str]:
    """The files of the package that a comparison on virtual ranks goes through in turn, ranks' own calls apart."""
    files = [""]

    def called(frame, event, _):
        file, comprehends = frame.f_code.co_filename, re.search("<[a-z]+>", frame.f_code.co_name)
        if event == "call" and file.startswith(str(PACKAGE)) and "comm/virtual" not in file and not comprehends:
            file = Path(file).relative_to(PACKAGE).as_posix()
            files.extend([file] * (file != files[-1]))

    sys.setprofile(called)
    try:
        simulate(job, ("allreduce",), (2,), compute="constant:1ms", network="1us,1Gbit/s", output=output, workers=1)
    finally:
        sys.setprofile(None)
    return files[1:]


def test_a_strategys_author_meets_few_names():
    assert len(met()) <= NAMES, met()
    assert len(exported()) <= ALL_NAMES, exported()


def test_strategies_leave_memory_that_is_no_window_to_collectives():
    texts = {path.name: path.read_text() for path in PACKAGE.glob("strategies/**/*.py")}
    assert [name for name, text in texts.items() if re.search(r"(comm|channel)\.memory\b", text)] == []


def test_how_often_a_comparison_changes_files(tmp_path, record_property):
    files = walk(Path(__file__).with_name("train") / "tiny.py", tmp_path / "simulated")
    record_property("stays", len(files))
    own = [file for file, _ in itertools.groupby(file for file in files if file.startswith("tools/compare/"))]
    assert len(own) - len(set(own)) <= RETURNS, own
