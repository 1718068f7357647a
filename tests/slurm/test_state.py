"""What Slurm's controller says of a job, as text and as JSON."""

from __future__ import annotations

import json

import pytest

from hpcdist.tools.slurm import queue, state
from hpcdist.tools.slurm.state import State

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
    "Contiguous=0 Licenses=(null) Network=(null) Command=(null) WorkDir=/work Comment=a ExitCode=0:9 "
    "JobState=COMPLETED b  StdErr=/work/a StdErr=x JobState=FAILED.out StdIn=/dev/null "
    "StdOut=/work/a StdErr=x JobState=FAILED.out Power= \n"
)
STDOUT = "JobId=1 JobName=it\n   Comment=see StdOut=/none\n   StdOut={}\n   Power=\n"

NOW = 10_000.0
NO = {"set": False, "infinite": False, "number": 0}


def number(value: int) -> dict:
    return {"set": True, "infinite": False, "number": value}


def old(**changes) -> dict:
    """A job in version 0.0.39 of Slurm's schema (23.02)."""
    code = {"status": "SUCCESS", "return_code": 0}
    told = {"job_id": 7, "array_job_id": number(0), "array_task_id": NO, "array_task_string": "", "name": "it"}
    told |= {"comment": "a ExitCode=0:9 JobState=COMPLETED b", "job_state": "RUNNING", "state_reason": "None"}
    told |= {"nodes": "n[1-2]", "restart_cnt": 2, "exit_code": code, "time_limit": number(90)}
    return told | {"start_time": 9_000, "end_time": 14_400, "pre_sus_time": 0} | changes


def new(**changes) -> dict:
    """The same in version 0.0.41 (24.05): states are lists, and more numbers objects."""
    code = {"status": ["SUCCESS"], "return_code": number(0), "signal": {"id": NO, "name": ""}}
    told = old(job_state=["RUNNING"], exit_code=code)
    times = {key: number(told[key]) for key in ("start_time", "end_time", "pre_sus_time")}
    return told | times | changes


@pytest.fixture
def read(monkeypatch):
    monkeypatch.setattr(state.time, "time", lambda: NOW)
    return lambda *jobs: state.read(json.dumps({"jobs": jobs, "errors": [], "meta": {}}))


def test_names_comments_and_paths_are_not_read_as_text():
    assert state.read(TEXT) == [State("1", "RUNNING", "", "n1", "00:00:01", "365-00:00:00", 0, 0)]


@pytest.mark.parametrize("job", [old(), new()])
def test_json_says_the_same(read, job):
    assert read(job) == [State("7", "RUNNING", "", "n[1-2]", "00:16:40", "01:30:00", 2, 0)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"job_state": ["FAILED"], "exit_code": {"return_code": number(3), "signal": {"id": NO}}},
            State("7", "FAILED", "", "n[1-2]", "01:30:00", "01:30:00", 2, 3),
        ),
        (
            {"job_state": ["CANCELLED", "COMPLETING"], "exit_code": {"return_code": NO, "signal": {"id": number(15)}}},
            State("7", "COMPLETING", "", "n[1-2]", "00:16:40", "01:30:00", 2, 143),
        ),
        (
            {"job_state": ["PENDING"], "state_reason": "Priority", "nodes": "", "time_limit": NO | {"infinite": True}},
            State("7", "PENDING", "Priority", "", "00:00:00", "UNLIMITED", 2, 0),
        ),
        (
            {"time_limit": NO, "start_time": number(10_000 - 90_061), "array_job_id": number(5), "job_id": 9}
            | {"array_task_id": number(0)},
            State("5_0", "RUNNING", "", "n[1-2]", "1-01:01:01", "Partition_Limit", 2, 0),
        ),
        (
            {"array_job_id": number(5), "array_task_string": "2-3%1", "job_state": ["PENDING"], "restart_cnt": 0},
            State("5_[2-3%1]", "PENDING", "", "n[1-2]", "00:00:00", "01:30:00", 0, 0),
        ),
        (
            {"job_state": "FAILED", "exit_code": {"return_code": 0, "signal": {"signal_id": 9}}, "end_time": 9_060},
            State("7", "FAILED", "", "n[1-2]", "00:01:00", "01:30:00", 2, 137),
        ),
    ],
)
def test_what_json_says(read, changes, expected):
    assert read(new(**changes)) == [expected]


# --- which of the two is asked for ------------------------------------------------------------------------------------
@pytest.fixture
def scontrol(monkeypatch, tmp_path):
    """`scontrol(script)` puts it first on PATH; where it appends to `asked`, the calls are counted there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(queue, "JSON", ["--json"])

    def write(script: str) -> None:
        (tmp_path / "scontrol").write_text(f'#!/bin/bash\necho "$@" >>asked\n{script}\n')
        (tmp_path / "scontrol").chmod(0o755)

    return write


OLDER = """case "$*" in *--json*) echo "scontrol: unrecognized option '--json'" >&2; exit 1 ;; esac"""
OTHER = """case "$*" in *--json*) echo '{"jobs": [{"id": 1}]}'; exit ;; esac"""


@pytest.mark.parametrize("without_json", [OLDER, OTHER])
def test_where_there_is_no_such_json_text_is_asked_for_from_then_on(scontrol, tmp_path, without_json):
    scontrol(f"{without_json}\necho '{TEXT}'")
    assert queue.states("1") == queue.states("1") == state.read(TEXT)
    told = (tmp_path / "asked").read_text().splitlines()
    assert ["--json" in line for line in told] == [True, False, False]


def test_json_is_taken_where_there_is_some(scontrol, tmp_path):
    (tmp_path / "answer").write_text(json.dumps({"jobs": [new(job_state=["COMPLETED"])]}))
    scontrol("cat answer")
    assert [(one.job, one.state, one.elapsed) for one in queue.states("7")] == [("7", "COMPLETED", "01:30:00")]
    assert (tmp_path / "asked").read_text() == "--oneliner --json show job 7\n"


def test_a_log_whose_path_has_blanks(scontrol, tmp_path):
    log = tmp_path / "a log ExitCode=0.out"
    log.touch()
    (tmp_path / "answer").write_text(STDOUT.format(log))
    scontrol("cat answer")
    assert queue.logs("1") == [log]
