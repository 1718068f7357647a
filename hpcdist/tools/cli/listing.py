"""`hpcdist strategies|compressors|topologies|schedules|datasets`: list algorithms, describe one; `topology`."""

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
from hpcdist.tools.options import Overrides, argument, option

app = typer.Typer()
MARGIN = 10  # columns of a drawing for the rank numbers
TOPOLOGIES = catalogue("topologies")
TRAIN = "mpirun -n 4 hpcdist train jobs/digits.py"


def _name(complete: Any) -> Any:
    return argument("NAME", "Describe this one. Default: list all.", autocompletion=complete)


@app.command()
def strategies(
    name: Annotated[str | None, _name(catalogue("strategies").available)] = None,
    checked: Annotated[str | None, argument("FILE:CLASS", "After `test`: your strategy.")] = None,
) -> None:
    """List the distribution strategies, or describe one with its options and its reference.

    `hpcdist strategies test FILE:CLASS` runs the tests of all strategies on yours: it learns, records every gradient,
    resumes from checkpoints, takes the same steps on real and virtual ranks... They take a minute or two, and need a
    checkout of hpcdist, and pytest. The exit status is 1 if one fails.

    Example: hpcdist strategies softsync
    """
    if name == "test":
        script = require_checkout("strategies test", "tests/check_strategy.py")
        require_packages("hpcdist strategies test", "test", "pytest", "hypothesis")
        raise typer.Exit(subprocess.run([sys.executable, str(script), *filter(None, [checked])]).returncode)
    _list_or_show("strategies", name, "strategy")


@app.command()
def compressors(name: Annotated[str | None, _name(catalogue("compressors").available)] = None) -> None:
    """List the compressors of messages, for a strategy's `compression`, or describe one.

    Example: hpcdist compressors topk
    """
    _list_or_show("compressors", name, "strategy.compression")


@app.command()
def topologies(name: Annotated[str | None, _name(TOPOLOGIES.available)] = None) -> None:
    """List the topologies, which define the neighbours that ranks average with, or describe one.

    Example: hpcdist topologies torus
    """
    from hpcdist.config.settings import options_of

    if not _list_if_unnamed("topologies", TOPOLOGIES, name):
        topology = TOPOLOGIES.load(str(name))
        required = {key: key.upper() for key, field in options_of(topology).model_fields.items() if field.is_required()}
        training = f"{TRAIN} --set strategy={'dpsgd' if topology.symmetric else 'sgp'} --set strategy.topology={name}"
        # A run sets an option `nodes` itself.
        training += "".join(f" --set strategy.topology.{key}={required[key]}" for key in required if key != "nodes")
        options = "".join(f" --set {key}={value}" for key, value in required.items())
        _show(topology, name, "strategy.topology", training, f"hpcdist topology {name} --ranks 16{options}")


@app.command()
def datasets(name: Annotated[str | None, _name(completion.datasets)] = None) -> None:
    """List the data sets and file types that `hpcdist data import` reads, or describe one.

    Example: hpcdist datasets digits
    """
    from hpcdist.config.settings import meaning
    from hpcdist.data import importers
    from hpcdist.data.fetch import RELEASES

    if not _list_if_unnamed("datasets", importers, name):
        importer = importers.load(str(name))
        fetch = [f"hpcdist data fetch {name}"] * (name in RELEASES)
        source = f"data/{name}" if fetch else getattr(sys.modules[importer.__module__], "INCLUDED", "SOURCE")
        command = f"hpcdist data import {name} {source} {name}.h5"
        more = f"SOURCE is {meaning(importer, 'source')}."
        _show(importer, name, "", *fetch, command, more=more, set_by="--NAME VALUE behind FILE")


@app.command()
def schedules(
    name: Annotated[str | None, _name(catalogue("schedules").available)] = None,
    ranks: Annotated[int, whole_number("Number of ranks in the drawings.")] = 4,
    micro_batches: Annotated[int, whole_number("Micro-batches in the drawings.")] = 8,
) -> None:
    """Draw the pipeline schedules, with a backward pass twice as long as a forward pass.

    F2 is the forward pass of micro-batch 2, B2 its backward pass; I2 and W2 are the halves of a backward pass that
    compute gradients of inputs and of weights. A rank with two stages has F2a and F2b.

    Example: hpcdist schedules zero_bubble --ranks 4
    """
    from hpcdist.parallel import schedules as known
    from hpcdist.parallel.plan import EQUAL
    from hpcdist.parallel.schedules.base import gantt

    for schedule in known.available() if name is None else [name]:
        console.algorithm(schedule, known.load(schedule))
        table = known.create(schedule, ranks, micro_batches, chunks=2 if schedule == "interleaved" else 1)
        timing = known.simulate(table, EQUAL)
        pass_columns = max(1, int((console.columns() - MARGIN) // timing.makespan_s))  # the same width for all
        print(*gantt(table, timing, int(timing.makespan_s) * pass_columns), "", sep="\n")


@app.command()
def topology(
    name: Annotated[
        str, argument("NAME", "Topology, such as ring; see `hpcdist topologies`.", autocompletion=TOPOLOGIES.available)
    ],
    ranks: Annotated[int | None, whole_number("Number of ranks. Default: only describe the topology.")] = None,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, option("FILE", "Also draw it, in a file .svg or .png. Needs matplotlib.", callback=writable)
    ] = None,
) -> None:
    """Describe a topology: checks of its weights, its spectral gap, the neighbours of each rank.

    Its options are given by --set.

    Example: hpcdist topology torus --ranks 16 --set rows=2 --output torus.svg
    """
    from hpcdist.config.merge import load
    from hpcdist.config.settings import checked_options
    from hpcdist.tools.topology import adjacency, describe, draw, steps

    if ranks is None:
        topologies(name)
        return
    create = TOPOLOGIES.load(name)
    created = create(ranks, **checked_options(create, load({}, None, overrides or [])))
    if output is not None:
        draw(created, output)
    console.facts(describe(created))
    for step in steps(created):
        console.rows(None if created.static else f"step {step}", adjacency(created, step))


# --- algorithms -------------------------------------------------------------------------------------------------------
def _list_or_show(group: str, name: str | None, setting: str) -> None:
    """List the algorithms of a group, or describe one; `setting` is the key that selects it."""
    known = catalogue(group)
    if not _list_if_unnamed(group, known, name):
        cls = known.load(str(name))
        contract: Any = getattr(cls, "contract", None)
        sgd = ""  # settings of the example, for a strategy that supports torch's SGD only
        if contract and contract.optimizer == "SGD":
            momentum = " --set optimizer.lr=0.05 --set optimizer.momentum=0.9"
            sgd = " --set optimizer.name=SGD" + momentum * (contract.step == "the optimiser's")
        _show(cls, name, setting, f"{TRAIN} --set {setting}={name}{sgd}")


def _list_if_unnamed(command: str, known: Any, name: str | None) -> bool:
    """If no name is given, list all algorithms of the group `known`; return whether it listed them."""
    if name is None:
        console.overview({algorithm: known.load(algorithm) for algorithm in known.available()})
        console.note(f"`hpcdist {command} NAME` describes one")
    return name is None


def _show(cls: Any, name: str | None, prefix: str, *examples: str, **texts: str) -> None:
    """Print an algorithm's docstring, its options under the key `prefix`, its reference, and example commands.

    `texts`: arguments of `console.algorithm`.
    """
    from hpcdist.config.settings import describe, options_of

    options = describe(cls.Config if hasattr(cls, "Config") else options_of(cls), prefix)
    console.algorithm(str(name), cls, options, examples, **texts)
