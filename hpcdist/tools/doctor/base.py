"""Shared by all checks: findings, the nodes of the job, and a gather that names ranks that do not reply."""

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

if TYPE_CHECKING:  # its module imports torch, which takes seconds
    from hpcdist.comm.communicator import Communicator, Envelope, Request

OK, WARNING, ERROR = "ok", "warning", "error"
ARRIVED, CONTINUE = 30_001, 30_002  # tags of messages to rank 0, and from rank 0
SLACK = 0.5  # load average above the processors that is ignored
SLURM_S = 5.0  # timeout for Slurm to expand a list of nodes
Result = TypeVar("Result")


@dataclass(frozen=True)
class Finding:
    """One line of the report: what a check found about one thing.

    `nodes`: excluding any one of them removes the problem; empty: no node is the cause. `weight`: severity among
    findings of the same status.
    """

    status: str  # ok, warning or error
    text: str
    nodes: tuple[str, ...] = ()
    weight: float = 1.0
    check: str = ""


@dataclass(frozen=True)
class Requirements:
    """The options of `hpcdist doctor`: what the user's job needs, then what the examination does.

    `environ`: this process's environment variables; `limit_s`: time limit of all checks.
    """

    ranks: int | None = None
    folder: Path = Path()
    gpus: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    spare: int | None = None
    exclude_file: Path | None = None
    strict: bool = False
    json_path: Path | None = None
    limit_s: float = 30.0


@dataclass(frozen=True)
class Nodes:
    """The nodes of the job: `names[i]` is node i's name, `of[r]` the node of rank r."""

    names: tuple[str, ...]
    of: tuple[int, ...]

    def name(self, rank: int) -> str:
        return self.names[self.of[rank]]

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, node_of_rank in enumerate(self.of) if node_of_rank == node]

    @property
    def leaders(self) -> list[int]:
        """List the first rank of each node."""
        return [self.of.index(node) for node in range(len(self.names))]

    def __str__(self) -> str:
        return listed(self.names)


# --- names of nodes ---------------------------------------------------------------------------------------------------
def find_nodes(comm: Communicator, host: str) -> Nodes:
    """Collective. Name the nodes by their hosts, numbered if several have the same name."""
    return name_nodes(gather(comm, host), comm.nodes)


def name_nodes(hosts: Sequence[str], locations: Sequence[Hashable]) -> Nodes:
    """Name the nodes of ranks by their hosts; ranks with the same location are on the same node."""
    first_rank = {location: rank for rank, location in reversed([*enumerate(locations)])}  # the lowest rank of each
    node_locations = sorted(first_rank, key=lambda location: first_rank[location])
    node_hosts = [hosts[first_rank[location]] for location in node_locations]
    names = [name if node_hosts.count(name) == 1 else f"{name}#{i}" for i, name in enumerate(node_hosts)]
    return Nodes(tuple(names), tuple(node_locations.index(location) for location in locations))


def introduction(environ: Mapping[str, str]) -> str:
    """Describe this rank's node for other ranks: host name, network identity (the same on the whole node), load."""
    return json.dumps([host_name(environ), network.stack_id(), overload()])


def introduced(introductions: Mapping[int, str]) -> tuple[Nodes, list[float]]:
    """Return the nodes, and each rank's `overload`; `introductions`: each rank's text from `introduction`."""
    hosts, locations, loads = zip(*(json.loads(introductions[rank]) for rank in range(len(introductions))))
    return name_nodes(hosts, locations), list(loads)


def overload() -> float:
    """Return the ratio of this node's load average to its number of processors; 1 if it is not overloaded."""
    processors = os.cpu_count() or 1
    return max([1.0, *(round(load / processors, 1) for load in load_average() if load > processors + SLACK)])


def host_name(environ: Mapping[str, str]) -> str:
    """Return this node's name: under srun Slurm's (mpirun may pass one node's to all ranks), otherwise the host's."""
    launched, host = task(environ), platform.node()
    if launched is not None and launched.launcher.startswith("srun") and "SLURMD_NODENAME" in environ:
        return environ["SLURMD_NODENAME"]
    return host.partition(".")[0] if "SLURM_JOB_ID" in environ else host  # Slurm's names have no domain


