"""`hpcdist strategies|compressors|topologies|schedules|datasets`: list algorithms, show one in full; `topology`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hpcdist.errors import require_packages
from hpcdist.registry import catalogue
from hpcdist.tools import completion, console
from hpcdist.tools.cli.base import require_checkout, whole_number, writable
from hpcdist.tools.options import Overrides

app = typer.Typer()
MARGIN = 10  # of a drawing, for the ranks' numbers
TRAIN = "mpirun -n 4 hpcdist train jobs/digits.py"


def _name(complete: completion.Completer) -> Any:
    return typer.Argument(metavar="NAME", help="Show this one in full. Default: list all.", autocompletion=complete)


@app.command()
def strategies(
    name: Annotated[str | None, _name(completion.names("strategies"))] = None,
    checked: Annotated[
        str | None, typer.Argument(metavar="FILE:CLASS", help="After `test`: the strategy to check, of your own.")
    ] = None,
) -> None:
    """List the distribution strategies; or show one in full: what it does, its options, its source.

    `hpcdist strategies test FILE:CLASS` runs the tests that hold for every strategy on one of your own: it learns,
    records every gradient, resumes from checkpoints, takes the same steps on real ranks as on virtual ones... They
    take a minute or two, and need a checkout of hpcdist, and pytest. The exit status is 1 if one fails.

    Example: hpcdist strategies softsync
    """
    if name == "test":
        script = require_checkout("strategies test", "tests/check_strategy.py")
        require_packages("hpcdist strategies test", "test", "pytest", "hypothesis")
        raise typer.Exit(subprocess.run([sys.executable, str(script), *filter(None, [checked])]).returncode)
    _list_or_show("strategies", name, "strategy")


@app.command()
def compressors(name: Annotated[str | None, _name(completion.names("compressors"))] = None) -> None:
    """List the compressors of messages, for a strategy's `compression`; or show one in full.

    Example: hpcdist compressors topk
    """
    _list_or_show("compressors", name, "strategy.compression")


@app.command()
def topologies(name: Annotated[str | None, _name(completion.names("topologies"))] = None) -> None:
    """List the topologies, which say what ranks average with each other; or show one in full.

    Example: hpcdist topologies torus
    """
    from hpcdist.config import options_of

    known = catalogue("topologies")
    if not _listed("topologies", known, name):
        found = known.load(str(name))
        needed = {key: key.upper() for key, field in options_of(found).model_fields.items() if field.is_required()}
        training = f"{TRAIN} --set strategy={'dpsgd' if found.symmetric else 'sgp'} --set strategy.topology={name}"
        training += "".join(f" --set strategy.topology.{key}={needed[key]}" for key in needed if key != "nodes")
        examined = "".join(f" --set {key}={value}" for key, value in needed.items())
        _show(found, name, "strategy.topology", training, f"hpcdist topology {name} --ranks 16{examined}")


@app.command()
def datasets(name: Annotated[str | None, _name(completion.datasets)] = None) -> None:
    """List the data sets and kinds of files that `hpcdist data import` reads; or show one in full.

    Example: hpcdist datasets digits
    """
    from hpcdist.config import meaning
    from hpcdist.data import importers
    from hpcdist.data.fetch import RELEASES

    if not _listed("datasets", importers, name):
        found = importers.load(str(name))
        fetch = [f"hpcdist data fetch {name}"] * (name in RELEASES)
        source = f"data/{name}" if fetch else getattr(sys.modules[found.__module__], "INCLUDED", "SOURCE")
        command = f"hpcdist data import {name} {source} {name}.h5"
        _show(found, name, "", *fetch, command, more=f"SOURCE is {meaning(found, 'source')}.")


@app.command()
def schedules(
    name: Annotated[str | None, _name(completion.names("schedules"))] = None,
    ranks: Annotated[int, whole_number("Number of ranks in the drawings.")] = 4,
    micro_batches: Annotated[int, whole_number("Micro-batches in the drawings.")] = 8,
) -> None:
    """Show the schedules of pipelines, each with a drawing in which a backward pass takes two forward passes' time.

    F2 is the forward pass of micro-batch 2, B2 its backward pass, or I2 and W2 the halves of that: gradients of inputs
    and of weights. A rank with two stages has F2a and F2b.

    Example: hpcdist schedules zero_bubble --ranks 4
    """
    from hpcdist.parallel import schedules as known
    from hpcdist.parallel.plan import EQUAL
    from hpcdist.parallel.schedules.base import gantt

    for each in known.available() if name is None else [name]:
        console.algorithm(each, known.load(each))
        table = known.create(each, ranks, micro_batches, chunks=2 if each == "interleaved" else 1)
        timing = known.simulate(table, EQUAL)
        pass_columns = max(1, int((console.columns() - MARGIN) // timing.makespan_s))  # so that all are as wide
        print(*gantt(table, timing, int(timing.makespan_s) * pass_columns), "", sep="\n")


@app.command()
def topology(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Topology, such as ring; see `hpcdist topologies`.",
            autocompletion=completion.names("topologies"),
        ),
    ],
    ranks: Annotated[int | None, whole_number("Number of ranks. Default: only describe the topology.")] = None,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw it, in a file .svg or .png. Needs matplotlib.", callback=writable),
    ] = None,
) -> None:
    """Examine a topology: checks of its weights, its spectral gap, the neighbours of each rank.

    Its options are given by --set.

    Example: hpcdist topology torus --ranks 16 --set rows=2 --output torus.svg
    """
    from hpcdist.config import checked_options, load
    from hpcdist.tools.topology import draw

    if ranks is None:
        topologies(name)
        return
    make = catalogue("topologies").load(name)
    chosen = make(ranks, **checked_options(make, load({}, None, overrides or [])))
    if output is not None:
        draw(chosen, output)
    console.topology(chosen)


# --- algorithms -------------------------------------------------------------------------------------------------------
def _list_or_show(group: str, name: str | None, setting: str) -> None:
    """List the algorithms of a group, or show one in full, which `setting` names."""
    known = catalogue(group)
    if not _listed(group, known, name):
        found = known.load(str(name))
        contract: Any = getattr(found, "contract", None)
        sgd = ""
        if contract and contract.optimizer == "SGD":
            momentum = " --set optimizer.lr=0.05 --set optimizer.momentum=0.9"
            sgd = " --set optimizer.name=SGD" + momentum * (contract.step == "the optimiser's")
        _show(found, name, setting, f"{TRAIN} --set {setting}={name}{sgd}")


def _listed(command: str, known: Any, name: str | None) -> bool:
    """List what is known, a line for each, unless one is named."""
    if name is None:
        console.overview({each: known.load(each) for each in known.available()})
        console.note(f"`hpcdist {command} NAME` shows one in full")
    return name is None


def _show(found: Any, name: str | None, where: str, *examples: str, more: str = "") -> None:
    """Show what an algorithm does, its options by their keys in the table `where`, its source, and commands."""
    from hpcdist.config import describe, options_of

    options = describe(found.Config if hasattr(found, "Config") else options_of(found), where)
    console.algorithm(str(name), found, options, examples, more)
