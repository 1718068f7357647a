"""`hpcdist horovod build`: what it finds, what a wheel depends on, and what each failure says to do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comm.jobs_here import python_alone
from contrib.horovod import build, toolset
from contrib.horovod.toolset import BuildOptions, GpuTools, Tools
from hpcdist.comm.external import horovod as hvd
from hpcdist.comm.mpi.library import loaded
from hpcdist.errors import BuildError, ConfigError

FOUND = Tools("/usr/bin/g++", "x86_64-linux-gnu 12", "/usr/bin/cmake", "/env/bin/mpicxx", "Open MPI v5.0.11", "")


@pytest.fixture(autouse=True)
def all_levels(caplog):
    caplog.set_level(logging.INFO, "hpcdist")


@pytest.fixture
def program(tmp_path):
    """Makes a program in tmp_path/bin."""

    def make(name: str, text: str = "true", folder: str = "bin") -> Path:
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return make


# --- what is found ----------------------------------------------------------------------------------------------------
def test_what_is_missing_is_told(program, tmp_path, monkeypatch):
    """One after the other, in a world of programs that lies in tmp_path."""
    monkeypatch.setattr(toolset, "search_path", lambda environ: str(tmp_path / "bin"))

    def refused(message: str, **choice: str) -> None:
        with pytest.raises(BuildError, match=message):
            toolset.find(BuildOptions(Path(), **choice), {})

    refused(r"C\+\+ compiler: one that knows C\+\+17 must be on PATH; got none. Install")
    refused("must be on PATH; got icpx. Install", cxx="icpx")
    program("g++", "echo 12")
    refused("CMake: cmake 3.13 or newer must be on PATH; got none. Install it")
    for shown, got in (("cmake version 3.10.2", "3.10"), ("segmentation fault", "none")):
        program("cmake", f"echo {shown}")
        refused(f"CMake: cmake 3.13 or newer must be on PATH; got {got}. Install it")
    program("cmake", "echo cmake version 4.1.0")
    refused("MPI compiler: mpicxx of the MPI that mpi4py uses, .*; got none. Load")
    other = program("mpicxx", "echo g++ -I/other/include -L/other/lib -lmpi")
    refused(f"must be in the environment or on PATH; got {other}. Load")
    refused("MPI compiler: --mpicxx must be a program; got CC. Check the path", mpicxx="CC")
    monkeypatch.setattr(toolset, "output", lambda *command: "cmake 4.1" if "cmake" in command[0] else "")
    refused("MPI: mpi4py must find its library; got none. Try `python -m")


def test_an_mpi_compiler_belongs_to_the_library_that_it_links(tmp_path):
    library = tmp_path / "lib" / "libmpi.so.40.30.4"
    library.parent.mkdir()
    library.touch()
    (tmp_path / "openmpi").mkdir()
    (tmp_path / "openmpi" / "libmpi.so").symlink_to(library)  # as Debian has it
    assert toolset.links(f"g++ -I/x -L{tmp_path}/openmpi -lmpi_cxx -lmpi", library)
    assert not toolset.links(f"g++ -L{tmp_path}/elsewhere -lmpi", library)
    assert not toolset.links("", library)


def test_here_all_is_found():
    path = toolset.search_path(os.environ)
    assert path.startswith(f"{sys.prefix}/bin:"), "the environment's own programs come first"
    if not (toolset.programs(path, "cmake") and toolset.programs(path, "g++")):
        pytest.skip("this machine has no CMake or no C++ compiler")
    found = toolset.find(BuildOptions(Path(), gpu="off"), os.environ)
    assert found.gpu == GpuTools(lack="as chosen")
    assert Path(found.mpicxx).parent == Path(build.launcher_of(found, None, path)[0]).parent


def test_the_launcher_is_the_one_beside_the_mpi_compiler(program, tmp_path):
    mpirun, other = program("mpirun", folder="mpi/bin"), program("mpirun", folder="other")
    found = replace(FOUND, mpicxx=str(program("mpicxx", folder="mpi/bin")))
    assert build.launcher_of(found, None, str(other.parent)) == [str(mpirun), "-n"]
    assert build.launcher_of(found, "srun --mpi=pmix -n", "") == ["srun", "--mpi=pmix", "-n"]
    with pytest.raises(BuildError, match="launcher: mpirun or mpiexec of that MPI must be on PATH; got none. Name it"):
        build.launcher_of(FOUND, None, str(tmp_path))


def test_the_libraries_that_a_process_has_mapped():
    maps = """
