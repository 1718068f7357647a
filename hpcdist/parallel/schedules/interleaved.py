"""One forward pass, one backward pass in turn, on several stages of each rank: a smaller bubble for more messages."""

from __future__ import annotations

from itertools import pairwise

from hpcdist.parallel.schedules.base import Operation, Table, one_by_one


def table(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Plan 1F1B where every rank has `chunks` stages, each a part of the model that is so much smaller.

    Micro-batches go through a rank's stages in groups of p (the number of ranks): the group through the first stage,
    then through the next. Where m is no multiple of p, some groups are larger; m < p are one group.

    Activations of more micro-batches are kept than with 1F1B. The bubble is (p − 1)/(cm + p − 1) of the time with c
    chunks and m ≥ p, a c-th of 1F1B's seconds.

    Reference: Deepak Narayanan, Mohammad Shoeybi, Jared Casper and others, "Efficient large-scale language model
    training on GPU clusters using Megatron-LM", 2021, section 2.2.2.
    """
    count = max(1, micro_batches // ranks)
    bounds = [-(-micro_batches * group // count) for group in range(count + 1)]  # rounded up: the first is a largest
    groups = [range(*pair) for pair in pairwise(bounds)]
    tables = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forward = [Operation("F", stage, batch) for group in groups for stage in stages for batch in group]
        backward = [Operation("B", stage, batch) for group in groups for stage in stages[::-1] for batch in group]
        # Number of forward passes before the first backward pass; as in Megatron-LM.
        ahead = (chunks - 1) * len(groups[0]) + (ranks - 1 - rank) * (2 if chunks > 1 else 1)
        tables.append(one_by_one(forward, backward, ahead))
    return tables
