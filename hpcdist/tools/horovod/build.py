"""`hpcdist horovod build`: take a wheel from the cache or compile it, test it on two ranks, and install it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcdist.errors import BuildError, ConfigError
from hpcdist.tools.horovod import cache, check, tools, wheel
from hpcdist.tools.horovod.tools import ChosenTools, Search, Tools

NEEDED = {"cloudpickle": "cloudpickle", "psutil": "psutil", "yaml": "pyyaml", "packaging": "packaging"}
NEEDED_TO_BUILD = {"setuptools": "setuptools", "packaging": "packaging"}
JOB_BYTES = 2 << 30  # memory that one compiler takes for torch's headers
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildOptions:
    """The user's choices, except those of tools."""

    folder: Path  # of the cache
    install: bool = True
    rebuild: bool = False
    source: Path | None = None
    launcher: str | None = None
    jobs: int | None = None


def run(options: BuildOptions, choice: ChosenTools, environ: Mapping[str, str]) -> dict:
    """Find or build a wheel that works, and install it. Return facts for the user: wheel, log, versions.

    Raises:
        ConfigError: an option breaks its rule.
        BuildError: a part of the build failed; the message names the part and the remedy.
    """
    if options.source is not None and not options.source.is_file():
        raise ConfigError(
            f"--source must be the file of Horovod's source package; got {options.source}. Check the path."
        )
    search = Search(environ)
    toolset = tools.find(choice, search)
    _report(toolset)
    key = cache.key(toolset, search.prefix)
    entry = cache.CachedBuild(options.folder, key)
    launcher = launcher_of(toolset, options.launcher, search)
    with entry.locked(lambda: _logger.info("another process builds the same wheel; waiting for it")):
        path = None if options.rebuild else entry.wheel
        if path is None:
            path = _make(options, toolset, entry, search, launcher)
        else:
            _logger.info(f"{path} was built before")
        tested = {}
        if options.install:
            install(path, entry.log, environ)
            _logger.info("summing on 2 ranks by what is installed")
            tested = check.prove(launcher, environ, entry.log)
    return {"wheel": path, "log": entry.log, "installed": options.install, **tested, **key}


def _report(toolset: Tools) -> None:
    gpu = f"CUDA {toolset.cuda_version} in {toolset.cuda_home}, NCCL in {toolset.nccl_home}"
    _logger.info(f"{toolset.cxx}; {toolset.cmake}; {toolset.mpicxx}: {toolset.mpi_version}; torch {toolset.torch}")
    _logger.info(f"GPU operations: {gpu if toolset.cuda_home else f'none ({toolset.why_no_gpu})'}")


def _make(
    options: BuildOptions,
    toolset: Tools,
    entry: cache.CachedBuild,
    search: Search,
    launcher: list[str],
) -> Path:
    """Build a new wheel. The cache takes it only after two ranks have summed by it."""
    start, jobs = time.monotonic(), options.jobs or _jobs()
    entry.log.write_text(f"{toolset}\n")
    with entry.building() as folder:
        _pip_install(NEEDED_TO_BUILD, None, entry.log, search.environ)
        _logger.info(f"building Horovod {cache.VERSION} by {jobs} compilers at a time: some minutes. Log: {entry.log}")
        new = wheel.build(toolset, folder, search, options.source, jobs, entry.log)
        unpacked = folder / "unpacked"
        with zipfile.ZipFile(new) as archive:
            archive.extractall(unpacked)
        _pip_install(NEEDED, None if options.install else unpacked, entry.log, search.environ)
        _logger.info("summing on 2 ranks by what was built")
        check.prove(launcher, search.environ, entry.log, unpacked)
        path = entry.keep(new)
    _logger.info(f"built in {time.monotonic() - start:.0f} s: {path}")
    return path


def _jobs() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // JOB_BYTES))


def launcher_of(toolset: Tools, chosen: str | None, search: Search) -> list[str]:
    """Return the command that starts ranks, up to their number: `chosen`, or the launcher of MPI's, or one on PATH."""
    if chosen is not None:
        return shlex.split(chosen)
    beside = Search({"PATH": search.path}, Path(toolset.mpicxx).parents[1])
    program = beside.program("mpirun", "mpiexec")
    if program is None:
        raise BuildError(
            "launcher: mpirun or mpiexec of that MPI must be on PATH; got none. Name it: --launcher 'srun --mpi=pmix "
            "-n'."
        )
    return [program, "-n"]


# --- installing -------------------------------------------------------------------------------------------------------
def install(path: Path, log: Path, environ: Mapping[str, str]) -> None:
    """Install the wheel and the packages that it needs into the running environment, unless they are there."""
    _pip_install(NEEDED, None, log, environ)
    if installed() == hashlib.sha256(path.read_bytes()).hexdigest():
        return
    _logger.info(f"installing it into {sys.prefix}")
    _pip(["install", "--no-deps", "--force-reinstall", str(path)], log, environ)


def installed() -> str | None:
    """Return the sha256 of the wheel that Horovod was installed from; None where pip doesn't know one."""
    try:
        origin = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        return json.loads(origin or "{}")["archive_info"]["hashes"]["sha256"]
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return None


def _pip_install(names: Mapping[str, str], folder: Path | None, log: Path, environ: Mapping[str, str]) -> None:
    """Install the packages whose modules are missing, into `folder` or, without one, into the environment.

    Args:
        names: the package of each module.
    """
    missing = [package for module, package in names.items() if importlib.util.find_spec(module) is None]
    if missing:
        _logger.info(f"installing {', '.join(missing)}, which Horovod needs")
        _pip(["install", *([] if folder is None else ["--target", str(folder)]), *missing], log, environ)


def _pip(arguments: list[str], log: Path, environ: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, errors="replace")
    with log.open("a") as out:
        out.write(f"$ {shlex.join(command)}\n{done.stdout}{done.stderr}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(
            f"install: `{shlex.join(command)}` must work; got: {last} Install it by hand, in an environment of your "
            f"own (python -m venv). Log: {log}"
        )