7f01 r-xp 00000000 08:01 11 /usr/lib/libmpi_cxx.so.40.30.1
7f02 r-xp 00000000 08:01 12 /opt/my mpi/lib/libmpi.so.12
7f03 r--p 00001000 08:01 12 /opt/my mpi/lib/libmpi.so.12
7f04 rw-p 00000000 00:00 0
7f05 r-xp 00000000 08:01 13 /usr/lib/libmpi.so.40.30.4
7f06 r-xp 00000000 08:01 14 /opt/cray/libmpi_gnu_123.so.12
7f07 r-xp 00000000 08:01 15 /env/mpi4py/MPI.openmpi.cpython-311-x86_64-linux-gnu.so
"""
    found = [str(path) for path in loaded(maps)]
    assert found == ["/opt/my mpi/lib/libmpi.so.12", "/usr/lib/libmpi.so.40.30.4", "/opt/cray/libmpi_gnu_123.so.12"]


def test_nccl_where_torch_cuda_and_nccl_are_there(program, tmp_path, monkeypatch):
    """With torch's own package of NCCL, which has no libnccl.so to link: a folder of links stands in for it."""
    for name in ("CUDA", "NCCL"):
        monkeypatch.setattr(toolset, name, "" if name == "CUDA" else [])
    program("nvcc", "echo Cuda compilation tools, release 12.6, V12.6.20", folder="cuda/bin")
    for part in ("include/nccl.h", "lib/libnccl.so.2"):
        (tmp_path / "nccl" / part).parent.mkdir(parents=True)
        (tmp_path / "nccl" / part).touch()
    cuda, nccl = tmp_path / "cuda", tmp_path / "nccl"
    choice, nowhere = BuildOptions(Path(), cuda_home=cuda, nccl_home=nccl), {"PATH": ""}
    found = toolset.find_gpu(choice, "12.8", nowhere)
    assert found == GpuTools(str(cuda), "12.6", str(nccl))
    assert (
        toolset.find_gpu(BuildOptions(Path()), "12.8", {**nowhere, "CUDA_HOME": str(cuda), "NCCL_HOME": str(nccl)})
        == found
    )
    assert toolset.find_gpu(replace(choice, gpu="off"), "12.8", nowhere) == GpuTools(lack="as chosen")
    for torch_cuda, skipped, lack in (
        (None, {}, "torch was built without CUDA"),
        ("13.0", {}, "nvcc is of CUDA 12.6, torch of CUDA 13.0. Load a module of CUDA 13"),
        ("12.8", {"cuda_home": None}, "there is no nvcc. Load the module of CUDA"),
        ("12.8", {"nccl_home": None}, "there is no nccl.h. Load the module of NCCL"),
    ):
        without = toolset.find_gpu(replace(choice, **skipped), torch_cuda, nowhere)
        assert not without.nccl_home and lack in without.lack
        with pytest.raises(BuildError, match=f"CUDA and NCCL: both must be there for --gpu nccl; .*{lack}"):
            toolset.find_gpu(replace(choice, gpu="nccl", **skipped), torch_cuda, nowhere)
    (tmp_path / "build").mkdir()
    settings = build.settings(replace(FOUND, gpu=found), tmp_path / "build", {}, jobs=3)
    assert settings["HOROVOD_GPU_OPERATIONS"] == "NCCL" and settings["HOROVOD_CUDA_HOME"] == str(cuda)
    assert (Path(settings["HOROVOD_NCCL_HOME"]) / "lib" / "libnccl.so").resolve().name == "libnccl.so.2"
    assert (Path(settings["HOROVOD_NCCL_HOME"]) / "include" / "nccl.h").exists()
    assert settings["MAKEFLAGS"] == "-j3"


# --- the cache --------------------------------------------------------------------------------------------------------
def test_a_wheel_depends_on_versions_and_not_on_where_the_environment_is():
    key = build.cache_key(FOUND)
    assert build.cache_key(replace(FOUND, mpicxx="/other/bin/mpicxx", cmake="/other/cmake")) == key
    for other in (
        {"mpi": "MPICH Version: 5.0.2"},
        {"mpi_folder": "/usr/lib"},
        {"cxx_version": "x86_64-linux-gnu 13"},
        {"gpu": GpuTools("/cuda", "12.6", "/nccl")},
    ):
        assert build.cache_key(replace(FOUND, **other)) != key
    assert key["torch"] == torch.__version__ and key["python"].startswith(f"3.{sys.version_info.minor}")


def test_the_caches_place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert build.default_folder() == Path("/scratch/hpcdist/horovod")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--cache must be a folder that can be written; got .*file/cache"):
        with build.locked(tmp_path / "file" / "cache", {}):
            pass


