"""What was submitted from a folder, and how far its run is; Slurm's part is in tests/cluster/test_queue.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.cases import each
from hpcdist.config.files import git_commit
from hpcdist.errors import ConfigError, DataError, QueueError
from hpcdist.records import RecordWriter, StepRecord, record_path
from hpcdist.tools.slurm import history, queue
from hpcdist.tools.slurm.history import Submission
from hpcdist.tools.slurm.spec import JobSpec, Site
from hpcdist.tools.slurm.state import State, describe, read
from hpcdist.tools.slurm.watch import facts, watch


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to submit from."""
    monkeypatch.chdir(tmp_path)


def entry(job: str, **given) -> Submission:
    values = {"job": job, "name": "it", "submitted": 1.5, "commit": None, "dirty": False, "cases": 0}
    values |= {"script": f".hpcdist/{job}.sh", "log": f"runs/it-{job}.out", "output": f"runs/{job}"}
    values |= {"spec": {"command": ["true"]}}
    return Submission(**values | given)


def remember(*entries: Submission) -> None:
    history.FOLDER.mkdir(exist_ok=True)
    for one in entries:
        history.append(one)


def test_the_newest_job_is_found_and_others_by_number():
    assert history.read() == [] and history.find(None) is None
    with pytest.raises(QueueError, match="job must be given where none was submitted; got no .hpcdist/jobs.jsonl here"):
        queue.newest(None)
    remember(entry("12"), entry("14"), entry("13", spec={"nodes": 2}))
    assert history.find(None) == entry("13", spec={"nodes": 2})
    assert history.find("14") == history.find("14_3") == entry("14")
    assert history.find("15") is None
    assert (queue.newest(None), queue.newest("99")) == ("13", "99")


def test_a_damaged_line_is_named():
    remember(entry("12"))
    with open(history.FOLDER / "jobs.jsonl", "a") as file:
        file.write('{"job": "13"\n')
    with pytest.raises(DataError, match=r"jobs.jsonl:2 must be a submitted job; got b'\{\"job.*Delete this line"):
        history.read()


def test_the_commit_and_whether_files_differ_from_it():
    assert git_commit() == (None, False)
    Path("file").touch()
    for command in ("init -q", "add file", "-c user.name=a -c user.email=a@b commit -q -m first"):
        subprocess.run(["git", *command.split()], check=True)
    commit, dirty = git_commit()
    assert len(commit) == 40 and not dirty
    Path("new").touch()
    assert git_commit() == (commit, False)
    Path("file").write_text("changed")
    assert git_commit() == git_commit(Path().resolve()) == (commit, True)
    assert git_commit(Path("none")) == (None, False)


# --- without a Slurm --------------------------------------------------------------------------------------------------
def test_slurm_must_be_there(monkeypatch):
    with pytest.raises(ConfigError, match="shape must be a batch shape to be submitted; got 'interactive'"):
        queue.submit(JobSpec(shape="interactive"), Site())
    monkeypatch.setattr(queue, "SLURM_REPLY_S", 0.1)
    with pytest.raises(QueueError, match="sleep must answer within 0.1 s; got nothing. The controller is down or busy"):
        queue.ask("sleep", "5")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(QueueError, match="sbatch must be on PATH to reach Slurm; found none. Log in to a host of the"):
        queue.submit(JobSpec(command=["true"]), Site())
    assert history.read() == [] and list(history.FOLDER.iterdir()) == []


