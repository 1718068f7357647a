"""`hpcdist doctor` on real ranks: what it prints, how it ends, and that it ends whatever hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from harness.launch import find_mpirun, launch
from hpcdist.errors import ConfigError
from hpcdist.registry import catalogue
from hpcdist.tools.doctor.base import WARNING, Finding, Nodes, Requirements
from hpcdist.tools.doctor.report import Report
from kit.hosts import NET, Cable

ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": str(ROOT)}
PATIENT = ("--limit-s", "100")  # tests share the machine

pytestmark = [pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed"), pytest.mark.time_limit(150)]

# Runs the command on nodes without other work, though tests share the machine.
IDLE = """
import os
os.getloadavg = lambda: (0.5 * os.cpu_count(),) * 3
from hpcdist.tools import cli
cli.main()
"""

# Runs the command on nodes with this load, after a statement of its own on each rank.
SCRIPT = """
import os, signal, sys, time
os.getloadavg = lambda: ({load} * os.cpu_count(),) * 3
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
from hpcdist.tools import cli
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()  # ranks wait for each other for a moment only
{text}
cli.main()
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def doctor(size: int, *options: str, before: str = "", load: float = 0.5) -> subprocess.CompletedProcess[str]:
    """The finished command, on nodes with this load per processor. Raises TimeoutExpired if it does not end."""
    program = ["-c", SCRIPT.format(text=before, load=load)]
    return launch(size, [*program, "doctor", *options], env={**ENV, "HOME": os.getcwd()}, timeout_s=120)


