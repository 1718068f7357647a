"""Build one wheel: pip compiles the unchanged source package by a compiler wrapper that replaces C++14 by C++17."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from hpcdist.errors import BuildError
from hpcdist.tools.horovod.cache import VERSION
from hpcdist.tools.horovod.tools import Search, Tools

LIMIT_S = 2 * 3600.0  # for a build that hangs
NEWS_S = 20.0  # between two lines of progress
UP_TO_LIBRARIES = "$ORIGIN/../../../.."  # from site-packages/horovod/torch to the environment's lib
_logger = logging.getLogger(__name__)

# CMake puts -std=c++14 behind all flags that can be given from outside, and torch's headers need C++17.
COMPILER = """#!/bin/sh
for argument do
    shift
    case $argument in -std=c++11 | -std=c++14 | -std=gnu++11 | -std=gnu++14) argument=-std=c++17 ;; esac
    set -- "$@" "$argument"
done
exec {cxx} "$@"
"""

# Patterns in a log, and the remedy for each; the first one that matches counts.
CAUSES = (
    (r"No space left on device", "A disk is full: make room, or choose others by --cache and TMPDIR."),
    (r"Killed signal|cc1plus.*Killed|std::bad_alloc|Cannot allocate memory", "Memory ran out: try --jobs 1."),
    (r"Python\.h: No such file", "Python's headers are missing: apt-get install python3-dev, or load its module."),
    (r"nvcc fatal.*|unsupported GNU version.*", "nvcc refuses the compiler: name one that it takes, --cxx PATH."),
    (r"Could NOT find MPI", "CMake can't use the MPI compiler: try `mpicxx --version`, or name it, --mpicxx PATH."),
    (r"Could NOT find NCCL", "NCCL's library is missing: name the folder that has lib/libnccl.so, --nccl-home PATH."),
    (r"No module named '?(?:setuptools|packaging)", "pip install setuptools packaging."),
    (r"No matching distribution|Could not find a version|Failed to establish|Connection.*(?:refused|timed out|broken)",
     "Give pip a package index, or the file of a source package: --source FILE."),
)  # fmt: skip
ADVICE = {
    "download of the source": "Try `pip download --no-deps horovod`, or give a file: --source FILE.",
    "configure": "The log's last lines say what CMake misses.",
    "compile": "The log's first `error:` says why; another compiler is chosen by --cxx PATH.",
}


def write_programs(folder: Path, tools: Tools) -> Path:
    """Write the wrappers of the compiler and of MPI's into a folder for PATH, and return the compiler's path."""
    folder.mkdir()
    compiler = folder / "hpcdist-c++"
    compiler.write_text(COMPILER.format(cxx=shlex.quote(tools.cxx)))
    for name in ("mpicxx", "mpic++", "mpiCC"):  # CMake looks for any of them
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(tools.mpicxx)} "$@"\n')
    for program in folder.iterdir():
        program.chmod(0o755)
    return compiler


def settings(tools: Tools, folder: Path, search: Search, jobs: int) -> dict[str, str]:
    """Return the environment variables of the build, and put its programs and links into `folder`."""
    compiler = write_programs(folder / "bin", tools)
    within = Path(tools.mpi_folder).is_relative_to(search.prefix)
    rpath = UP_TO_LIBRARIES if within else tools.mpi_folder
    path = [str(compiler.parent), str(Path(tools.cmake).parent), search.path]
    variables = {
        **search.environ,
        "PATH": ":".join(path),
        "CXX": str(compiler),
        "CXXFLAGS": f"{search.environ.get('CXXFLAGS', '')} -fno-strict-aliasing".strip(),
        "LDFLAGS": f"{search.environ.get('LDFLAGS', '')} -s -Wl,-rpath,{rpath}".strip(),
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # for CMake 4, with the libraries in the source package
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_CPU_OPERATIONS": "MPI",
    }
    if tools.cuda_home and tools.nccl_home:
        variables["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        variables["HOROVOD_CUDA_HOME"] = tools.cuda_home
        variables["HOROVOD_NCCL_HOME"] = str(_linkable(Path(tools.nccl_home), folder / "nccl"))
    return variables


def _linkable(nccl: Path, folder: Path) -> Path:
    """Return NCCL's folder; where it has libnccl.so.2 only, as torch's package, make one with a link libnccl.so."""
    library = nccl / "lib" / "libnccl.so.2"
    if not library.exists() or (nccl / "lib" / "libnccl.so").exists():
        return nccl
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(nccl / "include")
    (folder / "lib" / "libnccl.so").symlink_to(library)
    return folder


def build(tools: Tools, folder: Path, search: Search, source: Path | None, jobs: int, log: Path) -> Path:
    """Build a wheel in `folder` and return its path.

    Args:
        source: the source package; by default pip downloads it.
        log: a file to which the build's output is appended.

    Raises:
        BuildError: the download, CMake or a compiler failed; the message names the part and the remedy.
    """
    wheels = folder / "wheel"
    package = str(source) if source is not None else f"horovod=={VERSION}"
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
    command += ["--no-binary", "horovod", "-w", str(wheels), package]
    status = _run(command, settings(tools, folder, search, jobs), log)
    built = sorted(wheels.glob("*.whl"))
    if status == 0 and built:
        return built[0]
    text = log.read_text(errors="replace")
    part = failed_part(text)
    raise BuildError(f"{part}: pip must build Horovod; got exit status {status}. {advice(part, text)} Log: {log}")


def failed_part(log: str) -> str:
    """Name the part of a build that failed, by its log."""
    if "Preparing metadata" not in log:
        return "download of the source"
    return "compile" if "Build files have been written to" in log else "configure"


def advice(part: str, log: str) -> str:
    """Return the remedy for a failure, by the cause in its log."""
    return next((remedy for cause, remedy in CAUSES if re.search(cause, log)), ADVICE[part])


def _run(command: list[str], environ: Mapping[str, str], log: Path) -> int:
    """Run a command and return its exit status. End all processes that it has started with it."""
    start, percent, ended = time.monotonic(), "0", threading.Event()

    def report() -> None:
        while not ended.wait(NEWS_S):
            passed_s = time.monotonic() - start
            _logger.info(f"compiling: {percent} %, {passed_s:.0f} s")
            if passed_s > LIMIT_S:
                _end(pip)

    with (
        log.open("a") as out,
        subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as pip,
    ):
        reporter = threading.Thread(target=report)
        reporter.start()
        try:
            for line in pip.stdout or ():
                out.write(line)
                if match := re.match(r"\s*\[ *(\d+)%\]", line):
                    percent = match[1]
            return pip.wait()
        finally:
            ended.set()
            reporter.join()
            _end(pip)


def _end(pip: subprocess.Popen) -> None:
    try:
        os.killpg(pip.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all have ended
