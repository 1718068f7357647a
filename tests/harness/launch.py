"""Starting a job from a test."""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import pty
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE

from hpcdist.comm.launch import unlaunched

TESTS = Path(__file__).parents[1]
IMPORTS = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}  # the library, and the tests' own modules
# What Python reads first in every process of a job. To the library, lines in a folder of this name are not the user's.
SITE = Path(__file__).with_name("dist-packages")
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",  # a rank that waits leaves its core to other tests
    "OMPI_MCA_threads_pthreads_nanosleep_time": "300000",
    "OMPI_MCA_osc": "^ucx",  # see jobs/setup.sh
    "OMPI_MCA_btl": "^ofi",
    "OMP_NUM_THREADS": "1",
}


def find_mpirun() -> str | None:
    """The mpirun beside this Python, else the one on PATH."""
    beside = Path(sys.prefix) / "bin" / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def launch(
    size: int,
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 200.0,
    options: Sequence[str] = (),
    compiler: bool = False,
    preloaded: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` on `size` ranks, with further `options` of mpirun; stdout, stderr and the exit status.

    Without `compiler` the job can't use torch's, and starts sooner. With `preloaded` it can, and its ranks are forks of
    a process that has imported these modules: worth it where several jobs of a file use what takes seconds to import.

    Raises subprocess.TimeoutExpired, after ending the job, if it takes longer than `timeout_s`.
    """
    command = _command(size, arguments, options)
    with (
        launch_environment(env, compiler, preloaded) as environment,
        subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True, errors="replace") as job,
    ):
        try:
            stdout, stderr = job.communicate(timeout=timeout_s)
        except BaseException:
            job.terminate()  # mpirun ends its ranks; killed, it would leave them behind
            raise
    return subprocess.CompletedProcess(command, job.returncode, stdout, stderr)


@contextmanager
def started(
    size: int, arguments: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """The same job under way; what it writes goes to `log`. Ended at the end, if it has not come to it by itself."""
    with log.open("wb") as out, launch_environment(env) as environment:
        job = subprocess.Popen(_command(size, arguments, ()), env=environment, stdout=out, stderr=out)
        try:
            yield job
        finally:
            job.terminate()
            job.wait()


def on_terminal(
    words: Sequence[str],
    environment: Mapping[str, str],
    act: Callable[[int, bytearray, Callable[[], bool]], None],
    limit_s: float = 60.0,
) -> tuple[str, int]:
    """Runs a command on a terminal of its own; what it has shown, and its exit status as the shell gives it.

    `act` gets the terminal to type on, what has been shown so far, and a function that says whether the command runs.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell in the background ignores it for its children
        os.execvpe(words[0], words, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    shown = bytearray()
    reader = threading.Thread(target=_read_to_end, args=(terminal, shown), daemon=True)
    try:
        reader.start()
        act(terminal, shown, reader.is_alive)
        reader.join(limit_s)
    finally:
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    return shown.decode().replace("\r\n", "\n"), os.waitstatus_to_exitcode(status)


def _read_to_end(terminal: int, shown: bytearray) -> None:
    with suppress(OSError):  # which a terminal raises once nobody has it open any more
        while part := os.read(terminal, 4096):
            shown += part


def wait_until(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Looks now and then until it is so. Raises TimeoutError."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not so after {limit_s} s")
        time.sleep(0.02)


def commands() -> list[str]:
    """List the commands of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # ended meanwhile
            found.append(path.read_text(errors="replace"))
    return found


def _command(size: int, arguments: Sequence[str | Path], options: Sequence[str]) -> list[str]:
    return [find_mpirun(), *options, "-n", str(size), sys.executable, *map(str, arguments)]


@contextmanager
def launch_environment(
    env: Mapping[str, str] | None, compiler: bool = False, preloaded: tuple[str, ...] = ()
) -> Iterator[dict[str, str]]:
    """With a folder for what mpirun keeps under its process id: what a killed one leaves stops a later one there."""
    with tempfile.TemporaryDirectory(prefix="mpirun-", ignore_cleanup_errors=True) as folder:
        given = {**unlaunched(os.environ), **SETTINGS, "PRTE_MCA_prte_tmpdir_base": folder, **(env or {})}
        if compiler:
            yield given
            return
        paths = [str(SITE), given.get("PYTHONPATH", "")]
        with _served(Path(folder, "server"), preloaded) as address:
            yield {**given, **_compiler(preloaded), "PYTHONPATH": os.pathsep.join(paths), "FORKSERVER": address}


@contextmanager
def _served(path: Path, preloaded: tuple[str, ...]) -> Iterator[str]:
    """Serves a job at this address; in the end kills the ranks that are left."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        lifeline, other_end = socket.socketpair()
        with other_end:
            socket.send_fds(_forkserver(preloaded), [b"serve"], [listener.fileno(), other_end.fileno()])
    with lifeline:
        yield str(path)


@functools.cache
def _forkserver(preloaded: tuple[str, ...]) -> socket.socket:
    """Starts what serves all jobs of this process, and ends with it; what takes its requests."""
    here = {**unlaunched(os.environ), **SETTINGS, **_compiler(preloaded)}
    here["PYTHONPATH"] = os.pathsep.join([str(SITE), str(TESTS.parent)])
    requests, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other_end:
        given = other_end.fileno()
        command = [sys.executable, SITE / "forkserver.py", str(given), *preloaded]
        # In a session of its own: Ctrl-C is for the launchers of jobs.
        server = subprocess.Popen(command, env=here, pass_fds=[given], stdin=DEVNULL, start_new_session=True)
    atexit.register(server.wait)
    atexit.register(requests.close)  # first: then it ends
    return requests


def _compiler(preloaded: tuple[str, ...]) -> dict[str, str]:
    return {"TORCH_COMPILER": "used"} if preloaded else {}