def lines(job: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """Status, check and text of each finding."""
    return [line.split(maxsplit=2) for line in job.stdout.replace("\r\n", "\n").splitlines()]


# --- how it ends ------------------------------------------------------------------------------------------------------
def test_it_prints_a_line_per_finding_and_writes_what_it_measured():
    job = doctor(2, "--json", "told.json", "--exclude-file", "out", *PATIENT)
    assert job.returncode == 0, job.stdout + job.stderr
    found = lines(job)
    others = [name for name in catalogue("checks").available() if name != "world"]
    assert list(dict.fromkeys(check for _, check, _ in found)) == ["world", *others, "all"]
    assert found[0][2].startswith("2 ranks on 1 node (") and "started by Open MPI's mpirun" in found[0][2]
    assert all(status in ("ok", "warning") for status, _, _ in found)
    assert found[-1][2].startswith("0 errors, ") and found[-1][2].endswith("exit status 0")
    told = json.loads(Path("told.json").read_text())
    assert (told["status"], told["excluded"], len(told["nodes"])) == (0, [], 1)
    assert [f["check"] for f in told["findings"]] == [check for _, check, _ in found[:-1]]
    assert set(told["measured"]) == set(told["seconds_by_check"]) == {check for _, check, _ in found[:-1]}
    assert Path("out").read_text() == "" and sorted(path.name for path in Path().iterdir()) == ["out", "told.json"]


def test_another_number_of_ranks_is_told_once():
    job = doctor(2, "--ranks", "4")
    assert job.returncode == 1
    (world, total) = lines(job)
    assert world[:2] == ["error", "world"] and "must have 4 ranks (--ranks); got 2 with Open MPI" in world[2]
    assert total[2].startswith("1 error, 0 warnings, ") and total[2].endswith("exit status 1")


def test_files_are_written_with_what_is_known_before_mpi_starts_or_refused():
    report = Report(Requirements(json_path=Path("nowhere") / "told.json"), is_reporter=True)
    with pytest.raises(ConfigError, match="told.json must be a file that can be written; got No such file"):
        report.conclude()
    report = Report(Requirements(spare=2, exclude_file=Path("out"), json_path=Path("told.json")), is_reporter=True)
    report.nodes = Nodes(("n1", "n2", "n3"), ())
    report.add([Finding(WARNING, "n2 is not well", ("n2",))])
    report.write_files(status=1)
    told = json.loads(Path("told.json").read_text())
    assert (told["status"], told["excluded"], len(told["findings"])) == (1, ["n2", "n3"], 1)
    assert Path("out").read_text() == "n2,n3\n"


# --- it ends whatever hangs -------------------------------------------------------------------------------------------
SILENT = """
from hpcdist.comm.mpi import first_messages
first_messages.ANSWER_S = 5.0  # a busy rank answers late
if rank == 2: time.sleep(600)
"""


TOO_LONG = "from hpcdist.tools.doctor import examination\nexamination.startup.check = lambda *_: time.sleep(600)"


def at_once(*jobs: Callable[[], subprocess.CompletedProcess[str]]) -> list[subprocess.CompletedProcess[str]]:
    """Jobs that wait, most of the time."""
    with ThreadPoolExecutor() as pool:
        return [one.result() for one in [pool.submit(job) for job in jobs]]


def test_a_rank_that_never_answers_and_what_takes_too_long_are_named():
    silent, late = at_once(lambda: doctor(3, before=SILENT), lambda: doctor(2, "--limit-s", "5", before=TOO_LONG))
    for job, text in (
        (silent, "every rank must answer; got nothing from rank 2 within 5 s. It has ended, is stopped,"),
        (late, r"the examination must end within 5 s; got no end of 'world' on \S+. Look there"),
    ):
        assert job.returncode == 1
        (world, _) = lines(job)
        assert world[:2] == ["error", "world"] and re.match(text, world[2])


STOPS = """
from hpcdist.tools.doctor.checks import files
measure = files.measure
def stopping(comm, *arguments):
    comm.failures.deadline_s = 1.0
    if rank == {rank}:
        os.kill(os.getpid(), signal.SIGSTOP)
    return measure(comm, *arguments)
files.measure = stopping
"""


def test_a_rank_that_stops_is_named():
    jobs = at_once(*(partial(doctor, 2, *PATIENT, before=STOPS.format(rank=rank)) for rank in (0, 1)))
    for job, rank, seconds in zip(jobs, (0, 1), (2, 1)):
        assert job.returncode != 0
        (found,) = [line for line in lines(job) if line[0] == "error" and line[1] == "files"]
        assert found[2] == f"rank {rank} did not answer within {seconds} s. All must answer at 'files'"


SLOW = """
from hpcdist.tools.doctor import examination
from hpcdist.tools.doctor.checks import files
examination.WAIT_S = 2.0
measure = files.measure
def slow(*arguments):
    time.sleep(rank * 4)
    return measure(*arguments)
files.measure = slow
"""


def test_what_other_work_makes_slow_is_waited_for_and_errors_say_the_load():
    stops = SLOW.replace("rank * 4", "rank * 600")
    slow, stopped = at_once(*(partial(doctor, 2, *PATIENT, before=text, load=3.5) for text in (SLOW, stops)))
    assert slow.returncode == 0, slow.stdout
    found = lines(slow)
    assert [row[:2] for row in found if row[0] == "error"] == [] and found[0][:2] == ["warning", "world"]
    load = r"Other processes are running: \S+'s load is 3.5 times its processors"
    assert re.fullmatch(rf"{load}\. Measured times may be affected, and timeouts are longer", found[0][2])
    assert stopped.returncode != 0
    (error,) = [row[2] for row in lines(stopped) if row[:2] == ["error", "files"]]
    assert re.fullmatch(rf"rank 1 did not answer within 7 s\. All must answer at 'files'\. {load}", error)


SOONER = """
import time
from hpcdist.tools.doctor.examination import TimeLimit
limit = TimeLimit(60, print)
with limit.hard_limit(0.2):
    pass
time.sleep(0.4)
print("goes on", flush=True)
with limit.hard_limit(0.2):
    time.sleep(60)
"""


def test_what_may_not_come_back_ends_sooner_and_without_a_word():
    job = subprocess.run([sys.executable, "-c", SOONER], capture_output=True, text=True, timeout=100)
    assert (job.returncode, job.stdout, job.stderr) == (1, "goes on\n", "")


LATE = """
import os, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "{rank}": time.sleep(600)
from hpcdist.tools import cli
from hpcdist.comm.mpi import start
start.APART_S, start.LATEST_S = 5.0, 20.0  # the rank that is to speak may be late itself
cli.main()
"""


def test_a_rank_that_never_starts_mpi_is_not_waited_for():
    def run(late: int) -> subprocess.CompletedProcess[str]:
        command = ["-c", LATE.format(rank=late), "doctor", "--limit-s", "4", "--json", f"late-{late}.json"]
        return launch(3, command, env={**ENV, "HOME": os.getcwd()}, timeout_s=120)

    for late, is_reporter, job in zip((2, 0), (0, 1), at_once(lambda: run(2), lambda: run(0))):
        assert job.returncode == 1, job.stdout + job.stderr
        world, *more = lines(job)
        assert world[:2] == ["error", "world"]
        text = rf"rank {is_reporter} waited \d\S* s in MPI's start for the other ranks of 3\. A rank ended"
        assert re.match(text, world[2])
        assert [row[:2] for row in more] == [["error", "all"]] * (is_reporter == 0) and "Timeout" not in job.stderr
        assert Path(f"late-{late}.json").exists() == (is_reporter == 0)


# --- on hosts of its own ----------------------------------------------------------------------------------------------
def test_the_host_behind_a_slow_cable_is_named_and_a_folder_that_is_not_shared(make_hosts):
    """Each host has a /dev/shm of its own."""
    made = make_hosts(3)
    made.shape(Cable(50), "n2")
    options = ("--folder", "/dev/shm", "--spare", "1", "--exclude-file", "out", "--json", "told.json", *PATIENT)
    job = made.launch(
        ["-c", SCRIPT.format(text="", load=0.5), "doctor", *options], env={**ENV, "HOME": os.getcwd()}, timeout_s=120
    )
    found = [line.split(maxsplit=2) for line in job.stdout.splitlines()]
    said = [(status, text) for status, check, text in found if check == "links" and "is slow" in text]
    assert "n2" in [text.split()[0] for _, text in said], job.stdout + job.stderr
    slow = next(text for _, text in said if text.startswith("n2"))
    figures = r"\d+ µs, \d\d(\.\d)? Mbit/s"
    assert re.search(rf"n2 is slow: to n1 {figures}, to n3 {figures}; the nodes' median is \d+ µs, ", slow)
    assert ["ok", "spare", "excludes n2; 2 remain: n1, n3"] in found and Path("out").read_text() == "n2\n"
    (files,) = [text for status, check, text in found if (status, check) == ("error", "files")]
    assert files.startswith("folder must be on a file system that all nodes share; got /dev/shm, where n2, n3 see")
    assert job.returncode == 1, "leaving out a node does not settle that"
    assert json.loads(Path("told.json").read_text())["excluded"] == ["n2"]


def on_hosts(made, program: list[str], *options: str) -> tuple[list[list[str]], str]:
    """The lines of a doctor that fails, with one node to spare; and all that it has written."""
    options = ("doctor", "--spare", "1", "--exclude-file", "out", *PATIENT, *options)
    job = made.launch([*program, *options], env={**ENV, "HOME": os.getcwd()}, timeout_s=120)
    assert job.returncode != 0, job.stdout + job.stderr
    return lines(job), job.stdout + job.stderr


LOSE = ("neigh", "replace", "{}", "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")


def test_two_hosts_that_pass_each_other_nothing_are_named(make_hosts):
    made = make_hosts(4)
    words = [word.format(f"{NET}.2") for word in LOSE]
    subprocess.run([*made.inside("n4"), "ip", *words], check=True)
    found, said = on_hosts(made, ["-c", IDLE])
    assert [row[:2] for row in found] == [["error", "links"], ["ok", "spare"], ["error", "all"]], said
    assert found[0][2].startswith(
        "the link n2-n4 passes nothing: MPI's first message did not arrive within 2.5 s, though all reach n1. Exclude"
    )
    assert found[1][2] == "excludes n4; 3 remain: n1, n2, n3" and Path("out").read_text() == "n4\n"


BREAKS = """
import subprocess
from hpcdist.tools.doctor.checks import links
pair = links._pair
def breaking(comm, peer):
    comm.failures.deadline_s = 3.0
    if (comm.rank, peer) == (1, 2):
        subprocess.run("ip {command}", shell=True, check=True)
    return pair(comm, peer)
links._pair = breaking
"""


def test_a_link_that_breaks_while_it_is_measured_is_named(make_hosts):
    before = BREAKS.format(command=" ".join(LOSE).format(f"{NET}.3"))
    found, said = on_hosts(make_hosts(3), ["-c", SCRIPT.format(text=before, load=0.5)])
    (link,) = [row for row in found if row[0] == "error" and row[1] == "links"]
    assert link[2].startswith("the link n2-n3 passes nothing: its measurement did not end within 3 s, though"), said
    assert Path("out").read_text() == "n3\n"
