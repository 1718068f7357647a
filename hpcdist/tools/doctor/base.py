"""The parts that all checks share: findings, the nodes, and a gather that names the ranks that do not answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcdist.errors import DeadlineError

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from hpcdist.comm.communicator import Communicator

OK, WARNING, ERROR = "ok", "warning", "error"
ARRIVED, GO_ON = 30_001, 30_002  # tags
Result = TypeVar("Result")


@dataclass(frozen=True)
class Finding:
    """One line of the examination: a check's verdict on one thing.

    `nodes`: leaving out any one of them settles it; empty: no node is the cause. `weight`: how bad it is, beside other
    findings of the same status.
    """

    status: str  # ok, warning or error
    text: str
    nodes: tuple[str, ...] = ()
    weight: float = 1.0
    check: str = ""


@dataclass(frozen=True)
class Requirements:
    """The job that the nodes must be fit for, as the user wants it. `environ`: this process's variables."""

    ranks: int | None = None
    folder: Path = Path()
    gpus: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Nodes:
    """The nodes of the job: `names[i]` of node i, and `of[r]`, the node of rank r."""

    names: tuple[str, ...]
    of: tuple[int, ...]

    def name(self, rank: int) -> str:
        """Return the name of a rank's node."""
        return self.names[self.of[rank]]

    def ranks(self, node: int) -> list[int]:
        """List the ranks of a node."""
        return [rank for rank, own in enumerate(self.of) if own == node]

    @property
    def leaders(self) -> list[int]:
        """List the first rank of each node."""
        return [self.of.index(node) for node in range(len(self.names))]

    def __str__(self) -> str:
        return listed(self.names)


class Unanswered(DeadlineError):
    """Some ranks did not answer, for whom the others wait. `pairs`: those of them that wait for each other."""

    def __init__(self, ranks: Sequence[int], seconds: float, pairs: Sequence[tuple[int, int]] = ()):
        self.ranks, self.seconds, self.pairs = tuple(ranks), seconds, tuple(pairs)
        super().__init__(f"rank{'s' * (len(ranks) > 1)} {counted(ranks)} did not answer within {seconds:g} s.")


def gather(comm: Communicator, value: Any) -> list[Any]:
    """Collective. Return every rank's value in rank order, on every rank. JSON must be able to hold it.

    Goes through rank 0, by messages: a rank that waits leaves its core to those that still measure, and the ranks that
    do not come are known. Each rank sends one message, rank 0 as many as there are others.

    Raises:
        Unanswered: on rank 0, with all the ranks that did not come; on another one, with rank 0.
    """
    if comm.rank == 0:
        found = {0: value}
        while len(found) < comm.size:
            try:
                envelope = comm.probe(tag=ARRIVED)
            except DeadlineError as error:
                raise Unanswered([r for r in range(comm.size) if r not in found], comm.failures.deadline_s) from error
            found[envelope.source] = _receive(comm, envelope)
        values = [found[rank] for rank in range(comm.size)]
        for request in [_send(comm, values, rank, GO_ON) for rank in range(1, comm.size)]:
            request.wait()
        return values
    _send(comm, value, 0, ARRIVED).wait()
    try:
        envelope = comm.probe(0, GO_ON)
    except DeadlineError:
        try:
            envelope = comm.probe(0, GO_ON)  # rank 0 itself may wait that long for others
        except DeadlineError as error:
            raise Unanswered([0], 2 * comm.failures.deadline_s) from error
    return _receive(comm, envelope)


def gather_by_node(comm: Communicator, nodes: Nodes, call: Callable[[], Any]) -> dict[str, Any]:
    """Collective. Call a function on the first rank of each node; return what it returned there, by the node's name."""
    values = gather(comm, call() if comm.rank in nodes.leaders else None)
    return {nodes.name(rank): values[rank] for rank in nodes.leaders}


def _send(comm: Communicator, value: Any, rank: int, tag: int):
    import torch

    return comm.isend(torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8), rank, tag)


def _receive(comm: Communicator, envelope) -> Any:
    import torch

    data = torch.empty(envelope.n_bytes, dtype=torch.uint8)
    comm.irecv(data, envelope.source, envelope.tag).wait()
    return json.loads(data.numpy().tobytes())


def within(seconds: float, what: str, function: Callable[[], Result]) -> Result:
    """Call a function that may hang, as one of a dead file system does; past the limit go on without it.

    Raises:
        DeadlineError: it took longer than `seconds`.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def call() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:  # handed on to the caller below
            outcome.append((None, error))

    thread = threading.Thread(target=call, name=f"hpcdist-doctor: {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise DeadlineError(f"{what} did not end within {seconds:g} s.")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def listed(names: Sequence[str], most: int = 8) -> str:
    """Join names to a line: all, or the first ones and how many more."""
    more = [] if len(names) <= most else [f"{len(names) - most + 1} more"]
    return ", ".join([*names[: most - bool(more)], *more])


def counted(numbers: Sequence[int]) -> str:
    """Write numbers as a person does: 0-3, 7."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
