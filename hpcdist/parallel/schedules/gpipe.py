"""All micro-batches forward, then all backward."""

from __future__ import annotations

from hpcdist.parallel.schedules.base import Operation, Table


def table(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Plan every stage's forward passes before its backward passes; with several stages on a rank, breadth first.

    Activations of all m micro-batches are kept. The bubble is (p − 1)/(cm + p − 1) of the time with p ranks and c
    stages on each, where c = 1 or m ≥ p.

    Reference: Yanping Huang, Youlong Cheng, Ankur Bapna, Orhan Firat and others, "GPipe: efficient training of giant
    neural networks using pipeline parallelism", 2019. Several stages on a rank: Joel Lamy-Poirier, "Breadth-first
    pipeline parallelism", 2023.
    """
    batches = range(micro_batches)
    return [
        [Operation("F", stage, batch) for stage in range(rank, ranks * chunks, ranks) for batch in batches]
        + [Operation("B", stage, batch) for stage in range(rank, ranks * chunks, ranks)[::-1] for batch in batches]
        for rank in range(ranks)
    ]
