"""Fork the ranks of jobs off a process that has imported torch and the library.

To import them takes a second of a core: more than all else that a rank does in most tests, which launch many hundred.
`launch.py` starts one such process for all of its jobs, and has it fork a server for each: the parent of the ranks.
mpirun starts `python script.py` as ever. There `handover.py` gives script, environment and streams to the server,
passes on signals, and ends as the fork ends. To mpirun, MPI and the script all is as it would be without.

The ranks of a job share one seed of `hash`. Those of pytest under a launcher do not.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PRELOADED = ("torch", "h5py", "hpcdist.session", "hpcdist.train")  # none that starts MPI, or threads
MOST_BYTES = 1 << 20  # of a program's description
POLL_S = 0.005  # how often to look for ranks that have ended


class Program(NamedTuple):
    """What a rank runs, and where, as the interpreter that mpirun started would have."""

    command: list[str]
    path: list[str]
    environment: dict[str, str]
    folder: str
    cores: list[int]


class Rank(NamedTuple):
    """A fork, and the connection to the process that mpirun started."""

    pid: int
    connection: socket.socket

    def has_ended(self) -> bool:
        """Whether it has; if so tells how."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            with self.connection, suppress(OSError):  # nobody listens: it has been killed
                self.connection.send(str(status).encode())
        return pid != 0

    def signal(self, number: int) -> None:
        """Sends a signal to it and to what it has started, as mpirun does."""
        with suppress(ProcessLookupError):  # it is about to begin
            os.killpg(self.pid, number)


def main() -> Program:
    """Serves jobs until the process that launches them ends; returns in their ranks."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    names = sys.argv[2:] or PRELOADED
    for name in names:
        importlib.import_module(name)
    if "mpi4py.MPI" in sys.modules or len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"modules to import before a fork must start neither MPI nor threads; got {names}")
    gc.freeze()  # collections, and the end of an interpreter, leave alone what ranks share
    while True:
        message, sockets, *_ = socket.recv_fds(requests, 16, 2)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG if message else 0)[0]:
                pass
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return _serve(*(socket.socket(fileno=number) for number in sockets))
        for number in sockets:
            os.close(number)


def _serve(listener: socket.socket, lifeline: socket.socket) -> Program:
    """Forks the ranks of a job until it is over; returns in each of them."""
    ranks: list[Rank] = []
    while True:
        sockets = [listener, lifeline, *(rank.connection for rank in ranks)]
        ready, _, _ = select.select(sockets, [], [], POLL_S)
        ranks = [rank for rank in ranks if not rank.has_ended()]
        for rank in ranks:
            if lifeline in ready:
                rank.signal(signal.SIGKILL)
            elif rank.connection in ready:  # a signal to pass on; nothing where the other end has been killed
                rank.signal(int(rank.connection.recv(16) or signal.SIGKILL))
        if lifeline in ready and not ranks:
            os._exit(0)
        if listener in ready:
            connection, _ = listener.accept()
            message, streams, *_ = socket.recv_fds(connection, MOST_BYTES, 3)
            pid = os.fork()
            if pid == 0:
                os.setpgrp()
                for each in (*sockets, connection):
                    each.close()
                _take(streams)
                return Program(**json.loads(message))
            ranks.append(Rank(pid, connection))
            for number in streams:
                os.close(number)


# --- in a rank --------------------------------------------------------------------------------------------------------
def _take(streams: Iterable[int]) -> None:
    """Makes these files the standard streams."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty() and not sys.stdout.write_through)


def run(program: Program) -> None:
    """Runs a script, or a module, as the main one."""
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    os.sched_setaffinity(0, program.cores)
    sys.modules["numpy"].random.seed()  # as `random` does by itself
    sys.orig_argv[:] = program.command
    sys.modules["__main__"] = script = types.ModuleType("__main__")
    _, name, *arguments = program.command
    if name == "-m":
        sys.path[:] = [program.folder, *program.path]
        sys.argv[:] = arguments
        runpy._run_module_as_main(arguments[0])
    elif name == "-c":
        sys.path[:] = ["", *program.path]
        sys.argv[:] = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), vars(script))
    else:
        file = Path(name).absolute()
        sys.path[:] = [str(file.parent), *program.path]
        sys.argv[:] = [name, *arguments]
        script.__file__ = str(file)
        exec(compile(file.read_bytes(), file, "exec"), vars(script))


if __name__ == "__main__":
    run(main())
