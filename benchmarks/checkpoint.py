"""What checkpoints cost: `hd.save` and `hd.load` beside torch's calls, and training that saves beside training alone.

Processor time counts beside seconds: a disk that is busy with other work changes the seconds alone. A rank that waits
for another one uses the processor, too, so that the calls are best measured on one rank.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hpcdist as hd
from benchmarks import runner
from benchmarks.runner import Row, Side, beside, check, perceptron, perceptron_bytes, table
from hpcdist.comm.communicator import Communicator

CALLS, STEPS = (1024, 4096, 4096, 10), (784, 1200, 1200, 10)  # models: with AdamW's moments 252 and 29 MB
BATCH = 128
EVERY = 20  # steps between two checkpoints
STRATEGIES = ("allreduce", "gossip_pull")  # all ranks write one state together; each rank writes its own
COLUMNS = ("name", "bytes", "ranks", "median_s", "cpu_s", "slowdown_percent", "cpu_multiple")


def measure(comm: Communicator, rounds: int = 9, folder: str | Path | None = None) -> list[Row]:
    """Collective. Time saving and loading a model with AdamW's state, and steps with a checkpoint every EVERY steps.

    Args:
        rounds: timings of each side; the median counts, of the slowest rank.
        folder: where a folder for the files is made, and removed; by default the system's temporary folder.

    Returns:
        The same rows on all ranks: name, bytes (of one rank's state), ranks, median_s and cpu_s (of a call or a step),
        slowdown_percent and cpu_multiple (over torch's call, or over steps without checkpoints).
    """
    check(comm, rounds)
    rows = []
    for strategy in STRATEGIES:
        scratch = tempfile.TemporaryDirectory(dir=folder) if comm.rank == 0 else None
        shared = Path(comm.gather(scratch and scratch.name)[0])
        for measured in (_saving, _loading, _training):
            sides = [Side(f"{strategy}/{name}", *side) for name, side in measured(comm, strategy, shared)]
            found = beside(runner.measure(comm, sides, rounds), [sides[0].name], slowdown_percent="slowdown_percent")
            rows += [row | {"cpu_multiple": row["cpu_s"] / found[0]["cpu_s"]} for row in found]
        comm.barrier()  # nobody reads any more
        if scratch is not None:
            scratch.cleanup()
    return table(rows, COLUMNS)


class _Loop:
    """A training loop, and its checkpoints in a folder."""

    def __init__(self, comm: Communicator, strategy: str, widths: Sequence[int], folder: Path):
        torch.manual_seed(comm.rank)  # other data on each rank
        self.model, self.mine, self.taken = perceptron(widths), folder / f"{comm.rank}.pt", 0
        adamw = torch.optim.AdamW(self.model.parameters())
        self.optimizer = hd.DistributedOptimizer(adamw, self.model, strategy=strategy)
        self.x, self.y = torch.randn(BATCH, widths[0]), torch.randint(widths[-1], (BATCH,))
        self.folder = folder / "checkpoints"
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.columns = {"bytes": 3 * perceptron_bytes(widths)}
        self.train()  # AdamW's moments exist from the first step on

    def train(self, steps: int = 1, then: Callable[[], object] | None = None) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.x), self.y).backward()
            self.optimizer.step()
        self.taken += steps
        if then is not None:
            then()

    def save(self, *, background: bool = False) -> None:
        hd.save(self.folder, step=self.taken, keep=2, background=background, **self.state)

    def load(self) -> None:
        hd.load(self.folder, **self.state)

    def save_by_torch(self) -> None:
        torch.save({name: each.state_dict() for name, each in self.state.items()}, self.mine)

    def load_by_torch(self) -> None:
        for name, state in torch.load(self.mine, weights_only=True).items():
            self.state[name].load_state_dict(state)


Sides = list[tuple[str, tuple[Callable[[int], Mapping[str, float]], Row]]]


def _saving(comm: Communicator, strategy: str, folder: Path) -> Sides:
    loop = _Loop(comm, strategy, CALLS, folder / "calls")
    loop.folder.mkdir(parents=True, exist_ok=True)
    return _sides(loop, {"torch.save": loop.save_by_torch, "hd.save": loop.save})


def _loading(comm: Communicator, strategy: str, folder: Path) -> Sides:
    loop = _Loop(comm, strategy, CALLS, folder / "calls")
    return _sides(loop, {"torch.load": loop.load_by_torch, "hd.load": loop.load})


def _training(comm: Communicator, strategy: str, folder: Path) -> Sides:
    loop = _Loop(comm, strategy, STEPS, folder / "steps")
    thens: dict[str, Callable[[], object] | None] = {
        "steps": None,
        "steps_saving": loop.save,
        "steps_saving_in_background": partial(loop.save, background=True),
    }
    return _sides(loop, {name: partial(loop.train, EVERY, then) for name, then in thens.items()}, EVERY)


def _sides(loop: _Loop, calls: Mapping[str, Callable[[], object]], per_call: int = 1) -> Sides:
    """Make sides of calls, of which each takes so many steps; make each call once before."""
    for call in calls.values():
        call()
    return [(name, (partial(_timed, call, per_call), loop.columns)) for name, call in calls.items()]


def _timed(call: Callable[[], object], per_call: int, times: int) -> dict[str, float]:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    taken_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return {"median_s": taken_s / (times * per_call), "cpu_s": cpu_s / (times * per_call)}
