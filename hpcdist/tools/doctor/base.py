"""The parts that all checks share: findings, the nodes of the job, and a gather that names ranks that do not answer."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hpcdist.comm import network
from hpcdist.comm.launch import task
from hpcdist.errors import DeadlineError
from hpcdist.records import load_average

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from hpcdist.comm.communicator import Communicator, Envelope, Request

OK, WARNING, ERROR = "ok", "warning", "error"
ARRIVED, GO_ON = 30_001, 30_002  # tags
SLACK = 0.5  # of a load average, which nobody notices
SLURM_S = 5.0  # how long Slurm may take to expand a list of nodes
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


# --- their names: from Slurm, and from what ranks say -----------------------------------------------------------------
def find_nodes(comm: Communicator, host: str) -> Nodes:
    """Collective. Name the nodes by their hosts; where several have the same name, add their number."""
    return name_nodes(gather(comm, host), comm.nodes)


def name_nodes(hosts: Sequence[str], places: Sequence[Hashable]) -> Nodes:
    """Name the nodes of ranks by their hosts; ranks of one node are at the same place."""
    first = {place: rank for rank, place in reversed([*enumerate(places)])}
    nodes = sorted(first, key=lambda place: first[place])
    firsts = [hosts[first[place]] for place in nodes]
    names = [name if firsts.count(name) == 1 else f"{name}#{i}" for i, name in enumerate(firsts)]
    return Nodes(tuple(names), tuple(nodes.index(place) for place in places))


def introduction(environ: Mapping[str, str]) -> str:
    """Write down this rank's node: its name, and the network stack, which only ranks of that node share."""
    return f"{host_name(environ)}\n{network.stack_id()}\n{overload()}"


def introduced_nodes(introductions: Mapping[int, str]) -> Nodes:
    """Read the nodes from the introductions of all ranks."""
    hosts, places, _ = zip(*(introductions[rank].split("\n") for rank in range(len(introductions))))
    return name_nodes(hosts, places)


def introduced_loads(introductions: Mapping[int, str]) -> list[float]:
    """Read each rank's `overload` from the introductions of all ranks."""
    return [float(introductions[rank].split("\n")[2]) for rank in range(len(introductions))]


def overload() -> float:
    """Return how many times its processors this node's load average is; 1 where it is not above them."""
    processors = os.cpu_count() or 1
    return max([1.0, *(round(load / processors, 1) for load in load_average() if load > processors + SLACK)])


def host_name(environ: Mapping[str, str]) -> str:
    """Return the name of this node: under srun Slurm's; elsewhere its own.

    Slurm tells every task of srun, but not every rank of an mpirun, which may pass on the variables that it got itself.
    """
    own, host = task(environ), platform.node()
    if own is not None and own.launcher.startswith("srun") and "SLURMD_NODENAME" in environ:
        return environ["SLURMD_NODENAME"]
    return host.partition(".")[0] if "SLURM_JOB_ID" in environ else host


def allocated(environ: Mapping[str, str]) -> list[str]:
    """List the nodes that Slurm has started ranks on; none without Slurm, or where it does not answer."""
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not names:
        return []
    command = ["scontrol", "show", "hostnames", names]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SLURM_S, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


# --- gathering --------------------------------------------------------------------------------------------------------
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
                source, sent = _receive(comm, ARRIVED)
            except DeadlineError as error:
                raise Unanswered([r for r in range(comm.size) if r not in found], comm.failures.deadline_s) from error
            found[source] = sent
        values = [found[rank] for rank in range(comm.size)]
        for request in [_send(comm, values, rank, GO_ON) for rank in range(1, comm.size)]:
            request.wait()
        return values
    _send(comm, value, 0, ARRIVED).wait()
    for _ in range(2):  # rank 0 itself may wait as long for others
        with suppress(DeadlineError):
            return _receive(comm, GO_ON)[1]
    raise Unanswered([0], 2 * comm.failures.deadline_s)


def gather_by_node(comm: Communicator, nodes: Nodes, call: Callable[[], Any]) -> dict[str, Any]:
    """Collective. Call a function on the first rank of each node; return what it returned there, by the node's name."""
    values = gather(comm, call() if comm.rank in nodes.leaders else None)
    return {nodes.name(rank): values[rank] for rank in nodes.leaders}


def _send(comm: Communicator, value: Any, rank: int, tag: int) -> Request:
    import torch

    return comm.isend(torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8), rank, tag)


def _receive(comm: Communicator, tag: int) -> tuple[int, Any]:
    """Wait for a value that has this tag; return who sent it, and the value."""
    import torch

    envelope = cast("Envelope", comm.probe(tag=tag))
    data = torch.empty(envelope.n_bytes, dtype=torch.uint8)
    comm.irecv(data, envelope.source, envelope.tag).wait()
    return envelope.source, json.loads(data.numpy().tobytes())


def attempt(seconds: float, what: str, call: Callable[[], Result]) -> Result | dict[str, str]:
    """Call a function that may hang, for example on a dead file system; give up on it after `seconds`.

    Returns what it returned, or {"error": ...} where it failed or took longer. `what`: its name, for that.
    """
    outcome: list[Result | dict[str, str]] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append({"error": str(error).partition("\n")[0]})

    thread = threading.Thread(target=run, name=f"hpcdist-doctor: {what}", daemon=True)  # no pool: it may hang for ever
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else {"error": f"{what} did not end within {seconds:g} s."}


def listed(names: Sequence[str], most: int = 8) -> str:
    """Join names to a line: all, or the first ones and how many more."""
    more = [] if len(names) <= most else [f"{len(names) - most + 1} more"]
    return ", ".join([*names[: most - bool(more)], *more])


def counted(numbers: Sequence[int]) -> str:
    """Write numbers as a person does: 0-3, 7."""
    places = enumerate(sorted(set(numbers)))  # consecutive numbers are as far from their places
    spans = [[number for _, number in span] for _, span in groupby(places, lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
