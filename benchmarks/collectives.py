"""The time of each collective call, beside MPI's own, gloo's, another MPI library's, and a plain copy."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import runner
from benchmarks.runner import Row, Side, barrier_asleep, beside, check, table, timed, warm_up
from hpcdist.collectives.calls import Collectives
from hpcdist.collectives.tuning.timing import calls_within
from hpcdist.comm.launch import unlaunched
from hpcdist.errors import ConfigError
from hpcdist.records import local_cores_of_host
from hpcdist.torch_backend.default_group import default_group

if TYPE_CHECKING:  # it starts MPI
    from hpcdist.comm.mpi.communicator import MpiCommunicator

CALLS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
SIZES = tuple(4 << exponent for exponent in range(10, 27, 2))  # 4 KiB to 256 MiB
CALLS_S, MOST_CALLS = 4e-3, 200  # one timing covers as many calls as take about this long together
SHORT_BYTES = 1 << 20
LIMIT_S = 600  # of another library's run
OURS, COPY = "hpcdist", "copy"
COLUMNS = ("call", "name", "bytes", "ranks", "median_s", "speedup", "copies")


def measure(
    comm: MpiCommunicator,
    calls: Sequence[str] = CALLS,
    sizes: Sequence[int] = SIZES,
    rounds: int = 15,
    other: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """Collective. Time calls on float32 tensors, by call and size.

    Args:
        sizes: of the longer of a call's tensors: of what is gathered, or handed out.
        other: an environment with another MPI library, mpi4py and NumPy, whose `bin` has `mpiexec` and `python`. It is
            measured before and after the others, and the faster time counts.
        environment: this process's environment, for that library's processes.

    Returns:
        Rows with speedup, how many times as fast as the fastest of the other libraries, and copies, the time as a
        multiple of a copy's, which every rank makes at the same time.

    Raises:
        ConfigError: the environment breaks its rule.
    """
    check(comm, rounds, sizes_bytes=sizes, ranks=2)
    cases = list(itertools.product(calls, sizes))
    runs = [_other(comm, other, calls, sizes, rounds, environment)]
    own = Collectives(comm)
    with default_group(comm, "gloo"):
        measured = [_of_size(comm, own, call, n_bytes, rounds) for call, n_bytes in cases]
    own.close()
    runs.append(_other(comm, other, calls, sizes, rounds, environment))
    found = []
    for (call, n_bytes), rows in zip(cases, measured, strict=True):
        if other is not None:
            fastest_s = min(run[call][str(n_bytes)] for run in runs)
            rows.append({**rows[0], "name": other.name, "median_s": fastest_s})
        peers = [row["name"] for row in rows if row["name"] not in (OURS, COPY)]
        found += beside(beside(rows, peers, speedup="speedup"), [COPY], copies="multiple")
    return table(found, COLUMNS)


def _of_size(comm: MpiCommunicator, own: Collectives, call: str, n_bytes: int, rounds: int) -> list[Row]:
    """Collective. Time one call at one size."""
    from benchmarks.plain_calls import mpi_call  # starts MPI: not at import

    whole, _, other = made = tensors(n_bytes, comm.size)
    tried: dict[str, Callable[[], object]] = {
        OURS: own_call(own, call, *made),
        "mpi": mpi_call(comm.mpi, call, n_bytes),
        "gloo": torch_call(call, *made),
        COPY: lambda: other.copy_(whole),
    }
    sides = [Side(name, timed(comm, side), {"call": call, "bytes": n_bytes}) for name, side in tried.items()]
    once_s = warm_up(comm, sides, 1, 20 if n_bytes <= SHORT_BYTES else 8)  # long ones are tried in two ways
    steps = calls_within(CALLS_S, once_s, MOST_CALLS)
    return runner.measure(comm, sides, rounds, steps)


def tensors(n_bytes: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make what a call has of so many bytes: a tensor, a rank's part of it, and another tensor."""
    count = max(1, n_bytes // 4 // ranks)
    return torch.zeros(count * ranks), torch.zeros(count), torch.zeros(count * ranks)


def own_call(own: Collectives, call: str, whole: Tensor, part: Tensor, other: Tensor) -> Callable[[], object]:
    """Return one of CALLS, of hpcdist's."""
    return {
        "all_reduce": lambda: own.all_reduce(whole),
        "broadcast": lambda: own.broadcast(whole),
        "all_gather": lambda: own.all_gather(whole, part),
        "reduce_scatter": lambda: own.reduce_scatter(part, whole),
        "all_to_all": lambda: own.all_to_all(other, whole),
    }[call]


def torch_call(call: str, whole: Tensor, part: Tensor, other: Tensor, group: Any = None) -> Callable[[], object]:
    """Return one of CALLS, of torch.distributed's on a group; by default the default one."""
    gathered = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # named so from torch 2.12 on
    scattered = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda: gathered(whole, part, group=group),
        "reduce_scatter": lambda: scattered(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }[call]


def _other(
    comm: MpiCommunicator,
    place: Path | None,
    calls: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    environment: Mapping[str, str],
) -> Mapping[str, Mapping[str, float]]:
    """Collective. Let rank 0 measure another MPI library in ranks of its own, while these sleep."""
    if place is None:
        return {}

    found, failure = {}, None
    cores = {core for host, own in comm.gather(local_cores_of_host()) if host == platform.node() for core in own}
    if comm.rank == 0:
        own = local_cores_of_host()[1]
        try:
            os.sched_setaffinity(0, cores)  # its ranks begin on those of all, not on this one's share
            found = _run(place, comm.size, calls, sizes, rounds, environment)
        except ConfigError as error:
            failure = error
        finally:
            os.sched_setaffinity(0, own)
    barrier_asleep(comm)

    def known() -> Mapping[str, Mapping[str, float]]:
        if failure is not None:
            raise failure
        return found

    return comm.gather(comm.raise_on_all_ranks(known))[0]


def _run(
    place: Path, ranks: int, calls: Sequence[str], sizes: Sequence[int], rounds: int, environment: Mapping[str, str]
) -> dict:
    """Measure another MPI library in ranks of its own."""
    programs, program = place / "bin", Path(__file__).with_name("plain_calls.py")
    words = [programs / "mpiexec", "-n", ranks, programs / "python", "-m", "mpi4py", program]
    words += [",".join(calls), ",".join(map(str, sizes)), rounds]  # mpi4py ends all ranks if one fails
    own = unlaunched(environment) | {"OMP_NUM_THREADS": "1"}
    own["PATH"] = f"{programs}{os.pathsep}{environment.get('PATH', '')}"
    for name in ("PYTHONPATH", "MPI4PY_LIBMPI"):  # of this process's MPI
        own.pop(name, None)
    try:
        done = subprocess.run(
            list(map(str, words)), env=own, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stderr", None) or error
        raise ConfigError(
            f"--with must be an environment whose bin has mpiexec, and a python with mpi4py and NumPy; got {place} "
            f"({str(said).strip()[-300:]})."
        ) from None
