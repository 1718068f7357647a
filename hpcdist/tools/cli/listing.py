"""`hpcdist strategies|compressors|schedules|topology`: list algorithms, examine a topology."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.tools import console
from hpcdist.tools.cli.base import Overrides

app = typer.Typer()
COLUMNS = 120  # of a drawing


@app.command()
def strategies() -> None:
    """List the strategies with their options and references."""
    from hpcdist import strategies as catalogue

    console.algorithms({name: catalogue.load(name) for name in catalogue.available()}, "strategy")


@app.command()
def compressors() -> None:
    """List the compressors with their options and references. Each is a strategy's `compression`."""
    from hpcdist import compress as catalogue

    console.algorithms({name: catalogue.load(name) for name in catalogue.available()}, "strategy.compression")


@app.command()
def schedules(
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks in the drawings.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, metavar="N", help="Micro-batches in the drawings.")] = 8,
) -> None:
    """List the schedules of pipelines, with a drawing where a backward pass takes twice as long as a forward pass.

    F2 is the forward pass of micro-batch 2, B2 its backward pass, or I2 and W2 the halves of that: gradients of inputs
    and of weights. A rank with two stages has F2a and F2b.
    """
    from hpcdist.parallel import schedules as catalogue
    from hpcdist.parallel.plan import EQUAL
    from hpcdist.parallel.schedules.base import gantt

    for name in catalogue.available():
        console.algorithms({name: catalogue.load(name)}, "")
        table = catalogue.make(name, ranks, micro_batches, chunks=2 if name == "interleaved" else 1)
        timing = catalogue.simulate(table, EQUAL)
        whole = max(1, int(COLUMNS // timing.makespan_s))  # columns of a forward pass: all are as wide
        print(*gantt(table, timing, int(timing.makespan_s) * whole), "", sep="\n")


@app.command()
def topology(
    name: Annotated[str, typer.Argument(help="Topology, such as ring or torus; an unknown name lists all.")],
    ranks: Annotated[int, typer.Option(metavar="N", help="Number of ranks.")],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.svg|png", help="Draw it there, too; needs matplotlib.")
    ] = None,
) -> None:
    """Examine a topology: checks of its weights, its spectral gap, each rank's neighbours. Give options with --set."""
    from hpcdist import topology as catalogue
    from hpcdist.config import checked_options, load
    from hpcdist.tools.topology import draw

    make = catalogue.load(name)
    chosen = make(ranks, **checked_options(make.__init__, load({}, None, overrides or [])))
    if output is not None:
        draw(chosen, output)
    console.topology(chosen)
