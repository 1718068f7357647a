"""How long windows take, and what they cost their owner: the figures of `hpcdist bench window`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from hpcdist.collectives.timing import interleaved, slowest
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.mpi import MpiCommunicator
from hpcdist.comm.snapshot import Publication
from hpcdist.errors import ConfigError

SIZES = (4, 40_000, 4_000_000, 40_000_000)  # bytes
OWNER = 0
END_TAG = 1
STEP_S = 2e-3  # the owner's step is as many matrix products as take about this long
STEPS = 50  # steps of one phase
Side = Callable[[Tensor], object]


def measure(comm: MpiCommunicator, sizes: Sequence[int] = SIZES, *, rounds: int = 15) -> list[dict]:
    """Collective. Times one-sided calls of one rank on the memory of rank 0, and rank 0's own steps meanwhile.

    Rows `node/...` are between two ranks of one node, `across/...` between two nodes; where all ranks share a node
    they are made to count as being on nodes of their own for these. Every round times every side.

    Args:
        sizes: lengths in bytes, multiples of 4 (float32).
        rounds: how often each side is timed; the median counts.

    Returns: the same rows on all ranks: name, bytes, ranks, median_s (of a call, or of an owner's step), bytes_sent
    (by the asking rank, in one call), ratio_to_copy (median_s as a multiple of a plain copy of the same bytes), and for
    the owner's step only slowdown_percent and spare_cores: how many of the cores that the owner may use were idle
    meanwhile. Where there was none to spare without a window, a slower step says little about the window.
    """
    for n_bytes in sizes:
        if n_bytes < 4 or n_bytes % 4:
            raise ConfigError(f"sizes must be positive multiples of 4 bytes (float32); got {n_bytes}.")
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1; got {rounds}.")
    if comm.size < 2:
        raise ConfigError(f"ranks of this measurement must be at least 2; got {comm.size}. Use mpirun -n 2.")
    rows = []
    near = next((r for r in range(1, comm.size) if comm.nodes[r] == comm.nodes[OWNER]), None)
    if near is not None:
        rows += _calls(comm, "node", near, sizes, rounds)
    with _apart(comm) as far:
        asker = next(r for r in range(1, far.size) if far.nodes[r] != far.nodes[OWNER])
        rows += _calls(far, f"across/{far.choose_across()}", asker, sizes, rounds)
    return rows + _owner_steps(comm, sizes, max(1, rounds // 3))


@contextmanager
def _apart(comm: MpiCommunicator) -> Iterator[MpiCommunicator]:
    """Collective. Ranks of several nodes: those that there are, or the ranks of one node as if they were."""
    copy = comm.split(0) if len(set(comm.nodes)) > 1 else comm.apart()
    yield copy
    copy.close()


# --- calls ------------------------------------------------------------------------------------------------------------
def _calls(comm: Communicator, where: str, asker: int, sizes: Sequence[int], rounds: int) -> list[dict]:
    rows, tensor = [], torch.empty(max(sizes) // 4).zero_()  # written: its pages exist
    target = torch.empty_like(tensor).zero_()
    with _exposed(comm, tensor) as (window, words, published, slots):
        for n_bytes in sizes:
            part = tensor[: n_bytes // 4]
            copy_to = target[: part.numel()].copy_
            sides = {
                "copy": copy_to,
                "get": lambda t: window.get(t, OWNER),
                "put": lambda t: window.put(t, OWNER),
                "accumulate": lambda t: window.accumulate(t, OWNER),
            }
            rows += _rows(comm, where, asker, sides, part, rounds)
        sides = {
            "copy": target.copy_,
            "snapshot read": lambda t: published.read([t], OWNER),
            "pull + push": lambda t: (published.read([t], OWNER), slots.put(t, OWNER)),
        }
        rows += _rows(comm, where, asker, sides, tensor, rounds)
        sides = {
            "copy": torch.zeros(2).copy_,
            "fetch_add": lambda t: words.fetch_add(1, OWNER),
            "compare_and_swap": lambda t: words.compare_and_swap(0, 0, OWNER),
        }
        rows += _rows(comm, where, asker, sides, torch.zeros(2), rounds)
    return rows


@contextmanager
def _exposed(comm: Communicator, tensor: Tensor):
    """Collective. What the owner exposes: a window, words for atomics, one publication, a slot to put into."""
    mine = tensor.numel() if comm.rank == OWNER else 0
    windows = comm.window(mine), comm.window(min(mine, 1), torch.int64)
    published, slots = Publication(comm, [tensor], publishes=comm.rank == OWNER), comm.window(mine)
    if comm.rank == OWNER:
        published.publish([tensor], 0)
    comm.barrier()
    yield *windows, published, slots
    for exposed in (*windows, published, slots):
        exposed.close()


def _rows(
    comm: Communicator, where: str, asker: int, sides: dict[str, Side], tensor: Tensor, rounds: int
) -> list[dict]:
    """Collective. Times the sides on rank `asker`, while the others wait for it."""
    mine = sides if comm.rank == asker else dict.fromkeys(sides, lambda t: None)
    sent = {}
    for name, side in mine.items():  # a first call of each, that is not timed
        before = comm.traffic.bytes_sent
        side(tensor)
        sent[name] = comm.traffic.bytes_sent - before
    bytes_sent = [int(n) for n in slowest(comm, [float(n) for n in sent.values()])]
    times = {name: median(seconds) for name, seconds in interleaved(comm, mine, tensor, rounds).items()}
    return [
        {
            "name": f"{where}/{name}",
            "bytes": tensor.nbytes,
            "ranks": comm.size,
            "median_s": times[name],
            "bytes_sent": n_sent,
            "ratio_to_copy": times[name] / times["copy"] if times["copy"] > 0 else None,
            "slowdown_percent": None,
            "spare_cores": None,
        }
        for name, n_sent in zip(sides, bytes_sent, strict=True)
        if name != "copy" or len(sides) == 4
    ]


# --- the owner's step -------------------------------------------------------------------------------------------------
def _owner_steps(comm: MpiCommunicator, sizes: Sequence[int], rounds: int) -> list[dict]:
    """Collective. The owner's step without a window, with an idle one, and while another rank reads it about once a
    step, as in pull gossip; and how long those reads take. Whoever has nothing to do sleeps.

    Whether the owner's threads had a core of their own is measured, not assumed: a launcher may bind a rank to one
    core, and others may use the machine.
    """
    phases = ("missing", "idle", *(f"read, {n_bytes} bytes" for n_bytes in sizes))
    products = _products_per_step()
    taken_s: dict[str, list[float]] = {phase: [] for phase in phases}  # steps on the owner, calls on the asker
    idle_s, lasted_s = dict.fromkeys(phases, 0.0), dict.fromkeys(phases, 0.0)

    def phase(name: str, place: MpiCommunicator, transfer: Callable[[], None] | None) -> None:
        idle_before_s, start = _idle_s(), comm.now()
        taken_s[name] += _phase(place, products, transfer)
        idle_s[name] += _idle_s() - idle_before_s
        lasted_s[name] += comm.now() - start

    for _ in range(rounds):
        phase("missing", comm, None)
        with _apart(comm) as far:
            window = far.window(max(sizes) // 4 if far.rank == OWNER else 0)
            phase("idle", far, None)
            for n_bytes in sizes:
                out = torch.zeros(n_bytes // 4)
                phase(f"read, {n_bytes} bytes", far, lambda out=out: window.get(out, OWNER))
            window.close()
            way = far.across
    mine = [median(seconds) if seconds else 0.0 for seconds in taken_s.values()]
    steps_s = slowest(comm, mine if comm.rank == OWNER else [0.0] * len(mine))
    calls_s = slowest(comm, mine if comm.rank != OWNER else [0.0] * len(mine))
    spare = slowest(comm, [idle_s[p] / lasted_s[p] if comm.rank == OWNER else -math.inf for p in phases])
    common = {"ranks": comm.size, "bytes_sent": 0, "ratio_to_copy": None}
    rows = [
        {
            "name": f"across/{way}/get, owner computes",
            "bytes": n_bytes,
            "median_s": call_s,
            "slowdown_percent": None,
            "spare_cores": None,
            **common,
        }
        for n_bytes, call_s in zip(sizes, calls_s[2:], strict=True)
    ]
    return rows + [
        {
            "name": f"owner's step/window {phase.partition(',')[0]}",
            "bytes": n_bytes,
            "median_s": step_s,
            "slowdown_percent": 100 * (step_s / steps_s[0] - 1),
            "spare_cores": None if math.isnan(cores) else round(cores, 2),
            **common,
        }
        for phase, n_bytes, step_s, cores in zip(phases, (0, max(sizes), *sizes), steps_s, spare, strict=True)
    ]


def _phase(comm: Communicator, products: int, transfer: Callable[[], None] | None) -> list[float]:
    """Collective. Seconds of the owner's step: one mean of all, since a long read slows some of them and not others.
    Meanwhile one rank transfers, if told to, and has the seconds of each transfer; the others sleep, and have none.
    """
    comm.barrier()
    token, seconds = torch.zeros(1), []
    if comm.rank == OWNER:
        step_s = sum(_step(products) for _ in range(STEPS)) / STEPS
        for request in [comm.isend(token, rank, END_TAG) for rank in range(1, comm.size)]:
            request.wait()
        return [step_s]
    asker = next((r for r in range(1, comm.size) if comm.nodes[r] != comm.nodes[OWNER]), None)
    while transfer and comm.rank == asker and comm.probe(OWNER, END_TAG, block=False) is None:
        start = comm.now()
        transfer()
        seconds.append(comm.now() - start)
        time.sleep(STEP_S)
    comm.probe(OWNER, END_TAG)
    comm.irecv(token, OWNER, END_TAG).wait()
    return seconds


def _idle_s() -> float:
    """Seconds since boot that the cores this process may run on were idle, together; NaN where the system doesn't tell.
    """
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except (AttributeError, OSError):  # not Linux
        return math.nan
    ticks = sum(int(fields[4]) + int(fields[5]) for fields in lines if fields[0] in cores)  # idle, waiting for a disk
    return ticks / os.sysconf("SC_CLK_TCK")


def _step(products: int) -> float:
    matrix, start = torch.full((128, 128), 1e-3), time.perf_counter()
    for _ in range(products):
        matrix @ matrix
    return time.perf_counter() - start


def _products_per_step() -> int:
    return max(1, round(STEP_S * 10 / min(_step(10) for _ in range(5))))
