"""Running a rendered script by bash, with stand-ins for Slurm's commands that write down what they were given.

They test what the script says and does; that Slurm takes it so is tested on a Slurm, in tests/cluster.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hpcdist.tools.slurm.render import Script, render
from hpcdist.tools.slurm.spec import JobSpec, Site

COMMANDS = ("srun", "mpirun", "mpiexec", "scontrol", "salloc", "module", "conda")
RECORDER = r"""#!/bin/bash
name=${0##*/}
{ printf '%s\0' "$name" "$#" "$@"; printf '%s\0' "${HOSTILE-}"; } >>"$CALLS"
if [ "$name $1 $2" = "scontrol show hostnames" ]; then
    [ -z "$HOSTS" ] || printf '%s\n' $HOSTS
fi
if [ "$name $1 $2" = "scontrol show job" ]; then
    echo "${JOB-}"
fi
if [ "$name ${!#}" = "srun true" ]; then # asks whether all hosts are there
    eval "${ON_PROBE-}"
else
    case $name in srun | mpirun | mpiexec | salloc) eval "${ON_LAUNCH-}" ;; esac
fi
"""
RUN_IT = 'while [ "$1" != bash ]; do shift; done; exec "$@"'  # for ON_LAUNCH: run the task here


class Bash:
    """A folder with the stand-ins, in which scripts run as the job 4711 on the hosts n1, n2, ..."""

    def __init__(self, folder: Path):
        self.folder, self.calls_file = folder, folder / "calls"
        commands = folder / "bin"
        commands.mkdir()
        (commands / "record").write_text(RECORDER)
        (commands / "record").chmod(0o755)
        for name in COMMANDS:
            (commands / name).symlink_to("record")
        self.environ = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "HOSTS": "n1 n2",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_ARRAY_JOB_ID": "4700",
            "SLURM_ARRAY_TASK_ID": "1",
        }

    def start(self, script: Script, **environ: str) -> subprocess.Popen[str]:
        self.calls_file.unlink(missing_ok=True)
        path = self.folder / "job.sh"
        path.write_text(script.text, newline="\n")
        return subprocess.Popen(
            ["bash", str(path)], cwd=self.folder, env=self.environ | environ, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, script: Script, **environ: str) -> tuple[int, str]:
        """The script's status and all it printed."""
        process = self.start(script, **environ)
        printed, _ = process.communicate(timeout=200)
        return process.returncode, printed

    def calls(self) -> list[tuple[str, list[str], str]]:
        """Every call of a stand-in: its name, its arguments, and the variable HOSTILE."""
        words = self.calls_file.read_bytes().decode().split("\0") if self.calls_file.exists() else [""]
        found, at = [], 0
        while at < len(words) - 1:
            name, count = words[at], int(words[at + 1])
            found.append((name, words[at + 2 : at + 2 + count], words[at + 2 + count]))
            at += 3 + count
        return found

    def launched(self) -> list[list[str]]:
        """The arguments of each call of a launcher, but for those that ask whether all hosts are there."""
        calls = [arguments for name, arguments, _ in self.calls() if name in ("srun", "mpirun", "mpiexec")]
        return [arguments for arguments in calls if arguments[-1] != "true"]


def payload(arguments: list[str]) -> list[str]:
    """What a launcher was told to run, without the words around it."""
    return arguments[arguments.index("task") + 1 :]


def script(site: Site | None = None, **settings: object) -> Script:
    """A job's script; without the doctor if nothing else is said."""
    given = {"doctor": False, **settings}
    if "command" not in given:
        given.setdefault("job", "jobs/digits.py")
    if given.get("shape") == "study":
        given.setdefault("cases", [["seed=1"], ["seed=2", "optimizer.lr=0.1"]])
    return render(JobSpec(**given), site or Site())
