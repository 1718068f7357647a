"""`hpcdist horovod build`: take Horovod's wheel from the cache or compile it, test it on two ranks, and install it.

pip compiles the unchanged source package. CMake puts -std=c++14 behind all flags that can be given from outside, and
torch's headers need C++17, so the compiler is a wrapper that replaces this one argument.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from contrib.horovod import check
from contrib.horovod.toolset import BuildOptions, Tools, find, programs, search_path
from hpcdist.comm.launch import unlaunched
from hpcdist.errors import BuildError, ConfigError

VERSION = "0.28.1"  # Horovod's last release
NEEDED = ("setuptools", "packaging", "cloudpickle", "psutil", "pyyaml")  # by the build, or by Horovod itself
JOB_BYTES = 2 << 30  # memory that one compiler takes for torch's headers
UP_TO_LIBRARIES = "$ORIGIN/../../../.."  # from site-packages/horovod/torch to the environment's lib
# What Horovod's sources use and don't include; the standard library of GCC 13 does so no more.
HEADERS = ("algorithm", "cstdint", "cstdlib", "functional", "memory", "mutex", "stdexcept", "string", "utility")
INCLUDED = " ".join(f"-include {header}" for header in HEADERS)
RANKS = 2  # that test a build
CHECK_S, BUILD_S = 180.0, 2 * 3600.0  # limits
_logger = logging.getLogger("hpcdist")

# Let two ranks run on any machine, also for root in a container; the user's settings win.
ANYWHERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}

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
    (r"No matching distribution|Could not find a version|Failed to establish|Connection.*(?:refused|timed out|broken)",
     "Give pip a package index, or the file of a source package: --source FILE."),
)  # fmt: skip
ADVICE = {
    "download of the source": "Try `pip download --no-deps horovod`, or give a file: --source FILE.",
    "configure": "The log's last lines say what CMake misses.",
    "compile": "The log's first `error:` says why; another compiler is chosen by --cxx PATH.",
}


def default_folder() -> Path:
    """Return the folder of the cache, in XDG_CACHE_HOME or ~/.cache."""
    return platformdirs.user_cache_path("hpcdist", appauthor=False) / "horovod"


def run(options: BuildOptions, environ: Mapping[str, str]) -> dict:
    """Find or build a wheel that works, and install it. Return facts for the user: wheel, log, versions.

    The cache takes a wheel, in one step, only after two ranks have summed by it.

    Raises:
        ConfigError: an option breaks its rule.
        BuildError: a part of the build failed; the message names the part and the remedy.
    """
    if options.source is not None and not options.source.is_file():
        raise ConfigError(
            f"--source must be the file of Horovod's source package; got {options.source}. Check the path."
        )
    tools = find(options, environ)
    gpu = tools.gpu
    shown = f"CUDA {gpu.cuda} in {gpu.cuda_home}, NCCL in {gpu.nccl_home}" if gpu.nccl_home else f"none ({gpu.lack})"
    _logger.info(f"{tools.cxx}; {tools.cmake}; {tools.mpicxx}: {tools.mpi}; GPU operations: {shown}")
    launcher, key = launcher_of(tools, options.launcher, search_path(environ)), cache_key(tools)
    with (
        locked(options.folder, key) as (entry, log),
        tempfile.TemporaryDirectory(dir=options.folder, prefix="building-") as scratch,
    ):
        log.write_text(f"{tools}\n")
        pip_install(NEEDED, log, environ)
        kept, folder, start = None if options.rebuild else wheel_in(entry), Path(scratch), time.monotonic()
        jobs = options.jobs or most_jobs()
        wheel = kept or compile_wheel(tools, folder, environ, options.source, jobs, log)
        _logger.info(f"summing on {RANKS} ranks by {wheel.name}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "unpacked")
        tested = prove(launcher, job_environment(environ, tools, folder / "unpacked"), log)
        if kept is None:
            shutil.rmtree(entry, ignore_errors=True)
            os.replace(wheel.parent, entry)
            wheel = entry / wheel.name
            _logger.info(f"built in {time.monotonic() - start:.0f} s")
        if options.install:
            _logger.info(f"installing it into {sys.prefix}")
            pip_install(["--no-deps", "--force-reinstall", str(wheel)], log, environ)
    return {"wheel": wheel, "log": log, "installed": options.install, **tested, **key}


def launcher_of(tools: Tools, chosen: str | None, path: str) -> list[str]:
    """Return the command that starts ranks, up to their number: `chosen`, or the launcher of MPI's, or one on PATH."""
    if chosen is not None:
        return shlex.split(chosen)
    found = programs(f"{Path(tools.mpicxx).parent}:{path}", "mpirun", "mpiexec")
    if not found:
        raise BuildError(
            "launcher: mpirun or mpiexec of that MPI must be on PATH; got none. Name it: --launcher 'srun --mpi=pmix "
            "-n'."
        )
    return [found[0], "-n"]


