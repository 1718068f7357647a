"""The code blocks of a page of documentation, run from top to bottom in one process.

- A first line `# NAME.py` or `# NAME.toml` makes a file of a block.
- `python`: on virtual ranks, where the page uses `hd`; else as it stands. A block that calls `hd.init()` begins anew
  with a small model, its optimizer and loaders, under the names that the page uses for them.
- `toml`: a run's settings, or a job for Slurm if it has a `shape`.
- `sh`: `hpcdist ...` runs; `mpirun -n N hpcdist train ...` is set up on N virtual ranks, as before a run, and
  `hpcdist compare ...` and `hpcdist simulate ...` are checked.

Above a block a comment may stand that readers don't see: `<!-- not run: REASON -->`, or `<!-- before: CODE -->`.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import typer

import hpcdist as hd
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.merge import load
from hpcdist.tools import cli
from hpcdist.tools.slurm.spec import JobSpec
from hpcdist.train.planning import rehearse
from hpcdist.train.runs import specify

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RANKS = 4
SHOWN = {""}  # blocks of these languages are only looked at
BLOCK = re.compile(r"(?:^<!-- (not run|before): (.+?) -->\n)?^( *)```(\w*)[^\n]*\n(.*?)^\3```", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block, its line in the page, and what the comment above says of it."""

    language: str
    code: str
    line: int
    reason: str = ""  # why it is not run
    before: str = ""  # Python that runs first


def blocks(text: str) -> Iterator[Block]:
    for found in BLOCK.finditer(text):
        kind, said, _, language, code = found.groups()
        line = text.count("\n", 0, found.start(5))
        reasons = {"not run": "reason", "before": "before"}
        yield Block(language, textwrap.dedent(code), line, **({reasons[kind]: said} if kind else {}))


def run(page: Path) -> None:
    """Runs a page in the working directory. Raises what its first wrong block raises."""
    todo = [block for block in blocks(page.read_text()) if block.language not in SHOWN and not block.reason]
    for language in {block.language for block in todo} - {"python", "toml", "sh"}:
        raise ValueError(f"language of a block must be python, toml or sh, or it must not run; got {language}.")
    for block in todo:
        if name := re.match(r"# (\S+\.(?:py|toml))\n", block.code):
            Path(name[1]).write_text(block.code)
    _python(page, [block for block in todo if block.language == "python"])
    for block in todo:
        if block.language == "toml":
            _toml(block.code)
        elif block.language == "sh":
            for command in _commands(block.code):
                _run_command(command)


# --- Python -----------------------------------------------------------------------------------------------------------
def _python(page: Path, todo: list[Block]) -> None:
    if any("hd." in block.code for block in todo):
        run_virtual(lambda comm: _run_python(page, todo, comm), RANKS)
    else:
        _run_python(page, todo, None)


def _run_python(page: Path, todo: list[Block], comm) -> None:
    names: dict = {}
    for block in todo:
        if "hd.init()" in block.code:
            hd.init(comm=comm)
            names = users_names()
        with contextlib.redirect_stdout(io.StringIO()) if comm is None else contextlib.nullcontext():
            exec(block.before, names)
            lines = "\n" * block.line  # so that tracebacks name the page's line
            exec(compile(lines + block.code, str(page), "exec"), names)


def users_names() -> dict:
    """What stands for the reader's own model and data."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = torch.nn.Linear(4, 1)
    return {
        "contextlib": contextlib,
        "hd": hd,
        "torch": torch,
        "model": model,
        "loss_fn": torch.nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "loader": torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
        "test": torch.utils.data.DataLoader(data, batch_size=8),
    }


# --- settings and commands --------------------------------------------------------------------------------------------
def _toml(code: str) -> None:
    found = tomllib.loads(code)
    if "shape" in found:
        JobSpec.from_mapping(found)


def _commands(code: str) -> Iterator[list[str]]:
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def _run_command(words: list[str]) -> None:
    ranks = 1
    if words[:2] == ["mpirun", "-n"]:
        ranks, words = int(words[2]), words[3:]
    if words[:2] == ["hpcdist", "train"]:
        _set_up(words[2:], ranks)
    elif words[:2] in (["hpcdist", "compare"], ["hpcdist", "simulate"]):
        with mock.patch(
            "hpcdist.tools.compare.functions.run_all", return_value=False
        ):  # all is checked, no run is made
            _run_alone(words)
    elif words[0] == "hpcdist" and ranks == 1:
        _run_alone(words)
    else:
        raise ValueError(f"a block of sh must hold commands of hpcdist, or must not run; got {' '.join(words)}.")


def _run_alone(words: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        typer.main.get_command(cli.app).main(words[1:], prog_name="hpcdist", standalone_mode=False)


def _set_up(arguments: list[str], ranks: int) -> None:
    """What `hpcdist train` does with its arguments before the ranks train."""
    root = typer.main.get_command(cli.app)
    above = typer.Context(root, **root.context_settings)  # a command keeps its help option as it first was: -h, too
    given = root.commands["train"].make_context("train", list(arguments), parent=above).params
    config = given["config"] and Path(given["config"])
    load({}, config, given["overrides"] or [])
    _, settings = specify(Path(given["job"]), config, given["overrides"] or [])
    rehearse(settings, ranks)
