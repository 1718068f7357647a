"""Elastic averaging on quadratics: by the strategies, and written out from the paper in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.comm.virtual.compute import ComputeModel
from hpcdist.model.flat import FlatModel

DIMENSIONS = 5
START = np.linspace(-1, 2, DIMENSIONS)
Gradient = Callable[[int, np.ndarray], np.ndarray]  # of a worker's loss, at a point


def curved(worker: int, x: np.ndarray) -> np.ndarray:
    """The gradient of a worker's own quadratic: curvatures from 0.5 to 2, and another minimum for each."""
    return np.linspace(0.5, 2.0, DIMENSIONS) * (x - np.sin(np.arange(DIMENSIONS) + worker))


@dataclass(frozen=True)
class Paces(ComputeModel):
    """Every step of a rank takes the same time, another one for each rank."""

    seconds: tuple[float, ...]

    def sample(self, rank, generator) -> float:
        return self.seconds[rank]


@dataclass
class Found:
    """What a run ended with: the centre, what each worker's model holds, and in which order workers exchanged."""

    centre: np.ndarray
    models: list[np.ndarray]
    order: list[int]


def run(name: str, options: dict, steps: int, paces: Sequence[float], gradient: Gradient = curved, **sgd) -> Found:
    """One server, and a worker for each of `paces`."""

    def body(comm):
        module = torch.nn.Linear(DIMENSIONS, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(START))
        cls, channel = strategies.load(name), comm.split(0)
        strategy = cls(cls.Config(**options), channel, FlatModel(module))
        local = torch.optim.SGD(module.parameters(), **sgd)
        order: list[int] = []
        if strategy.is_worker:
            for _ in range(steps):
                comm.compute()
                point = module.weight.detach().numpy()[0]
                module.weight.grad = torch.from_numpy(gradient(comm.rank - 1, point))[None].clone()
                strategy.step(local.step)
            strategy.pause()
        else:
            receive = strategy.server.receive
            strategy.server.receive = lambda request: (order.append(request.source - 1), receive(request))
            strategy.serve(local.step)
        centre = strategy.consensus()[0][0].numpy().copy()
        held = strategy.model.params[0].numpy().copy()
        strategy.close()
        channel.close()
        return centre, held, order

    found = run_virtual(body, len(paces) + 1, compute=Paces((1.0, *paces)))
    return Found(found[0][0], [held for _, held, _ in found[1:]], found[0][2])


@dataclass
class Worker:
    """A worker's x and v of the paper; `lead` is δ, `gradient` includes weight decay."""

    x: np.ndarray
    v: np.ndarray
    steps: int = 0


def asynchronous(
    order: Sequence[int], workers: int, steps: int, period: int, beta: float, rate: float, gradient: Gradient,
    momentum: float = 0.0,
) -> tuple[np.ndarray, list[Worker]]:  # fmt: skip
    """Algorithms 1 and 2 of the paper, with exchanges in this order: the centre and the workers in the end."""
    alpha, centre = beta / workers, START.copy()
    found = [Worker(START.copy(), np.zeros(DIMENSIONS)) for _ in range(workers)]

    def step(i: int) -> None:
        nonlocal centre
        worker, x = found[i], found[i].x
        if worker.steps % period == 0:
            worker.x = worker.x - alpha * (x - centre)
            centre = centre + alpha * (x - centre)
        worker.v = momentum * worker.v - rate * gradient(i, x + momentum * worker.v)
        worker.x = worker.x + worker.v
        worker.steps += 1

    for i in order:
        step(i)
        while found[i].steps < steps and found[i].steps % period:
            step(i)
    return centre, found


def synchronous(
    workers: int, steps: int, period: int, beta: float, rate: float, gradient: Gradient, momentum: float = 0.0
) -> tuple[np.ndarray, list[Worker]]:
    """Equations 3 and 4 of the paper, with the gradients of algorithm 2."""
    centre = START.copy()
    found = [Worker(START.copy(), np.zeros(DIMENSIONS)) for _ in range(workers)]
    for number in range(steps):
        old, xs = centre, [worker.x for worker in found]
        if number % period == 0:
            centre = (1 - beta) * old + beta * np.mean(xs, axis=0)
        for i, worker in enumerate(found):
            worker.v = momentum * worker.v - rate * gradient(i, worker.x + momentum * worker.v)
            pull = beta / workers * (worker.x - old) if number % period == 0 else 0.0
            worker.x = worker.x - pull + worker.v
    return centre, found
