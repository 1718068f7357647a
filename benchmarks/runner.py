"""Time several ways of doing the same side by side: the one runner under all commands of `hpcdist bench`.

A bench is one file here. It makes its sides, has them measured, adds what each is beside another one, and lists the
columns of its rows:

    sides = [Side("ours", timed(comm, ours), {"bytes": 8}), Side("theirs", timed(comm, theirs), {"bytes": 8})]
    rows = beside(measure(comm, sides, rounds), ["theirs"], speedup="speedup")
    return table(rows, ("name", "bytes", "ranks", "median_s", "speedup"))

Its function `measure` is collective, and returns the same rows on all ranks. `rounds` says how often each side is
timed; the median counts, of the slowest rank. `sizes` are bytes of float32 tensors. A size, a number of rounds or of
ranks that breaks its rule is refused with a ConfigError.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.collectives.tuning.timing import in_random_order, slowest
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError
from hpcdist.tools.doctor.base import gather

Row = dict[str, Any]
Counts = Mapping[str, int] | int  # of each side by its name, or of all alike
Run = Callable[[int], float | Mapping[str, float]]
Synchronize = Callable[[Communicator], object]
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

RATIOS: dict[str, Callable[[float, float], float | None]] = {
    "speedup": lambda own_s, other_s: other_s / own_s,
    "multiple": lambda own_s, other_s: own_s / other_s if other_s > 0 else None,  # a copy on virtual ranks takes none
    "overhead_s": lambda own_s, other_s: own_s - other_s,
    "slowdown_percent": lambda own_s, other_s: 100 * (own_s / other_s - 1),
}


@dataclass(frozen=True)
class Side:
    """Describe one way of doing the same, to be timed. All ranks have the same sides in the same order.

    Args:
        name: its row's.
        run: takes so many steps, and returns the seconds of one, or several figures by column, `median_s` among them.
        columns: others of its row, or a function that returns them when all has been timed. Collective.
        close: releases what the side holds. Collective.
    """

    name: str
    run: Run
    columns: Row | Callable[[], Row] = field(default_factory=dict)
    close: Callable[[], object] = lambda: None


def timed(comm: Communicator, call: Callable[[], object]) -> Callable[[int], float]:
    """Make a call a side's `run`."""

    def run(steps: int) -> float:
        start = comm.now()
        for _ in range(steps):
            call()
        return (comm.now() - start) / steps

    return run


def count_bytes(comm: Communicator, call: Callable[[], object]) -> int:
    """Collective. Call once, and return the bytes that the busiest rank sent."""
    before = comm.trace.traffic.bytes_sent
    call()
    return max(comm.gather(comm.trace.traffic.bytes_sent - before))


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Call, and return by how many bytes this process's resident set rose at most; None where the system does not tell.

    Linux lets a process begin its peak anew.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else the call would be given memory that others freed, at no cost
        CLEAR.write_text("5")  # the peak begins anew: proc(5)
    except (AttributeError, OSError):
        call()
        return None
    before = _resident("VmRSS")
    call()
    return max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    (kib,) = re.findall(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return 1024 * int(kib)


def perceptron(widths: Sequence[int]) -> nn.Sequential:
    """Make a network of layers between these widths, with ReLU."""
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def perceptron_bytes(widths: Sequence[int]) -> int:
    """Return the bytes of its parameters, of float32."""
    return sum(4 * (a + 1) * b for a, b in itertools.pairwise(widths))


def training_step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Callable[[], object]:
    """Return a step that makes a network's outputs smaller."""

    def step() -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    return step


def finish(like: Tensor) -> None:
    """Wait until the device of this tensor has done what it was given."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)


def measure(
    comm: Communicator,
    sides: Sequence[Side],
    rounds: Counts,
    steps: Counts = 1,
    synchronize: Synchronize = Communicator.barrier,
) -> list[Row]:
    """Collective. Time all sides in every round, in another order each time, and close them.

    Args:
        rounds: how often each side is timed, or each by its name; the median counts, of the slowest rank.
        steps: how many of them one timing covers, of all sides or by a side's name.
        synchronize: lets the ranks begin together.

    Returns:
        The same rows on all ranks, one per side: name, ranks, the side's figures, its other columns.
    """
    taken = _run(comm, sides, rounds, steps, synchronize)
    rows = []
    for side in sides:
        figures = _slowest(comm, taken[side.name], median)
        columns = side.columns() if callable(side.columns) else side.columns
        rows.append({"name": side.name, "ranks": comm.size, **figures, **columns})
        side.close()
    return rows


def warm_up(
    comm: Communicator, sides: Sequence[Side], *steps: Counts, synchronize: Synchronize = Communicator.barrier
) -> dict[str, float]:
    """Collective. Run each side once for each number of steps, before it counts; return the least seconds of a step."""
    runs = [_run(comm, sides, 1, number, synchronize) for number in steps]
    return {s.name: _slowest(comm, [run[s.name][0] for run in runs], min)["median_s"] for s in sides}


def _run(
    comm: Communicator, sides: Sequence[Side], rounds: Counts, steps: Counts, synchronize: Synchronize
) -> dict[str, list[Mapping[str, float]]]:
    """Collective. Return this rank's figures of each side, round by round."""
    by_name = {side.name: side for side in sides}
    taken: dict[str, list[Mapping[str, float]]] = {name: [] for name in by_name}
    wanted = dict.fromkeys(by_name, rounds) if isinstance(rounds, int) else rounds
    for name in in_random_order(by_name, max(wanted.values())):
        if len(taken[name]) == wanted[name]:
            continue
        synchronize(comm)
        found = by_name[name].run(steps if isinstance(steps, int) else steps[name])
        taken[name].append(found if isinstance(found, Mapping) else {"median_s": found})
    return taken


def _slowest(
    comm: Communicator, taken: Sequence[Mapping[str, float]], of: Callable[[list[float]], float]
) -> dict[str, float]:
    """Collective. Reduce the rounds of each figure; return the largest of all ranks'."""
    return dict(zip(taken[0], slowest(comm, [of([figures[column] for figures in taken]) for column in taken[0]])))


def beside(rows: Iterable[Row], others: Collection[str], **columns: str) -> list[Row]:
    """Add columns to all rows: those of RATIOS, to the seconds of the fastest one among `others`."""
    rows = list(rows)
    other_s = min(row["median_s"] for row in rows if row["name"] in others)
    return [row | {name: RATIOS[ratio](row["median_s"], other_s) for name, ratio in columns.items()} for row in rows]


def table(rows: Iterable[Row], columns: Sequence[str]) -> list[Row]:
    """Give all rows these columns, in this order; None where a row has none."""
    return [{column: row.get(column) for column in columns} for row in rows]


def check(comm: Communicator, rounds: int, *, sizes_bytes: Iterable[int] = (), ranks: int = 1) -> None:
    """Refuse sizes that no float32 tensor has, no rounds, and fewer ranks than these.

    Raises:
        ConfigError: one breaks its rule.
    """
    for n_bytes in sizes_bytes:
        if n_bytes < 4 or n_bytes % 4:
            raise ConfigError(f"sizes must be positive multiples of 4 bytes (float32); got {n_bytes}.")
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1; got {rounds}.")
    if comm.size < ranks:
        raise ConfigError(
            f"ranks of this measurement must be at least {ranks}; got {comm.size}. Use mpirun -n {ranks}."
        )


def barrier_asleep(comm: Communicator) -> None:
    """Collective. Wait for all ranks, leaving the core to others meanwhile, as MPI's barrier doesn't."""
    gather(comm, None)
