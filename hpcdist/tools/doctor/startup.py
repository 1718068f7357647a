"""The start-up check, with limits: which nodes and ranks are there, and which of them reach each other.

A collective call waits for ever for a member that can't be reached, and some MPI libraries hang, or end the job, while
they start. So all members introduce themselves to the first one, which tells them of each other; then pairs of them
try to reach each other, and tell the first one where that fails. No wait is longer than its limit.

The members are srun's nodes, which use TCP before MPI starts (the second part of this file), and then all ranks, which
use MPI (`comm/mpi/first_messages.py`). MPI may have a network of its own, so that neither proves anything of the other.
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

if TYPE_CHECKING:  # it starts MPI
    from hpcdist.comm.mpi.first_messages import FirstMessages

Pair = tuple[int, int]
ALL_PAIRS = 128  # of more members not every pair is tried
ANSWER_S = 8.0  # how long a node may take to come; not all start at the same moment
REACH_S = 3.5  # how long another one may take to connect; a packet that is lost is sent again after 1 s, and after 3 s
PAUSE_S = 0.05
FIRST_PORT, PORTS = 30_000, 2_700  # below those that Linux gives to whoever names none
AT_ONCE = 64
LINE = 1 << 16  # characters of a node's introduction; a stranger may send more


class Result(NamedTuple):
    """Members that came, absent ones and unreachable pairs, as member 0 and all that it reaches know them.

    On the others member 0 is absent.
    """

    introductions: dict[int, str]  # of the members that came
    absent: tuple[int, ...] = ()
    unreachable: tuple[Pair, ...] = ()  # pairs of members that pass each other nothing


def check(
    transport: Tcp | FirstMessages, introduction: str, pairs: Callable[[Mapping[int, str]], Iterable[Pair]]
) -> Result:
    """Collective. Find the members that are absent, and pairs of the others that do not reach each other.

    Args:
        transport: of members 0 to size − 1. Its `exchange` returns the texts of those that reached member 0 within a
            limit, for whose reply the others wait twice as long; where that does not come, a member's own text alone.
            Its `unreachable` returns those pairs that this member has found to pass nothing.
        introduction: what the others are to know of this member.
        pairs: tells which pairs to try, from the introductions of those that came.
    """
    came = transport.exchange(introduction, transport.answer_s, range(transport.size))
    if 0 not in came:
        return Result(came, absent=(0,))
    absent = tuple(member for member in range(transport.size) if member not in came)
    wanted = sorted(pairs(came))
    if not wanted:
        return Result(came, absent)
    own = json.dumps(transport.unreachable(wanted))
    failed = transport.exchange(own, 2 * transport.reach_s, came)  # those who reach all are there sooner
    return Result(came, absent, tuple(sorted({tuple(pair) for text in failed.values() for pair in json.loads(text)})))


def pairs_to_try(count: int) -> list[Pair]:
    """List the pairs of `count` members: all, or of very many those 1, 2, 4, ... places apart, as in collectives."""
    steps = range(1, count) if count <= ALL_PAIRS else [1 << i for i in range((count - 1).bit_length())]
    pairs = ((one, (one + step) % count) for one in range(count) for step in steps)
    return sorted({(min(pair), max(pair)) for pair in pairs})


# --- of srun's nodes, by TCP ------------------------------------------------------------------------------------------
# Some MPI libraries connect all ranks while they start, or end the job at the first connection that fails: nobody would
# learn of a node that hangs, or of two that don't reach each other. One process of each node takes part; where srun has
# not started it, or another program has the port, none does.
NOTHING = Result({})


def takes_part(environ: Mapping[str, str]) -> bool:
    """Tell whether this process is the one of its node that takes part."""
    own = task(environ)
    return own is not None and own.launcher.startswith("srun") and own.local_rank == 0


def check_nodes(environ: Mapping[str, str], names: Sequence[str]) -> Result:
    """Collective, with a limit. Find absent nodes and unreachable pairs, by number; only the first node knows them.

    Args:
        names: the step's nodes, as the network knows them.
    """
    step, node = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}", number(environ, "SLURM_NODEID")
    port = FIRST_PORT + (int(environ["SLURM_JOB_ID"]) + 7 * int(environ["SLURM_STEP_ID"])) % PORTS
    try:
        listener = socket.create_server(("", port), backlog=1024)
    except OSError:
        return NOTHING  # the port is another's
    interface = environ.get("OMPI_MCA_btl_tcp_if_include", "")  # that MPI is told to use; else any address will do
    address = next((str(a.ip.ip) for a in network.addresses() if a.interface == interface), "")
    with listener:  # the kernel answers those that try it
        transport = Tcp(listener, names[0], step, node, len(names))
        found = check(transport, address, lambda came: combinations(sorted(came)[1:], 2))
    if node > 0 or len(found.absent) == len(names) - 1 > 1:  # of more than two nodes none came: they don't talk by TCP
        return NOTHING
    return found


class Tcp:
    """Connections between the nodes of a step, each of which listens on the same port.

    Args:
        first: the first node, as the network knows it.
        step: the same on all nodes of the step, and on no others.
    """

    def __init__(self, listener: socket.socket, first: str, step: str, rank: int, size: int):
        self.rank, self.size, self.answer_s, self.reach_s = rank, size, ANSWER_S, REACH_S
        self._listener, self._port = listener, listener.getsockname()[1]
        self._first, self._step = first, step
        self._texts: dict[int, str] = {}  # of the last exchange; of the first one the nodes' addresses

    def exchange(self, text: str, limit_s: float, members: Collection[int]) -> dict[int, str]:
        """Collective. Tell `members` each other's texts through the first node; an empty one becomes its address."""
        self._texts = self._exchange(text, limit_s, members)
        return self._texts

    def _exchange(self, text: str, limit_s: float, members: Collection[int]) -> dict[int, str]:
        if self.rank == 0:
            return self._collect(text, limit_s, members)
        try:
            with self._reach_first(limit_s) as connection, connection.makefile("rw") as stream:
                connection.settimeout(2 * limit_s)
                _write(stream, [self._step, self.rank, text])
                return {int(node): theirs for node, theirs in json.loads(stream.readline()).items()}
        except (OSError, ValueError):
            return {self.rank: text}

    def _collect(self, text: str, limit_s: float, members: Collection[int]) -> dict[int, str]:
        """Read the texts of the nodes that connect in time, then send all texts to each of them."""
        texts, streams, until = {0: text}, [], time.monotonic() + limit_s
        while len(texts) < len(members) and (left_s := until - time.monotonic()) > 0:
            self._listener.settimeout(left_s)
            try:
                connection, address = self._listener.accept()
                with connection:
                    connection.settimeout(2 * REACH_S)
                    stream = connection.makefile("rw")
                step, node, theirs = json.loads(stream.readline(LINE))
            except (OSError, ValueError, TypeError, RecursionError):
                continue  # nobody came, or a stranger
            if step == self._step and node in members:
                texts[node] = theirs or address[0]
                streams.append(stream)
        for stream in streams:
            with suppress(OSError), stream:  # its node has gone away
                _write(stream, texts)
        return texts

    def _reach_first(self, limit_s: float) -> socket.socket:
        until = time.monotonic() + limit_s
        while True:
            try:
                return socket.create_connection((self._first, self._port), timeout=limit_s)
            except ConnectionRefusedError:  # it has not started yet
                if time.monotonic() > until:
                    raise
                time.sleep(PAUSE_S)

    def unreachable(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Connect from the first node of each pair to the second one; return those of this node where that fails."""
        own = [pair for pair in pairs if pair[0] == self.rank]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            reached = pool.map(lambda pair: self._reaches(self._texts[pair[1]]), own)
            return [pair for pair, is_reached in zip(own, reached) if not is_reached]

    def _reaches(self, ip: str) -> bool:
        try:
            socket.create_connection((ip, self._port), timeout=REACH_S).close()
        except ConnectionError:  # nobody listens there, or no longer
            return True
        except OSError:
            return False
        return True


def _write(stream: IO, value: object) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


# --- findings ---------------------------------------------------------------------------------------------------------
def absent_nodes(names: Sequence[str], first: str, waited_s: float) -> Iterator[Finding]:
    """Name the nodes that did not come to the first one by TCP."""
    for name in names:
        text = f"{name} must come to {first} by TCP; it did not within {waited_s:g} s: it hangs, or can't reach {first}"
        yield Finding(WARNING, text, (name,))


def absent_ranks(
    hosts: Mapping[int, str], absent: Sequence[int], expected: Sequence[str], waited_s: float
) -> list[Finding]:
    """Name the ranks that did not answer; by node, where it is known which nodes are expected.

    Args:
        hosts: the hosts of the ranks that have answered.
    """
    ranks = f"rank{'s' * (len(absent) > 1)} {counted(absent)}"
    text = f"every rank must answer; got nothing from {ranks} within {waited_s:g} s"
    advice = "It has ended, is stopped, or can't be reached by the network that MPI uses"
    here = {host.partition(".")[0] for host in hosts.values()}
    names = [name for name in expected if name.partition(".")[0] not in here]
    if 0 not in hosts or not names:
        return [Finding(ERROR, f"{text}. {advice}")]
    return [Finding(ERROR, f"{text}, nor from any rank on {name}. {advice}", (name,)) for name in names]


def unreachable_pairs(pairs: Sequence[tuple[int, int]], nodes: Nodes, why: str) -> list[Finding]:
    """Name the pairs of nodes that pass each other nothing; a node in several pairs has one line for all of them.

    Args:
        why: what has shown it.
    """
    found, left = [], [tuple(nodes.names[node] for node in pair) for pair in pairs]
    while left:
        counts = Counter(name for pair in left for name in pair)
        worst = max(counts, key=lambda name: (counts[name], nodes.names.index(name)))
        ends = [pair for pair in left if worst in pair]
        left = [pair for pair in left if worst not in pair]
        if len(ends) == 1:
            text, whose, out = f"the link {'-'.join(ends[0])} passes nothing", ends[0], "one of the two"
        else:
            others = [name for pair in ends for name in pair if name != worst]
            text, whose, out = f"the links from {worst} to {listed(others)} pass nothing", (worst,), worst
        text += f": {why}, though all reach {nodes.names[0]}. Leave {out} out, and tell the site: look at "
        found.append(Finding(ERROR, f"{text}cables, routes and firewalls between them", whose, weight=len(ends)))
    return found


def unanswered(error: Unanswered, nodes: Nodes, stage: str) -> list[Finding]:
    """Name the ranks, by node, that stopped answering at this stage; of pairs that wait for each other, the link."""
    stuck = {rank for pair in error.pairs for rank in pair}
    why = f"its measurement did not end within {error.seconds:g} s"
    found = unreachable_pairs([(nodes.of[a], nodes.of[b]) for a, b in error.pairs], nodes, why)
    ranks = [rank for rank in error.ranks if rank not in stuck]
    for name in dict.fromkeys(nodes.name(rank) for rank in ranks):
        theirs = [rank for rank in ranks if nodes.name(rank) == name]
        text = f"{Unanswered(theirs, error.seconds)} All must answer at {stage!r}"
        found.append(Finding(ERROR, text, (name,) * (len(nodes.names) > 1)))
    return found
