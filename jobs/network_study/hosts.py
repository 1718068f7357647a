"""Hosts on this machine, joined by real TCP over cables of a given speed: network namespaces. Needs root.

Each host has a name, an address and shared memory of its own, and one cable to a switch; files are common to all, as
on a cluster. A cable carries so many bits per second in each direction (`tc`, token bucket), and a message takes so
long from one host to another: half of it on either cable, where a process relays it (`relay`). The round trip between
two hosts is twice that, and half a millisecond.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpcdist.comm.launch import unlaunched

NET = "10.78.0"
RELAY = Path(__file__).with_name("relay.py")
BURST_BYTES = 1 << 17  # what may leave at once: a segment of TCP, 64 KiB, and some more
QUEUE_S = 0.02  # how long what waits at a cable's end may take to leave; what comes beyond is lost
INIT = """
mount --bind {folder}/hosts /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit 1
hostname {name} && ip link set lo up || exit 1
echo $$ > {folder}/{name}.pid
while [ -e /proc/{maker}/exe ]; do sleep 1; done  # then nobody has taken the host away: it ends all that it runs
own=$(readlink /proc/$$/ns/net)
for process in /proc/[0-9]*; do
    [ $process != /proc/$$ ] && [ "$(readlink $process/ns/net)" = "$own" ] && kill -9 "${{process#/proc/}}"
