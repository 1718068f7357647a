"""Schedules as tables of operations: checks, the time that they take, and a drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from hpcdist.errors import ConfigError


class Operation(NamedTuple):
    """An operation of a stage on a micro-batch.

    Kinds are F, the forward pass; B, the whole backward pass; and its halves I, gradients of the inputs, and W,
    gradients of the weights, for which no other rank waits. Rank `stage % ranks` has a stage, of ranks * chunks stages
    in all.
    """

    kind: Literal["F", "B", "I", "W"]
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"

    def needs(self, stages: int) -> Iterator[tuple[Operation, ...]]:
        """Yield groups of earlier operations. The operation can run once one operation of each group has run."""
        _, stage, micro_batch = self
        if self.kind == "F":
            if stage > 0:
                yield (Operation("F", stage - 1, micro_batch),)
        elif self.kind == "W":
            yield (Operation("I", stage, micro_batch),)
        else:
            yield (Operation("F", stage, micro_batch),)
            if stage < stages - 1:
                yield (Operation("B", stage + 1, micro_batch), Operation("I", stage + 1, micro_batch))


Table: TypeAlias = list[list[Operation]]  # a list for each rank, in the order of execution
ORDERS = {"F": "forward", "BI": "gradients of inputs", "BW": "gradients of weights"}  # by the kinds that compute them
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # of a rank's stages in a drawing


@dataclass(frozen=True)
class Timing:
    """The times of a table."""

    makespan_s: float  # from the start of the first operation to the end of the last one
    bubbles: list[float]  # by rank: the idle share of that time
    peaks: list[int]  # by rank: the largest number of micro-batches in its stages whose activations it keeps at a time
    spans_s: list[list[tuple[float, float]]]  # by rank: start and end of each operation

    @property
    def bubble(self) -> float:
        """The mean idle share."""
        return sum(self.bubbles) / len(self.bubbles)


def one_chunk(schedule: str, chunks: int) -> None:
    """Raise ConfigError unless each rank has one stage."""
    if chunks != 1:
        raise ConfigError(
            f"chunks must be 1 with the schedule {schedule}; got {chunks}. Take the schedule interleaved, or gpipe."
        )


def check(table: Table, ranks: int, micro_batches: int, chunks: int = 1) -> None:
    """Check that ranks can execute a table.

    Every stage must process each micro-batch once, in ascending order forward and backward, so that all schedules sum
    gradients in the same order. No rank may wait for ever.

    Raises:
        ConfigError: an operation is missing, repeated, out of order or on the wrong rank; or ranks wait for ever.
    """
    if len(table) != ranks:
        raise ConfigError(f"table must have one list for each of {ranks} ranks; got {len(table)}. Mend the schedule.")
    for rank, operations in enumerate(table):
        for operation in operations:
            if operation.kind not in ("F", "B", "I", "W"):
                raise ConfigError(f"kind must be one of F, B, I, W; got {operation.kind!r}. Mend the schedule.")
            if operation.stage not in range(rank, ranks * chunks, ranks):
                raise ConfigError(
                    f"stage must be one that rank {rank} of {ranks} has; got {operation}. Mend the schedule."
                )
        for stage in range(rank, ranks * chunks, ranks):
            for kinds, name in ORDERS.items():
                got = [op.micro_batch for op in operations if op.stage == stage and op.kind in kinds]
                if got != list(range(micro_batches)):
                    raise ConfigError(
                        f"micro-batches of stage {stage} must be 0 to {micro_batches - 1}, each once and in this "
                        f"order ({name}); got {', '.join(map(str, got)) or 'none'}. Mend the schedule."
                    )
    simulate(table, dict.fromkeys("FBIW", 1.0))


def simulate(
    table: Table,
    seconds: Mapping[str, float] | Callable[[Operation], float],
    transfer_s: Callable[[Operation], float] = lambda operation: 0.0,
) -> Timing:
    """Compute the times of a table if each rank executes its operations in order, as soon as possible.

    Args:
        table: the operations of each rank.
        seconds: of each kind of operation, or a function of the operation.
        transfer_s: returns the time until an operation's result reaches the next rank; both ranks may work meanwhile.

    Raises:
        ConfigError: ranks wait for each other for ever.
    """
    cost = seconds if callable(seconds) else lambda operation: seconds[operation.kind]
    stages = 1 + max((op.stage for operations in table for op in operations), default=0)
    ends: dict[Operation, float] = {}
    free = [0.0] * len(table)
    spans: list[list[tuple[float, float]]] = [[] for _ in table]
    progress = True
    while progress:
        progress = False
        for rank, operations in enumerate(table):
            for operation in operations[len(spans[rank]) :]:
                arrival = _arrival(operation, ends, stages, len(table), transfer_s)
                if arrival is None:
                    break
                start = max(arrival, free[rank])
                ends[operation] = free[rank] = start + cost(operation)
                spans[rank].append((start, free[rank]))
                progress = True
    waiting = {rank: ops[len(spans[rank])] for rank, ops in enumerate(table) if len(spans[rank]) < len(ops)}
    if waiting:
        raise ConfigError(
            "operations must be in an order in which none waits for ever; got "
            f"{', '.join(f'rank {rank} at {operation}' for rank, operation in waiting.items())}. Mend the schedule."
        )
    makespan = max(free, default=0.0)
    busy = [sum(map(cost, operations)) for operations in table]
    bubbles = [1 - time / makespan if makespan else 0.0 for time in busy]
    return Timing(makespan, bubbles, [peak(operations) for operations in table], spans)


def _arrival(
    operation: Operation,
    ends: Mapping[Operation, float],
    stages: int,
    ranks: int,
    transfer_s: Callable[[Operation], float],
) -> float | None:
    """Return when the results that an operation needs are on its rank, by the `ends` of others; None: not yet known."""
    latest = 0.0
    for group in operation.needs(stages):
        finished = [needed for needed in group if needed in ends]
        if not finished:
            return None
        on_other_rank = finished[0].stage % ranks != operation.stage % ranks
        latest = max(latest, ends[finished[0]] + (transfer_s(finished[0]) if on_other_rank else 0.0))
    return latest


def peak(
    operations: Sequence[Operation], size: Callable[[int], int] = lambda stage: 1, *, recomputed: bool = False
) -> int:
    """Return the peak of what a rank keeps for its backward passes: the sum of `size(stage)` over kept micro-batches.

    A micro-batch is kept from its forward pass to the end of B or W; if it is `recomputed`, from the start of B or I.
    """
    kept = highest = 0
    for operation in operations:
        kept += (operation.kind in ("BI" if recomputed else "F")) * size(operation.stage)
        highest = max(highest, kept)
        kept -= (operation.kind in "BW") * size(operation.stage)
    return highest


def one_by_one(forward: Sequence[Operation], backward: Sequence[Operation], ahead: int) -> list[Operation]:
    """Merge a rank's operations: `ahead` forward ones, then forward and backward in turn, then the rest."""
    ahead = min(ahead, len(forward))
    merged = [*forward[:ahead]]
    for index, operation in enumerate(backward):
        merged += [*forward[ahead + index : ahead + index + 1], operation]
    return merged


