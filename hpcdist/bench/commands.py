"""`hpcdist bench`: each command measures all sides in one run and prints a table, or writes a row per measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

import hpcdist as hd  # its init imports torch when it is called, and not before
from hpcdist import console

app = typer.Typer(no_args_is_help=True, help="Measure side by side in one run; launch with mpirun.")
Json = Annotated[Optional[Path], typer.Option("--json", help="Write the rows to this file as well.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each side is timed; the median counts.")]

SIZES = tuple(4 << exponent for exponent in range(10, 27, 2))  # 4 KiB to 256 MiB


def _show(title: str, rows: list[dict], path: Path | None, comm=None) -> None:
    if comm is None or comm.rank == 0:
        console.rows(title, rows)
        if path is not None:
            path.write_text(json.dumps(rows, indent=2) + "\n")


@app.command()
def allreduce(
    sizes: Annotated[Optional[list[int]], typer.Option(help="Bytes; may be repeated.")] = None,
    algorithm: Annotated[Optional[list[str]], typer.Option(help="May be repeated; default auto and all else.")] = None,
    rounds: Rounds = 15,
    json_path: Json = None,
) -> None:
    """All-reduce in place, float32: our algorithms, MPI's own, gloo's, Horovod's, and a plain copy. Collective."""
    from hpcdist.bench import peers
    from hpcdist.collectives import bench
    from hpcdist.collectives.table import candidates

    from hpcdist.comm.mpi_plain import plain_allreduce

    comm = hd.init()
    names = algorithm or ["auto", *candidates(comm)]
    with peers.gloo(comm):
        others = {"mpi": plain_allreduce(comm), "gloo": peers.gloo_allreduce}
        rows = bench.measure(comm, sizes or SIZES, names, rounds, others)
    with peers.horovod(comm) as horovods:
        more = bench.measure(comm, sizes or SIZES, [], rounds, horovods) if horovods else []
    rows = sorted(rows + [row for row in more if row["name"] in horovods], key=lambda row: row["bytes"])
    others |= horovods
    for row in rows:  # how many times as fast as the best of the others
        best_s = min(other["median_s"] for other in rows if other["name"] in others and other["bytes"] == row["bytes"])
        row["speedup"] = best_s / row["median_s"]
    _show(f"all-reduce on {comm.size} ranks", rows, json_path, comm)


@app.command()
def train(rounds: Rounds = 9, json_path: Json = None) -> None:
    """A training step of the strategy allreduce, also by Horovod, beside torch's DDP on gloo. Collective."""
    from hpcdist.bench import training

    comm = hd.init()
    _show(f"training step on {comm.size} ranks", training.measure(comm, rounds=rounds), json_path, comm)


@app.command()
def loader(batch_size: int = 128, json_path: Json = None) -> None:
    """Reading shuffled batches from HDF5 beside a NumPy memory map of the same samples."""
    from hpcdist.data import bench

    _show("loader", bench.measure(batch_size=batch_size), json_path)


@app.command()
def window(rounds: Rounds = 15, json_path: Json = None) -> None:
    """One-sided operations, their cost to the owner, and a server's pull and push. Collective."""
    from hpcdist.bench import window as bench

    comm = hd.init()
    _show(f"windows on {comm.size} ranks", bench.measure(comm, rounds=rounds), json_path, comm)


@app.command()
def server(
    sizes: Annotated[Optional[list[int]], typer.Option(help="Parameters, float32; may be repeated.")] = None,
    rounds: Rounds = 5,
    json_path: Json = None,
) -> None:
    """Updates through parameter servers beside the same exchange by send and recv on gloo. Collective."""
    from hpcdist.bench import server as bench

    comm = hd.init()
    rows = bench.measure(comm, sizes or bench.SIZES, rounds=rounds)
    _show(f"parameter servers on {comm.size} ranks", rows, json_path, comm)


@app.command()
def gossip(rounds: Rounds = 7, json_path: Json = None) -> None:
    """A training step of each decentralised strategy beside all-reduce and the model alone. Collective."""
    from hpcdist.bench import gossip as bench

    comm = hd.init()
    _show(f"training step on {comm.size} ranks", bench.measure(comm, rounds=rounds), json_path, comm)


@app.command()
def compress(rounds: Rounds = 7, json_path: Json = None) -> None:
    """How fast each compressor codes; and, on several ranks, a training step with all-reduce compressed. Collective."""
    from hpcdist.bench import compress as bench

    comm = hd.init()
    if comm.size == 1:
        _show("coding and decoding on one core", bench.measure_coding(rounds=rounds), json_path)
    else:
        _show(f"training step on {comm.size} ranks", bench.measure_steps(comm, rounds=rounds), json_path, comm)
