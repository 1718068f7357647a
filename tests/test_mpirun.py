"""`hpcdist run`: a script of one's own on ranks; and what starts ranks, with which environment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.launch import IMPORTS, SETTINGS, find_mpirun, on_terminal, wait_until
from hpcdist.comm.launch import unlaunched
from hpcdist.errors import ConfigError
from hpcdist.tools.cli.init import FIRST_JOB
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


MPICH = Path(__file__).parents[1] / ".venv-mpich"
needs_mpich = pytest.mark.skipif(not MPICH.exists(), reason="no .venv-mpich beside .venv")
MPI = pytest.mark.parametrize(
    "python",
    [
        pytest.param(sys.executable, id="Open MPI", marks=needs_mpirun),
        pytest.param(f"{MPICH}/bin/python", id="MPICH", marks=needs_mpich),
    ],
)


@pytest.fixture
def environment(tmp_path, request):
    """As a user has it: without the settings that other tests give mpirun."""
    plain = {name: value for name, value in unlaunched(os.environ).items() if name not in SETTINGS}
    fast = {name: SETTINGS[name] for name in ("OMPI_MCA_osc", "OMPI_MCA_btl")}
    if "MPICH" in request.node.name:
        fast["MPI4PY_LIBMPI"] = f"{MPICH}/lib/libmpi.so.12"
    return {**plain, **fast, "PRTE_MCA_prte_tmpdir_base": str(tmp_path), **IMPORTS, "MASTER_PORT": "1"}


@pytest.fixture
def started(tmp_path, environment):
    """Runs `hpcdist run *arguments`."""
    (tmp_path / "my.py").write_text(SCRIPT)

    def run(*arguments: str, python=sys.executable, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "hpcdist", "run", *arguments]
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
def test_a_script_whose_ranks_would_train_alone_is_told_once(started, tmp_path):
    (tmp_path / "helper.py").write_text("")
    said = "hpcdist: plain.py does not import hpcdist: each of the 2 ranks runs all of it, and trains a"
    for script, ranks, is_told in (
        ("import sys, torch.nn", 2, True),
        ("from torch import nn", 1, False),
        ("import torch, hpcdist", 2, False),
        ("import torch.distributed as dist", 2, False),
        ("import torch, helper", 2, False),
        ("import sys", 2, False),
        ("import torch\nfrom else", 2, False),
    ):
        (tmp_path / "plain.py").write_text(f"import sys\nsys.exit()\n{script}\n")
        assert started("-n", str(ranks), "plain.py").stderr.count(said) == is_told, script


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


@MPI
def test_a_block_about_a_rank_that_was_killed_after_its_error_is_left_out(started, tmp_path, python):
    (tmp_path / "ends.py").write_text(f"import sys\nprint('hpcdist: error: no', file=sys.stderr)\n{ENDS}")
    done = started("-n", "2", "ends.py", "is killed", python=python)
    assert done.returncode in (9, 137) and "hpcdist: error: no\n" in done.stderr
    assert "BAD TERMINATION" not in done.stdout and "EXIT STRING" not in done.stdout


# Ranks that a first Ctrl-C asks to leave, as hd.Leaving does; those of `deaf` it ends.
ASKED = """
import os, signal, sys, time
if "deaf" not in sys.argv:
    signal.signal(signal.SIGUSR1, lambda number, frame: print("heard", flush=True))
print("size " + " ".join(map(str, os.get_terminal_size(1) if os.isatty(1) else "-")), flush=True)  # in one write
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0":
    print("typed " + sys.stdin.readline().strip(), flush=True)
