"""The start-up check, with timeouts: which nodes and ranks are present, and which of them reach each other.

A collective call would wait forever for an unreachable member, and some MPI libraries hang, or abort, while they start.
Here all members introduce themselves to member 0, which sends every introduction to all; then pairs of members try to
connect, and report failures to member 0.

The members are first srun's nodes, which use TCP before MPI starts (second part of this file), then all ranks, which
use MPI (`comm/mpi/first_messages.py`). MPI may use another network, so both checks are needed.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import combinations
from typing import IO, TYPE_CHECKING, NamedTuple

from hpcdist.comm import network
from hpcdist.comm.launch import number, task
from hpcdist.tools.doctor.base import ERROR, WARNING, Finding, Nodes, Unanswered, counted, listed

if TYPE_CHECKING:  # importing it starts MPI
    from hpcdist.comm.mpi.first_messages import FirstMessages

Pair = tuple[int, int]
ALL_PAIRS = 128  # with more members not every pair is tried
ANSWER_S = 8.0  # timeout for a node to arrive; nodes don't start at the same moment
REACH_S = 3.5  # timeout of a connection; a lost packet is sent again after 1 s and 3 s
PAUSE_S = 0.05
FIRST_PORT, PORTS = 30_000, 2_700  # below Linux's ephemeral ports
CONCURRENT = 64
LINE = 1 << 16  # maximal characters of an introduction; strangers may connect, too


class Result(NamedTuple):
    """Members that arrived, absent members and unreachable pairs, as known to member 0 and all members that it reaches.

    On all other members, member 0 is absent.
    """

    introductions: dict[int, str]  # by member that arrived
    absent: tuple[int, ...] = ()
    unreachable: tuple[Pair, ...] = ()  # pairs without a connection


def check(
    transport: Tcp | FirstMessages, introduction: str, pairs: Callable[[Mapping[int, str]], Iterable[Pair]]
) -> Result:
    """Collective. Find absent members, and pairs of present members that can't reach each other.

    `exchange` returns the texts of all members that reached member 0 in time (on an unreachable member only its text);
    the other members wait twice as long for the reply. `pairs` returns the pairs to try, from all introductions.
    """
    arrived = transport.exchange(introduction, transport.answer_s, range(transport.size))
    if 0 not in arrived:
        return Result(arrived, absent=(0,))
    absent = tuple(member for member in range(transport.size) if member not in arrived)
    to_try = sorted(pairs(arrived))
    if not to_try:
        return Result(arrived, absent)
    local_failures = json.dumps(transport.unreachable(to_try))
    failed = transport.exchange(local_failures, 2 * transport.reach_s, arrived)  # members try for up to reach_s
    return Result(arrived, absent, tuple(sorted({tuple(pair) for row in failed.values() for pair in json.loads(row)})))


def pairs_to_try(count: int) -> list[Pair]:
    """Return the pairs of `count` members to try: all; beyond ALL_PAIRS members those 1, 2, 4, ... apart in a ring."""
    steps = range(1, count) if count <= ALL_PAIRS else [1 << i for i in range((count - 1).bit_length())]
    pairs = ((first, (first + step) % count) for first in range(count) for step in steps)
    return sorted({(min(pair), max(pair)) for pair in pairs})


# --- srun's nodes, by TCP ---------------------------------------------------------------------------------------------
# Some MPI libraries connect all ranks while they start, or abort at the first failed connection, without naming the
# node that hangs or the two that can't connect. One process of each node takes part, if srun has started it and the
# port is free.
NOTHING = Result({})


def takes_part(environ: Mapping[str, str]) -> bool:
    """Return whether this is the participating process of its node."""
    launched = task(environ)
    return launched is not None and launched.launcher.startswith("srun") and launched.local_rank == 0


def check_nodes(environ: Mapping[str, str], names: Sequence[str]) -> Result:
    """Collective, with a timeout. Find absent nodes and unreachable pairs of a Slurm step's nodes (host `names`).

    Only the first node gets the result; on the others, and if TCP can't be used, it is NOTHING.
    """
    step, node = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}", number(environ, "SLURM_NODEID")
    port = FIRST_PORT + (int(environ["SLURM_JOB_ID"]) + 7 * int(environ["SLURM_STEP_ID"])) % PORTS
    try:
        listener = socket.create_server(("", port), backlog=1024)
    except OSError:
        return NOTHING  # the port is in use
    interface = environ.get("OMPI_MCA_btl_tcp_if_include", "")  # MPI's interface, if set; otherwise any
    address = next((str(a.ip.ip) for a in network.addresses() if a.interface == interface), "")
    with listener:  # `unreachable` needs no accept(): the kernel completes connections to a listening socket
        transport = Tcp(listener, names[0], step, node, len(names))
        # The first node is in no pair to try: all nodes that arrived have reached it.
        result = check(transport, address, lambda arrived: combinations(sorted(arrived)[1:], 2))
    if node > 0 or len(result.absent) == len(names) - 1 > 1:  # no node arrived: no TCP between nodes
        return NOTHING
    return result


class Tcp:
    """Connections between the nodes of a step, which all listen on the same port, as other programs may.

    `first`: host name of the first node.
    """

    def __init__(self, listener: socket.socket, first: str, step: str, rank: int, size: int):
        self.rank, self.size, self.answer_s, self.reach_s = rank, size, ANSWER_S, REACH_S
        self._listener, self._port = listener, listener.getsockname()[1]
        self._first, self._step = first, step
        self._texts: dict[int, str] = {}  # of the last exchange; after the first one, the nodes' addresses

    def exchange(self, text: str, limit_s: float, members: Collection[int]) -> dict[int, str]:
        """Collective. Return texts by node (only this one if the first is absent); an empty one becomes an address."""
        self._texts = {self.rank: text}
        if self.rank == 0:
            self._texts = self._collect(text, limit_s, members)
            return self._texts
        with suppress(OSError, ValueError), self._reach_first(limit_s) as connection:
            connection.settimeout(2 * limit_s)
            with connection.makefile("rw") as stream:
                _write(stream, [self._step, self.rank, text])
                self._texts = {int(node): other_text for node, other_text in json.loads(stream.readline()).items()}
        return self._texts

    def _collect(self, text: str, limit_s: float, members: Collection[int]) -> dict[int, str]:
        """Read the texts of the nodes that connect in time, then send all texts to each of them."""
        texts, streams, until = {0: text}, [], time.monotonic() + limit_s
        while len(texts) < len(members) and (remaining_s := until - time.monotonic()) > 0:
            self._listener.settimeout(remaining_s)
            try:
                connection, address = self._listener.accept()
                with connection:
                    connection.settimeout(2 * REACH_S)
                    stream = connection.makefile("rw")
                step, node, other_text = json.loads(stream.readline(LINE))
            except (OSError, ValueError, TypeError, RecursionError):
                continue  # timeout, or another program
            if step == self._step and node in members:
                texts[node] = other_text or address[0]
                streams.append(stream)
        for stream in streams:
            with suppress(OSError), stream:  # the node has disconnected
                _write(stream, texts)
        return texts

    def _reach_first(self, limit_s: float) -> socket.socket:
        """Connect to the first node, retrying until it listens; raise OSError if it does not within `limit_s`."""
        until = time.monotonic() + limit_s
        while True:
            try:
                return socket.create_connection((self._first, self._port), timeout=limit_s)
            except ConnectionRefusedError:  # not started yet
                if time.monotonic() > until:
                    raise
                time.sleep(PAUSE_S)

    def unreachable(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Connect from the first node of each pair to the second; return this node's failed pairs."""
        local_pairs = [pair for pair in pairs if pair[0] == self.rank]
        with ThreadPoolExecutor(CONCURRENT) as pool:
            reached = pool.map(lambda pair: self._reaches(self._texts[pair[1]]), local_pairs)
            return [pair for pair, is_reached in zip(local_pairs, reached) if not is_reached]

    def _reaches(self, ip: str) -> bool:
        """Return whether a node accepts or refuses a connection; False if it does not reply within REACH_S."""
        try:
            socket.create_connection((ip, self._port), timeout=REACH_S).close()
        except ConnectionError:  # reachable, but not listening
            return True
        except OSError:
            return False
        return True


