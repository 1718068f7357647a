"""The examples in docstrings, as `>>>` marks them: each runs on virtual ranks, and gives what it says on rank 0.

"Example:" in a docstring means two ranks, "Example on 4 ranks:" four. An example may use these names without making
them: hd, torch, nn, comm (the ranks), model (a linear layer, 4 to 2), sgd (its optimiser) and data (8 samples). If it
makes an `optimizer` that is distributed, this trains the model for an epoch.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import hpcdist as hd
from hpcdist import compress, strategies, topology
from hpcdist.comm.virtual import run_virtual

ROOT = Path(__file__).parents[1]
LEAST, MOST_LINES = 80, 5
RANKS = re.compile(r"Example on (\d+) ranks?:")


def examples() -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each class and function that has an example."""
    for path in sorted((ROOT / "hpcdist").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
            if text and ">>>" in text:
                yield f"{path.relative_to(ROOT / 'hpcdist').with_suffix('').as_posix()}:{node.name}", text


FOUND = dict(examples())


def run(text: str, comm) -> None:
    """Run an example on one rank; rank 0 compares what its expressions give."""
    hd.init(comm=comm)
    model = nn.Linear(4, 2)
    names = {"hd": hd, "torch": torch, "nn": nn, "comm": comm, "model": model, "__name__": "example"}
    names["sgd"] = torch.optim.SGD(model.parameters(), lr=0.1)
    names["data"] = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
    for step in doctest.DocTestParser().get_examples(text):
        if step.options.get(doctest.SKIP):  # needs real MPI ranks
            continue
        if not step.want:
            exec(step.source, names)
            continue
        got = f"{eval(step.source, names)!r}\n"
        same = doctest.OutputChecker().check_output(step.want, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert same or comm.rank > 0, f"{step.source.strip()} must give {step.want.strip()}; got {got}"
    if hasattr(names.get("optimizer"), "strategy"):
        train(model, names["optimizer"], names["data"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.utils.data.Dataset) -> None:
    """Train an epoch, so that the options of an example are tried."""
    for x, y in hd.shard(torch.utils.data.DataLoader(data, batch_size=2)):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("name", FOUND)
def test_an_example_runs_and_is_short(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = FOUND[name]
    ranks = RANKS.search(text)
    assert ranks or "Example:" in text, "say how many ranks it runs on"
    lines = [line for step in doctest.DocTestParser().get_examples(text) for line in step.source.splitlines()]
    assert len(lines) <= MOST_LINES
    run_virtual(lambda comm: run(text, comm), int(ranks[1]) if ranks else 2)


def test_an_example_that_gives_something_else_fails():
    with pytest.raises(AssertionError, match="must give 3; got 2"):
        run_virtual(lambda comm: run("Example:\n    >>> comm.size\n    3\n", comm), 2)


def test_what_users_meet_first_has_examples():
    wanted = {f"strategies/{name}:{strategies.load(name).__name__}" for name in strategies.available()}
    wanted |= {f"compress/{name}:{compress.load(name).__name__}" for name in compress.available()}
    wanted |= {f"topology/{name}:{topology.load(name).__name__}" for name in topology.available()}
    assert not wanted - FOUND.keys()
    functions = {name.split(":")[1] for name in FOUND}
    started = {"Future", "compare", "simulate", "submit", "sweep", "read_runs"}  # jobs; the pages' code shows them
    assert not set(hd.__all__) - started - functions
    assert len(FOUND) >= LEAST
