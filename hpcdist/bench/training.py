"""Steps per second of data-parallel training, beside torch's DistributedDataParallel on gloo and one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist import strategies
from hpcdist.bench import peers
from hpcdist.collectives.timing import slowest
from hpcdist.comm.communicator import Communicator
from hpcdist.flat import FlatModel

MODELS: dict[str, tuple[int, ...]] = {"mlp_100k": (128, 384, 128, 10), "mlp_10M": (1024, 2560, 2560, 384, 10)}
BATCH = 32
SIDES = ("alone", "ddp_gloo", "allreduce", "allreduce_overlap_on", "allreduce_overlap_off")

Step = Callable[[], None]


def measure(comm: Communicator, names: list[str] | None = None, rounds: int = 9, steps: int = 5) -> list[dict]:
    """Collective. Times `steps` training steps of each side in turn, `rounds` times over.

    Sides: `alone` (the model without any communication: the limit), `ddp_gloo`, and the strategy allreduce with its
    overlap left to itself, on and off. Every side has a replica and an SGD optimiser of its own.

    Returns:
        The same rows on all ranks: name, bytes (of the gradients), ranks, median_s (of a step, of the slowest rank),
        bytes_sent (per step of rank 0; None for ddp_gloo, which doesn't tell), speedup (over ddp_gloo).
    """
    rows = []
    with peers.gloo(comm):
        for name in names or list(MODELS):
            rows += _measure_model(comm, name, rounds, steps)
    return rows


def _measure_model(comm: Communicator, name: str, rounds: int, steps: int) -> list[dict]:
    torch.manual_seed(0)
    widths = MODELS[name]
    x, y = torch.randn(BATCH, widths[0]), torch.randint(widths[-1], (BATCH,))
    made = [_side(comm, side, widths, x, y) for side in SIDES]
    for step, _ in made:
        for _ in range(25):  # enough for `auto` to have made up its mind
            step()
    taken_s: list[list[float]] = [[] for _ in SIDES]
    for _ in range(rounds):
        for times, (step, _) in zip(taken_s, made, strict=True):
            comm.barrier()
            start = comm.now()
            for _ in range(steps):
                step()
            times.append((comm.now() - start) / steps)
    medians = dict(zip(SIDES, slowest(comm, [median(times) for times in taken_s]), strict=True))
    sent = [None if strategy is None else _sent(step, strategy) for step, strategy in made]
    for _, strategy in made:
        if strategy is not None:
            strategy.close()
            strategy.comm.close()
    n_bytes = sum(4 * (a + 1) * b for a, b in zip(widths, widths[1:]))
    return [
        {
            "name": f"{name}/{side}",
            "bytes": n_bytes,
            "ranks": comm.size,
            "median_s": medians[side],
            "bytes_sent": 0 if side == "alone" else n_sent,
            "speedup": medians["ddp_gloo"] / medians[side],
        }
        for side, n_sent in zip(SIDES, sent, strict=True)
    ]


def _sent(step: Step, strategy: strategies.Strategy) -> int:
    before = strategy.traffic().bytes_sent
    step()
    return strategy.traffic().bytes_sent - before


def _side(
    comm: Communicator, side: str, widths: tuple[int, ...], x: Tensor, y: Tensor
) -> tuple[Step, strategies.Strategy | None]:
    """One training step of that side, and its strategy if it has one."""
    layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())][:-1]
    module: nn.Module = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    strategy, finish = None, optimizer.step
    if side == "ddp_gloo":
        module = DistributedDataParallel(module)
    elif side != "alone":
        cls = strategies.load("allreduce")
        options = {"overlap": side.rpartition("_")[2]} if "_" in side else {}
        strategy = cls(cls.Config(**options), comm.split(0), FlatModel(module))
        finish = lambda: strategy.step(optimizer.step)  # noqa: E731

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        finish()

    return step, strategy