def _write(stream: IO, value: object) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


# --- findings ---------------------------------------------------------------------------------------------------------
def absent_nodes(names: Sequence[str], first: str, waited_s: float) -> Iterator[Finding]:
    """Report the nodes (`names`) that did not reach the first one by TCP within `waited_s`."""
    for name in names:
        text = f"{name} must connect to {first} by TCP; it did not within {waited_s:g} s: it hangs, or can't reach it"
        yield Finding(WARNING, text, (name,))


def absent_ranks(
    hosts: Mapping[int, str], absent: Sequence[int], expected: Sequence[str], waited_s: float
) -> list[Finding]:
    """Report absent ranks: by expected node without any reply, or in one line. `hosts`: by rank that replied."""
    ranks = f"rank{'s' * (len(absent) > 1)} {counted(absent)}"
    text = f"every rank must answer; got nothing from {ranks} within {waited_s:g} s"
    advice = "It has ended, is stopped, or can't be reached by the network that MPI uses"
    answering = {host.partition(".")[0] for host in hosts.values()}
    silent = [node for node in expected if node.partition(".")[0] not in answering]
    if 0 not in hosts or not silent:  # without rank 0, this rank has no other rank's reply
        return [Finding(ERROR, f"{text}. {advice}")]
    return [Finding(ERROR, f"{text}, nor from any rank on {node}. {advice}", (node,)) for node in silent]


