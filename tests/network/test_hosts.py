"""Hosts of this machine and the cables between them: speed, delay, changing them; and where none can be made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launch import commands, wait_until
from kit import relay
from kit.hosts import Cable, Hosts, describe, hosts, why_not

ROOT = Path(__file__).parents[2]

# Host n2 sends back a byte for each one, or, of a connection that begins otherwise, takes and gives a megabyte.
ECHO = """
import socket, threading
listener = socket.create_server(("", 5000))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    if connection.recv(1) == b"p":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"p")
        while data := connection.recv(1):
            connection.sendall(data)
    else:
        sending = threading.Thread(target=connection.sendall, args=[bytes(1 << 20)])
        sending.start()
        left = 1 << 20
        while left:
            left -= len(connection.recv(left))
        sending.join()
        connection.sendall(b".")
    connection.close()
"""
ASK = """
import json, socket, threading, time
def connect():
    connection = socket.create_connection(("10.78.0.2", 5000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
pings, connection = [], connect()
for _ in range(10):
    start = time.perf_counter()
    connection.sendall(b"p")
    connection.recv(1)
    pings.append(time.perf_counter() - start)
connection.close()
megabytes = []
for _ in range(3):
    connection, start = connect(), time.perf_counter()
    sending = threading.Thread(target=connection.sendall, args=[b"m" + bytes(1 << 20)])
    sending.start()
    left = 1 + (1 << 20)
    while left:
        left -= len(connection.recv(left))
    megabytes.append(time.perf_counter() - start)
print(json.dumps({"ping_ms": 1e3 * min(pings[1:]), "megabyte_s": min(megabytes)}))
"""


@pytest.fixture
def ask():
    """`ask(hosts)`: the shortest round trip from n1 to n2, and how long a megabyte takes there and back at best."""
    servers = []

    def call(made) -> dict:
        if not servers:
            command = [*made.inside("n2"), sys.executable, "-c", ECHO]
            servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert servers[0].stdout.readline() == "ready\n"
        command = [*made.inside("n1"), sys.executable, "-c", ASK]
        job = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert job.returncode == 0, job.stderr
        return json.loads(job.stdout)

    yield call
    for server in servers:
        server.terminate()
        server.wait()
        server.stdout.close()


def test_a_cable_has_a_speed_in_each_direction_and_a_delay_for_each_message_and_can_be_changed(make_hosts, ask):
    made = make_hosts(3, mbit_s=100, delay_ms=20)
    slow = ask(made)
    assert 40 < slow["ping_ms"] < 75, "the round trip"
    assert slow["megabyte_s"] > 0.11
    made.shape(Cable(20))
    alone_s = ((1 << 20) - (1 << 17)) * 8 / 20e6  # less what may leave at once
    assert alone_s < ask(made)["megabyte_s"] < 20 * alone_s
    made.shape(Cable())
    fast = ask(made)
    assert fast["ping_ms"] < 35 and fast["megabyte_s"] < 0.3, "the relay passes on at once"
    made.shape(Cable(delay_ms=20))
    assert 40 < ask(made)["ping_ms"] < 75


def test_hosts_are_gone_at_the_end(tmp_path):
    if reason := why_not(Cable(delay_ms=1)):
        pytest.skip(reason)
    with hosts(tmp_path, 1, Cable(delay_ms=1)) as made:
        pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
        assert len(pids) == 3, "the switch, a host and a relay"
        left_behind = subprocess.Popen([*made.inside("n1"), "sh", "-c", "sleep 100 & echo $!"], stdout=subprocess.PIPE)
        pids.append(int(left_behind.stdout.readline()))
        assert all(runs(pid) for pid in pids)
    left_behind.communicate(timeout=100)
    wait_until(lambda: not any(runs(pid) for pid in pids))


ABANDONED = """
import os, subprocess, sys
from pathlib import Path
from kit.hosts import Cable, hosts
folder = Path(sys.argv[1])
with hosts(folder, 1, Cable(delay_ms=1)) as made:
    left_behind = subprocess.Popen([*made.inside("n1"), "sleep", "100"])
    print(left_behind.pid, *(path.read_text().strip() for path in folder.glob("*.pid")), flush=True)
    os._exit(0)
"""


def test_hosts_go_when_who_made_them_is_gone(tmp_path):
    if reason := why_not(Cable(delay_ms=1)):
        pytest.skip(reason)
    command = [sys.executable, "-c", ABANDONED, tmp_path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the library, and the kit of the studies
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=150, env=env).stdout
    pids = [int(pid) for pid in told.split()]
    assert len(pids) == 4, "a process, the switch, a host and a relay"
    wait_until(lambda: not any(runs(pid) for pid in pids))


def runs(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_hosts_may_be_machines_of_their_own_that_fail_and_come_back(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    describe(tmp_path / "hosts", ["n1", "n2"])
    made = Hosts(tmp_path / "hosts", common=[tmp_path])

    def run(name: str, script: str) -> str:
        command = [*made.inside(name), "env", "-C", tmp_path, "sh", "-c", script]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        made.start("n1")
        made.start("n2")
        assert run("n2", "touch /tmp/own /run/own common; hostname; [ $$ -lt 100 ]") == "n2\n", "with few processes"
        assert run("n1", "cat common; ls -d /tmp/own /run/own || echo none") == "none\n"
        left_behind = subprocess.Popen([*made.inside("n2"), "sleep", "100"])
        made.end("n2")
        assert left_behind.wait(timeout=100) != 0
        made.start("n2", Cable(100))
        assert run("n1", "getent hosts n2") == "10.78.0.2       n2\n"
    finally:
        made.close()


def test_a_host_that_does_not_start_says_why(monkeypatch, tmp_path):
    if reason := why_not(Cable(delay_ms=1)):
        pytest.skip(reason)
    describe(tmp_path / "hosts", ["n1"])
    made = Hosts(tmp_path / "hosts", common=[tmp_path / "absent"])
    with pytest.raises(RuntimeError, match="host n1 must start; it ended and wrote: mount: .*/absent"):
        made.start("n1")
    made.close()
    monkeypatch.setattr(relay, "__file__", str(tmp_path / "absent"))
    with pytest.raises(RuntimeError, match="the relay of n1's cable must run; it has ended"):
        with hosts(tmp_path / "others", 1, Cable(delay_ms=1)):
            pass


def test_ranks_can_be_started_on_them_from_the_command_line(tmp_path):
    if reason := why_not(Cable(100)):
        pytest.skip(reason)
    program = [sys.executable, ROOT / "jobs" / "studies" / "on_hosts.py", "100", "2"]
    told = "import os, socket; from mpi4py import MPI; print(MPI.COMM_WORLD.size, socket.gethostname(), flush=True)"
    for code, status in ((told, 0), ("import os; from mpi4py import MPI; os._exit(3)", 3)):
        done = subprocess.run([*program, sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
        # Of a rank that fails nothing else is expected: the launcher ends the others, whatever they have written.
        assert sorted(line for line in done.stdout.splitlines() if line[:1] == "2") == ["2 n1", "2 n2"] * (status == 0)


def test_the_launcher_ends_a_run_that_takes_too_long(tmp_path):
    if reason := why_not(Cable(100)):
        pytest.skip(reason)
    code = "import on_hosts, sys; on_hosts.TIME_LIMIT_S = 3; sys.exit(on_hosts.main(*sys.argv[1:]))"
    program = [sys.executable, "-c", code, "100", "2", sys.executable, "-c", "import time; time.sleep(77.3)"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, cwd=ROOT / "jobs" / "studies")
    assert done.returncode == 124 and done.stderr.endswith("error: a run must end within 3 s; this one did not.\n")
    wait_until(lambda: not any("sleep(77.3)" in command for command in commands()))


def test_cables_have_names():
    assert [str(cable) for cable in (Cable(), Cable(100), Cable(1000, 10))] == [
        "unshaped", "100 Mbit/s", "1 Gbit/s, 10 ms",
    ]  # fmt: skip


def test_where_no_hosts_can_be_made_it_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert why_not() == "needs ip, unshare, nsenter, mount (iproute2, util-linux)"
    assert why_not(Cable(100)) == "needs ip, unshare, nsenter, mount, tc (iproute2, util-linux)"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert why_not() == "making network namespaces needs root"