# --- drawing ----------------------------------------------------------------------------------------------------------
def gantt(table: Table, timing: Timing, columns: int = 120) -> list[str]:
    """Draw the operations of each rank as a line of text, to scale.

    `F2b--` is the forward pass of micro-batch 2 in the rank's second stage; ranks with one stage have no letters. A
    narrow operation has no letter, or no number either. A drawing is not wider than its labels need.
    """
    ranks, chunks = len(table), 1 + max((op.stage for ops in table for op in ops), default=0) // len(table)
    letters = [LETTERS[chunk % len(LETTERS)] if chunks > 1 else "" for chunk in range(chunks)]
    lines = [
        [(f"{op.kind}{op.micro_batch}{letters[op.stage // ranks]}", *span) for op, span in zip(ops, spans)]
        for ops, spans in zip(table, timing.spans_s)
    ]
    # Columns per second at which each label fits into its operation.
    enough = [(len(label) + 1) / (end - start) for line in lines for label, start, end in line if end > start]
    scale = min(columns / (timing.makespan_s or 1.0), max(enough, default=1.0))
    return [f"rank {rank:<{len(str(ranks - 1))}}  {_drawn(line, scale)}" for rank, line in enumerate(lines)]


def _drawn(line: list[tuple[str, float, float]], scale: float) -> str:
    """Draw a rank's operations, each (label, start, end), with `scale` columns per second."""
    drawn = ""
    for label, start, end in line:
        width = round(end * scale) - round(start * scale)
        text = next(text for text in (label, label.rstrip(LETTERS), label[0], "") if len(text) <= width)
        drawn = drawn.ljust(round(start * scale)) + text.ljust(width, "-")
    return drawn
