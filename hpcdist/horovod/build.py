"""`hpcdist horovod build`: from the cache or compiled, proven on two ranks, and installed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcdist.errors import BuildError, ConfigError
from hpcdist.horovod import cache, check, tools, wheel
from hpcdist.horovod.tools import Search, Tools, Wanted

NEEDED = {"cloudpickle": "cloudpickle", "psutil": "psutil", "yaml": "pyyaml", "packaging": "packaging"}
NEEDED_TO_BUILD = {"setuptools": "setuptools", "packaging": "packaging"}
JOB_BYTES = 2 << 30  # that one compiler takes for torch's headers


@dataclass(frozen=True)
class Options:
    """What the user chose beside the tools."""

    folder: Path  # of the cache
    install: bool = True
    rebuild: bool = False
    source: Path | None = None
    launcher: str | None = None
    jobs: int | None = None


def run(options: Options, wanted: Wanted, environ: Mapping[str, str], say: Callable[[str], None]) -> dict:
    """Makes sure that there is a wheel that works, and installs it; what there is now, for the user.

    Args:
        say: tells what is done meanwhile.

    Raises:
        ConfigError: an option breaks its rule.
        BuildError: a part of it failed: which, and what to do.
    """
    if options.source is not None and not options.source.is_file():
        raise ConfigError(
            f"--source must be the file of Horovod's source package; got {options.source}. Check the path."
        )
    search = Search(environ)
    found = tools.find(wanted, search)
    _tell(found, say)
    key = cache.key(found, search.prefix)
    entry = cache.Entry(options.folder, key)
    launcher = launcher_of(found, options.launcher, search)
    with entry.locked(lambda: say("another process builds the same wheel; waiting for it")):
        path = None if options.rebuild else entry.wheel
        if path is None:
            path = _make(options, found, entry, search, launcher, say)
        else:
            say(f"{path} was built before")
        proven = {}
        if options.install:
            install(path, entry.log, environ, say)
            say("summing on 2 ranks by what is installed")
            proven = check.prove(launcher, environ, entry.log)
    return {"wheel": path, "log": entry.log, "installed": options.install, **proven, **key}


def _tell(found: Tools, say: Callable[[str], None]) -> None:
    gpu = f"CUDA {found.cuda_version} in {found.cuda_home}, NCCL in {found.nccl_home}"
    say(f"{found.cxx}; {found.cmake}; {found.mpicxx}: {found.mpi_version}; torch {found.torch}")
    say(f"GPU operations: {gpu if found.cuda_home else f'none ({found.why_no_gpu})'}")


def _make(
    options: Options,
    found: Tools,
    entry: cache.Entry,
    search: Search,
    launcher: list[str],
    say: Callable[[str], None],
) -> Path:
    """A new wheel, which is kept only once two ranks have summed by it."""
    start, jobs = time.monotonic(), options.jobs or _jobs()
    entry.log.write_text(f"{found}\n")
    with entry.building() as folder:
        _pip_install(NEEDED_TO_BUILD, None, entry.log, search.environ, say)
        say(f"building Horovod {cache.VERSION} by {jobs} compilers at a time: some minutes. Log: {entry.log}")
        made = wheel.build(found, folder, search, options.source, jobs, entry.log, say)
        unpacked = folder / "unpacked"
        with zipfile.ZipFile(made) as archive:
            archive.extractall(unpacked)
        _pip_install(NEEDED, None if options.install else unpacked, entry.log, search.environ, say)
        say("summing on 2 ranks by what was built")
        check.prove(launcher, search.environ, entry.log, unpacked)
        path = entry.keep(made)
    say(f"built in {time.monotonic() - start:.0f} s: {path}")
    return path


def _jobs() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // JOB_BYTES))


def launcher_of(found: Tools, chosen: str | None, search: Search) -> list[str]:
    """The command that starts ranks, up to their number: the launcher beside MPI's compiler, else on PATH."""
    if chosen is not None:
        return shlex.split(chosen)
    beside = Search({"PATH": search.path}, Path(found.mpicxx).parents[1])
    program = beside.program("mpirun", "mpiexec")
    if program is None:
        raise BuildError(
            "launcher: mpirun or mpiexec of that MPI must be on PATH; got none. Name it: --launcher 'srun --mpi=pmix "
            "-n'."
        )
    return [program, "-n"]


# --- installing -------------------------------------------------------------------------------------------------------
def install(path: Path, log: Path, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Puts the wheel, and what it needs, into the running environment, unless it is there."""
    _pip_install(NEEDED, None, log, environ, say)
    if installed() == hashlib.sha256(path.read_bytes()).hexdigest():
        return
    say(f"installing it into {sys.prefix}")
    _pip(["install", "--no-deps", "--force-reinstall", str(path)], log, environ)


def installed() -> str | None:
    """The sha256 of the wheel that Horovod was installed from; None where pip doesn't know one."""
    try:
        told = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        return json.loads(told or "{}")["archive_info"]["hashes"]["sha256"]
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return None


def _pip_install(
    names: Mapping[str, str], folder: Path | None, log: Path, environ: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Installs packages, by the module of each, that are not there; into `folder` rather than the environment."""
    missing = [package for module, package in names.items() if importlib.util.find_spec(module) is None]
    if missing:
        say(f"installing {', '.join(missing)}, which Horovod needs")
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