time.sleep(100)
"""


@MPI
@pytest.mark.parametrize("script", [["asked.py"], ["asked.py", "deaf"]])
def test_a_first_ctrl_c_asks_the_ranks_and_a_second_one_ends_them(tmp_path, monkeypatch, environment, python, script):
    """Standard input is the terminal, and the ranks of Open MPI know its size."""
    monkeypatch.chdir(tmp_path)
    Path("asked.py").write_text(ASKED)
    is_deaf, began_s = "deaf" in script, time.monotonic()

    def act(terminal, shown, is_running):
        os.write(terminal, b"some words\n")
        wait_until(lambda: b"typed some words" in shown and shown.count(b"size") == 2)
        os.write(terminal, b"\x03")
        if not is_deaf:
            wait_until(lambda: shown.count(b"heard") == 2)
            os.write(terminal, b"\x03")

    text, status = on_terminal([python, "-m", "hpcdist", "run", "-n", "2", *script], environment, act)
    assert status != 0 and time.monotonic() - began_s < 60, text
    assert text.count("size -" if "mpich" in python else "size 80 24") == 2, text
    assert ("hpcdist: Ctrl-C: the ranks are asked to save and leave; Ctrl-C again" in text) != is_deaf, text


@MPI
def test_after_ctrl_c_a_loop_saves_and_says_how_it_continues(tmp_path, monkeypatch, environment, python):
    monkeypatch.chdir(tmp_path)
    Path("leaves.py").write_text(LEAVES)

    def act(terminal, shown, is_running):
        wait_until(lambda: b"step 3" in shown or not is_running())
        os.write(terminal, b"\x03")

    text, status = on_terminal([python, "-m", "hpcdist", "run", "-n", "2", "leaves.py", "7"], environment, act)
    assert status == 75, text
    left = re.search(r"\nhpcdist: left after step (\d+) \(SIGUSR1 on rank \d\)\. Resume with:\n  (.*)\n", text)
    assert left and left[2] == "hpcdist run -n 2 python leaves.py 7", text
    assert Path(f"saved/step-{int(left[1]):08}").is_dir()
    assert "prterun" not in text and "BAD TERMINATION" not in text


@MPI
def test_after_ctrl_c_a_job_saves_and_has_status_75(tmp_path, monkeypatch, environment, python):
    monkeypatch.chdir(tmp_path)
    Path("my_job.py").write_text(FIRST_JOB.read_text())
    settings = ["--set", "epochs=100000", "--set", "leave.every_s=0.2", "--progress", "lines"]
    words = [python, "-m", "hpcdist", "run", "-n", "2", python, "-m", "hpcdist", "train", "my_job.py", *settings]

    def act(terminal, shown, is_running):
        wait_until(lambda: b"test accuracy" in shown or not is_running())
        os.write(terminal, b"\x03")

    text, status = on_terminal(words, environment, act)
    assert status == 75 and "(SIGUSR1 on rank " in text and "Resume with:\n  hpcdist run -n 2 " in text, text


LEAVES = """
import sys, time, torch
import hpcdist as hd

comm = hd.init(torch_distributed=False)
model = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(model.parameters(), 0.01)
optimizer = hd.DistributedOptimizer(sgd, model, strategy="allreduce", identical_batches="allow")
with hd.Leaving(comm, every_s=0.1) as leaving:
    for step in range(10_000):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        if step == 3 and comm.rank == 0:
            print("step 3", flush=True)
        if leaving.step_done():
            break
    if leaving.due():
        hd.save("saved", optimizer=optimizer)
        sys.exit(75)
"""


@MPI
def test_ranks_end_with_hpcdist_run(tmp_path, environment, python):
    (tmp_path / "waits.py").write_text("import os, time\nopen(f'pid-{os.getpid()}', 'w').close()\ntime.sleep(100)")
    command = [python, "-m", "hpcdist", "run", "-n", "2", "waits.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as job:
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        job.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(psutil.pid_exists(int(path.name[4:])) for path in tmp_path.glob("pid-*")), 30)


BLOCK_OF_OPEN_MPI = f"""{74 * "-"}
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-25750@1,0]
   Exit code:    1
{74 * "-"}
""".encode()


BLOCK_OF_MPICH = f"""
{83 * "="}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 22594 RUNNING AT vm
=   EXIT CODE: 1
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
{83 * "="}
""".encode()


def test_only_a_block_that_tells_nothing_new_is_left_out():
    rule = 74 * b"-" + b"\n"
    other = rule + b"prterun noticed that process rank 1 exited on\nsignal 9 (Killed).\n" + rule
    for said in (b"hpcdist: error: no\n", b"Traceback (most recent call last):\n", b"[1,0]<stderr>: [rank 0] no\n"):
        assert without_block(said + BLOCK_OF_OPEN_MPI + b"more\n" + other) == said + b"more\n" + other
        assert without_block(said + rule + b"own\n" + BLOCK_OF_OPEN_MPI + rule) == said + rule + b"own\n" + rule
    assert without_block(b"no\n" + BLOCK_OF_OPEN_MPI) == b"no\n" + BLOCK_OF_OPEN_MPI
    assert without_block(BLOCK_OF_OPEN_MPI, explained=True) == b""
    killed = b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\nThis typically refers to a problem "
    killed += b"with your application.\nPlease see the FAQ page for debugging suggestions\n"
    assert without_block(BLOCK_OF_MPICH + b"more\n" + BLOCK_OF_MPICH + killed, explained=True) == b"more\n"


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
