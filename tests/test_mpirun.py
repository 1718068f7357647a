"""`hpcdist run`: a script of one's own on ranks; and what starts ranks, with which environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.launch import IMPORTS, SETTINGS, find_mpirun
from hpcdist.comm.launch import unlaunched
from hpcdist.errors import ConfigError
from hpcdist.tools.mpirun import AS_ROOT, find_launcher, ranks_environment, start_script, without_block

SCRIPT = """
import os
import sys
from mpi4py.MPI import COMM_WORLD as comm
words = comm.gather((sys.argv[1:], os.environ["OMP_NUM_THREADS"], os.environ.get("MASTER_PORT")))
if comm.rank == 0:
    print(comm.size, *(words if len(set(map(str, words))) > 1 else words[0]), flush=True)
comm.barrier()
if comm.rank == 1 and "fail" in sys.argv:
    sys.exit(5)
"""
needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")


@pytest.fixture
def started(tmp_path):
    """Runs `hpcdist run *arguments` as a user types it: without the settings that other tests give mpirun."""
    (tmp_path / "my.py").write_text(SCRIPT)
    plain = {name: value for name, value in unlaunched(os.environ).items() if name not in SETTINGS}
    fast = {name: SETTINGS[name] for name in ("OMPI_MCA_osc", "OMPI_MCA_btl")}
    environment = {**plain, **fast, "PRTE_MCA_prte_tmpdir_base": str(tmp_path), **IMPORTS, "MASTER_PORT": "1"}

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hpcdist", "run", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env={**environment, **variables}, capture_output=True, text=True, timeout=200
        )

    return run


@needs_mpirun
def test_a_script_runs_on_ranks_with_its_arguments(started):
    """Also more ranks than cores, and as root; options behind the script's name are its own."""
    cores = len(os.sched_getaffinity(0))
    ranks = cores + 1
    done = started("-n", str(ranks), "my.py", "--label", "-n", "7")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(ranks), "['--label',", "'-n',", "'7']", "1", "None"]
    threads = {"": str(cores), "3": "3"}
    for given, used in threads.items():
        assert started("-n", "1", "my.py", OMP_NUM_THREADS=given).stdout.split() == ["1", "[]", used, "None"]
    assert started("-n", "1", "--threads", "2", "my.py", OMP_NUM_THREADS="3").stdout.split()[2] == "2"
    assert started("-n", "2", "-m", "my").stdout.split()[0] == "2"
    assert started("-n", "2", "python", "my.py").stdout.split()[0] == "2"


@needs_mpirun
def test_its_exit_status_is_that_of_the_first_rank_that_fails(started):
    done = started("-n", "2", "--label", "--hosts", "localhost:2", "my.py", "fail")
    assert done.returncode == 5
    assert done.stdout.startswith("[1,0]<stdout>: 2 ['fail']")


ENDS = """
import os, signal, sys, time
import hpcdist as hd

how = sys.argv[1]
if how in ("says", "raises"):
    hd.init(torch_distributed=False, **{"log": "x"} if how == "says" else {})
    raise ValueError("unhappy")
if how == "silent":
    sys.exit(3)
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_mpirun
@pytest.mark.parametrize(
    ("how", "said", "status"),
    [
        ("says", "hpcdist: error: log must be a list of names", 1),
        ("raises", "[rank 0] ValueError: unhappy", 1),
        ("silent", "prterun detected that one or more processes exited with non-zero status", 3),
        ("is killed", "exited on\nsignal 9 (Killed)", 137),
    ],
)
def test_open_mpis_own_message_is_shown_where_no_rank_has_one(started, tmp_path, how, said, status):
    (tmp_path / "ends.py").write_text(ENDS)
    done = started("-n", "2", "ends.py", how)
    assert done.returncode == status and said in done.stderr, done.stderr
    assert ("prterun" in done.stderr) == (how in ("silent", "is killed")), done.stderr
    assert ("-----" in done.stderr) == (how in ("silent", "is killed"))


BLOCK_OF_OPEN_MPI = f"""{74 * "-"}
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-25750@1,0]
   Exit code:    1
{74 * "-"}
""".encode()


def test_only_a_block_that_tells_nothing_new_is_left_out():
    rule = 74 * b"-" + b"\n"
    other = rule + b"prterun noticed that process rank 1 exited on\nsignal 9 (Killed).\n" + rule
    for said in (b"hpcdist: error: no\n", b"Traceback (most recent call last):\n", b"[1,0]<stderr>: [rank 0] no\n"):
        assert without_block(said + BLOCK_OF_OPEN_MPI + b"more\n" + other) == said + b"more\n" + other
        assert without_block(said + rule + b"own\n" + BLOCK_OF_OPEN_MPI + rule) == said + rule + b"own\n" + rule
    assert without_block(b"no\n" + BLOCK_OF_OPEN_MPI) == b"no\n" + BLOCK_OF_OPEN_MPI
    assert without_block(BLOCK_OF_OPEN_MPI, explained=True) == b""


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("none.py", {}, r"SCRIPT must be a file of Python, -m MODULE, or a program on PATH; got 'none.py'"),
        ("--bogus", {}, r"SCRIPT must follow the options of `hpcdist run`, which .*; got '--bogus'\. Write it as"),
        ("-m", {}, r"SCRIPT must follow the options of .*; got '-m' without a module"),
        ("python", {"hosts": "a:1"}, r"--hosts must be hosts with the number of ranks on each, 2 or more .* got 'a:1'"),
        ("python", {"hosts": "a,b"}, r"--hosts must be hosts with .*; got 'a,b'. Write it as --hosts node1:2,node2:2"),
        ("python", {"label": True, "launcher": "env -n"}, r"--label must be omitted with --launcher, .*'srun --label"),
        ("python", {"launcher": "nosuch -n"}, r"--launcher must start with a program on PATH; got 'nosuch -n'"),
        ("python", {"hosts": "a:2"}, r"--hosts must be omitted with .*/mpirun, whose options are not known .* before"),
    ],
)
def test_what_cannot_be_started_is_refused(script, options, message, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text("#!/bin/sh\necho an MPI of a site\n")
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        start_script([script], 2, os.environ, **options)


def test_launchers_are_found_or_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ConfigError, match="--launcher must be given where there is no mpirun"):
        find_launcher(None, "")
    for name in ("bin/mpirun", "site/mpiexec"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert find_launcher(None, str(tmp_path / "site")) == [str(tmp_path / "bin/mpirun"), "-n"]
    (tmp_path / "bin/mpirun").unlink()
    assert find_launcher(None, str(tmp_path / "site")) == [str(tmp_path / "site/mpiexec"), "-n"]
    assert find_launcher("env A=1 srun -n", os.environ["PATH"]) == ["env", "A=1", "srun", "-n"]
    with pytest.raises(ConfigError, match="--launcher must start with a program on PATH; got 'nosuch -n'"):
        find_launcher("nosuch -n", os.environ["PATH"])


def test_ranks_may_outnumber_cores():
    assert ranks_environment({"A": "1"}, 2, crowded=False) == {**AS_ROOT, "A": "1", "OMP_NUM_THREADS": "2"}
    shared = ranks_environment({"OMPI_MCA_mpi_yield_when_idle": "0"}, 1, crowded=True)
    assert shared["OMPI_MCA_mpi_yield_when_idle"] == "0" and ":oversubscribe" in shared.values()
