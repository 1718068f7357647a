"""The kit itself: hosts that are apart, Slurm that works, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster import kit

CRASHES = """
import os
from cluster import kit
with kit.made() as cluster:
    print(cluster.folder, *map(cluster.hosts.pid, cluster.hosts.names), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_each_node_is_a_host_of_its_own(cluster, workdir):
    script = "h=$(hostname); echo $h $(hostname -I) $(readlink /proc/self/ns/ipc); touch /tmp/of-$h /dev/shm/of-$h"
    found = cluster.run("srun", "-N4", "sh", "-c", script, cwd=workdir).stdout.splitlines()
    names, addresses, places = zip(*(line.split() for line in sorted(found)))
    assert names == cluster.nodes
    assert addresses == ("10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.0.4")
    assert len({*places, os.readlink("/proc/self/ns/ipc")}) == 5
    own = cluster.run("sh", "-c", "ls -d /tmp/of-* /dev/shm/of-*", on="n3").stdout.split()
    assert own == ["/dev/shm/of-n3", "/tmp/of-n3"]


def test_gpus_are_dealt_out(cluster, workdir):
    command = ["srun", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1", "sh", "-c"]
    found = cluster.run(*command, "echo $SLURM_NODEID $SLURM_LOCALID $CUDA_VISIBLE_DEVICES", cwd=workdir).stdout
    assert sorted(found.splitlines()) == ["0 0 0", "0 1 1", "1 0 0", "1 1 1"]


def test_cables_are_slowed_down(cluster):
    """Pings of 8 KiB: at 1 Mbit/s the answers to many at once are late, beyond what may leave in one burst."""

    def mean_ms() -> float:
        done = cluster.run("ping", "-q", "-c", "40", "-i", "0.002", "-s", "8000", "n1", on="n2", check=False)
        return float(done.stdout.split("mdev = ")[1].split("/")[1])

    before = mean_ms()
    with cluster.shaped("n2", mbit_s=1):
        assert mean_ms() > 10 > before
    assert mean_ms() < 10


def test_a_crash_leaves_nothing_behind(cluster):
    """Of another cluster than that of the tests."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", CRASHES], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder, *hosts = done.stdout.split()
    assert len(hosts) == 5 and Path(folder).exists(), "it had no time to delete its files"
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in hosts):
        assert time.monotonic() < until
        time.sleep(0.01)
    kit.delete_left_behind()
    assert not Path(folder).exists()


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert kit.why_not() == "a Slurm cluster of namespaces needs root"
