"""The harness itself, on small test files that it runs under a real mpirun."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import time_limit
from harness.cases import each
from harness.launch import IMPORTS, SITE, find_mpirun, launch, launch_environment, started, wait_until

TESTS = Path(__file__).parent
PYTEST = ["-m", "pytest", "-c", "pytest.ini", "--color=no", "-ra", "-p", "no:cacheprovider"]

needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a test file into an empty project that uses the harness, and goes there."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    (tmp_path / "temporary").mkdir()  # in a common one, runs that clear it at the same time warn of each other
    monkeypatch.setenv("PYTEST_DEBUG_TEMPROOT", str(tmp_path / "temporary"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other packages' plugins, which take a second to import
    monkeypatch.chdir(tmp_path)
    return lambda text: (tmp_path / "test_it.py").write_text(f"import pytest, time\nfrom mpi4py import MPI\n{text}")


def run(size: int, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest on `size` ranks, or without a launcher for 0."""
    if size:
        return launch(size, [*PYTEST, *options], env=IMPORTS)
    with launch_environment(IMPORTS) as env:
        return subprocess.run([sys.executable, *PYTEST, *options], env=env, capture_output=True, text=True, timeout=120)


VERDICTS = """
from hypothesis import given, strategies

pytestmark = pytest.mark.sizes(3)

def test_without_ranks():
    pass

def test_all_pass(ranks):
    assert ranks(lambda comm: comm.rank) == list(range(ranks.size))

def test_rank_1_fails(ranks):
    def body(comm):
        print("output of rank", comm.rank)
        assert comm.rank != 1, "rank one is unhappy"
    ranks(body)

def test_ranks_fail_differently(ranks):
    def body(comm):
        if comm.rank:
            raise ValueError(f"way {comm.rank}")
    ranks(body)

def test_expected_everywhere(ranks):
    def body(comm):
        if comm.rank == 2:
            raise ValueError("of rank 2")
    with pytest.raises(ValueError, match="of rank 2"):
        ranks(body)

def test_some_skip(ranks):
    if MPI.COMM_WORLD.rank == 2:
        pytest.skip("not rank 2")

def test_teardown_fails(ranks, request):
    request.addfinalizer(lambda: [][not MPI.COMM_WORLD.rank == 1])  # everywhere

@pytest.mark.sizes(4, 8)
def test_more_ranks(ranks):
    pass

@pytest.mark.sizes(1, 2)
def test_fewer_ranks(ranks):
    assert ranks(lambda comm: comm.size) == [2, 2] and MPI.COMM_WORLD.size == 3

@pytest.mark.mpi(min_size=4)
def test_real_and_more_ranks():
    pass

@pytest.mark.mpi
def test_real():
    assert MPI.COMM_WORLD.size == 3

@pytest.mark.virtual
def test_virtual(ranks):
    pass

@pytest.mark.computes
def test_computed(ranks):
    pass

@pytest.mark.extended
def test_extended(ranks):
    pass

@given(values=strategies.lists(strategies.integers()))
def test_property(ranks, values):
    assert ranks(lambda comm: values) == [values] * ranks.size
    assert sum(values) < 1000, "found"

def test_shared_folder(ranks, shared_tmp_path, tmp_path):
    assert len({str(path) for path in ranks(lambda comm: shared_tmp_path)}) == 1
    assert len({str(path) for path in ranks(lambda comm: tmp_path)}) == ranks.size
"""


@needs_mpirun
def test_one_verdict_for_all_ranks(write):
    write(VERDICTS)
    done = run(3, "-v")
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = dict(re.findall(r"^test_it.py::test_(\w+)(?:\[\w+\])? ([A-Z]+)", done.stdout, re.MULTILINE))
    assert verdicts == {
        "all_pass": "PASSED",
        "rank_1_fails": "FAILED",
        "ranks_fail_differently": "FAILED",
        "expected_everywhere": "PASSED",
        "some_skip": "FAILED",
        "teardown_fails": "ERROR",
        "more_ranks": "SKIPPED",
        "fewer_ranks": "PASSED",
        "real_and_more_ranks": "SKIPPED",
        "real": "PASSED",
        "property": "FAILED",
        "shared_folder": "PASSED",
    }, done.stdout + done.stderr
    told = [
        "ranks: 3 of ",
        "4 tests deselected that run in plain pytest only (they use no real ranks) or with --all",
        "needs 4 or more ranks; this job has 3",
        "test_rank_1_fails[n3] - [rank 1] AssertionError: rank one",
        "failed on rank 1 of 3; shown is rank 1",
        "output of rank 1",
        "failed on ranks 1, 2 of 3; shown is rank 1",
        "ValueError: way 2",
        "every rank must skip a test or none:\nrank 0: passed\nrank 1: passed\nrank 2: skipped: Skipped: not rank 2",
        "ERROR test_it.py::test_teardown_fails[n3] - [rank 0] IndexError",
        "test_property[n3] - [rank 0] AssertionError: found",
        "4 failed, 6 passed, 2 skipped, 4 deselected, 1 error",
    ]
    stdout = done.stdout.replace("\r\n", "\n")
    assert [text for text in told if text not in stdout] == [], stdout
    assert "output of rank 0" not in stdout
    assert stdout.count("test session starts") == 1


