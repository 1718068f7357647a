"""1F1B whose backward passes are in two halves: gradients of weights fill the time in which ranks would wait."""

from __future__ import annotations

from hpcdist.parallel.schedules.base import Operation, Table, one_by_one, one_chunk


def table(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Plan ZB-H1: 1F1B, where only the gradient of the inputs keeps the previous stage waiting.

    On rank r gradients of weights are r micro-batches behind those of inputs, so each of the p ranks keeps activations
    of up to p micro-batches, as 1F1B's first rank does. Let F, I and W be the seconds of a forward pass and of the
    gradients of inputs and weights: with at least p micro-batches the bubble is (p − 1)(F + I − W), and 1F1B's is
    (p − 1)(F + I + W), three times as long if the times are equal.

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
