"""Read the state of a job as Slurm's controller prints it, a line of text in all its versions."""

from __future__ import annotations

import re
from typing import NamedTuple

ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split()
FORGOTTEN = "unknown"  # a state: Slurm remembers ended jobs for minutes only, where it has no accounting
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


def status_of(state: str, code: str) -> int:
    """Return a job's exit status as a shell does, from Slurm's `status:signal`.

    A job that has ended without completing has failed, also where its script's last command returned 0.
    """
    last, signal = map(int, code.split(":"))
    status = 128 + signal if signal else last
    return 1 if status == 0 and state in ENDED and state != "COMPLETED" else status


def read(output: str) -> list[State]:
    """Parse the output of `scontrol --oneliner show job`: KEY=VALUE of each job, by the first place of each key.

    Free text may hold such keys, too. The job's name, the only one that comes before them, is cut out; comments,
    commands and paths come after them.
    """
    found = []
    for line in filter(str.strip, output.splitlines()):
        text = _NAME.sub(" GroupId=", line, count=1)

        def value(key: str, text: str = text) -> str:
            match = re.search(rf"(?:^| ){key}=(\S*)", text)
            return match[1] if match else ""

        job, array, task, state = map(value, ("JobId", "ArrayJobId", "ArrayTaskId", "JobState"))
        if array and task:  # named as the accounting does: 7_2, or 7_[2-3] for tasks that wait together
            job = f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"
        found.append(
            State(
                job=job,
                state=state,
                reason="" if value("Reason") == "None" else value("Reason"),
                nodes=value("NodeList").replace("(null)", ""),
                elapsed=value("RunTime"),
                limit=value("TimeLimit"),
                restarts=int(value("Restarts")),
                status=status_of(state, value("ExitCode")),
            )
        )
    return found
