"""What `tests/gpu/run.py` measures, one part at a time, in a process or on ranks of its own.

    python tests/gpu/measure.py coding rows.json --device cuda
    mpirun -n 2 python tests/gpu/measure.py steps rows.json --device cuda

Rank 0 writes the rows after each measurement, so that what comes before a failure is kept, and notes: what was left
out, and why.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import hpcdist as hd
from benchmarks import compress, train
from benchmarks.runner import Side, beside, finish, measure, table, timed, warm_up
from benchmarks.train import ALLREDUCE, ALONE, DDP, DDP_NCCL, Way
from hpcdist.errors import ConfigError
from hpcdist.torch_backend.default_group import default_group

OURS = (ALLREDUCE, Way("parameter_server", "parameter_server"), Way("gossip_pull", "gossip_pull"))
MESSAGES = tuple(4 << exponent for exponent in range(10, 27, 4))  # 4 KiB to 256 MiB
CODED = 10_000_000  # elements
RATES = ("name", "bytes", "median_s", "bytes_per_s")


class Part:
    """Hold one part's rows and notes."""

    def __init__(self, comm, path: Path, device: torch.device, shared: bool, quick: bool):
        self.comm, self.path, self.device, self.shared, self.quick = comm, path, device, shared, quick
        self.rows: list[dict] = []
        self.notes: list[str] = []

    def add(self, rows: list[dict]) -> None:
        self.rows += rows
        self._write()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._write()

    def _write(self) -> None:
        if self.comm.rank == 0:
            self.path.write_text(json.dumps({"rows": self.rows, "notes": self.notes}))

    def attempt(self, name: str, call: Callable[[], None]) -> None:
        """Collective. Note what fails alike on all ranks, and go on."""
        try:
            call()
        except ConfigError as error:
            self.note(f"{name}: {error}")


def own_device(comm, kind: str) -> tuple[torch.device, bool]:
    """Choose this rank's device, and tell whether ranks of a node share one."""
    if kind == "cpu":
        return torch.device("cpu"), False
    here = [rank for rank in range(comm.size) if comm.nodes[rank] == comm.nodes[comm.rank]]
    count = torch.cuda.device_count()
    torch.cuda.set_device(here.index(comm.rank) % count)
    return torch.device("cuda", torch.cuda.current_device()), len(here) > count


# --- steps ------------------------------------------------------------------------------------------------------------
@contextmanager
def _ddp(part: Part):
    """Collective. Open the process group for DDP; give the way to train by it, and the library's name."""
    if part.device.type == "cuda" and not part.shared:
        with default_group(part.comm, "nccl"):
            yield DDP_NCCL, "nccl"
    else:
        if part.shared:
            part.note("NCCL takes one rank per GPU, and ranks share one here: DDP is on gloo.")
        with default_group(part.comm, "gloo"):
            yield DDP, "gloo"


def measure_steps(part: Part) -> None:
    """Collective. Time a training step of each way, by model."""
    with _ddp(part) as (ddp, library):
        provided = Way(f"allreduce_{library}", "allreduce", {"provider": library})
        _step_rows(part, ddp.name, (ALONE, ddp, *OURS))
        if part.comm.size > 1:
            part.attempt(provided.name, lambda: _step_rows(part, provided.name, (provided,)))


def measure_horovod(part: Part) -> None:
    """Collective. Time a training step by Horovod, beside DDP."""
    from hpcdist.comm.external import horovod

    if obstacle := horovod.obstacle():
        part.note(f"Horovod can't be used here: {obstacle}")
        part.add([])
        return
    built = horovod.built_with()
    part.note(f"Horovod was built with {', '.join(built)}.")
    if part.device.type == "cuda" and (part.shared or "NCCL" not in built):
        why = "ranks share a GPU, and NCCL takes one rank per GPU" if part.shared else "it was built without NCCL"
        part.note(f"Horovod is measured on the CPU: {why}.")
        part.device, part.shared = torch.device("cpu"), False
    with _ddp(part) as (ddp, library):
        _sum_rows(part, library)
        way = Way("allreduce_horovod", "allreduce", {"provider": "horovod"})
        if part.comm.size > 1:
            part.attempt(way.name, lambda: _step_rows(part, ddp.name, (ALONE, ddp, way)))


