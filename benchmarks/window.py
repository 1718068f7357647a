"""The time of one-sided calls on windows, and their cost to the owner."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import psutil
import torch
from torch import Tensor

from benchmarks import runner
from benchmarks.runner import Row, Side, beside, check, count_bytes, table, timed
from hpcdist.collectives.tuning.timing import slowest
from hpcdist.comm.communicator import Communicator, Window
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.snapshot import Publication

SIZES = (4, 40_000, 4_000_000, 40_000_000)  # bytes
OWNER = 0
END_TAG = 1
STEP_S = 2e-3  # the owner's step is as many matrix products as take about this long
STEPS = 50  # steps of one phase
COPY = "copy"
STEP = "owner's step/window"
Calls = dict[str, Callable[[Tensor], object]]
COLUMNS = (
    *("name", "bytes", "ranks", "median_s", "bytes_sent"),
    *("ratio_to_copy", "slowdown_percent", "spare_cores"),
)


def measure(comm: MpiCommunicator, sizes: Sequence[int] = SIZES, *, rounds: int = 15) -> list[Row]:
    """Collective. Time one-sided calls of one rank on the memory of rank 0, and rank 0's own steps meanwhile.

    Rows `node/...` are between two ranks of one node, `internode/...` between two nodes; where all ranks share a node
    they are made to count as being on nodes of their own for these. Every round times every side.

    Returns: name, bytes, ranks, median_s (of a call, or of an owner's step), bytes_sent
    (by the calling rank, in one call), ratio_to_copy (median_s as a multiple of a plain copy of the same bytes), and
    for the owner's step only slowdown_percent and spare_cores: how many of the cores that the owner may use were idle
    meanwhile. Where there was none to spare without a window, a slower step says little about the window.
    """
    check(comm, rounds, sizes_bytes=sizes, ranks=2)
    rows = []
    near = next((r for r in range(1, comm.size) if comm.nodes[r] == comm.nodes[OWNER]), None)
    if near is not None:
        rows += _calls(comm, "node", near, sizes, rounds)
    with _apart(comm) as far:
        rows += _calls(far, f"internode/{far.memory.choose()}", _first_far(far), sizes, rounds)
    return table(rows + _owner_steps(comm, sizes, max(1, rounds // 3)), COLUMNS)


@contextmanager
def _apart(comm: MpiCommunicator) -> Iterator[MpiCommunicator]:
    """Collective. Give a communicator over several nodes; the ranks of a single node count as if each had its own."""
    copy = comm.split(0) if len(set(comm.nodes)) > 1 else comm.apart()
    yield copy
    copy.close()


def _first_far(comm: Communicator) -> int | None:
    """Return the first rank on another node than the owner's."""
    return next((r for r in range(1, comm.size) if comm.nodes[r] != comm.nodes[OWNER]), None)


# --- calls ------------------------------------------------------------------------------------------------------------
def _calls(comm: Communicator, where: str, caller: int | None, sizes: Sequence[int], rounds: int) -> list[Row]:
    """Collective. Time calls of rank `caller` on the owner's memory."""
    tensor = torch.empty(max(sizes) // 4).zero_()  # written: its pages exist
    with _exposed(comm, tensor) as (window, words, published, slots):

        def pull_and_push(t: Tensor) -> None:
            published.read([t], OWNER)
            slots.put(t, OWNER)

        of_windows: Calls = {
            "get": lambda t: window.get(t, OWNER),
            "put": lambda t: window.put(t, OWNER),
            "accumulate": lambda t: window.accumulate(t, OWNER),
        }
        of_servers: Calls = {
            "snapshot read": lambda t: published.read([t], OWNER),
            "pull + push": pull_and_push,
        }
        atomics: Calls = {
            "fetch_add": lambda t: words.fetch_add(1, OWNER),
            "compare_and_swap": lambda t: words.compare_and_swap(0, 0, OWNER),
        }
        rows = [row for n in sizes for row in _beside_copy(comm, where, caller, of_windows, tensor[: n // 4], rounds)]
        more = _beside_copy(comm, where, caller, of_servers, tensor, rounds)
        more += _beside_copy(comm, where, caller, atomics, torch.zeros(2), rounds)
    return rows + [row for row in more if row["name"] != f"{where}/{COPY}"]


@contextmanager
def _exposed(comm: Communicator, tensor: Tensor) -> Iterator[tuple[Window, Window, Publication, Window]]:
    """Collective. Give what the owner exposes: a window, words for atomics, one publication, a slot to put into."""
    mine = tensor.numel() if comm.rank == OWNER else 0
    windows = comm.window(mine), comm.window(min(mine, 1), torch.int64)
    published, slots = Publication(comm, [tensor], publishes=comm.rank == OWNER), comm.window(mine)
    if comm.rank == OWNER:
        published.publish([tensor], 0)
    comm.barrier()
    yield *windows, published, slots
    for exposed in (*windows, published, slots):
        exposed.close()


def _beside_copy(
    comm: Communicator, where: str, caller: int | None, calls: Calls, tensor: Tensor, rounds: int
) -> list[Row]:
    """Collective. Time calls on rank `caller`, and a copy of `tensor`, while the others wait for it."""
    target = torch.empty_like(tensor).zero_()
    sides = []
    for name, call in {COPY: target.copy_, **calls}.items():
        mine = partial(call, tensor) if comm.rank == caller else lambda: None
        sent = count_bytes(comm, mine)
        sides.append(Side(f"{where}/{name}", timed(comm, mine), {"bytes": tensor.nbytes, "bytes_sent": sent}))
    return beside(runner.measure(comm, sides, rounds), [f"{where}/{COPY}"], ratio_to_copy="multiple")


# --- the owner's step -------------------------------------------------------------------------------------------------
def _owner_steps(comm: MpiCommunicator, sizes: Sequence[int], rounds: int) -> list[Row]:
    """Collective. Time the owner's step without a window, with an idle one, and while another rank reads it about once
    a step, as in pull gossip; and those reads.

    Idle cores are counted meanwhile, as a launcher may bind a rank to one core, and others may use the machine.
    """
    products = max(1, round(STEP_S * 10 / min(_step(10) for _ in range(5))))
    largest, missing = max(sizes), f"{STEP} missing"
    reads = [_owner_step(comm, f"{STEP} read, {n_bytes} bytes", products, largest, n_bytes) for n_bytes in sizes]
    sides = [_owner_step(comm, missing, products), _owner_step(comm, f"{STEP} idle", products, largest), *reads]
    rows = beside(runner.measure(comm, sides, rounds, STEPS), [missing], slowdown_percent="slowdown_percent")
    common = {"ranks": comm.size, "bytes_sent": 0}
    calls = [{**common, "name": row["call"], "bytes": row["bytes"], "median_s": row["call_s"]} for row in rows[2:]]
    return calls + [{**row, **common, "name": row["name"].partition(",")[0]} for row in rows]


def _owner_step(comm: MpiCommunicator, name: str, products: int, window_bytes: int = 0, read_bytes: int = 0) -> Side:
    """Make a side that computes on the owner, while another rank reads the owner's window; the others sleep."""
    calls_s, spent_s = [], [(0.0, 0.0)]  # of each read, on the rank that reads; the owner's idle cores, the clock
    way: str | None = None

    def phase(place: Communicator, steps: int, read: Callable[[], object] | None) -> float:
        """Return the mean of the owner's steps, since a long read slows some of them and not others."""
        place.barrier()
        token, idle_s, start, step_s = torch.zeros(1), _idle_s(), comm.now(), 0.0
        if place.rank == OWNER:
            step_s = sum(_step(products) for _ in range(steps)) / steps
            for request in [place.isend(token, rank, END_TAG) for rank in range(1, place.size)]:
                request.wait()
        else:
            while read and place.rank == _first_far(place) and place.probe(OWNER, END_TAG, block=False) is None:
                calls_s.append(timed(place, read)(1))
                time.sleep(STEP_S)
            place.probe(OWNER, END_TAG)
            place.irecv(token, OWNER, END_TAG).wait()
        spent_s.append((_idle_s() - idle_s, comm.now() - start))
        return step_s

    def run(steps: int) -> float:
        nonlocal way
        if not window_bytes:
            return phase(comm, steps, None)
        with _apart(comm) as far:
            window = far.window(window_bytes // 4 if far.rank == OWNER else 0)
            out = torch.zeros(read_bytes // 4)
            step_s = phase(far, steps, partial(window.get, out, OWNER) if read_bytes else None)
            window.close()
            way = far.memory.internode
        return step_s

    def columns() -> Row:
        idle_s, lasted_s = (sum(spent) for spent in zip(*spent_s, strict=True))
        mine = [median(calls_s or [0.0]), idle_s / lasted_s if comm.rank == OWNER else -math.inf]
        call_s, spare = slowest(comm, mine)
        return {
            "call": f"internode/{way}/get, owner computes",
            "call_s": call_s,
            "bytes": read_bytes or window_bytes,
            "spare_cores": round(spare, 2),
        }

    return Side(name, run, columns)


def _idle_s() -> float:
    """Read the seconds since boot that the cores this process may run on were idle, together."""
    times = psutil.cpu_times(percpu=True)
    return sum(times[core].idle + times[core].iowait for core in os.sched_getaffinity(0))


def _step(products: int) -> float:
    """Compute one step of the owner; return its seconds."""
    matrix, start = torch.full((128, 128), 1e-3), time.perf_counter()
    for _ in range(products):
        matrix @ matrix
    return time.perf_counter() - start
