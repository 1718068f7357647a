"""The start-up check of srun's nodes, by plain TCP, before MPI starts.

Some MPI libraries connect all ranks while they start, or end the job at the first connection that fails: nobody would
learn of a node that hangs, or of two that don't reach each other. One process of each node takes part; where srun has
not started it, or another program has the port, none does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import combinations
from typing import IO

from hpcdist.comm.launch import number, task
from hpcdist.comm.network import interfaces
from hpcdist.tools.doctor.startup.check import Pair, Result, check

ANSWER_S = 8.0  # how long a node may take to come; not all start at the same moment
REACH_S = 3.5  # how long another one may take to connect; a packet that is lost is sent again after 1 s, and after 3 s
LONGEST_S = 20.0  # all of it
PAUSE_S = 0.05
FIRST_PORT, PORTS = 30_000, 2_700  # below those that Linux gives to whoever names none
AT_ONCE = 64
NOTHING = Result({})


def takes_part(environ: Mapping[str, str]) -> bool:
    """Tell whether this process is the one of its node that takes part."""
    own = task(environ)
    return own is not None and own.launcher.startswith("srun") and own.local_rank == 0


def check_nodes(environ: Mapping[str, str], names: Sequence[str]) -> Result:
    """Collective, with a limit. Find absent nodes and unreachable pairs of nodes, by number; on the first node only.

    In a process of its own: MPI is to start in one that has done nothing yet. (MPICH 5.0.2 sends 4096 bytes from where
    a shorter address lies. Slurm's PMI-2 refuses them if they hold text, and that depends on what was done before.)

    Args:
        names: the step's nodes, as the network knows them.
    """
    command = [sys.executable, "-m", __name__, *names]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LONGEST_S, check=True)
        absent, unreachable = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return NOTHING
    return Result({}, tuple(absent), tuple(map(tuple, unreachable)))


def check_here(environ: Mapping[str, str], names: Sequence[str]) -> Result:
    """Do as `check_nodes`, in this process."""
    step, node = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}", number(environ, "SLURM_NODEID")
    port = FIRST_PORT + (int(environ["SLURM_JOB_ID"]) + 7 * int(environ["SLURM_STEP_ID"])) % PORTS
    try:
        listener = listen(port)
    except OSError:
        return NOTHING  # the port is another's
    with listener:  # the kernel answers those that try it
        transport = Tcp(listener, names[0], step, node, len(names))
        found = check(transport, _wanted(environ), lambda came: combinations(sorted(came)[1:], 2))
    if node > 0 or len(found.absent) == len(names) - 1 > 1:  # of more than two nodes none came: they don't talk by TCP
        return NOTHING
    return found


def listen(port: int) -> socket.socket:
    """Open a socket that listens on that port of all addresses."""
    return socket.create_server(("", port), backlog=1024)


def _wanted(environ: Mapping[str, str]) -> str:
    """Return this node's address on the interface that MPI is told to use; empty if none."""
    name = environ.get("OMPI_MCA_btl_tcp_if_include", "")
    return next((str(a.ip.ip) for a in interfaces.addresses() if a.interface == name), "")


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

    def exchange(self, text: str, limit_s: float, members: Collection[int]) -> dict[int, str]:
        """Collective. Tell `members` each other's texts through the first node; an empty one becomes its address."""
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
                step, node, theirs = json.loads(stream.readline())
            except (OSError, ValueError, TypeError):
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

    def unreachable(self, pairs: Sequence[Pair], texts: Mapping[int, str]) -> list[Pair]:
        """Connect from the first node of each pair to the second one; return those of this node where that fails."""
        own = [pair for pair in pairs if pair[0] == self.rank]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            reached = pool.map(lambda pair: self._reaches(texts[pair[1]]), own)
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


if __name__ == "__main__":
    print(json.dumps(check_here(os.environ, sys.argv[1:])[1:]))