def most_jobs() -> int:
    """Return how many compilers the cores and the memory of this machine take."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // JOB_BYTES))


def logged(command: Sequence[str], environ: Mapping[str, str], log: Path, limit_s: float) -> tuple[int, list[str]]:
    """Run a command, append its output to the log; return its exit status and the output's lines that say something."""
    with log.open("a") as out:
        start = out.tell()
        out.write(f"$ {shlex.join(command)}\n")
        out.flush()
        try:
            status = subprocess.call(
                command,
                env=dict(environ),
                timeout=limit_s,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired:
            status = 1
            out.write(f"\nnothing within {limit_s:g} s\n")
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()[1:]
    return status, [line.strip() for line in lines if line.strip(" -*\n")]


# --- the cache: a folder for each set of versions that a wheel depends on ---------------------------------------------
def cache_key(tools: Tools) -> dict[str, str]:
    """Collect the versions that a wheel depends on."""
    import torch

    return {
        "horovod": VERSION,
        "torch": torch.__version__,
        "mpi": f"{tools.mpi} in {tools.mpi_folder}" if tools.mpi_folder else tools.mpi,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}{sysconfig.get_config_var('ABIFLAGS') or ''}",
        "cuda": f"{tools.gpu.cuda}, NCCL in {tools.gpu.nccl_home}" if tools.gpu.nccl_home else "none",
        "compiler": f"{tools.cxx_version}, cxx11 abi {int(torch.compiled_with_cxx11_abi())}",
        "platform": sysconfig.get_platform(),
    }


@contextmanager
def locked(folder: Path, key: Mapping[str, str]) -> Iterator[tuple[Path, Path]]:
    """Lock a wheel's place in the cache against other processes; give its folder and its log.

    Raises:
        ConfigError: the cache can't be made.
    """
    entry = folder / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--cache must be a folder that can be written; got {folder} ({error.strerror}). Choose another."
        ) from None
    lock = FileLock(entry.with_suffix(".lock"))
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        _logger.info("another process builds the same wheel; waiting for it")
        held = lock.acquire()
    with held:
        yield entry, entry.with_suffix(".log")


def wheel_in(folder: Path) -> Path | None:
    """Find the wheel in a folder; None where it has not been built."""
    return next(iter(sorted(folder.glob("*.whl"))), None)


# --- building ---------------------------------------------------------------------------------------------------------
def compile_wheel(
    tools: Tools, folder: Path, environ: Mapping[str, str], source: Path | None, jobs: int, log: Path
) -> Path:
    """Build a wheel in `folder` from the source package, which pip downloads if None is given; return its path.

    Raises:
        BuildError: the download, CMake or a compiler failed; the message names the part and the remedy.
    """
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
    command += ["--no-binary", "horovod", "-w", str(folder / "wheel"), str(source or f"horovod=={VERSION}")]
    _logger.info(f"building Horovod {VERSION} by {jobs} compilers at a time: some minutes. Log: {log}")
    status, lines = logged(command, settings(tools, folder, environ, jobs), log, BUILD_S)
    wheel = wheel_in(folder / "wheel")
    if status == 0 and wheel:
        return wheel
    text = "\n".join(lines)
    part = "compile" if "Build files have been written to" in text else "configure"
    part = part if "Preparing metadata" in text else "download of the source"
    raise BuildError(f"{part}: pip must build Horovod; got exit status {status}. {advice(part, text)} Log: {log}")


def advice(part: str, log: str) -> str:
    """Return the remedy for a part's failure, by the cause in its log."""
    return next((remedy for cause, remedy in CAUSES if re.search(cause, log)), ADVICE[part])


