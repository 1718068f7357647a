"""One forward pass, one backward pass in turn, so that few activations are kept."""

from __future__ import annotations

from hpcdist.parallel.schedules.base import Operation, Table, one_by_one, one_chunk


def table(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Plan as many forward passes as it takes to fill the pipeline, then one backward pass behind each forward pass.

    Activations of p − r micro-batches at most are kept on rank r of p, however many there are. The bubble is GPipe's,
    (p − 1)/(m + p − 1) of the time with m micro-batches.

    Reference: Deepak Narayanan, Aaron Harlap, Amar Phanishayee, Vivek Seshadri and others, "PipeDream: generalized
    pipeline parallelism for DNN training", 2019; with a flush at the end of each batch, as here: Deepak Narayanan,
    Mohammad Shoeybi, Jared Casper and others, "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", 2021, section 2.2.1.
    """
    one_chunk("one_f_one_b", chunks)
    return [
        one_by_one(
            [Operation("F", rank, batch) for batch in range(micro_batches)],
            [Operation("B", rank, batch) for batch in range(micro_batches)],
            ahead=ranks - 1 - rank,
        )
        for rank in range(ranks)
    ]
