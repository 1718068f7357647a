"""The time of a training step by several ways of training, one beside the other on the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist import strategies
from hpcdist.collectives.timing import slowest
from hpcdist.comm.communicator import Communicator, Traffic
from hpcdist.flat import FlatModel

MODELS: dict[str, tuple[int, ...]] = {"mlp_100k": (128, 384, 128, 10), "mlp_10M": (1024, 2560, 2560, 384, 10)}
BATCH = 32
WARM_UP = 25  # steps: enough for what measures its own first steps to have made up its mind
ALONE = "alone"  # the model without any communication: the limit
DDP = "ddp_gloo"  # torch's DistributedDataParallel, in gloo's process group


@dataclass(frozen=True)
class Side:
    """A way of training: a strategy with options, or one of ALONE and DDP."""

    name: str
    strategy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def measure(comm: Communicator, model: str, sides: Sequence[Side], rounds: int, steps: int = 5) -> dict[str, dict]:
    """Collective. Times `steps` training steps of each side in turn, `rounds` times over.

    Every side has a replica of one of MODELS and a plain SGD optimiser of its own.

    Returns:
        By the side's name, the same on all ranks: bytes (of the gradients), ranks, median_s (of a step, of the slowest
        rank), bytes_sent and bytes_fetched (per step, the mean of the ranks; None for DDP, which doesn't tell).
    """
    torch.manual_seed(0)
    widths = MODELS[model]
    x, y = torch.randn(BATCH, widths[0]), torch.randint(widths[-1], (BATCH,))
    made = [_Training(comm, side, widths, x, y) for side in sides]
    for training in made:
        for _ in range(WARM_UP):
            training.step()
        training.rest()
    taken_s: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for times, training in zip(taken_s, made, strict=True):
            comm.barrier()
            start = comm.now()
            for _ in range(steps):
                training.step()
            times.append((comm.now() - start) / steps)
            training.rest()
    medians = slowest(comm, [median(times) for times in taken_s])
    count = WARM_UP + rounds * steps
    rows = {}
    for side, training, median_s in zip(sides, made, medians, strict=True):
        rows[side.name] = {
            "bytes": sum(4 * (a + 1) * b for a, b in zip(widths, widths[1:])),
            "ranks": comm.size,
            "median_s": median_s,
            **training.traffic(comm, count),
        }
        training.close()
    return rows


class _Training:
    """One side's replica, and its steps."""

    def __init__(self, comm: Communicator, side: Side, widths: tuple[int, ...], x: torch.Tensor, y: torch.Tensor):
        layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())][:-1]
        self._module: nn.Module = nn.Sequential(*layers)
        self._x, self._y, self._side = x, y, side
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-3)
        self._finish: Callable[[], object] = self._optimizer.step
        self._strategy: strategies.Strategy | None = None
        if side.name == DDP:
            self._module = DistributedDataParallel(self._module)
        elif side.strategy is not None:
            cls = strategies.load(side.strategy)
            strategy = self._strategy = cls(cls.Config(**side.options), comm.split(0), FlatModel(self._module))
            strategy.optimizer = self._optimizer
            strategy.start()
            self._finish = lambda: strategy.step(self._optimizer.step)
            self._before = strategy.traffic()

    def step(self) -> None:
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._module(self._x), self._y).backward()
        self._finish()

    def rest(self) -> None:
        """Collective. Nothing is under way while others are timed."""
        if self._strategy is not None:
            self._strategy.pause()

    def traffic(self, comm: Communicator, steps: int) -> dict[str, float | None]:
        """Collective. What a rank sent and fetched per step, the mean of all."""
        if self._side.name == DDP:
            return {"bytes_sent": None, "bytes_fetched": None}
        moved = Traffic() if self._strategy is None else self._strategy.traffic() - self._before
        sums = torch.tensor([moved.bytes_sent, moved.bytes_fetched])
        comm.allreduce(sums)
        sent, fetched = (sums / (comm.size * steps)).tolist()
        return {"bytes_sent": sent, "bytes_fetched": fetched}

    def close(self) -> None:
        if self._strategy is not None:
            self._strategy.close()
            self._strategy.comm.close()
