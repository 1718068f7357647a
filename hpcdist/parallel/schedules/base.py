"""Schedules as tables of operations: checks, the time that they take, and a drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from hpcdist.errors import ConfigError

Kind: TypeAlias = Literal["F", "B", "I", "W"]


class Operation(NamedTuple):
    """One part of the work of a stage on a micro-batch.

    Kinds are F, forward; B, the whole backward pass; and its halves I, gradient of the inputs, and W, gradient of the
    weights, which nobody waits for. Stages count from 0 to ranks * chunks - 1; rank `stage % ranks` has a stage.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"

    def needs(self, stages: int) -> Iterator[tuple[Operation, ...]]:
        """Yield the operations that come before this one, as groups of which one is enough."""
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
ORDERS = {"F": "forward", "BI": "gradients of inputs", "BW": "gradients of weights"}  # by the kinds that make them
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # of a rank's first stage, its second...


@dataclass(frozen=True)
class Timing:
    """The course of a table.

    Args:
        makespan_s: the time from the first operation's start to the last one's end.
        bubbles: for each rank, the share of that time in which it has nothing to do.
        peaks: for each rank, the most micro-batches whose activations it keeps at a time, counted for each stage.
        spans_s: for each operation of each rank, the times at which it begins and ends.
    """

    makespan_s: float
    bubbles: list[float]
    peaks: list[int]
    spans_s: list[list[tuple[float, float]]]

    @property
    def bubble(self) -> float:
        """Average the ranks' shares."""
        return sum(self.bubbles) / len(self.bubbles)


def one_chunk(schedule: str, chunks: int) -> None:
    """Refuse more than one stage on a rank.

    Raises:
        ConfigError: there are several.
    """
    if chunks != 1:
        raise ConfigError(
            f"chunks must be 1 with the schedule {schedule}; got {chunks}. Take the schedule interleaved, or gpipe."
        )


def check(table: Table, ranks: int, micro_batches: int, chunks: int = 1) -> None:
    """Refuse a table that ranks can't execute, each in its order.

    Every stage must work once on each micro-batch, in ascending order forward and backward, so that gradients are
    summed in the same order by all schedules; and no rank may wait for an operation that comes behind the wait.

    Raises:
        ConfigError: an operation is missing, repeated, out of order or on another stage's rank; or ranks wait for ever.
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
    """Compute the time that a table takes where each rank executes its operations in order, as soon as they can begin.

    Args:
        table: the operations of each rank.
        seconds: the time of each kind of operation, or a function that returns that of an operation.
        transfer_s: a function that returns the time in which an operation's result reaches the next rank, which
            costs neither rank any time of its own.

    Raises:
        ConfigError: ranks wait for one another for ever.
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
                begin = max(arrival, free[rank])
                ends[operation] = free[rank] = begin + cost(operation)
                spans[rank].append((begin, free[rank]))
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
    """Return the time at which all that an operation needs is there; None where some of it is not yet computed."""
    latest = 0.0
    for group in operation.needs(stages):
        made = [one for one in group if one in ends]
        if not made:
            return None
        far = made[0].stage % ranks != operation.stage % ranks
        latest = max(latest, ends[made[0]] + (transfer_s(made[0]) if far else 0.0))
    return latest


def peak(operations: Sequence[Operation], size: Callable[[int], int] = lambda stage: 1) -> int:
    """Compute the most that a rank keeps for its backward passes at a time: the sum of `size(stage)` of micro-batches.

    A micro-batch is kept from its forward pass to the end of B or W.
    """
    kept = most = 0
    for operation in operations:
        kept += {"F": 1, "I": 0}.get(operation.kind, -1) * size(operation.stage)
        most = max(most, kept)
    return most


def recomputed_peak(operations: Sequence[Operation], size: Callable[[int], int] = lambda stage: 1) -> int:
    """Compute the most that a rank keeps at a time of what is computed again: in B, and from I to the end of W."""
    kept = most = 0
    for operation in operations:
        kept += {"B": 1, "I": 1}.get(operation.kind, 0) * size(operation.stage)
        most = max(most, kept)
        kept -= {"B": 1, "W": 1}.get(operation.kind, 0) * size(operation.stage)
    return most


def one_by_one(forward: Sequence[Operation], backward: Sequence[Operation], ahead: int) -> list[Operation]:
    """Merge a rank's operations: the first `ahead` forward, then forward and backward in turn, then the rest."""
    ahead = min(ahead, len(forward))
    merged = [*forward[:ahead]]
    for index, operation in enumerate(backward):
        merged += [*forward[ahead + index : ahead + index + 1], operation]
    return merged


# --- drawing ----------------------------------------------------------------------------------------------------------
def gantt(table: Table, timing: Timing, columns: int = 120) -> list[str]:
    """Draw the operations of each rank, as wide as their time, and their micro-batches.

    `F2b--` is the forward pass of micro-batch 2 in the rank's second stage; ranks with one stage have no letters.
    Where an operation is too narrow, the letter is left out, or the number too. There are fewer columns where these
    are enough for all.
    """
    ranks, chunks = len(table), 1 + max((op.stage for ops in table for op in ops), default=0) // len(table)
    lines = [
        [(_label(op, ranks, chunks), *span) for op, span in zip(ops, spans)]
        for ops, spans in zip(table, timing.spans_s)
    ]
    enough = [(len(label) + 1) / (end - start) for line in lines for label, start, end in line if end > start]
    scale = min(columns / (timing.makespan_s or 1.0), max(enough, default=1.0))
    return [f"rank {rank:<{len(str(ranks - 1))}}  {_drawn(line, scale)}" for rank, line in enumerate(lines)]


def _label(operation: Operation, ranks: int, chunks: int) -> str:
    letter = LETTERS[operation.stage // ranks % len(LETTERS)] if chunks > 1 else ""
    return f"{operation.kind}{operation.micro_batch}{letter}"


def _drawn(line: list[tuple[str, float, float]], scale: float) -> str:
    drawn = ""
    for label, start, end in line:
        width = round(end * scale) - round(start * scale)
        text = next(text for text in (label, label.rstrip(LETTERS), label[0], "") if len(text) <= width)
        drawn = drawn.ljust(round(start * scale)) + text.ljust(width, "-")
    return drawn
