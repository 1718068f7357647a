"""The start-up check by plain TCP, before MPI starts: absent nodes, and pairs that do not reach each other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpcdist.tools.doctor.startup import tcp
from hpcdist.tools.doctor.startup.check import Result, check

ROOT = Path(__file__).parents[2]
SRUN = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
CHECK = """
import json, os, sys
from hpcdist.tools.doctor.startup import tcp
print(json.dumps(tcp.check_nodes(os.environ, sys.argv[1:])[1:]))
"""


def checked(made, absent: str = "", env: dict[str, str] | None = None) -> tuple[list, float]:
    """What each host found but for one that does not come; and the seconds that all took."""
    running, start = [], time.monotonic()
    for node, name in enumerate(made.names):
        if name != absent:
            own = {**os.environ, **SRUN, "PYTHONPATH": str(ROOT), "SLURM_PROCID": str(node), "SLURM_NODEID": str(node)}
            command = [*made.inside(name), sys.executable, "-c", CHECK, *made.names]
            running.append(subprocess.Popen(command, env=own | (env or {}), stdout=subprocess.PIPE, text=True))
    found = [json.loads(process.communicate(timeout=60)[0]) for process in running]
    return found, time.monotonic() - start


def cut(made, one: str, other: str, *what: str) -> None:
    address = next(line.split()[0] for line in (made.folder / "hosts").read_text().splitlines() if other in line)
    words = [word.format(address) for word in what]
    subprocess.run([*made.inside(one), "ip", *words], check=True)


LOST = ("neigh", "replace", "{}", "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
REFUSED = ("route", "add", "unreachable", "{}/32")
WELL = [[], []]


def test_hosts_that_reach_each_other_find_nothing(make_hosts):
    found, _ = checked(make_hosts(4), env={"OMPI_MCA_btl_tcp_if_include": "eth0"})
    assert found == [WELL] * 4


@pytest.mark.parametrize("what", [LOST, REFUSED], ids=["lost", "refused"])
def test_the_pair_that_passes_nothing_is_found_though_only_one_way_is_broken(make_hosts, what):
    made = make_hosts(4)
    cut(made, "n4", "n3", *what)
    found, _ = checked(made)
    assert found == [[[], [[2, 3]]], WELL, WELL, WELL]


def test_the_host_that_does_not_come_is_found(make_hosts):
    found, seconds = checked(make_hosts(3), absent="n2")
    assert found == [[[1], []], WELL] and tcp.ANSWER_S < seconds < tcp.ANSWER_S + 30


def test_hosts_of_which_none_can_come_have_another_network(make_hosts):
    made = make_hosts(3)
    for name in ("n2", "n3"):
        cut(made, name, "n1", *REFUSED)
    assert checked(made)[0] == [WELL] * 3


# --- in one process ---------------------------------------------------------------------------------------------------
def test_only_the_first_process_of_a_node_takes_part_and_only_with_srun():
    assert tcp.takes_part({**SRUN, "SLURM_PROCID": "2"})
    assert not tcp.takes_part({**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "1"})
    assert not tcp.takes_part({}) and not tcp.takes_part({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"})
    mpirun = {f"OMPI_COMM_WORLD_{what}": value for what, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"))}
    assert not tcp.takes_part({**SRUN, **mpirun})


def test_strangers_are_not_counted(monkeypatch):
    monkeypatch.setattr(tcp, "ANSWER_S", 1.0)
    with tcp.listen(0) as listener:
        port = listener.getsockname()[1]
        found: list[Result] = []
        first = tcp.Tcp(listener, "here", "1.0", rank=0, size=2)
        leader = threading.Thread(target=lambda: found.append(check(first, "", lambda came: [])))
        leader.start()
        for line in (b"GET / HTTP/1.1\r\n", b'["2.0", 1, ""]\n', b"[]\n", b"7\n"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(line)
        leader.join(20)
    assert found == [Result({0: ""}, absent=(1,))]


def test_a_port_that_is_taken_is_left_alone():
    port = tcp.FIRST_PORT + (4711 + 7 * 2) % tcp.PORTS
    with tcp.listen(port):
        assert tcp.check_here({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, ["n1", "n2"]) == Result({})