def test_two_builds_of_the_same_wheel_wait_for_each_other(tmp_path, caplog):
    order = []

    def second():
        with build.locked(tmp_path, {"torch": "1"}):
            order.append("second")

    thread = threading.Thread(target=second)
    with build.locked(tmp_path, {"torch": "1"}), build.locked(tmp_path, {}):  # others need not wait
        assert caplog.messages == []
        thread.start()
        while not caplog.messages:
            pass
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert caplog.messages == ["another process builds the same wheel; waiting for it"]


def test_a_wheel_that_does_not_sum_is_not_kept(tmp_path, monkeypatch):
    """One that sums is, and is not built again."""
    built, proofs = [], []

    def compile_wheel(tools, folder, *rest):
        (folder / "wheel").mkdir()
        with zipfile.ZipFile(folder / "wheel" / "horovod.whl", "w") as archive:
            archive.writestr("horovod/__init__.py", str(len(built)))
        built.append(folder)
        return folder / "wheel" / "horovod.whl"

    def prove(launcher, environ, log):
        unpacked = Path(environ["PYTHONPATH"].split(os.pathsep)[0])
        proofs.append((unpacked / "horovod" / "__init__.py").read_text())
        if proofs[-1] == "0":
            raise BuildError("two-rank check: no luck")
        return {}

    monkeypatch.setattr(build, "find", lambda choice, environ: FOUND)
    monkeypatch.setattr(build, "compile_wheel", compile_wheel)
    monkeypatch.setattr(build, "prove", prove)
    monkeypatch.setattr(build, "pip_install", lambda *given: None)
    options = BuildOptions(tmp_path, install=False, launcher="mpirun -n")
    with pytest.raises(BuildError, match="no luck"):
        build.run(options, os.environ)
    assert not list(tmp_path.glob("**/*.whl")) and not built[0].exists()
    wheel = build.run(options, os.environ)["wheel"]
    assert wheel.parent.parent == tmp_path and build.run(options, os.environ)["wheel"] == wheel
    assert build.run(replace(options, rebuild=True), os.environ)["wheel"] == wheel
    assert proofs == ["0", "1", "1", "2"], "what the cache has is tested, too"


# --- the build --------------------------------------------------------------------------------------------------------
def test_the_compiler_takes_17_for_what_is_older(tmp_path):
    gxx = next(iter(toolset.programs(toolset.search_path(os.environ), "g++")), None)
    if gxx is None:
        pytest.skip("this machine has no g++")
    folder = tmp_path / "a b"
    folder.mkdir()
    compiler = build.settings(replace(FOUND, cxx=gxx), folder, {}, 1)["CXX"]
    source = tmp_path / "with space.cc"
    source.write_text('#define NAME "two words"\nlong version = __cplusplus; const char* name = NAME;\n')
    for asked in ("c++11", "c++14", "gnu++14", "c++17", "c++20"):
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
        (None, "download of the source: pip must build Horovod; got exit status .*--source"),
        ("broken", "download of the source: pip must build Horovod; got exit status .*--source"),
    ],
)
def test_a_failed_build_says_which_part_and_what_to_do(tmp_path, printed, message):
    """Also where a file is no package, and where an index has none."""
    log, environ, source = tmp_path / "log", dict(os.environ), None
    if printed == "broken":
        source = tmp_path / "broken.tar.gz"
        source.write_text("no archive")
    elif printed:
        source = source_package(tmp_path, printed)
    else:
        environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    with pytest.raises(BuildError, match=message) as error:
        build.compile_wheel(FOUND, tmp_path, environ, source, 1, log)
    assert str(error.value).endswith(f"Log: {log}")
    assert (printed or "").rpartition("\n")[2] in log.read_text()


