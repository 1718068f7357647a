"""Read the state of a job as Slurm's controller prints it: as JSON, since Slurm 23.02, or as a line of text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split()
FORGOTTEN = "unknown"  # a state: Slurm remembers ended jobs for minutes only, where it has no accounting
# Flags that Slurm's text shows in the state's place.
_SHOWN = "COMPLETING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESIZING RESV_DEL_HOLD REVOKED".split()
_SHOWN += "SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED".split()
_NAME = re.compile(r" JobName=.*? UserId=\S+\(\d+\) GroupId=")


class State(NamedTuple):
    """The state of a job, or of one task of an array."""

    job: str  # 12, or 12_3 of an array
    state: str
    reason: str = ""  # why it waits
    nodes: str = ""
    elapsed: str = ""
    limit: str = ""
    restarts: int = 0
    status: int = 0  # exit status, of the shell's kind: 128 and the signal's number where a signal ended it

    @property
    def ended(self) -> bool:
        return self.state in (*ENDED, FORGOTTEN)


def describe(one: State) -> str:
    """Describe a job's state in one line."""
    parts = [f"job {one.job} is {one.state}"]
    parts += [f"({one.reason})"] if one.reason else []
    parts += [f"on {one.nodes}"] if one.nodes else []
    parts += [f"for {one.elapsed} of {one.limit}"] if one.elapsed and one.state == "RUNNING" else []
    parts += [f"after {one.elapsed}"] if one.elapsed and one.ended else []
    parts += [f"with status {one.status}"] if one.ended and one.status else []
    parts += [f"({one.restarts} times requeued)"] if one.restarts > 1 else ["(requeued once)"] * one.restarts
    return " ".join(parts)


def read(output: str) -> list[State]:
    """Parse the output of `scontrol --oneliner [--json] show job`."""
    if output.lstrip().startswith("{"):
        return [_from_json(job, time.time()) for job in json.loads(output)["jobs"]]
    return [_from_line(line) for line in output.splitlines() if line.strip()]


def status_of(state: str, code: str) -> int:
    """Return a job's exit status as a shell does, from Slurm's `status:signal`.

    A job that has ended without completing has failed, also where its script's last command returned 0.
    """
    last, signal = map(int, code.split(":"))
    status = 128 + signal if signal else last
    return 1 if status == 0 and state in ENDED and state != "COMPLETED" else status


# --- text -------------------------------------------------------------------------------------------------------------
def _from_line(line: str) -> State:
    """Parse a line of KEY=VALUE, by the first place of each key.

    Free text may hold such keys, too. The job's name, the only one that comes before them, is cut out; comments,
    commands and paths come after them.
    """
    line = _NAME.sub(" GroupId=", line, count=1)

    def value(key: str) -> str:
        match = re.search(rf"(?:^| ){key}=(\S*)", line)
        return match[1] if match else ""

    array, task, state = value("ArrayJobId"), value("ArrayTaskId"), value("JobState")
    return State(
        job=_name(value("JobId"), array, task),
        state=state,
        reason="" if value("Reason") == "None" else value("Reason"),
        nodes=value("NodeList").replace("(null)", ""),
        elapsed=value("RunTime"),
        limit=value("TimeLimit"),
        restarts=int(value("Restarts")),
        status=status_of(state, value("ExitCode")),
    )


def _name(job: str, array: str, task: str) -> str:
    """Name a job or a task as the accounting does: 7, 7_2, or 7_[2-3] for tasks that wait together."""
    if not array or not task:
        return job
    return f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"


# --- JSON -------------------------------------------------------------------------------------------------------------
def _from_json(job: Mapping[str, Any], now: float) -> State:
    """Parse a job of Slurm's REST schema, 0.0.39 or newer. Versions differ in which values are objects or lists."""
    states = job["job_state"]
    states = [states] if isinstance(states, str) else states
    state = next((flag for flag in states[1:] if flag in _SHOWN), states[0])  # as in the text
    task = _number(job.get("array_task_id"))
    tasks = job.get("array_task_string") or ("" if task is None else str(task))
    code = job["exit_code"]
    signal = code.get("signal") or {}
    number = signal.get("id", signal.get("signal_id"))
    return State(
        job=_name(str(job["job_id"]), str(_number(job.get("array_job_id")) or ""), tasks),
        state=state,
        reason="" if job["state_reason"] == "None" else job["state_reason"],
        nodes=job["nodes"] or "",
        elapsed=_clock(_elapsed_s(job, state, now)),
        limit=_limit(job["time_limit"]),
        restarts=_number(job["restart_cnt"]) or 0,
        status=status_of(state, f"{_number(code.get('return_code')) or 0}:{_number(number) or 0}"),
    )


def _number(value: Any) -> int | None:
    """Read a number, or an object {set, infinite, number}; None where it is unset or infinite."""
    if isinstance(value, Mapping):
        return int(value["number"]) if value.get("set") and not value.get("infinite") else None
    return None if value is None else int(value)


def _elapsed_s(job: Mapping[str, Any], state: str, now: float) -> float:
    start, end = _number(job["start_time"]) or 0, _number(job["end_time"]) or 0
    if not start or start > now or state == "PENDING":  # then `start` is the expected one
        return 0.0
    return (end if state in ENDED else now) - start - (_number(job.get("pre_sus_time")) or 0)


def _limit(value: Any) -> str:
    if isinstance(value, Mapping) and value.get("infinite"):
        return "UNLIMITED"
    minutes = _number(value)
    return "Partition_Limit" if minutes is None else _clock(60.0 * minutes)


def _clock(seconds: float) -> str:
    """Write seconds as Slurm does: [days-]hours:minutes:seconds."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}" if days else f"{hour:02}:{minute:02}:{second:02}"
