"""Parse a job's state from the output of Slurm's controller, plain text that all versions print."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split()
FORGOTTEN = "unknown"  # a state: without accounting, Slurm forgets ended jobs after minutes
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
    status: int = 0  # exit status as in a shell: 128 + signal number after a signal

    @property
    def ended(self) -> bool:
        return self.state in (*ENDED, FORGOTTEN)


def describe(job_state: State) -> str:
    """Describe a job's state in one line."""
    job, state, reason, nodes, elapsed, limit, restarts, status = job_state
    parts = {  # a text: when it is said
        f"job {job} is {state}": True,
        f"({reason})": reason,
        f"on {nodes}": nodes,
        f"for {elapsed} of {limit}": elapsed and state == "RUNNING",
        f"after {elapsed}": elapsed and job_state.ended,
        f"with status {status}": status and job_state.ended,
        "(requeued once)" if restarts == 1 else f"({restarts} times requeued)": restarts,
    }
    return " ".join(text for text, is_said in parts.items() if is_said)


def status_of(state: str, code: str) -> int:
    """Return a job's exit status as in a shell, from `code`: Slurm's `status:signal`.

    A job that ended without completing has failed, even if its script's last command returned 0.
    """
    last, signal = map(int, code.split(":"))
    status = 128 + signal if signal else last
    return 1 if status == 0 and state in ENDED and state != "COMPLETED" else status


def read(output: str) -> list[State]:
    """Parse the output of `scontrol --oneliner show job`: KEY=VALUE for each job.

    The first occurrence of a key counts, since comments, commands and paths, which come later, may contain such text.
    The job's name, which comes before, is removed first.
    """
    states = []
    for line in filter(str.strip, output.splitlines()):
        pairs = re.findall(r"(?:^| )(\w+)=(\S*)", _NAME.sub(" GroupId=", line, count=1))
        values = defaultdict(str, reversed(pairs))
        job, array, task = values["JobId"], values["ArrayJobId"], values["ArrayTaskId"]
        if array and task:  # named as in the accounting: 7_2, or 7_[2-3] for waiting tasks
            job = f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"
        states.append(
            State(
                job=job,
                state=values["JobState"],
                reason="" if values["Reason"] == "None" else values["Reason"],
                nodes=values["NodeList"].replace("(null)", ""),
                elapsed=values["RunTime"],
                limit=values["TimeLimit"],
                restarts=int(values["Restarts"]),
                status=status_of(values["JobState"], values["ExitCode"]),
            )
        )
    return states
