"""What neighbour averaging is tested with: topologies of every name, and serial twins of the ranks' training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.virtual import Network
from hpcdist.config.settings import Named
from hpcdist.data import EpochPlan
from hpcdist.model.flat import FlatModel
from hpcdist.topology import Topology, make_topology
from strategies import problem

NODES = Network(1e-4, 1e9, ranks_per_node=2)
LINEAR_BYTES = 8 * 8  # of the parameters of `linear`


def option(name: str, size: int, folder: Path) -> dict:
    """A topology of that name as a strategy's option; graphs are uneven, digraphs go on one way only."""
    if name not in ("graph", "digraph"):
        return {"name": name}
    edges = [(a, (a + 1) % size) for a in range(size)] + [(0, b) for b in range(2, size)]
    path = folder / f"{name}-{size}"
    path.write_text("\n".join(f"{a} {b}" for a, b in edges if a != b))
    return {"name": name, "path": str(path)}


def linear(comm, name: str, **options):
    """A strategy with a small model of which nothing is learned."""
    return problem.make(comm, name, torch.nn.Linear(3, 2, dtype=torch.float64), **options)


def drawn(rank: int, count: int = 8) -> Tensor:
    """Parameters that differ between ranks."""
    return torch.randn(count, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64)


def made(comm, option: dict) -> Topology:
    return make_topology(Named(**option), comm)


def matrix(found: Topology, step: int) -> Tensor:
    return torch.from_numpy(found.matrix(step))


def simulate(
    size: int,
    step: Callable[[Tensor, list[Callable[[Tensor], Tensor]], int], Tensor],
    *,
    samples: int,
    optimizer: str = "momentum",
    epochs: int = 2,
    batch: int = 4,
) -> Tensor:
    """Trains replicas in one process, on the batches of `problem.train`; their parameters, a row per rank.

    `step(z, updates, number)` returns the next rows; `updates[i](at)` is where rank i's optimiser takes parameters `at`
    with the gradient at the row z[i] of before.
    """
    modules = [problem.model() for _ in range(size)]
    flats = [FlatModel(module) for module in modules]
    locals_ = [problem.OPTIMIZERS[optimizer](module.parameters()) for module in modules]
    z = torch.stack([flat.params[0].clone() for flat in flats])
    number = 0

    def updates_of(rank: int, has_samples: bool) -> Callable[[Tensor], Tensor]:
        def update(at: Tensor) -> Tensor:
            flats[rank].params[0].copy_(at)
            if has_samples:
                locals_[rank].step()
            return flats[rank].params[0].clone()

        return update

    for epoch in range(epochs):
        plan = EpochPlan(samples, size, batch, seed=1, epoch=epoch)
        for at in range(plan.steps):
            sizes = plan.sizes(at)
            for rank in range(size):
                flats[rank].params[0].copy_(z[rank])
                if sizes[rank]:
                    locals_[rank].zero_grad()
                    problem.loss(modules[rank], plan.indices(at, rank)).backward()
            z = step(z, [updates_of(rank, bool(sizes[rank])) for rank in range(size)], number)
            number += 1
    return z


def is_recursion(ranks, folder: Path, strategy: str, graph: str, overlap: bool, recursion: Callable) -> None:
    """Training with neighbours on `graph`, where some ranks have no sample in the last step of an epoch.

    `recursion(matrix)` gives the `step` of `simulate`, and what tells afterwards the mean that the ranks stand for;
    `matrix(number)` is the topology's.
    """

    def body(comm):
        chosen = option(graph, comm.size, folder)
        comm.barrier()  # the file is whole
        run = problem.train(comm, strategy, {"topology": chosen, "overlap": overlap}, samples=50)
        return run.params[0], run.consensus[0], made(comm, chosen) if comm.rank == 0 else None

    found = ranks(body, network=NODES)
    step, mean = recursion(lambda number: matrix(found[0][2], number))
    expected = simulate(len(found), step, samples=50)
    assert torch.allclose(torch.stack([params for params, *_ in found]), expected, rtol=0, atol=1e-12)
    for _, consensus, _ in found:
        assert torch.allclose(consensus, mean(expected), rtol=0, atol=1e-12)


def step_without_samples(strategy):
    """Takes part in a step without a gradient."""
    strategy.model.gradients.start_batch(0.0)
    strategy.step(lambda: None)


def sources(run: Callable, steps: int, **options) -> list[list[int]]:
    """Of each step of gossip_sync: from whom each rank receives; its own number if it is left alone.

    Each rank brings 2^rank to every mixing, so that the average tells whose it is. `run` runs a body on all ranks.
    """

    def body(comm):
        strategy, found = linear(comm, "gossip_sync", **options), []
        for _ in range(steps):
            strategy.model.params[0].fill_(2.0**comm.rank)
            strategy.step(lambda: None)
            found.append(strategy.model.params[0][0].item())
        strategy.close()
        return found

    of_steps = zip(*run(body), strict=True)
    return [[round(np.log2(2 * value - 2.0**rank)) for rank, value in enumerate(values)] for values in of_steps]