# --- ranks that are forks ---------------------------------------------------------------------------------------------
AS_STARTED = """
import json, os, sys
found = {
    "main": [__name__, globals().get("__file__"), sys.modules["__main__"].__dict__ is globals()],
    "words": [sys.argv, sys.orig_argv],
    "path": sys.path,
    "folder": os.getcwd(),
    "variables": sorted(os.environ),
    "home": os.environ["HOME"],
    "cores": sorted(os.sched_getaffinity(0)),
    "terminals": [os.isatty(n) for n in range(3)] + [sys.stdout.line_buffering, sys.stderr.line_buffering],
}
print(json.dumps(found))
print("has torch" if "torch" in sys.modules else "lacks torch", file=sys.stderr)
"""


@needs_mpirun
@each("command", [["it.py"], ["-m", "it"], ["-c", AS_STARTED]])
def test_a_fork_finds_everything_as_a_process_of_its_own_does(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("it.py").write_text(AS_STARTED)
    options = [*command, "a word", "--an-option"]
    env = {"HOME": str(tmp_path), "PYTHONPATH": str(TESTS)}
    own, fork = (launch(1, options, env=env, compiler=compiler) for compiler in (True, False))
    assert (own.stderr.strip(), fork.stderr.strip()) == ("lacks torch", "has torch")
    expected, found = json.loads(own.stdout), json.loads(fork.stdout)
    found["path"].remove(str(SITE))
    assert found == expected


@needs_mpirun
@each("ending", [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("raise KeyError", 1)])
def test_mpirun_sees_how_a_fork_ends_and_what_it_keeps_is_out_of_the_way_of_others_and_goes(tmp_path, ending):
    end, status = ending
    (tmp_path / "it.py").write_text(f"import os, sys\nprint(os.environ['PMIX_SERVER_TMPDIR'], flush=True)\n{end}")
    done = launch(1, [tmp_path / "it.py"])
    assert done.returncode == status and done.stderr.count("KeyError") == (status == 1) * 2, done.stderr
    folder = Path(done.stdout.strip()).parent
    assert folder.name.startswith("mpirun-") and not folder.exists()


@needs_mpirun
def test_a_fork_gets_signals_and_ends_with_its_job_all_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("it.py").write_text("""
import os, signal, time
from pathlib import Path

for name in ("SIGUSR1", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda number, _: Path(signal.Signals(number).name).touch())
Path("pid").write_text(f"{os.getpid()}.")
while True:
    time.sleep(1)
""")
    with started(1, ["it.py"], Path("log")) as job:
        wait_until(lambda: Path("pid").exists() and Path("pid").read_text().endswith("."))
        job.send_signal(signal.SIGUSR1)
        wait_until(Path("SIGUSR1").exists)
    wait_until(lambda: not Path(f"/proc/{Path('pid').read_text()[:-1]}").exists())
    assert Path("SIGTERM").exists()


def test_k_selects_tests_with_a_value_and_they_run_with_that_alone(write):
    write("""
from harness.cases import each

@each("name", ["ring_gossip", "Tree"])
def test_of_names(name):
    raise ValueError(name)

@each("case", [("tree", {}), ("path/mine.py:Tree", {"a": 1}), ("ring", {})])
def test_of_cases(case):
    raise ValueError(case[0])

@each("name", ["ring"])
def test_of_others(name):
    raise ValueError(name)
""")
    for word, told in {"gossip": ["ring_gossip"], "mine.py:Tree": ["path/mine.py:Tree"], "others": ["ring"]}.items():
        done = run(0, "-k", word)
        assert re.findall(r"^E +ValueError: (.*)", done.stdout, re.M) == told, done.stdout


def test_plain_runs_virtual_ranks_only_and_each_names_the_value_that_fails(write):
    write("""
from harness.cases import each

@each("a", [1, 2])
@each("b", [3, 4])
def test_each(tmp_path, a, b):
    (tmp_path / f"{a}-{b}").touch()
    assert len(list(tmp_path.iterdir())) == 2 * a + b - 4 < 4

def test_sizes(ranks):
    assert ranks(lambda comm: comm.size) == [ranks.size] * ranks.size and not ranks.real

@pytest.mark.sizes(2, 5)
def test_given_sizes(ranks):
    assert len(ranks(lambda comm: None, seed=3)) == ranks.size

@pytest.mark.mpi
def test_real():
    assert False

@pytest.mark.extended
def test_extended():
    pass
""")
    done = run(0, "-v")
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout
    assert sys.version_info < (3, 11) or ("with b = 4\n" in done.stdout and "with a = 2\n" in done.stdout)
    ids = re.findall(r"::(\S+) PASSED", done.stdout)
    assert ids == [*(f"test_sizes[n{n}]" for n in (1, 2, 3, 4)), "test_given_sizes[n2]", "test_given_sizes[n5]"]
    assert "2 tests deselected that run under mpirun only or with --all" in done.stdout
    done = run(0, "--all", "--collect-only", "--quiet")
    assert "8/9 tests collected (1 deselected)" in done.stdout
    done = run(0, "nowhere")
    told = done.stdout + done.stderr
    assert done.returncode == 4 and "file or directory not found: nowhere" in told and "INTERNALERROR" not in told


BLOCKED = """
@pytest.mark.mpi
def test_it(ranks):
    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("only on rank 1")
    {waits}
"""


@needs_mpirun
@each("how", [("MPI.COMM_WORLD.Barrier()", 1, "the other ranks did not come there within 1 s"),
              ("ranks(lambda comm: None)", 20, "ranks are at different places")])  # fmt: skip
def test_a_failing_rank_ends_the_others(write, how):
    waits, grace_s, why = how
    write(BLOCKED.format(waits=waits))
    done = run(2, f"--grace={grace_s}")  # raises if it hangs
    assert done.returncode == 1
    assert re.search(r"^\[rank 1\] E +ValueError: only on rank 1$", done.stderr, re.MULTILINE)
    assert why in done.stderr
    assert "[rank 0] E  " not in done.stderr


LIMIT = """
@pytest.mark.mpi
@pytest.mark.time_limit(0.5)
def test_it():
    rank_1_computes() if MPI.COMM_WORLD.rank == 1 else MPI.COMM_WORLD.Barrier()

def rank_1_computes():
    while True:
        pass
"""


@needs_mpirun
def test_time_limit_shows_the_stacks_of_every_rank(write):
    write(LIMIT)
    done = run(2)
    assert done.returncode == time_limit.STATUS
    for rank, where in enumerate(["in test_it", "in rank_1_computes"]):
        lines = [line for line in done.stderr.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert any("test_it took longer than its limit of 0.5 s" in line for line in lines)
        assert any(where in line for line in lines)


def test_time_limit_without_launcher_also_where_the_interpreter_lock_is_never_given_back(write):
    write("def test_it():\n    time.sleep(60)\n")
    done = run(0, "--time-limit=0.5")
    assert done.returncode == time_limit.STATUS and "_pytest" not in done.stderr
    assert "test_it took longer than its limit of 0.5 s" in done.stderr and "time.sleep(60)" in done.stderr
    write("import ctypes\n\ndef test_it():\n    ctypes.PyDLL(None).sleep(60)\n")
    done = run(0, "--time-limit=0.5")
    assert done.returncode == 1 and "Timeout (0:00:05.500000)!" in done.stderr and "in test_it" in done.stderr


@needs_mpirun
@each("case", [
    ("@pytest.mark.parametrize('n', range(MPI.COMM_WORLD.rank + 1))\n", "every rank must collect the same tests"),
    ("n = pytest.fixture(lambda: 0)\nassert not MPI.COMM_WORLD.rank, 'no'\n", "collection failed on rank 1:"),
])  # fmt: skip
def test_collection_that_differs_between_ranks(write, case):
    text, why = case
    write(f"{text}@pytest.mark.mpi\ndef test_it(n):\n    pass\n")
    done = run(2)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert why in done.stdout and "no tests ran" in done.stdout


def test_the_script_that_runs_all_names_files_that_exist():
    named = re.findall(r"tests/[\w/]+\.(?:py|sh)", (TESTS / "run.sh").read_text())
    assert len(named) > 4 and [path for path in named if not (TESTS.parent / path).exists()] == []


FAIL_ONCE = """
import os
from pathlib import Path

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "1")))
pytestmark = [pytest.mark.mpi] if {real} else []

@pytest.mark.parametrize("case", range({failing}))
def test_it(case):
    seen = Path(f"seen-{{case}}-{{rank}}")
    first = not seen.exists()
    seen.touch()
    assert not first or rank == 0

def test_always():
    assert {always}
"""


@needs_mpirun
@pytest.mark.parametrize(
    ("size", "failing", "always", "passes", "runs"),
    [(2, 2, True, True, 2), (0, 1, False, False, 2), (0, 5, True, False, 1)],
    ids=["passes later", "fails again", "many"],
)
def test_the_script_runs_a_few_failures_once_more_and_names_them(write, size, failing, always, passes, runs):
    write(FAIL_ONCE.format(real=size > 0, failing=failing, always=always))
    launcher = [str(find_mpirun()), "-n", str(size)] if size else []
    script = f'DURATIONS=. LATER=later; touch later; source "{TESTS}/tested.sh"; tested name "$@"'
    command = ["bash", "-euc", script, "bash", *launcher, sys.executable, *PYTEST[:5]]
    with launch_environment({**IMPORTS, "PYTEST_PLUGINS": "xdist.plugin"}) as env:  # it knows --numprocesses
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) is passes, done.stdout + done.stderr
    assert done.stdout.count("test session starts") == runs
    assert Path("name.xml").exists()
    later = Path("later").read_text().split()
    assert later == ([f"test_it.py::test_it[{case}]" for case in range(failing)] if passes else [])