done
"""
SHELL = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter -t "$(cat {folder}/"$host".pid)" -n -u -m --wd="$PWD" -- /bin/sh -c "$*"
"""
SETTINGS = {
    **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    **dict.fromkeys(("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    # Open MPI sends so much at once. For more it asks the receiver, whose answer waits behind what that one sends.
    **{f"OMPI_MCA_btl_tcp_{what}": str(1 << 22) for what in ("eager_limit", "rndv_eager_limit", "max_send_size")},
    "UCX_TLS": "self,tcp",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Cable:
    """What joins a host to the switch. `mbit_s`: 10⁶ bits per second each way; None: as fast as the machine is."""

    mbit_s: float | None = None
    delay_ms: float = 0.0  # from one host to another

    def __str__(self) -> str:
        if self.mbit_s is None:
            speed = "unshaped"
        else:
            speed = f"{self.mbit_s:g} Mbit/s" if self.mbit_s < 1000 else f"{self.mbit_s / 1000:g} Gbit/s"
        return f"{speed}, {self.delay_ms:g} ms" if self.delay_ms else speed


def why_not(cable: Cable = Cable()) -> str | None:
    """Why such hosts can't be made here; None if they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    tools = ("ip", "unshare", "nsenter", "mount", *["tc"] * bool(cable.mbit_s))
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    if cable.delay_ms and not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun for cables that delay"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"namespaces are refused: {tried.stderr.strip()}" if tried.returncode else None


class Hosts:
    """Hosts `n1`, `n2`, ..., as `folder` describes them: any process of this machine may speak of them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = [line.split()[1] for line in (folder / "hosts").read_text().splitlines()[1:]]

    def inside(self, name: str, namespaces: str = "-n") -> list[str]:
        """What to put before a command that is to run on a host."""
        return ["nsenter", "-t", (self.folder / f"{name}.pid").read_text().strip(), *namespaces.split()]

    def shape(self, cable: Cable, *names: str) -> None:
        """Makes the cables of these hosts, or all, like that from now on. They can delay only if they were made so."""
        for i, name in enumerate(self.names):
            if names and name not in names:
                continue
            for host, device in (("switch", f"port{i}"), (name, "eth0")):
                qdisc = [*self.inside(host), "tc", "qdisc"]
                if cable.mbit_s is None:
                    subprocess.run([*qdisc, "del", "dev", device, "root"], capture_output=True)  # there may be none
                else:
                    limit = int(BURST_BYTES + cable.mbit_s * 1e6 / 8 * QUEUE_S)
                    bucket = ["tbf", "rate", f"{cable.mbit_s:g}mbit", "burst", str(BURST_BYTES), "limit", str(limit)]
                    _run([*qdisc, "replace", "dev", device, "root", *bucket])
            relay = self.folder / f"relay{i}.pid"
            if relay.exists():
                os.kill(int(relay.read_text()), signal.SIGUSR1 if cable.delay_ms else signal.SIGUSR2)

    def launch(
        self,
        arguments: list,
        *,
        env: dict[str, str] | None = None,
        prefix: Path = Path(sys.prefix),
        timeout_s: float = 90,
        capture: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python *arguments` with one rank on each host.

        Args:
            env: beside what this process's own environment says.
            prefix: the environment whose Python and MPI run.
            capture: keep what the ranks write, instead of passing it on.
        """
        shell, hosts = str(self.folder / "shell"), ",".join(self.names)
        if (prefix / "bin" / "mpiexec.hydra").exists():
            how = ["mpiexec", "-launcher", "ssh", "-launcher-exec", shell, "-hosts", hosts, "-iface", "eth0"]
        else:
            how = ["mpirun", "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", shell]
            how += ["--host", hosts, "--map-by", "ppr:1:node"]
        python = str(prefix / "bin" / "python")
        command = [*how, "-n", str(len(self.names)), python, *map(str, arguments)]
        inherited = unlaunched(os.environ)
        settings = {**SETTINGS, "PATH": f"{prefix}/bin:{os.environ['PATH']}"}
        settings["PRTE_MCA_prte_tmpdir_base"] = str(self.folder)  # else a killed mpirun leaves files in others' way
        if prefix != Path(sys.prefix):
            settings["MPI4PY_LIBMPI"] = str(next((prefix / "lib").glob("libmpi.so.*")))
        return subprocess.run(
            [*self.inside(self.names[0], f"-n -u -m --wd={os.getcwd()} --"), *command],
            env={**inherited, **settings, **(env or {})},
            capture_output=capture,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )


@contextmanager
def hosts(folder: Path, size: int, cable: Cable = Cable()) -> Iterator[Hosts]:
    """Makes hosts on one network and takes them away again. `folder`, empty, is to describe them."""
    names = [f"n{i + 1}" for i in range(size)]
    lines = ["127.0.0.1 localhost", *(f"{NET}.{i + 1} {name}" for i, name in enumerate(names))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "shell").write_text(SHELL.format(folder=folder))
    (folder / "shell").chmod(0o755)
    made, running = Hosts(folder), []
    try:
        for name in ("switch", *names):
            script = INIT.format(folder=folder, name=name, maker=os.getpid())
            running.append(subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sh", "-c", script]))
        for name in ("switch", *names):
            _until_exists(folder / f"{name}.pid")
        _connect(made, cable.delay_ms / 2e3, running)
        made.shape(cable)
        yield made
    finally:
        _end(running)


def _end(running: list[subprocess.Popen]) -> None:
    """Ends these processes, and whatever else is left on the hosts."""
    left = list(_neighbours(running))
    for pid in (*(process.pid for process in running if process.poll() is None), *left):  # shells before what they run
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in running:
        process.wait()
        if process.stdout:
            process.stdout.close()


def _neighbours(running: list[subprocess.Popen]) -> Iterator[int]:
    """Processes in the network namespaces of these, but not in this process's own."""
    places = {_network(process.pid) for process in running} - {_network(os.getpid()), None}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and _network(int(path.name)) in places:
            yield int(path.name)


def _network(pid: int) -> int | None:
    """The network namespace of a process; None if it has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _connect(made: Hosts, delay_s: float, running: list[subprocess.Popen]) -> None:
    """A bridge on a host of its own (one that has an address would take what is meant for it off the bridge)."""
    switch = made.inside("switch")
    _run([*switch, "ip", "link", "add", "bridge", "type", "bridge"])
    _run([*switch, "ip", "link", "set", "bridge", "up"])
    for i, name in enumerate(made.names):
        port, pid = f"port{i}", made.inside(name)[2]
        if delay_s:
            command = [*switch, sys.executable, str(RELAY), port, f"far{i}", str(delay_s)]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            if not running[-1].stdout.readline():
                raise RuntimeError(f"{RELAY.name} has ended: see what it wrote to stderr")
            (made.folder / f"relay{i}.pid").write_text(str(running[-1].pid))
            _run([*switch, "ip", "link", "set", f"far{i}", "netns", pid, "name", "eth0"])
        else:
            _run([*switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid])
        _run([*switch, "ip", "link", "set", port, "master", "bridge"])
        _run([*switch, "ip", "link", "set", port, "up"])
        _run([*made.inside(name), "ip", "addr", "add", f"{NET}.{i + 1}/24", "dev", "eth0"])
        _run([*made.inside(name), "ip", "link", "set", "eth0", "up"])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def _until_exists(path: Path, seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not (path.exists() and path.read_text().strip()):
        if time.monotonic() > until:
            raise TimeoutError(f"no host has written {path}")
        time.sleep(0.01)