def unreachable_pairs(pairs: Sequence[tuple[int, int]], nodes: Nodes, reason: str) -> list[Finding]:
    """Report pairs of nodes without a connection: all pairs of the node with most are one finding, then the next node.

    A pair whose nodes are in no other remaining pair is reported as a faulty link. `reason`: how it was detected.
    """
    findings, remaining = [], [tuple(nodes.names[node] for node in pair) for pair in pairs]
    while remaining:
        counts = Counter(name for pair in remaining for name in pair)
        worst = max(counts, key=lambda name: (counts[name], nodes.names.index(name)))
        links = [pair for pair in remaining if worst in pair]
        remaining = [pair for pair in remaining if worst not in pair]
        if len(links) == 1:
            text, causes, excluded = f"the link {'-'.join(links[0])} passes nothing", links[0], "one of the two"
        else:
            others = [name for pair in links for name in pair if name != worst]
            text, causes, excluded = f"the links from {worst} to {listed(others)} pass nothing", (worst,), worst
        text += f": {reason}, though all reach {nodes.names[0]}. Exclude {excluded}, and tell the site: check "
        findings.append(Finding(ERROR, f"{text}cables, routes and firewalls between them", causes, weight=len(links)))
    return findings


def unanswered(error: Unanswered, nodes: Nodes, stage: str) -> list[Finding]:
    """Report the ranks that stopped answering during a check, by node; report the link if two wait for each other."""
    stuck = {rank for pair in error.pairs for rank in pair}
    reason = f"its measurement did not end within {error.seconds:g} s"
    findings = unreachable_pairs([(nodes.of[a], nodes.of[b]) for a, b in error.pairs], nodes, reason)
    ranks = [rank for rank in error.ranks if rank not in stuck]
    for name in dict.fromkeys(nodes.name(rank) for rank in ranks):
        node_ranks = [rank for rank in ranks if nodes.name(rank) == name]
        text = f"{Unanswered(node_ranks, error.seconds)} All must answer at {stage!r}"
        findings.append(Finding(ERROR, text, (name,) * (len(nodes.names) > 1)))
    return findings