def test_what_a_log_tells_of_the_cause():
    for line, what in (
        ("Could NOT find MPI (missing: MPI_CXX_FOUND)", "--mpicxx PATH"),
        ("Could NOT find NCCL", "--nccl-home PATH"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("cc1plus: out of memory allocating; std::bad_alloc", "--jobs 1"),
        ("ld: final link failed: No space left on device", "TMPDIR"),
        ("#error -- unsupported GNU version! gcc versions later than 13 are not supported!", "--cxx PATH"),
        ("a.cc:1: error: expected ;", "The log's first `error:`"),
    ):
        assert what in build.advice("compile", f"[ 10%] Building\n{line}\n")


def test_what_pip_can_not_install_is_told(tmp_path):
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    with pytest.raises(BuildError, match="install: `.*no-such-package-anywhere` must work; got: .* Install it by"):
        build.pip_install(["no-such-package-anywhere"], tmp_path / "log", environ)
    build.pip_install(["pip"], tmp_path / "log", environ)  # is there: no index is asked
    assert build.logged(["sleep", "9"], environ, tmp_path / "log", 0.01) == (1, ["nothing within 0.01 s"])


def test_a_source_that_is_no_file_is_refused(tmp_path):
    options = BuildOptions(tmp_path, source=tmp_path / "none.tar.gz")
    with pytest.raises(ConfigError, match="--source must be the file of Horovod's source package; got .*none.tar.gz"):
        build.run(options, os.environ)


# --- the check --------------------------------------------------------------------------------------------------------
def fake(folder: Path, text: str) -> Path:
    (folder / "horovod" / "torch").mkdir(parents=True, exist_ok=True)
    (folder / "horovod" / "__init__.py").touch()
    (folder / "horovod" / "torch" / "__init__.py").write_text(text)
    return folder


def test_what_does_not_import_or_sum_is_told(tmp_path):
    log, python = tmp_path / "log", sys.executable
    (tmp_path / "torch.py").touch()  # which takes seconds to import
    unpacked = fake(tmp_path, "raise ImportError('undefined symbol: _ZN3c10')")
    with pytest.raises(BuildError, match="import: `import horovod.torch` must work; got: .*symbol: _ZN3c10.*Log: "):
        build.prove(["mpirun", "-n"], build.job_environment(os.environ, FOUND, unpacked), log)
    unpacked = fake(tmp_path, "init = None")
    for launcher, got in (
        (["false"], "exit status 1, 'no message'"),
        ([python, "-c", "print('{\"ranks\": 1}')"], "worlds of 1"),
        ([python, "-c", "print('all is well')"], "exit status 0, 'all is well'"),
    ):
        with pytest.raises(BuildError, match=f"two-rank check: `.*` must sum on 2 ranks; got {got}.* Name the launch"):
            build.prove(launcher, build.job_environment(os.environ, FOUND, unpacked), log)


def test_a_new_job_does_not_take_itself_for_a_rank_of_this_one_and_finds_this_environments_mpi():
    """Also by a wheel that lies where it was unpacked, far from the libraries beside which it will be installed."""
    given = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "OMPI_MCA_btl": "tcp", "LD_LIBRARY_PATH": "/mine"}
    for mpi_folder, libraries in (("", f"{sys.prefix}/lib:/mine"), ("/opt/mpi/lib", "/mine")):
        environ = build.job_environment(given, replace(FOUND, mpi_folder=mpi_folder), Path("/x"))
        assert not {"OMPI_COMM_WORLD_RANK", "PMIX_RANK"} & set(environ)
        assert environ["OMPI_MCA_btl"] == "tcp" and environ["PYTHONPATH"].startswith("/x:")
        assert environ["LD_LIBRARY_PATH"] == libraries
    assert build.job_environment({}, FOUND, Path("/x"))["LD_LIBRARY_PATH"] == f"{sys.prefix}/lib"


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_the_command_tells_what_is_lacking(tmp_path):
    done = python_alone(tmp_path, "-m", "hpcdist", "horovod", "build", "--gpu", "nccl", "--cache", tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("hpcdist: error: ") and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- what is installed ------------------------------------------------------------------------------------------------
def test_a_horovod_that_is_not_there_or_of_another_mpi_is_told(tmp_path, monkeypatch):
    extension = fake(tmp_path, "") / "horovod" / "torch" / "mpi_lib_v2.cpython-311.so"
    monkeypatch.syspath_prepend(tmp_path)
    assert "Horovod is not installed in this environment, or without its part for torch. Run" in hvd.obstacle()
    with pytest.raises(ConfigError, match="Horovod must be built for this environment's torch and MPI; got none: "):
        hvd.load()
    extension.write_bytes(b"\0libmpi.so.99\0")
    assert "Horovod was built for libmpi.so.99, and mpi4py uses /" in hvd.obstacle()


def test_a_horovod_that_says_that_it_is_of_another_torch_is_refused(tmp_path):
    extension = fake(tmp_path, "print('undefined symbol')") / "horovod" / "torch" / "mpi_lib_v2.so"
    program = "import pathlib, sys\nfrom hpcdist.comm.external import horovod\n"
    program += "from hpcdist.comm.mpi.library import loaded_here\n"
    program += "pathlib.Path(sys.argv[1]).write_bytes(loaded_here()[0].name.encode())\nhorovod.load()"
    done = subprocess.run(
        [sys.executable, "-c", program, extension],
        env=build.job_environment(os.environ, FOUND, tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"Horovod must be built for this torch, {torch.__version__}; got another's. Run" in done.stderr
