"""Make runs on hosts of their own on this machine, one rank on each, joined by slow cables. Needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hpcdist import session
from hpcdist.config.files import load_function
from hpcdist.config.merge import load
from hpcdist.errors import RunError
from hpcdist.tools.compare.launchers import LAST_LINES, LOG
from hpcdist.tools.compare.plan import PlannedRun
from kit.hosts import Cable, hosts

DEADLINE_S = 120  # of the ranks
TIME_LIMIT_S = 1800  # of a run


class HostedLauncher:
    """Make runs of loops, whose cluster is a cable: `mbit_s`, `delay_ms`.

    Beside those of the run, a loop's settings have this `cable`, and `hosts`, the folder that describes them.
    """

    def run(self, run: PlannedRun, folder: Path) -> None:
        """Make a run.

        Raises:
            RunError: it failed.
        """
        cable = load({}, None, run.cluster)
        with tempfile.TemporaryDirectory() as where, hosts(Path(where), run.ranks, Cable(**cable)) as made:
            settings = {**load({}, None, run.overrides), "cable": cable, "hosts": where}
            paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
            env = {"PYTHONPATH": os.pathsep.join(paths)}  # where hosts find this module
            what = json.dumps({"loop": run.loop, "settings": settings, "folder": str(folder)})
            try:
                job = made.launch(["-m", "kit.hosted", what], env=env, timeout_s=TIME_LIMIT_S)
                status, said = job.returncode, job.stdout + job.stderr
            except subprocess.TimeoutExpired:
                status, said = 124, f"it took more than {TIME_LIMIT_S} s"
        (folder / LOG).write_text(said)
        if status:
            last = "\n".join(said.splitlines()[-LAST_LINES:])
            raise RunError(f"exit status {status} on {run.ranks} hosts; the last lines:\n{last}")


def main(what: str) -> None:
    """Collective. Make a run on this host."""
    given = json.loads(what)
    comm = session.init(deadline_s=DEADLINE_S, internode="tcp:eth0")
    load_function(given["loop"], "loop")(given["settings"], Path(given["folder"]))(comm)


if __name__ == "__main__":
    main(sys.argv[1])
