"""1F1B whose backward passes are in two halves: gradients of weights fill the time in which ranks would wait."""

from __future__ import annotations

from hpcdist.parallel.schedules.base import Operation, Table, one_by_one, one_chunk


def table(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Plan ZB-H1: 1F1B, where only the gradient of the inputs keeps the previous stage waiting.

    Activations of as many micro-batches as on 1F1B's first rank, p at most, are kept on each rank r, where gradients of
    weights are r micro-batches behind those of inputs. The bubble is (p − 1)(F + I − W) seconds with these times of
    the three kinds and m ≥ p: with equal ones a third of 1F1B's (p − 1)(F + I + W).

    Reference: Penghui Qi, Xinyi Wan, Guangxing Huang, Min Lin, "Zero bubble pipeline parallelism", 2023, section 2.1.
    """
    one_chunk("zero_bubble", chunks)
    batches = range(micro_batches)
    tables = []
    for rank in range(ranks):
        operations = []
        forward, inputs = ([Operation(kind, rank, batch) for batch in batches] for kind in ("F", "I"))
        for operation in one_by_one(forward, inputs, ahead=ranks - 1 - rank):
            operations.append(operation)
            if operation.kind == "I" and operation.micro_batch >= rank:
                operations.append(Operation("W", rank, operation.micro_batch - rank))
        late = range(max(0, micro_batches - rank), micro_batches)
        tables.append([*operations, *(Operation("W", rank, batch) for batch in late)])
    return tables
