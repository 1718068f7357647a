"""What all checks share: findings, nodes by name, and gathering that names who does not answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
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
    """What one check says about one thing, in one line.

    `nodes`: leaving out any one of them settles it; none: it is nobody's in particular. `weight`: how bad it is, beside
    other findings of the same status.
    """

    status: str  # ok, warning or error
    text: str
    nodes: tuple[str, ...] = ()
    weight: float = 1.0
    check: str = ""


@dataclass(frozen=True)
class Asked:
    """What the user wants to be there. `environ` is what the launcher and the shell said."""

    ranks: int | None = None
    folder: Path = Path()
    gpus: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Nodes:
    """The nodes of the job: `names[i]` of node i, and `of[r]`, the node that rank r lives on."""

    names: tuple[str, ...]
    of: tuple[int, ...]

    def name(self, rank: int) -> str:
        """The node of a rank."""
        return self.names[self.of[rank]]

    def ranks(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, place in enumerate(self.of) if place == node]

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [self.of.index(node) for node in range(len(self.names))]

    def __str__(self) -> str:
        return listed(self.names)


def find_nodes(comm: Communicator, host: str) -> Nodes:
    """Collective. The nodes by the names of their hosts; where several have the same, with their number."""
    return name_nodes(gather(comm, host), comm.nodes)


def name_nodes(hosts: Sequence[str], places: Sequence[Hashable]) -> Nodes:
    """The nodes of ranks by the names of their hosts; ranks of one node are at the same place."""
    first = {place: rank for rank, place in reversed([*enumerate(places)])}
    nodes = sorted(first, key=first.get)
    firsts = [hosts[first[place]] for place in nodes]
    names = [name if firsts.count(name) == 1 else f"{name}#{i}" for i, name in enumerate(firsts)]
    return Nodes(tuple(names), tuple(nodes.index(place) for place in places))


class Unanswered(DeadlineError):
    """Some ranks did not come to where the others wait for them. `pairs`: those of them that wait for each other."""

    def __init__(self, ranks: Sequence[int], seconds: float, pairs: Sequence[tuple[int, int]] = ()):
        self.ranks, self.seconds, self.pairs = tuple(ranks), seconds, tuple(pairs)
        super().__init__(f"rank{'s' * (len(ranks) > 1)} {counted(ranks)} did not answer within {seconds:g} s.")


def gather(comm: Communicator, value: Any) -> list[Any]:
    """Collective. Every rank's value in rank order, on every rank. JSON must hold it.

    Goes through rank 0, by messages: who waits leaves its core to those that still measure, and who does not come is
    known. Each rank sends one message, rank 0 as many as there are others.

    Raises:
        Unanswered: on rank 0, with all the ranks that did not come; on another one, with rank 0.
    """
    if comm.rank == 0:
        found = {0: value}
        while len(found) < comm.size:
            try:
                envelope = comm.probe(tag=ARRIVED)
            except DeadlineError as error:
                raise Unanswered([r for r in range(comm.size) if r not in found], comm.deadline_s) from error
            found[envelope.source] = _receive(comm, envelope)
        told = [found[rank] for rank in range(comm.size)]
        for request in [_send(comm, told, rank, GO_ON) for rank in range(1, comm.size)]:
            request.wait()
        return told
    _send(comm, value, 0, ARRIVED).wait()
    try:
        envelope = comm.probe(0, GO_ON)
    except DeadlineError:
        try:
            envelope = comm.probe(0, GO_ON)  # rank 0 itself may wait that long for others
        except DeadlineError as error:
            raise Unanswered([0], 2 * comm.deadline_s) from error
    return _receive(comm, envelope)


def _send(comm: Communicator, value: Any, rank: int, tag: int):
    import torch

    return comm.isend(torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8), rank, tag)


def _receive(comm: Communicator, envelope) -> Any:
    import torch

    data = torch.empty(envelope.n_bytes, dtype=torch.uint8)
    comm.irecv(data, envelope.source, envelope.tag).wait()
    return json.loads(data.numpy().tobytes())


def within(seconds: float, what: str, function: Callable[[], Result]) -> Result:
    """What a call returns or raises that may hang, as one of a dead file system does: it is then left behind.

    Raises:
        DeadlineError: it took longer.
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
    """Names in a line: all, or the first ones and how many more."""
    more = [] if len(names) <= most else [f"{len(names) - most + 1} more"]
    return ", ".join([*names[: most - bool(more)], *more])


def counted(numbers: Sequence[int]) -> str:
    """Numbers as a person writes them: 0-3, 7."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