def settings(tools: Tools, folder: Path, environ: Mapping[str, str], jobs: int) -> dict[str, str]:
    """Return the environment variables of the build, and write its wrappers of compilers into `folder`/bin."""
    wrappers = {"hpcdist-c++": COMPILER.format(cxx=shlex.quote(tools.cxx))}
    for name in ("mpicxx", "mpic++", "mpiCC"):  # CMake looks for any of them
        wrappers[name] = f'#!/bin/sh\nexec {shlex.quote(tools.mpicxx)} "$@"\n'
    (folder / "bin").mkdir()
    for name, text in wrappers.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    own = "WITH_PYTORCH WITHOUT_TENSORFLOW WITHOUT_MXNET WITH_MPI WITH_GLOO".split()
    return {
        **environ,
        **{f"HOROVOD_{name}": "1" for name in own},
        **(_gpu_settings(tools, folder) if tools.gpu.nccl_home else {}),
        "HOROVOD_CPU_OPERATIONS": "MPI",
        "PATH": f"{folder / 'bin'}:{Path(tools.cmake).parent}:{search_path(environ)}",
        "CXX": str(folder / "bin" / "hpcdist-c++"),
        "CXXFLAGS": f"{environ.get('CXXFLAGS', '')} -fno-strict-aliasing {INCLUDED}".strip(),
        "LDFLAGS": f"{environ.get('LDFLAGS', '')} -s -Wl,-rpath,{tools.mpi_folder or UP_TO_LIBRARIES}".strip(),
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # for CMake 4, with the libraries in the source package
    }


def _gpu_settings(tools: Tools, folder: Path) -> dict[str, str]:
    nccl, links = Path(tools.gpu.nccl_home), folder / "nccl"
    library = nccl / "lib" / "libnccl.so.2"
    if library.exists() and not (nccl / "lib" / "libnccl.so").exists():  # torch's package has no libnccl.so to link
        (links / "lib").mkdir(parents=True)
        (links / "include").symlink_to(nccl / "include")
        (links / "lib" / "libnccl.so").symlink_to(library)
        nccl = links
    homes = {"HOROVOD_CUDA_HOME": tools.gpu.cuda_home, "HOROVOD_NCCL_HOME": str(nccl)}
    return {"HOROVOD_GPU_OPERATIONS": "NCCL", **homes}


def pip_install(arguments: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
    """Install packages by pip into the running environment, those that are missing there.

    Raises:
        BuildError: pip fails.
    """
    command = [sys.executable, "-m", "pip", "install", *arguments]
    status, lines = logged(command, environ, log, BUILD_S)
    if status:
        raise BuildError(
            f"install: `{shlex.join(command)}` must work; got: {(lines or ['no message'])[-1]} Install it by hand, in "
            f"an environment of your own (python -m venv). Log: {log}"
        )


# --- testing ----------------------------------------------------------------------------------------------------------
def prove(launcher: Sequence[str], environ: Mapping[str, str], log: Path) -> dict:
    """Sum by Horovod on two ranks, and return their report: ranks, devices, and the features of the build.

    Args:
        launcher: the command that starts ranks, up to their number.
        environ: of the ranks, see `job_environment`.

    Raises:
        BuildError: Horovod does not import, or does not sum.
    """
    importing = [sys.executable, "-c", "import torch, horovod.torch as hvd; hvd.init"]
    command = [*launcher, str(RANKS), sys.executable, check.__file__]
    status, lines = logged(importing, environ, log, CHECK_S)
    if status:
        raise BuildError(f"import: `import horovod.torch` must work; got: {_last(status, lines)} Log: {log}")
    status, lines = logged(command, environ, log, CHECK_S)
    report = json.loads(next((line for line in reversed(lines) if line.startswith('{"ranks"')), "{}"))
    if status or report.get("ranks") != RANKS:
        got = f"worlds of {report['ranks']}" if not status and "ranks" in report else _last(status, lines)
        raise BuildError(
            f"two-rank check: `{shlex.join(command)}` must sum on {RANKS} ranks; got {got} Name the launcher of that "
            f"MPI, --launcher 'srun --mpi=pmix -n', or see what its ranks say. Log: {log}"
        )
    return report


def _last(status: int, lines: Sequence[str]) -> str:
    """Return the exit status and the last line of the output, as the end of a sentence."""
    return f"exit status {status}, {lines[-1] if lines else 'no message'!r}."


def job_environment(environ: Mapping[str, str], tools: Tools, unpacked: Path) -> dict[str, str]:
    """Return the environment of a new job, without the variables of this one's launcher.

    Its ranks import this package, and Horovod from `unpacked`, which finds the environment's MPI: an installed wheel
    does so relative to its own place.
    """
    environ = unlaunched(environ)
    path = [unpacked, Path(__file__).parents[3], environ.get("PYTHONPATH")]
    found = {**ANYWHERE, **environ, "PYTHONPATH": os.pathsep.join(str(one) for one in path if one)}
    if not tools.mpi_folder:
        folders = [f"{sys.prefix}/lib", environ.get("LD_LIBRARY_PATH")]
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return found
