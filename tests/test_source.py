"""Rules of the library's source that its linters don't know, read from its syntax trees.

The others (layers, lines, assert statements, imports of mpi4py...) are in pyproject.toml; tests/run.sh checks them.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from hpcdist import registry
from hpcdist.session import rules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hpcdist"
LINES = 480

# Folders that their parent's row in docs/architecture.md describes.
PLUGINS_BELOW = (
    "collectives/tuning/", "compress/coding/", "data/importers/", "parallel/schedules/", "session/loader/",
    "tools/doctor/checks/", "tools/report/figures/", "session/loggers/",
)  # fmt: skip

# Who reads the environment, and why it is no setting.
ENVIRONMENT = {
    "tools/cli/": "the command line",
    "tools/completion.py": "the words that a shell asks to complete",
    "tools/mpirun.py": "which processes that mpirun has started are ranks",
    "tools/compare/functions.py": "what the ranks that it starts inherit",
    "tools/slurm/": "what Slurm tells its jobs",
    "tools/doctor/": "what it examines",
    "comm/mpi/start.py": "MPI's connection to srun's PMI-2",
    "comm/external/base.py": "settings of other libraries",
    "comm/external/horovod.py": "the only way to give Horovod settings",
    "torch_backend/default_group.py": "what torchrun sets, which libraries read, settings of Gloo, and a rank's GPUs",
    "torch_backend/__init__.py": "where torchrun lets ranks meet, and whether a launcher of MPI's has started them",
    "hvd/state.py": "HOROVOD_CYCLE_TIME, a setting of Horovod's",
    "session/leaving.py": "what Slurm tells its jobs",
    "session/world.py": "the launcher's number of ranks, to hold against MPI's",
}


Nodes = list[ast.AST]


def parsed(path: Path) -> Nodes:
    """All nodes of a file, of which the first is the module."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def modules() -> dict[str, Nodes]:
    """The package's files by their paths, parsed."""
    return {path.relative_to(PACKAGE).as_posix(): parsed(path) for path in sorted(PACKAGE.rglob("*.py"))}


