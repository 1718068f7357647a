"""The time of each collective call, beside MPI's own, gloo's, another MPI library's, and a plain copy.

Each side has ranks of its own, started one after the other by `plain_calls.py`: in one process each would find the
caches cold, and gloo's threads beside it.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import hpcdist as hd
from benchmarks.runner import Row, barrier_asleep, beside, check, table
from hpcdist.collectives.calls import Collectives
from hpcdist.comm.launch import unlaunched
from hpcdist.errors import ConfigError
from hpcdist.records import local_cores_of_host
from hpcdist.tools.mpirun import find_launcher, ranks_environment
from hpcdist.torch_backend.default_group import default_group

if TYPE_CHECKING:  # it starts MPI
    from hpcdist.comm.mpi.communicator import MpiCommunicator

CALLS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
SIZES = tuple(4 << exponent for exponent in range(10, 27, 2))  # 4 KiB to 256 MiB
LIMIT_S = 600  # of one side's run
TURNS = 2  # of each side; the faster one counts, as the machine may be busy with others meanwhile
OURS, MPI, GLOO, COPY = "hpcdist", "mpi", "gloo", "copy"
ROOT = Path(__file__).parents[1]
COLUMNS = ("call", "name", "bytes", "ranks", "median_s", "speedup", "copies")


def measure(
    comm: MpiCommunicator,
    calls: Sequence[str] = CALLS,
    sizes: Sequence[int] = SIZES,
    rounds: int = 15,
    other: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """Collective. Time calls on float32 tensors, by call and size, in as many other ranks on the same cores.

    Args:
        sizes: of the longer of a call's tensors: of what is gathered, or handed out.
        rounds: timings of each call in each of TURNS; the median counts, of the slowest rank.
        other: an environment with another MPI library, mpi4py and NumPy, whose `bin` has `mpiexec` and `python`.
        environment: this process's environment, for the other ranks.

    Returns:
        Rows with speedup, how many times as fast as the fastest of the other libraries, and copies, the time as a
        multiple of a copy's, which every rank makes at the same time.

    Raises:
        ConfigError: an environment breaks its rule.
    """
    check(comm, rounds, sizes_bytes=sizes, ranks=2)
    own = Path(sys.prefix)
    places = {} if other is None else {other.name: other}  # first, as it may not work
    places |= {OURS: own, MPI: own, GLOO: own, COPY: own}
    cores = [cores for _, cores in comm.gather(local_cores_of_host())]
    found, failure = {}, None
    if comm.rank == 0:
        try:
            found = _in_turns(places, cores, calls, sizes, rounds, environment)
        except ConfigError as error:
            failure = error
    barrier_asleep(comm)

    def known() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
        if failure is not None:
            raise failure
        return found

    found = comm.gather(comm.raise_on_all_ranks(known))[0]
    made: list[Row] = []
    for call, n_bytes in itertools.product(calls, sizes):
        of_call = {"call": call, "bytes": n_bytes, "ranks": comm.size}
        rows = [{"name": name, **of_call, "median_s": of[call][str(n_bytes)]} for name, of in found.items()]
        peers = [name for name in places if name not in (OURS, COPY)]
        made += beside(beside(rows, peers, speedup="speedup"), [COPY], copies="multiple")
    return table(made, COLUMNS)


def _in_turns(
    places: Mapping[str, Path],
    cores: Sequence[Sequence[int]],
    calls: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    environment: Mapping[str, str],
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the least seconds of each side's turns, by call and size."""
    own = os.sched_getaffinity(0)
    runs: dict[str, list[dict]] = {name: [] for name in places}
    words = [",".join(calls), ",".join(map(str, sizes)), str(rounds)]
    words.append(" ".join(",".join(map(str, sorted(of_rank))) for of_rank in cores))
    try:
        os.sched_setaffinity(0, set(itertools.chain(*cores)))  # launchers refuse more ranks than the cores they may use
        for name in [*places] * TURNS:
            runs[name].append(_run(name, places[name], len(cores), words, environment))
    finally:
        os.sched_setaffinity(0, own)
    return {
        name: {call: {n: min(turn[call][n] for turn in turns) for n in map(str, sizes)} for call in calls}
        for name, turns in runs.items()
    }


def _run(name: str, place: Path, ranks: int, words: Sequence[str], environment: Mapping[str, str]) -> dict:
    """Measure a side in ranks of its own; a side of another environment is MPI's calls there."""
    programs, is_own = place / "bin", place == Path(sys.prefix)
    crowded = ranks > len(os.sched_getaffinity(0))
    variables = ranks_environment(unlaunched(environment), 1, crowded=crowded, bound=False)
    variables["I_MPI_PIN"] = "off"  # the program binds its ranks
    if is_own:
        variables["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        launcher, python = find_launcher(None, environment.get("PATH", "")), sys.executable
    else:
        variables["PATH"] = f"{programs}{os.pathsep}{environment.get('PATH', '')}"
        for variable in ("PYTHONPATH", "MPI4PY_LIBMPI"):  # of this process's MPI
            variables.pop(variable, None)
        launcher, python = [str(programs / "mpiexec"), "-n"], str(programs / "python")
    # mpi4py ends all ranks if one fails
    command = [*launcher, str(ranks), python, "-m", "mpi4py", str(ROOT / "benchmarks" / "plain_calls.py")]
    try:
        done = subprocess.run(
            [*command, name if is_own else MPI, *words], env=variables, capture_output=True, text=True,
            timeout=LIMIT_S, check=True,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stderr", None) or error
        raise ConfigError(
            f"{'this environment' if is_own else '--with'} must be an environment whose bin has mpiexec, and a python "
            f"with mpi4py and NumPy; got {place} ({str(said).strip()[-300:]})."
        ) from None


@contextmanager
def side_calls(name: str) -> Iterator[Callable[[str, int], Callable[[], object]]]:
    """Collective. Give the maker of a side's calls, in ranks that were started for them."""
    comm = hd.init()
    if name == GLOO:
        with default_group(comm, GLOO):
            yield lambda call, n_bytes: torch_call(call, *tensors(n_bytes, comm.size))
    elif name == OURS:
        own = Collectives(comm)
        yield lambda call, n_bytes: own_call(own, call, *tensors(n_bytes, comm.size))
        own.close()
    else:
        yield lambda call, n_bytes: copy_call(*tensors(n_bytes, comm.size))


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


def copy_call(whole: Tensor, part: Tensor, other: Tensor) -> Callable[[], object]:
    return lambda: other.copy_(whole)
