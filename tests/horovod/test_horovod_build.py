"""`hpcdist horovod build`: every failure says which part it is and what to do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tools_here import FOUND

from hpcdist.comm.external import horovod as hvd
from hpcdist.comm.external import horovod_process
from hpcdist.errors import BuildError, ConfigError
from hpcdist.tools.horovod import build, check, wheel
from hpcdist.tools.horovod.tools import ChosenTools, Search


@pytest.fixture(autouse=True)
def all_levels(caplog):
    caplog.set_level(logging.INFO, "hpcdist")


# --- the build --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("asked", ["c++11", "c++14", "gnu++14", "c++17", "c++20"])
def test_the_compiler_takes_17_for_what_is_older(tmp_path, asked):
    gxx = Search(os.environ).program("g++")
    if gxx is None:
        pytest.skip("this machine has no g++")
    compiler = wheel.write_programs(tmp_path / "a b", replace(FOUND, cxx=gxx))
    source = tmp_path / "with space.cc"
    source.write_text('#define NAME "two words"\nlong version = __cplusplus; const char* name = NAME;\n')
    done = subprocess.run([compiler, f"-std={asked}", "-E", source], capture_output=True, text=True)
    assert ("202002" if asked == "c++20" else "201703") in done.stdout and '"two words"' in done.stdout, done.stderr


SETUP = """
import sys
from setuptools import setup
if "bdist_wheel" in sys.argv:
    print({printed!r}, flush=True)
    sys.exit(1)
setup(name="horovod", version="0.28.1")
"""


def source_package(folder: Path, printed: str) -> Path:
    """A package of Horovod's name whose build prints that and fails."""
    (folder / "setup.py").write_text(SETUP.format(printed=printed))
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    path = folder / "horovod-0.28.1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("setup.py", "PKG-INFO"):
            archive.add(folder / name, f"horovod-0.28.1/{name}")
    return path


CONFIGURED = "-- Build files have been written to: /tmp/x\n[  7%] Building CXX object a.o\n"


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("CMake Error: no luck", "configure: pip must build Horovod; got exit status 1. The log's last lines say what"),
        (f"{CONFIGURED}fatal error: Python.h: No such file", "compile: .* Python's headers are missing"),
    ],
)  # fmt: skip
def test_a_failed_build_says_which_part_and_what_to_do(tmp_path, caplog, printed, message):
    log = tmp_path / "log"
    with pytest.raises(BuildError, match=message) as error:
        wheel.build(FOUND, tmp_path, Search(os.environ), source_package(tmp_path, printed), 1, log)
    assert str(error.value).endswith(f"Log: {log}") and printed.splitlines()[-1] in log.read_text()
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("Could NOT find MPI (missing: MPI_CXX_FOUND)", "--mpicxx PATH"),
        ("Could NOT find NCCL", "--nccl-home PATH"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("cc1plus: out of memory allocating; std::bad_alloc", "--jobs 1"),
        ("ld: final link failed: No space left on device", "TMPDIR"),
        ("#error -- unsupported GNU version! gcc versions later than 13 are not supported!", "--cxx PATH"),
        ("a.cc:1: error: expected ;", "The log's first `error:`"),
    ],
)
def test_what_a_log_tells_of_the_cause(line, what):
    assert what in wheel.advice("compile", f"[ 10%] Building\n{line}\n")


@pytest.mark.parametrize("source", ["broken", None])
def test_a_failed_download_says_so(tmp_path, caplog, source):
    """A file that is no package; and an index that has none."""
    if source:
        (tmp_path / "broken.tar.gz").write_text("no archive")
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    file = tmp_path / "broken.tar.gz" if source else None
    with pytest.raises(BuildError, match="download of the source: pip must build Horovod; got exit status .*--source"):
        wheel.build(FOUND, tmp_path, Search(environ), file, 1, tmp_path / "log")
    assert caplog.messages == []


def test_what_pip_can_not_install_is_told(tmp_path, caplog):
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    names = {"no_such_module_anywhere": "no-such-package-anywhere"}
    with pytest.raises(BuildError, match="install: `.*no-such-package-anywhere` must work; got: .* Install it by"):
        build._pip_install(names, None, tmp_path / "log", environ)
    build._pip_install({"torch": "torch"}, None, tmp_path / "log", environ)  # is there
    assert caplog.messages == ["installing no-such-package-anywhere, which Horovod needs"]


