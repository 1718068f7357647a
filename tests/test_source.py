"""Rules that the library's source keeps, read from its syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hpcdist"
LINES, COLUMNS = 400, 120

# Imports go downwards only. One line is one layer; packages on the same line may import each other.
LAYERS = """
__main__
cli
bench doctor horovod
slurm
console
study
train
session
torch_backend
checkpoint
data
strategies
server
parallel
compress
topology
flat buckets layout
collectives
comm
faults
config
records
errors
""".split("\n")
HEIGHT = {name: -depth for depth, names in enumerate(LAYERS) for name in names.split()}

# Who reads the environment, and why it is no setting.
ENVIRONMENT = {
    "cli": "the command line",
    "slurm": "what Slurm tells its jobs",
    "doctor": "what it examines",
    "horovod": "where programs, CUDA and the user's cache are, and what pip is told",
    "comm/hvd_process.py": "the only way to give Horovod settings",
    "session/world.py": "the launcher's number of ranks, to hold against MPI's",
}

MODULES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def layer(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Names of modules that a file imports, and of what it takes from them, which may be modules too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names(tree: ast.AST) -> set[str]:
    """The names that a file calls or reads as attributes."""
    return {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)}


def test_imports_go_downwards():
    upward = []
    for path, tree in MODULES.items():
        if path == "__init__.py":
            continue
        for name in imports(tree):
            parts = name.split(".")
            if parts[0] == "hpcdist" and len(parts) > 1 and parts[1] in HEIGHT:
                if HEIGHT[parts[1]] > HEIGHT.get(layer(path), 0):
                    upward.append(f"{path} imports {name}")
    assert upward == []


def test_imports_are_absolute():
    nodes = [(path, node) for path, tree in MODULES.items() for node in ast.walk(tree)]
    assert [f"{path}:{n.lineno}" for path, n in nodes if isinstance(n, ast.ImportFrom) and n.level] == []


def test_every_package_has_its_layer():
    assert {layer(path) for path in MODULES} - {"__init__"} <= set(HEIGHT)


@pytest.mark.parametrize(("library", "where"), [("mpi4py", r"comm/mpi\w*\.py"), ("horovod", r"comm/hvd\w*\.py")])
def test_only_one_place_imports(library, where):
    users = [path for path, tree in MODULES.items() if any(n.split(".")[0] == library for n in imports(tree))]
    assert [path for path in users if not re.fullmatch(where, path)] == []


def test_no_assert_statements():
    found = [f"{p}:{n.lineno}" for p, tree in MODULES.items() for n in ast.walk(tree) if isinstance(n, ast.Assert)]
    assert found == [], "python -O drops them: raise an error of hpcdist.errors"


def test_files_are_short():
    lengths = {path: len((PACKAGE / path).read_text().splitlines()) for path in MODULES}
    assert {path: length for path, length in lengths.items() if length > LINES} == {}


def test_lines_are_short():
    paths = [path for folder in ("hpcdist", "jobs", "tests") for path in (ROOT / folder).rglob("*.py")]
    lines = [(path, n, line) for path in paths for n, line in enumerate(path.read_text().splitlines(), 1)]
    assert [f"{path}:{n}" for path, n, line in lines if len(line) > COLUMNS] == []


def test_only_some_read_the_environment():
    readers = [path for path, tree in MODULES.items() if names(tree) & {"environ", "environb", "getenv"}]
    readers = [path for path in readers if "import os" in (PACKAGE / path).read_text()]
    assert [path for path in readers if not {path, layer(path)} & set(ENVIRONMENT)] == []


def test_no_module_is_dead():
    """Every module is imported by the library or a job, or stands in a package that finds its modules by name."""
    jobs = [ast.parse(path.read_text()) for path in (ROOT / "jobs").glob("*.py")]
    imported = {name for tree in [*MODULES.values(), *jobs] for name in imports(tree)}
    by_name = {str(Path(p).parent) for p, tree in MODULES.items() if names(tree) & {"import_module", "iter_modules"}}
    dead = []
    for path in MODULES:
        name = ".".join(["hpcdist", *Path(path).with_suffix("").parts])
        entry = path in ("cli.py", "cli/__init__.py") or Path(path).name in ("__init__.py", "__main__.py")
        if name not in imported and not entry and str(Path(path).parent) not in by_name:
            dead.append(path)
    assert dead == []


# --- every error's message is matched by a test -----------------------------------------------------------------------
SHORTEST = 8  # letters that count as a match of a message
WORDS = 4  # so do as many words in a row


def words(text: str) -> set[tuple[str, ...]]:
    """All runs of WORDS words."""
    split = text.split()
    return {tuple(split[at : at + WORDS]) for at in range(len(split) - WORDS + 1)}


def messages() -> Iterator[tuple[str, list[str]]]:
    """Where an error is raised, and the constant pieces of its message."""
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                first = node.exc.args[0]
                parts = first.values if isinstance(first, ast.JoinedStr) else [first]
                pieces = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
                if getattr(node.exc.func, "id", "") == "UnknownNameError":
                    pieces = [f"{piece} must be one of" for piece in pieces]
                if pieces:
                    yield f"{path}:{node.lineno}", pieces


def matched() -> set[str]:
    """The pieces of all strings in the tests, as what a regular expression says literally."""
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and path != Path(__file__):
                for piece in re.split(r"\.\*|\.\+|\\[dswSW][+*]?|\[[^\]]*\][+*]?|[()|^$\n](?<!\\.)", node.value):
                    piece = re.sub(r"\\(.)", r"\1", piece)
                    if len(piece.strip()) >= SHORTEST:
                        found.add(piece.strip())
    return found


def test_every_error_message_is_matched_by_a_test():
    """By words: a test holds a string that is part of the message, or contains it, or shares WORDS words in a row."""
    known = matched()
    runs = {run for text in known for run in words(text)}
    missing = []
    for where, pieces in messages():
        pieces = [piece.strip() for piece in pieces if len(piece.strip()) >= SHORTEST]
        if any(runs & words(piece) for piece in pieces):
            continue
        if pieces and not any(test in piece or piece in test for piece in pieces for test in known):
            missing.append(f"{where}: {pieces[0]}")
    assert not missing, "\n".join(["no test matches:", *missing])