def _sum_rows(part: Part, library: str) -> None:
    """Collective. Time sums by Horovod, beside the process group's."""
    from hpcdist.comm.external.horovod import Horovod

    reduce = Horovod(part.comm)
    for n_bytes in (4096, 65536) if part.quick else MESSAGES:
        calls = {"allreduce/horovod": reduce.all_reduce, f"allreduce/{library}": dist.all_reduce}
        _rates(part, torch.zeros(n_bytes // 4, device=part.device), calls, *RATES, "ranks")
    reduce.close()


def _step_rows(part: Part, base: str, ways: tuple[Way, ...]) -> None:
    """Collective. Time training steps of each model, beside the way `base`."""
    models = ["small"] if part.quick else list(train.MODELS)
    rounds, each = (2, 2) if part.quick else (9, 5)
    if part.quick:
        train.MODELS["small"], train.WARM_UP = (8, 16, 4), 2
    for model in models:
        rows = train.time_steps(part.comm, model, ways, rounds, each, part.device)
        part.add([{**row, "beside": base} for row in beside(rows, [f"{model}/{base}"], speedup="speedup")])


# --- coding -----------------------------------------------------------------------------------------------------------
def measure_coding(part: Part) -> None:
    """Time each compressor's encode and decode, in bytes of the gradient per second, beside a copy on the device."""
    elements, rounds = (10_007, 2) if part.quick else (CODED, 3)
    for name, config in compress.CONFIGS.items():  # each may take memory, and what one can't do the others may
        try:
            copy, row = compress.measure_coding(elements, rounds, part.device, {name: config})
        except Exception as error:  # told, with the others beside it
            part.note(f"{name}: {type(error).__name__}: {error}")
            continue
        for each in (row,) if part.rows else (copy, row):
            rates = {f"{what}_bytes_per_s": _speed(each, what) for what in ("encode", "decode")}
            part.add([{**{key: each[key] for key in ("name", "bytes", "message_bytes")}, **rates}])


def _speed(row: dict, what: str) -> float | None:
    return row["bytes"] / row[f"{what}_s"] if row[f"{what}_s"] else None  # a copy is not decoded


# --- messages ---------------------------------------------------------------------------------------------------------
def measure_messages(part: Part) -> None:
    """Collective. Time exchanges and sums of memory on the device: by pinned host memory, and by MPI itself."""
    from hpcdist.comm.mpi.library import device_obstacle

    ways = {"host": part.comm.split(0)}
    reasons = part.comm.gather(device_obstacle())
    if any(reasons) or part.device.type == "cpu":
        part.note(f"GPU-aware MPI is left out: {next(filter(None, reasons), 'the tensors are on the CPU')}.")
    else:
        ways["mpi"] = part.comm.split(0)
        ways["mpi"].staging.device_aware = True
    sizes = (4096, 65536) if part.quick else MESSAGES
    peer = (part.comm.rank + 1) % part.comm.size, (part.comm.rank - 1) % part.comm.size
    for n_bytes in sizes:
        tensor = torch.zeros(n_bytes // 4, device=part.device)
        into = torch.empty_like(tensor)
        for what, call in (
            ("sendrecv", lambda comm, into=into: lambda t: comm.sendrecv(t, peer[0], into, peer[1])),
            ("allreduce", lambda comm: comm.allreduce),
        ):
            _rates(part, tensor, {f"{what}/{way}": call(comm) for way, comm in ways.items()}, *RATES)
    for comm in ways.values():
        comm.close()


def _rates(part: Part, tensor: torch.Tensor, calls: dict[str, Callable], *columns: str) -> None:
    """Collective. Time calls on a tensor, each until the device has done it."""

    def finished(call: Callable) -> Callable[[], None]:
        def run() -> None:
            call(tensor)
            finish(tensor)

        return run

    sides = [Side(name, timed(part.comm, finished(call)), {"bytes": tensor.nbytes}) for name, call in calls.items()]
    warm_up(part.comm, sides, 1)
    rows = measure(part.comm, sides, 2 if part.quick else 7)
    part.add(table(({**row, "bytes_per_s": row["bytes"] / row["median_s"]} for row in rows), columns))


WHAT = {
    "steps": measure_steps,
    "horovod": measure_horovod,
    "coding": measure_coding,
    "messages": measure_messages,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    comm = hd.init(deadline_s=60)
    device, shared = own_device(comm, options.device)
    part = Part(comm, options.rows, device, shared, options.quick)
    WHAT[options.what](part)


if __name__ == "__main__":
    main()