def test_a_source_that_is_no_file_is_refused(tmp_path, caplog):
    options = build.BuildOptions(tmp_path, source=tmp_path / "none.tar.gz")
    with pytest.raises(ConfigError, match="--source must be the file of Horovod's source package; got .*none.tar.gz"):
        build.run(options, ChosenTools(), os.environ)
    assert caplog.messages == []


# --- the check --------------------------------------------------------------------------------------------------------
def fake(folder: Path, text: str) -> Path:
    (folder / "horovod" / "torch").mkdir(parents=True)
    (folder / "horovod" / "__init__.py").touch()
    (folder / "horovod" / "torch" / "__init__.py").write_text(text)
    return folder


def test_what_does_not_import_is_told(tmp_path):
    unpacked = fake(tmp_path, "raise ImportError('undefined symbol: _ZN3c10')")
    with pytest.raises(BuildError, match="import: `import horovod.torch` must work; got: .*symbol: _ZN3c10.*Log: "):
        check.prove(["mpirun", "-n"], os.environ, tmp_path / "log", unpacked)


@pytest.mark.parametrize(
    ("launcher", "got"),
    [
        (["false"], "exit status 1, 'no message'"),
        ([sys.executable, "-c", "print('{\"ranks\": 1}')"], "worlds of 1"),
        ([sys.executable, "-c", "print('all is well')"], "exit status 0, 'all is well'"),
    ],
)
def test_ranks_that_do_not_sum_are_told(tmp_path, launcher, got):
    unpacked = fake(tmp_path, "init = None")
    with pytest.raises(BuildError, match=f"two-rank check: `.*` must sum on 2 ranks; got {got}.* Name the launcher"):
        check.prove(launcher, os.environ, tmp_path / "log", unpacked)


def test_the_launcher_is_the_one_beside_the_mpi_compiler(program, tmp_path):
    mpirun, other = program("mpirun", folder="mpi/bin"), program("mpirun", folder="other")
    found = replace(FOUND, mpicxx=str(program("mpicxx", folder="mpi/bin")))
    search = Search({"PATH": str(other.parent)}, tmp_path)
    assert build.launcher_of(found, None, search) == [str(mpirun), "-n"]
    assert build.launcher_of(found, "srun --mpi=pmix -n", search) == ["srun", "--mpi=pmix", "-n"]
    with pytest.raises(BuildError, match="launcher: mpirun or mpiexec of that MPI must be on PATH; got none. Name it"):
        build.launcher_of(FOUND, None, Search({"PATH": ""}, tmp_path))


def test_a_new_job_does_not_take_itself_for_a_rank_of_this_one():
    launched = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "OMPI_MCA_btl": "tcp"}
    environ = check.environment(launched, Path("/x"))
    assert not {"OMPI_COMM_WORLD_RANK", "PMIX_RANK"} & set(environ)
    assert environ["OMPI_MCA_btl"] == "tcp" and environ["PYTHONPATH"].startswith("/x:")


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_the_command_tells_what_is_lacking(tmp_path):
    command = [sys.executable, "-m", "hpcdist", "horovod", "build", "--gpu", "nccl", "--cache", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("hpcdist: error: ") and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- what is installed ------------------------------------------------------------------------------------------------
def test_a_horovod_that_is_not_there_or_of_another_mpi_is_told(tmp_path, monkeypatch):
    extension = fake(tmp_path, "") / "horovod" / "torch" / "mpi_lib_v2.cpython-311.so"
    monkeypatch.syspath_prepend(tmp_path)
    assert "Horovod is not installed in this environment, or without its part for torch. Run" in hvd.obstacle()
    with pytest.raises(ConfigError, match="Horovod must be built for this environment's torch and MPI; got none: "):
        horovod_process.horovod()
    extension.write_bytes(b"\0libmpi.so.99\0")
    assert "Horovod was built for libmpi.so.99, and mpi4py uses /" in hvd.obstacle()


def test_a_horovod_that_says_that_it_is_of_another_torch_is_refused(tmp_path):
    extension = fake(tmp_path, "print('undefined symbol')") / "horovod" / "torch" / "mpi_lib_v2.so"
    program = "import pathlib, sys\nfrom hpcdist.comm.external import horovod_process\n"
    program += "from hpcdist.comm.mpi.library import loaded_here\n"
    program += "pathlib.Path(sys.argv[1]).write_bytes(loaded_here()[0].name.encode())\nhorovod_process.horovod()"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", program, extension],
        env=check.environment({**os.environ, "PYTHONPATH": path}, None) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"Horovod must be built for this torch, {torch.__version__}; got another's. Run" in done.stderr
