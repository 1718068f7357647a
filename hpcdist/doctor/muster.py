"""Before MPI: srun's nodes meet by plain TCP, and each tries the others.

Some MPI libraries connect all ranks while they start, or end the job at the first connection that fails: of a node
that hangs, or of two that don't reach each other, nobody would be told. MPI may have a network of its own, so that
what is found here proves nothing against it; all go on. One process of each node takes part, and where srun has not
started it, or another one has the port, none.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, NamedTuple

from hpcdist.comm import interfaces
from hpcdist.comm.launch import number, task

COME_S = 8.0  # how long a node may take to come; not all start at the same moment
TRY_S = 3.5  # how long a connection may take; a packet that is lost is sent again after 1 s, and after 3 s
LONGEST_S = 20.0  # all of it
PAUSE_S = 0.05
FIRST_PORT, PORTS = 30_000, 2_700  # below those that Linux gives to whoever names none
AT_ONCE = 64


class Muster(NamedTuple):
    """On the first node: the nodes that did not come, and pairs of those that passed no TCP, by number."""

    absent: tuple[int, ...] = ()
    severed: tuple[tuple[int, int], ...] = ()


def takes_part(environ: Mapping[str, str]) -> bool:
    """Whether this process does."""
    told = task(environ)
    return told is not None and told.launcher.startswith("srun") and told.local_rank == 0


def hold(environ: Mapping[str, str], names: Sequence[str]) -> Muster:
    """Collective, but waits only so long. Who has come and who reaches whom; on other nodes than the first, nothing.

    In a process of its own: MPI is to start in one that has done nothing yet. (MPICH 5.0.2 sends 4096 bytes from where
    a shorter address lies. Slurm's PMI-2 refuses them if they hold text, and that depends on what was done before.)

    Args:
        names: the step's nodes, as the network knows them.
    """
    command = [sys.executable, "-m", __name__, *names]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LONGEST_S, check=True)
        absent, severed = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return Muster()
    return Muster(tuple(absent), tuple(map(tuple, severed)))


def meet(environ: Mapping[str, str], names: Sequence[str]) -> Muster:
    """What `hold` does, in this process."""
    job, node = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}", number(environ, "SLURM_NODEID")
    port = FIRST_PORT + (int(environ["SLURM_JOB_ID"]) + 7 * int(environ["SLURM_STEP_ID"])) % PORTS
    try:
        with listen(port) as listener:  # the kernel answers those that try it
            if node == 0:
                return lead(listener, job, len(names))
            _follow(names[0], port, node, [job, node, _wanted(environ)])
    except (OSError, ValueError):
        pass  # the port is another's, or the first node can't be reached
    return Muster()


def listen(port: int) -> socket.socket:
    """A socket that listens on that port of all addresses."""
    return socket.create_server(("", port), backlog=1024)


def _wanted(environ: Mapping[str, str]) -> str:
    """This node's address on the interface that MPI is told to use; empty if none."""
    name = environ.get("OMPI_MCA_btl_tcp_if_include", "")
    return next((str(a.ip.ip) for a in interfaces.addresses() if a.interface == name), "")


# --- the first node ---------------------------------------------------------------------------------------------------
def lead(listener: socket.socket, job: str, count: int) -> Muster:
    """Waits for the others of `count` nodes, tells them of each other, and hears what they have found out."""
    come: dict[int, IO] = {}
    ips: dict[int, str] = {}
    until = time.monotonic() + COME_S
    while len(come) < count - 1 and (left_s := until - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            connection, address = listener.accept()
            with connection:
                connection.settimeout(2 * TRY_S)
                stream = connection.makefile("rw")
            theirs, node, ip = json.loads(stream.readline())
        except (OSError, ValueError, TypeError):
            continue  # nobody came, or a stranger
        if theirs == job:
            come[node], ips[node] = stream, ip or address[0]
    for stream in come.values():
        _say(stream, ips)
    if not come and count > 2:
        return Muster()  # these nodes don't talk by TCP
    severed = {(node, other) for node, stream in come.items() for other in _hear(stream) or ()}
    return Muster(tuple(node for node in range(1, count) if node not in come), tuple(sorted(severed)))


def _say(stream: IO, value: object) -> None:
    try:
        stream.write(json.dumps(value) + "\n")
        stream.flush()
    except OSError:
        pass  # it has gone away


def _hear(stream: IO):
    try:
        with stream:
            return json.loads(stream.readline())
    except (OSError, ValueError):
        return None


# --- the others -------------------------------------------------------------------------------------------------------
def _follow(first: str, port: int, node: int, hello: list) -> None:
    with _reach(first, port) as connection, connection.makefile("rw") as stream:
        connection.settimeout(2 * COME_S)
        _say(stream, hello)
        ips = {int(other): ip for other, ip in json.loads(stream.readline()).items()}
        _say(stream, _unreached({other: ip for other, ip in ips.items() if other > node}, port))


def _reach(first: str, port: int) -> socket.socket:
    until = time.monotonic() + COME_S
    while True:
        try:
            return socket.create_connection((first, port), timeout=COME_S)
        except ConnectionRefusedError:  # it has not started yet
            if time.monotonic() > until:
                raise
            time.sleep(PAUSE_S)


def _unreached(ips: Mapping[int, str], port: int) -> list[int]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers: Iterable[bool] = pool.map(lambda ip: _answers(ip, port), ips.values())
        return [node for node, answered in zip(ips, answers) if not answered]


def _answers(ip: str, port: int) -> bool:
    try:
        socket.create_connection((ip, port), timeout=TRY_S).close()
    except ConnectionError:  # nobody listens there, or no longer
        return True
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(meet(os.environ, sys.argv[1:])))
