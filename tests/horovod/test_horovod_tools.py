"""What a build finds on a machine, and what a wheel in the cache depends on."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tools_here import FOUND

from hpcdist.comm.mpi.library import loaded
from hpcdist.errors import BuildError, ConfigError
from hpcdist.tools.horovod import build, cache, tools, wheel
from hpcdist.tools.horovod.tools import ChosenTools, Search


# --- what is found ----------------------------------------------------------------------------------------------------
def test_without_a_compiler(search):
    with pytest.raises(BuildError, match=r"C\+\+ compiler: one that knows C\+\+17 must be on PATH; got none. Install"):
        tools.find(ChosenTools(), search)
    with pytest.raises(BuildError, match="must be on PATH; got icpx. Install"):
        tools.find(ChosenTools(cxx="icpx"), search)


@pytest.mark.parametrize(
    ("shown", "got"), [(None, "none"), ("cmake version 3.10.2", "3.10"), ("segmentation fault", "none")]
)
def test_without_cmake_or_with_an_old_one(program, search, shown, got):
    program("g++", "echo 12")
    if shown:
        program("cmake", f"echo {shown}")
    with pytest.raises(BuildError, match=f"CMake: cmake 3.13 or newer must be on PATH; got {got}. Install it"):
        tools.find(ChosenTools(), search)


def test_without_the_compiler_of_this_mpi(program, search):
    program("g++", "echo 12")
    program("cmake", "echo cmake version 4.1.0")
    with pytest.raises(BuildError, match="MPI compiler: mpicxx of the MPI that mpi4py uses, .*; got none. Load"):
        tools.find(ChosenTools(), search)
    other = program("mpicxx", "echo g++ -I/other/include -L/other/lib -lmpi")
    with pytest.raises(BuildError, match=f"must be in the environment or on PATH; got {other}. Load"):
        tools.find(ChosenTools(), search)
    with pytest.raises(BuildError, match="MPI compiler: --mpicxx must be a program; got CC. Check the path"):
        tools.find(ChosenTools(mpicxx="CC"), search)


def test_an_mpi_compiler_belongs_to_the_library_that_it_links(tmp_path):
    library = tmp_path / "lib" / "libmpi.so.40.30.4"
    library.parent.mkdir()
    library.touch()
    (tmp_path / "openmpi").mkdir()
    (tmp_path / "openmpi" / "libmpi.so").symlink_to(library)  # as Debian has it
    assert tools.links(f"g++ -I/x -L{tmp_path}/openmpi -lmpi_cxx -lmpi", library)
    assert not tools.links(f"g++ -L{tmp_path}/elsewhere -lmpi", library)
    assert not tools.links("", library)


def test_the_environments_own_programs_come_first(program, tmp_path):
    ours, others = program("cmake"), program("cmake", folder="other")
    search = Search({"PATH": str(others.parent)}, tmp_path)
    assert list(search.programs("cmake")) == [str(ours), str(others)]


def test_here_all_is_found():
    search = Search(os.environ)
    if not (search.program("cmake") and search.program("g++")):
        pytest.skip("this machine has no CMake or no C++ compiler")
    found = tools.find(ChosenTools(gpu="off"), search)
    assert found.torch == torch.__version__ and found.why_no_gpu == "as chosen"
    assert Path(found.mpicxx).parent == Path(build.launcher_of(found, None, search)[0]).parent


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


# --- GPUs -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def cuda(program, tmp_path):
    """CUDA 12.6 and NCCL, as folders have them."""
    program("nvcc", "echo Cuda compilation tools, release 12.6, V12.6.20", folder="cuda/bin")
    (tmp_path / "nccl" / "include").mkdir(parents=True)
    (tmp_path / "nccl" / "include" / "nccl.h").touch()
    return ChosenTools(cuda_home=tmp_path / "cuda", nccl_home=tmp_path / "nccl")


def test_nccl_where_torch_cuda_and_nccl_are_there(cuda, search):
    found = tools.with_gpu(FOUND, "12.8", cuda, search)
    assert (found.cuda_version, found.cuda_home, found.nccl_home) == ("12.6", str(cuda.cuda_home), str(cuda.nccl_home))
    named = Search({"PATH": "", "CUDA_HOME": str(cuda.cuda_home), "NCCL_HOME": str(cuda.nccl_home)}, search.prefix)
    assert tools.with_gpu(FOUND, "12.8", ChosenTools(), named) == found


@pytest.mark.parametrize(
    ("torch_cuda", "left_out", "lack"),
    [
        (None, (), "torch was built without CUDA"),
        ("13.0", (), "nvcc is of CUDA 12.6, torch of CUDA 13.0. Load a module of CUDA 13"),
        ("12.8", ("cuda_home",), "there is no nvcc. Load the module of CUDA"),
        ("12.8", ("nccl_home",), "there is no nccl.h. Load the module of NCCL"),
    ],
)
def test_what_is_lacking_for_gpus_is_told_or_refused(cuda, search, torch_cuda, left_out, lack, monkeypatch):
    choice = replace(cuda, **dict.fromkeys(left_out))
    monkeypatch.setattr(tools, "SYSTEMS_CUDA", [])
    monkeypatch.setattr(tools, "SYSTEMS_NCCL", [])
    found = tools.with_gpu(FOUND, torch_cuda, choice, search)
    assert found.cuda_home is None and lack in found.why_no_gpu
    with pytest.raises(BuildError, match="CUDA and NCCL: both must be there for --gpu nccl; ") as error:
        tools.with_gpu(FOUND, torch_cuda, replace(choice, gpu="nccl"), search)
    assert lack in str(error.value)


def test_the_settings_of_a_build_with_nccl(cuda, search, tmp_path):
    """torch's own package of NCCL has no libnccl.so to link: a folder of links stands in for it."""
    (tmp_path / "nccl" / "lib").mkdir()
    (tmp_path / "nccl" / "lib" / "libnccl.so.2").touch()
    found = tools.with_gpu(FOUND, "12.8", cuda, search)
    (tmp_path / "build").mkdir()
    settings = wheel.settings(found, tmp_path / "build", search, jobs=3)
    assert settings["HOROVOD_GPU_OPERATIONS"] == "NCCL" and settings["HOROVOD_CUDA_HOME"] == found.cuda_home
    assert (Path(settings["HOROVOD_NCCL_HOME"]) / "lib" / "libnccl.so").resolve().name == "libnccl.so.2"
    assert (Path(settings["HOROVOD_NCCL_HOME"]) / "include" / "nccl.h").exists()
    assert settings["MAKEFLAGS"] == "-j3"