def imports(nodes: Nodes) -> Iterator[str]:
    """Names of modules that a file imports, and of what it takes from them, which may be modules too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names(nodes: Nodes) -> set[str]:
    """The names that a file calls or reads as attributes."""
    return {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}


def module(path: str) -> str:
    return ".".join(["hpcdist", *Path(path).with_suffix("").parts]).removesuffix(".__init__")


def imported() -> dict[str, set[str]]:
    """The modules that each module imports, for typing and inside functions too."""
    files = {module(path): nodes for path, nodes in modules().items()}
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, nodes in files.items():
        for node in nodes:
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & set(files)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:  # from a package a module, or a name that its __init__ has
                    one = f"{node.module}.{alias.name}"
                    found[name] |= {one if one in files else node.module} & set(files)
    return found


def test_no_import_circles():
    TopologicalSorter(imported()).prepare()  # raises CycleError, which names a circle


def test_files_are_short():
    lengths = {path: len((PACKAGE / path).read_text().splitlines()) for path in modules()}
    assert {path: length for path, length in lengths.items() if length > LINES} == {}


# --- folders ----------------------------------------------------------------------------------------------------------
def architecture(row: str) -> list[tuple[str, ...]]:
    """The rows of docs/architecture.md that match a pattern: what its groups hold."""
    return re.findall(row, (ROOT / "docs" / "architecture.md").read_text(), re.M)


def test_the_architecture_has_every_folder_in_the_order_of_imports():
    listed = architecture(r"^\| `([\w/]+)/` \| ")
    folders = {str(parent) for path in modules() for parent in Path(path).parents} - {"."}
    assert set(listed) == {name for name in folders if not f"{name}/".startswith(tuple(PLUGINS_BELOW))}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [name.strip(" ()") for layer in settings["contracts"][0]["layers"] for name in layer.split(":")]
    assert [name for name in listed if "/" not in name] == [name for name in layers if name in listed]


def test_every_wing_keeps_its_budget_of_lines():
    wings = {name: (int(lines), text) for name, lines, text in architecture(r"^\| (\w+) \| (\d+) \| (.*) \|$")}
    wing_of = {folder: name for name, (_, text) in wings.items() for folder in re.findall(r"`(\w+)/`", text)}
    found = Counter[str]()
    for path in modules():
        found[wing_of.get(path.partition("/")[0], "core")] += (PACKAGE / path).read_text().count("\n")
    assert set(found) == set(wings)
    assert {name: (n, wings[name][0]) for name, n in found.items() if n > wings[name][0]} == {}


def test_only_some_read_the_environment():
    readers = [path for path, nodes in modules().items() if names(nodes) & {"environ", "environb", "getenv"}]
    readers = [path for path in readers if "import os" in (PACKAGE / path).read_text()]
    assert [path for path in readers if not path.startswith(tuple(ENVIRONMENT))] == []


def test_no_module_is_dead():
    """Every module is imported by the library or a job, or stands in a package that finds its modules by name."""
    jobs = [parsed(path) for path in (ROOT / "jobs").rglob("*.py")]
    imported = {name for nodes in [*modules().values(), *jobs] for name in imports(nodes)}
    by_name = {
        str(Path(p).parent) for p, nodes in modules().items() if names(nodes) & {"import_module", "iter_modules"}
    }
    by_name |= {"/".join(kind.package.split(".")[1:]) for kind in registry.CATALOGUES.values()}
    dead = []
    for path in modules():
        name = ".".join(["hpcdist", *Path(path).with_suffix("").parts])
        entry = Path(path).name in ("__init__.py", "__main__.py", "first_job.py")  # `hpcdist init` copies it
        if name not in imported and not entry and str(Path(path).parent) not in by_name:
            dead.append(path)
    assert dead == []


# --- names -----------------------------------------------------------------------------------------------------------
NAMED_TWICE = {
    "AllReduce",  # a strategy, whose class name is in checkpoints; and the collectives' public base
    "State",  # Horovod's name for what elastic training keeps; and how a job of Slurm's is
    "SyncBatchNorm",  # Horovod's name for it, too
    "Trainer",  # that of jobs; and the one for users of transformers' Trainer
}


def test_no_two_classes_have_one_name():
    names = Counter(n.name for nodes in modules().values() for n in nodes[0].body if isinstance(n, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1 and name not in NAMED_TWICE} == set()


# --- every error's message is matched by a test -----------------------------------------------------------------------
SHORTEST = 8  # letters that count as a match of a message
WORDS = 4  # so do as many words in a row


def words(text: str) -> set[tuple[str, ...]]:
    """All runs of WORDS words."""
    split = text.split()
    return {tuple(split[at : at + WORDS]) for at in range(len(split) - WORDS + 1)}


def messages() -> Iterator[tuple[str, list[str]]]:
    """Where an error is raised, and the constant pieces of its message."""
    for path, nodes in modules().items():
        for node in nodes:
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                if ast.unparse(node.exc.func) == "rules.error":  # whose messages follow below
                    continue
                first = node.exc.args[0]
                parts = first.values if isinstance(first, ast.JoinedStr) else [first]
                chunks = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
                if getattr(node.exc.func, "id", "") == "UnknownNameError":
                    chunks = [f"{chunk} must be one of" for chunk in chunks]
                if chunks:
                    yield f"{path}:{node.lineno}", chunks

    for pattern, rule in rules.RULES.items():
        yield f"session/rules.py, {pattern}", [*re.split(r"{[^}]*}", rule.message), pattern]


def matched() -> set[str]:
    """The pieces of all strings in the tests, as what a regular expression says literally."""
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in parsed(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and path != Path(__file__):
                for chunk in re.split(r"\.\*|\.\+|\\[dswSW][+*]?|\[[^\]]*\][+*]?|[()|^$\n](?<!\\.)", node.value):
                    chunk = re.sub(r"\\(.)", r"\1", chunk)
                    if len(chunk.strip()) >= SHORTEST:
                        found.add(chunk.strip())
    return found


def test_every_error_message_is_matched_by_a_test():
    """By words: a test holds a string that is part of the message, or contains it, or shares WORDS words in a row."""
    known = matched()
    runs = {run for text in known for run in words(text)}
    missing = []
    for where, chunks in messages():
        chunks = [chunk.strip() for chunk in chunks if len(chunk.strip()) >= SHORTEST]
        if any(runs & words(chunk) for chunk in chunks):
            continue
        if chunks and not any(test in chunk or chunk in test for chunk in chunks for test in known):
            missing.append(f"{where}: {chunks[0]}")
    assert not missing, "\n".join(["no test matches:", *missing])
