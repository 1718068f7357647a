"""`hpcdist.submit` on Slurm: functions on four nodes, and what is said of those that fail, die or are cancelled."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cluster import jobs
from harness.launch import IMPORTS


def test_functions_run_on_nodes(cluster, workdir):
    jobs.write_site(workdir, "srun-pmix")
    script = Path(__file__).with_name("submitting.py")
    done = cluster.run(sys.executable, script, cwd=workdir, env=IMPORTS, timeout_s=200)
    found = json.loads(done.stdout)
    assert sorted(found["results"]) == [[f"n{i}", 15.0] for i in range(1, 5)], "the mean of 0, 1, 2, 3 ten times"
    assert found["state"] == "COMPLETED" and found["stdout"].count("told by a rank") == 4
    assert "told by a rank" not in found["stderr"]
    assert found["error"] == "LookupError('on one rank')" and "on rank 1 of job" in found["cause"]
    assert "in fails" in found["cause"]
    for words in ("is FAILED", "without a result of any rank", "it dies"):
        assert words in found["died"]
    assert (found["held"], found["waits"]) == ("PENDING", True) and "is CANCELLED" in found["cancelled"]