# --- what Slurm says --------------------------------------------------------------------------------------------------
# Told by Slurm 22.05 of a job whose name, comment and log's path look like what is read.
TEXT = (
    "JobId=1 JobName=my ExitCode=0:15 job UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 Nice=0 "
    "Account=(null) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 "
    "Reboot=0 ExitCode=0:0 RunTime=00:00:01 TimeLimit=365-00:00:00 TimeMin=N/A SubmitTime=2026-11-22T16:17:34 "
    "EligibleTime=2026-11-22T16:17:34 AccrueTime=2026-11-22T16:17:34 StartTime=2026-11-22T16:17:35 "
    "EndTime=2027-11-22T16:17:35 Deadline=N/A PreemptEligibleTime=2026-11-22T16:17:35 PreemptTime=None "
    "SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-22T16:17:35 Scheduler=Backfill Partition=main "
    "AllocNode:Sid=ctl:0 ReqNodeList=(null) ExcNodeList=(null) NodeList=n1 BatchHost=n1 NumNodes=1 NumCPUs=1 "
    "NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=1,node=1,billing=1 Socks/Node=* NtasksPerN:B:S:C=0:0:*:* "
    "CoreSpec=* MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=OK "
    "Contiguous=0 Licenses=(null) Network=(null) Command=(null) WorkDir=/scratch Comment=a ExitCode=0:9 "
    "JobState=COMPLETED b  StdErr=/scratch/a StdErr=x JobState=FAILED.out StdIn=/dev/null "
    "StdOut=/scratch/a StdErr=x JobState=FAILED.out Power= \n"
)
STDOUT = "JobId=1 JobName=it\n   Comment=see StdOut=/none\n   StdOut={}\n   Power=\n"
LINE = (
    "JobId=7 JobName=it JobState={} Reason={} Restarts={} ExitCode={} RunTime=00:01:02 TimeLimit=01:00:00 NodeList={}"
)


@each(
    "case",
    [
        (("PENDING", "Priority", 0, "0:0", "(null)"), (False, 0), "is PENDING (Priority)"),
        (("RUNNING", "None", 2, "0:0", "n1"), (False, 0), "on n1 for 00:01:02 of 01:00:00 (2 times requeued)"),
        (("COMPLETING", "None", 1, "75:0", "n1"), (False, 75), "is COMPLETING on n1 (requeued once)"),
        (("COMPLETED", "None", 0, "0:0", "n1"), (True, 0), "is COMPLETED on n1 after 00:01:02"),
        (("FAILED", "NonZeroExitCode", 0, "7:0", "n1"), (True, 7), "after 00:01:02 with status 7"),
        (("CANCELLED", "None", 0, "0:15", "n1"), (True, 143), "with status 143"),
        (("TIMEOUT", "TimeLimit", 0, "0:0", "n1"), (True, 1), "with status 1"),
    ],
)
def test_a_state_and_what_it_means(case):
    told, expected, text = case
    (state,) = read(LINE.format(*told))
    assert (state.ended, state.status) == expected
    assert text in describe(state)


def test_names_comments_and_paths_are_not_read_as_text():
    assert read(TEXT) == [State("1", "RUNNING", "", "n1", "00:00:01", "365-00:00:00", 0, 0)]


def test_tasks_and_logs_of_an_array_have_names_of_their_own():
    line = LINE.format("RUNNING", "None", 0, "0:0", "n1").replace("JobId=7", "JobId=9 ArrayJobId=7 ArrayTaskId=2")
    assert read(line)[0].job == "7_2"
    remember(entry("7", log="runs/it-7_%a.out", cases=12))
    Path("runs").mkdir()
    for task in (0, 10, 2):
        Path(f"runs/it-7_{task}.out").touch()
    assert [path.name for path in queue.logs("7")] == ["it-7_0.out", "it-7_2.out", "it-7_10.out"]
    assert [path.name for path in queue.logs("7_10")] == ["it-7_10.out"]
    assert queue.logs("7_3") == []


def test_what_there_is_to_say_of_a_job():
    state = State("7", "COMPLETED", "", "n1", "00:01:02", "01:00:00")
    assert facts("7", None, [state]) == {"7": "COMPLETED on n1 after 00:01:02"}
    with RecordWriter(record_path("runs/7", 0)) as writer:
        writer.write(StepRecord(1, samples=16, loss=0.5))
    told = facts("7", entry("7", commit="0123456789abcdef", dirty=True), [state])
    assert told["run"] == "runs/7: step 1, 16 samples, loss 0.5000" and told["commit"] == "0123456789ab and changes"
    Path("runs/7/summary.json").touch()
    assert facts("7", entry("7"), [state])["run"].endswith(", has ended")
    Path("runs/8_0").mkdir()
    assert facts("8", entry("8", cases=4), [state])["run"] == "runs/8: 0 of 4 runs have ended"


