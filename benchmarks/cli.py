"""`hpcdist bench`: each command measures all sides in one run and prints a table, or writes a row per measurement."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import hpcdist as hd  # its init imports torch when it is called, and not before
from hpcdist.tools import console
from hpcdist.tools.cli.base import Json, plugin, whole_number
from hpcdist.tools.options import option

app = typer.Typer(rich_markup_mode=None)
Sizes = Annotated[list[int] | None, option("BYTES", "Length of the longest tensor. May be repeated.")]
Rounds = Annotated[int, whole_number("Times that each side is measured. The median counts.")]


def _calls(*more: str) -> Any:
    names = ", ".join(["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", *more])
    return option("NAME", f"{names}. May be repeated. Default: all.")


def _run(title: str, measure: Callable[..., list[dict]], path: Path | None, **options: object) -> None:
    """Collective. Measure on all ranks; rank 0 shows the rows."""
    from hpcdist.records import cores_by_host, load_average, local_cores_of_host
    from hpcdist.tools.machine import describe_cores, timing_warnings

    comm, load = hd.init(), load_average()
    found = comm.gather(local_cores_of_host())
    rows = measure(comm, **options)
    if comm.rank == 0:
        console.rows(f"{title} on {comm.size} rank{'s' * (comm.size > 1)}", rows)
        if path is not None:
            path.write_text(json.dumps(rows, indent=2) + "\n")
        host, ranks = found[0][0], sum(host == found[0][0] for host, _ in found)
        load += load_average()
        doubts = timing_warnings(ranks, cores_by_host(found)[host], os.cpu_count() or 1, max(load, default=0.0))
        for sentence in [*describe_cores(found), *doubts]:
            console.note(sentence)


def _chosen(given: Sequence[str] | None, known: Sequence[str]) -> Sequence[str]:
    """Return the calls to be measured, by default all; raise UnknownNameError for others."""
    from hpcdist.errors import UnknownNameError

    for name in given or ():
        if name not in known:
            raise UnknownNameError("--call", name, known)
    return given or known


@app.command()
def allreduce(
    sizes: Sizes = None,
    algorithm: Annotated[
        list[str] | None, plugin("collectives", "Algorithm to measure. May be repeated. Default: auto and all others.")
    ] = None,
    rounds: Rounds = 15,
    json_path: Json = None,
) -> None:
    """Time the sum of float32 tensors over all ranks: by hpcdist's algorithms, MPI, gloo and Horovod.

    Example: mpirun -n 2 hpcdist bench allreduce --sizes 4096 --algorithm ring
    """
    from benchmarks.allreduce import SIZES, measure

    _run("all-reduce", measure, json_path, sizes=sizes or SIZES, algorithms=algorithm, rounds=rounds)


@app.command()
def collectives(
    call: Annotated[list[str] | None, _calls()] = None,
    sizes: Sizes = None,
    rounds: Rounds = 15,
    other: Annotated[Path | None, option("ENVIRONMENT", "Also measure the MPI library of this one.", "--with")] = None,
    json_path: Json = None,
) -> None:
    """Time every collective call on float32 tensors: hpcdist's, MPI's, gloo's, another MPI library's.

    Example: mpirun -n 2 hpcdist bench collectives --call broadcast --sizes 4096
    """
    from benchmarks.collectives import CALLS, SIZES, measure

    _run(
        "collective calls", measure, json_path,
        calls=_chosen(call, CALLS), sizes=sizes or SIZES, rounds=rounds, other=other, environment=os.environ,
    )  # fmt: skip


@app.command("torch")
def torch_calls(
    call: Annotated[list[str] | None, _calls("send")] = None,
    sizes: Sizes = None,
    steps: Annotated[bool, typer.Option(help="Also time steps of DistributedDataParallel and FSDP2.")] = True,
    rounds: Rounds = 15,
    json_path: Json = None,
) -> None:
    """Time torch.distributed's calls on the backend hpcdist, on gloo, and hpcdist's own below them.

    Example: mpirun -n 2 hpcdist bench torch --call send --no-steps
    """
    from benchmarks.torch_calls import CALLS, SIZES, measure

    calls = _chosen(call, CALLS)
    _run("torch.distributed", measure, json_path, calls=calls, sizes=sizes or SIZES, rounds=rounds, steps=steps)


@app.command("horovod")
def horovod_calls(
    sizes: Sizes = None,
    steps: Annotated[bool, typer.Option(help="Also time steps of DistributedOptimizer.")] = True,
    rounds: Rounds = 15,
    json_path: Json = None,
) -> None:
    """Time what scripts written for Horovod do, by hpcdist.hvd and by Horovod, which has to be built.

    Example: mpirun -n 2 hpcdist bench horovod --sizes 4096 --no-steps
    """
    from benchmarks.horovod_calls import SIZES, measure

    _run("Horovod's calls", measure, json_path, sizes=sizes or SIZES, rounds=rounds, steps=steps)


@app.command()
def train(rounds: Rounds = 9, json_path: Json = None) -> None:
    """Time a training step with the strategy allreduce, with Horovod, and with torch's DDP on gloo.

    Example: mpirun -n 2 hpcdist bench train
    """
    from benchmarks.train import measure

    _run("training step", measure, json_path, rounds=rounds)


@app.command()
def loader(
    batch_size: Annotated[int, whole_number("Samples of a batch.")] = 128,
    json_path: Json = None,
) -> None:
    """Time the reading of shuffled batches from HDF5 and from a NumPy memory map.

    Example: mpirun -n 2 hpcdist bench loader --batch-size 64
    """
    from benchmarks.loader import measure

    _run("loader", measure, json_path, batch_size=batch_size)


@app.command()
def checkpoint(
    rounds: Rounds = 9,
    folder: Annotated[Path | None, option("FOLDER", "Where files are made. Default: the temporary folder.")] = None,
    json_path: Json = None,
) -> None:
    """Time hd.save and hd.load, torch's calls, and training steps with and without checkpoints.

    Example: mpirun -n 2 hpcdist bench checkpoint
    """
    from benchmarks.checkpoint import measure

    _run("checkpoints", measure, json_path, rounds=rounds, folder=folder)


@app.command()
def window(rounds: Rounds = 15, json_path: Json = None) -> None:
    """Time one-sided operations, what they cost the owner of the memory, and a server's pull and push.

    Example: mpirun -n 2 hpcdist bench window
    """
    from benchmarks.window import measure

    _run("windows", measure, json_path, rounds=rounds)


@app.command()
def server(
    sizes: Annotated[list[int] | None, option("N", "Number of parameters (float32). May be repeated.")] = None,
    rounds: Rounds = 5,
    json_path: Json = None,
) -> None:
    """Time updates through parameter servers, and the same exchange by send and recv on gloo.

    Example: mpirun -n 2 hpcdist bench server --sizes 100000
    """
    from benchmarks.server import SIZES, measure

    _run("parameter servers", measure, json_path, sizes=sizes or SIZES, rounds=rounds)


@app.command()
def gossip(rounds: Rounds = 7, json_path: Json = None) -> None:
    """Time a training step with each strategy without servers, and without communication: a minute and a half.

    Slow strategies take fewer rounds than others.

    Example: mpirun -n 2 hpcdist bench gossip
    """
    from benchmarks.train import SHORT_S, compare, gossip_ways

    def measure(comm: Any) -> list[dict]:
        return compare(comm, list(gossip_ways(comm.size)), rounds=rounds, span_s=SHORT_S)

    _run("training step", measure, json_path)


@app.command()
def pipeline(
    stages: Annotated[list[int] | None, whole_number("Ranks of a pipeline. May be repeated.")] = None,
    micro_batches: Annotated[int, whole_number("Micro-batches of a step.")] = 8,
    width: Annotated[int, whole_number("Inputs, and outputs, of each layer of the model.")] = 256,
    batch: Annotated[int, whole_number("Samples of a step.")] = 512,
    rounds: Rounds = 7,
    json_path: Json = None,
) -> None:
    """Time steps of a pipeline with each schedule, on one rank, and with torch.distributed.pipelining.

    Example: mpirun -n 2 hpcdist bench pipeline --stages 2
    """
    from benchmarks.pipeline import STAGES, measure

    options = {"stages": stages or STAGES, "micro_batches": micro_batches, "width": width, "batch": batch}
    _run("pipelines", measure, json_path, rounds=rounds, **options)


@app.command()
def compress(rounds: Rounds = 7, json_path: Json = None) -> None:
    """Time the coding of each compressor on one rank; on several ranks, a training step with each.

    Example: mpirun -n 2 hpcdist bench compress
    """
    from benchmarks.compress import measure_coding
    from benchmarks.train import COMPRESSED_WAYS, compare

    if hd.init().size == 1:
        _run("coding and decoding", lambda comm: measure_coding(rounds=rounds), json_path)
    else:
        _run("training step", compare, json_path, ways=COMPRESSED_WAYS, rounds=rounds, steps=5)