def allocated(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes that Slurm has started ranks on; empty without Slurm, or if it does not reply."""
    node_list = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not node_list:
        return []
    command = ["scontrol", "show", "hostnames", node_list]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SLURM_S, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


# --- gathering --------------------------------------------------------------------------------------------------------
class Unanswered(DeadlineError):
    """Some ranks did not reply in time. `pairs`: ranks that were waiting for each other."""

    def __init__(self, ranks: Sequence[int], seconds: float, pairs: Sequence[tuple[int, int]] = ()):
        self.ranks, self.seconds, self.pairs = tuple(ranks), seconds, tuple(pairs)
        super().__init__(f"rank{'s' * (len(ranks) > 1)} {counted(ranks)} did not answer within {seconds:g} s.")


def gather(comm: Communicator, value: Any) -> list[Any]:
    """Collective. Return every rank's JSON value, in rank order, on every rank.

    Rank 0 collects and distributes the values by point-to-point messages: a waiting rank leaves its core to ranks that
    still measure, and missing ranks are known by number. Messages: 1 per rank, p − 1 on rank 0. After a timeout it
    raises Unanswered: on rank 0 with all missing ranks, on another rank with rank 0.
    """
    if comm.rank == 0:
        by_rank = {0: value}
        while len(by_rank) < comm.size:
            try:
                source, received = _receive(comm, ARRIVED)
            except DeadlineError as error:
                raise Unanswered([r for r in range(comm.size) if r not in by_rank], comm.failures.deadline_s) from error
            by_rank[source] = received
        values = [by_rank[rank] for rank in range(comm.size)]
        for request in [_send(comm, values, rank, CONTINUE) for rank in range(1, comm.size)]:
            request.wait()
        return values
    _send(comm, value, 0, ARRIVED).wait()
    for _ in range(2):  # one timeout more: rank 0 may wait that long for other ranks
        with suppress(DeadlineError):
            return _receive(comm, CONTINUE)[1]
    raise Unanswered([0], 2 * comm.failures.deadline_s)


def gather_by_node(comm: Communicator, nodes: Nodes, call: Callable[[], Any]) -> dict[str, Any]:
    """Collective. Call a function on the first rank of each node; return its results by node name."""
    values = gather(comm, call() if comm.rank in nodes.leaders else None)
    return {nodes.name(rank): values[rank] for rank in nodes.leaders}


def _send(comm: Communicator, value: Any, rank: int, tag: int) -> Request:
    import torch

    return comm.isend(torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8), rank, tag)


def _receive(comm: Communicator, tag: int) -> tuple[int, Any]:
    """Wait for a message with this tag; return its source and its value."""
    import torch

    envelope = cast("Envelope", comm.probe(tag=tag))
    data = torch.empty(envelope.n_bytes, dtype=torch.uint8)
    comm.irecv(data, envelope.source, envelope.tag).wait()
    return envelope.source, json.loads(data.numpy().tobytes())


def attempt(seconds: float, description: str, call: Callable[[], Result]) -> Result | dict[str, str]:
    """Return a call's result, or {"error": ...} if it fails or takes over `seconds`, as on a dead file system."""
    outcome: list[Result | dict[str, str]] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append({"error": str(error).partition("\n")[0]})

    # No pool, whose threads Python joins at exit: this one may never end.
    thread = threading.Thread(target=run, name=f"hpcdist-doctor: {description}", daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else {"error": f"{description} did not end within {seconds:g} s."}


def listed(names: Sequence[str], max_names: int = 8) -> str:
    """Join names: all, or the first ones and the number of others."""
    rest = [] if len(names) <= max_names else [f"{len(names) - max_names + 1} more"]
    return ", ".join([*names[: max_names - bool(rest)], *rest])


def counted(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: 0-3, 7."""
    indexed = enumerate(sorted(set(numbers)))  # within a range, number - index is constant
    spans = [[number for _, number in span] for _, span in groupby(indexed, lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