# --- the cache --------------------------------------------------------------------------------------------------------
def test_a_wheel_depends_on_versions_and_not_on_where_the_environment_is():
    key = cache.key(FOUND, Path("/env"))
    moved = replace(FOUND, mpi_folder="/other/lib", mpicxx="/other/bin/mpicxx", cmake="/other/cmake")
    assert cache.key(moved, Path("/other")) == key
    others = [
        replace(FOUND, torch="2.14.0"),
        replace(FOUND, mpi_version="MPICH Version: 5.0.2"),
        replace(FOUND, mpi_folder="/usr/lib"),
        replace(FOUND, python="3.12.1"),
        replace(FOUND, cxx_version="x86_64-linux-gnu 13"),
        replace(FOUND, cxx11_abi=False),
        replace(FOUND, cuda_home="/cuda", cuda_version="12.6", nccl_home="/nccl"),
    ]
    assert all(cache.key(other, Path("/env")) != key for other in others)
    assert cache.key(replace(FOUND, python="3.11.9"), Path("/env")) == key


def test_wheels_are_kept_outside_the_checkout(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert cache.default_folder() == Path("/scratch/hpcdist/horovod")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.default_folder() == Path.home() / ".cache" / "hpcdist" / "horovod"


def test_a_cache_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--cache must be a folder that can be written; got .*file/cache"):
        cache.CachedBuild(tmp_path / "file" / "cache", {})


def test_a_wheel_is_in_the_cache_whole_or_not_at_all(tmp_path):
    entry = cache.CachedBuild(tmp_path / "cache", {"torch": "1"})
    with pytest.raises(KeyboardInterrupt), entry.building() as folder:
        (folder / "half.whl").write_text("half")
        raise KeyboardInterrupt
    assert entry.wheel is None and not folder.exists()
    folder.mkdir()  # of a build that was killed
    (folder / "half.whl").write_text("half")
    with entry.building() as folder:
        assert list(folder.iterdir()) == []
        (folder / "whole.whl").write_text("whole")
        kept = entry.keep(folder / "whole.whl")
        assert entry.wheel == kept and kept.read_text() == "whole"
    assert cache.CachedBuild(tmp_path / "cache", {"torch": "1"}).wheel == kept
    assert cache.CachedBuild(tmp_path / "cache", {"torch": "2"}).wheel is None
    assert '"torch": "1"' in (kept.parent / "key.json").read_text()


def test_two_builds_of_the_same_wheel_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "POLL_S", 0.01)
    order, waits = [], threading.Event()

    def second():
        with cache.CachedBuild(tmp_path, {"torch": "1"}).locked(waits.set):
            order.append("second")

    thread = threading.Thread(target=second)
    with cache.CachedBuild(tmp_path, {"torch": "1"}).locked(pytest.fail):
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    with (
        cache.CachedBuild(tmp_path, {"torch": "1"}).locked(pytest.fail),
        cache.CachedBuild(tmp_path, {}).locked(pytest.fail),
    ):
        pass  # others need not wait