# Stand-ins, for what takes a Slurm too long, or one without accounting; the others are in tests/cluster.
FORGOTTEN = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"
NO_ACCOUNTING = "echo Slurm accounting storage is disabled >&2; exit 1"
ACCOUNTED = """[ "${*: -1}" != 7 ] || cat <<END
8|7_0|REQUEUED|00:00:01|365-00:00:00|n2|0:0
9|7_1|TIMEOUT|00:01:28|00:01:00|n2|0:0
11|7_0|NODE_FAIL|00:00:21|365-00:00:00|n[3-4]|0:0
10|7_[2-3%1]|CANCELLED by 1000|00:00:00|Partition_Limit|None assigned|0:0
END"""


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """`stand_ins(name=script)` puts these first on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(**scripts: str) -> None:
        for name, script in scripts.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
            (tmp_path / name).chmod(0o755)

    return write


def test_the_accounting_remembers(stand_ins):
    stand_ins(scontrol=FORGOTTEN, sacct=ACCOUNTED)
    lost = State("7_0", "NODE_FAIL", "", "n[3-4]", "00:00:21", "365-00:00:00", 1, 1)
    late = State("7_1", "TIMEOUT", "", "n2", "00:01:28", "00:01:00", 0, 1)
    never = State("7_[2-3%1]", "CANCELLED", "", "", "00:00:00", "Partition_Limit", 0, 1)
    assert queue.states("7") == [lost, late, never]
    assert queue.states("7_3") == [never] and queue.wait("7") == 1
    stand_ins(sacct=NO_ACCOUNTING)
    with pytest.raises(QueueError, match="job must be one that Slurm or .hpcdist/jobs.jsonl knows; got 7."):
        queue.states("7")
    remember(entry("7"))
    assert queue.states("7") == [State("7", "unknown")]


MEASURED = """echo '7|160000
7.batch|90000
7.extern|91000
7.0|70000
7.1|0
7.2|18446744073709551614
7.3|12500'"""


def test_the_energy_of_a_jobs_steps(stand_ins):
    for sacct, joules in ((MEASURED, 82_500.0), ("echo '7|0'; echo '7.0|0'", None), (NO_ACCOUNTING, None)):
        stand_ins(sacct=sacct)
        assert queue.consumed_joules("7") == joules


def test_an_array_s_tasks_are_forgotten_one_by_one(stand_ins, monkeypatch):
    monkeypatch.setattr(queue, "SHORTEST_S", 0.01)
    failed, runs, done, waits = (
        LINE.format(state, "None", 0, code, "n1").replace("JobId=7", f"JobId=9 ArrayJobId=7 ArrayTaskId={task}")
        for task, state, code in (
            ("0", "FAILED", "3:0"),
            ("1", "RUNNING", "0:0"),
            ("1", "COMPLETED", "0:0"),
            ("2-3%1", "PENDING", "0:0"),
        )
    )
    stand_ins(scontrol=f"echo '{runs}'; echo '{waits}'", sacct=ACCOUNTED)
    assert [(one.job, one.state) for one in queue.states("7")] == [
        ("7_1", "RUNNING"),
        ("7_[2-3%1]", "PENDING"),
        ("7_0", "NODE_FAIL"),
    ]
    later = f"[ -e asked ] && echo '{done}' || {{ touch asked; echo '{failed}'; echo '{runs}'; }}"
    stand_ins(scontrol=later, sacct=NO_ACCOUNTING)
    assert queue.wait("7") == 3


def test_a_log_whose_path_has_blanks(stand_ins, tmp_path):
    log = tmp_path / "a log ExitCode=0.out"
    log.touch()
    (tmp_path / "answer").write_text(STDOUT.format(log))
    stand_ins(scontrol="cat answer")
    assert queue.logs("1") == [log]


def test_a_job_is_shown_until_it_has_ended(stand_ins, monkeypatch, capsys):
    monkeypatch.setattr(queue, "SHORTEST_S", 0.01)
    with RecordWriter(record_path("runs/7", 0)) as writer:
        writer.write(StepRecord(1, samples=16, loss=0.5))
    runs, failed = (
        LINE.format(state, "None", 0, code, "n1") for state, code in (("RUNNING", "0:0"), ("FAILED", "3:0"))
    )
    stand_ins(scontrol=f"[ -e asked ] && echo '{failed}' || {{ touch asked; echo '{runs}'; }}")
    assert watch(entry("7")) == 3
    shown = " ".join(capsys.readouterr().err.split())
    assert "job 7 is RUNNING" in shown and "with status 3" in shown and "step 1, 16 samples, loss 0.5000" in shown
