"""Make hosts on this machine, joined by real TCP over cables of a given speed: namespaces. Needs root.

    with hosts(folder, 4, Cable(mbit_s=100)) as made:
        made.launch(["script.py"])                      # one rank on each host
        made.shape(Cable(mbit_s=10), "n2")              # a slower cable from now on

Each host has a name, an address and shared memory of its own, and one cable to a switch; files are common to all, as
on a cluster. A cable carries so many bits per second in each direction (`tc`, token bucket), and a message takes so
long from one host to another: half of it on either cable, where a process relays it (`relay`). The round trip between
two hosts is twice that, and half a millisecond. Hosts end with the process that started them, however that ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcdist.comm.launch import unlaunched
from kit import relay

NET = "10.78.0"
SWITCH = "switch"  # a host of its own: a bridge that has an address would take what is meant for it off the cables
HOST = Path(__file__).with_name("host.sh")
NAMESPACES = ("--net", "--uts", "--ipc", "--mount")  # as `unshare` and `nsenter` call them
PROCESSES = ("--pid", "--fork", "--kill-child")  # a process namespace, for `unshare`
BURST_BYTES = 1 << 17  # what may leave at once: a segment of TCP, 64 KiB, and some more
QUEUE_MS = 20  # how long what waits at a cable's end may take to leave; what comes beyond is lost
SHELL = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter -t "$(cat {folder}/"$host".pid)" {namespaces} env -C "$PWD" /bin/sh -c "$*"
"""
SETTINGS = {  # under which MPI works on such hosts
    **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    **dict.fromkeys(("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "OMP_NUM_THREADS": "1",
}
ONE_RANK_EACH = {
    # Open MPI sends so much at once. For more it asks the receiver, whose answer waits behind what that one sends.
    **{f"OMPI_MCA_btl_tcp_{what}": str(1 << 22) for what in ("eager_limit", "rndv_eager_limit", "max_send_size")},
    "UCX_TLS": "self,tcp",
}


@dataclass(frozen=True)
class Cable:
    """Join a host to the switch. `mbit_s`: 10⁶ bits per second each way; None: as fast as the machine is."""

    mbit_s: float | None = None
    delay_ms: float = 0.0  # from one host to another

    def __str__(self) -> str:
        if self.mbit_s is None:
            speed = "unshaped"
        else:
            speed = f"{self.mbit_s:g} Mbit/s" if self.mbit_s < 1000 else f"{self.mbit_s / 1000:g} Gbit/s"
        return f"{speed}, {self.delay_ms:g} ms" if self.delay_ms else speed


def why_not(cable: Cable = Cable()) -> str | None:
    """Return the reason why such hosts can't be made here; None if they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    tools = ("ip", "unshare", "nsenter", "mount", *["tc"] * bool(cable.mbit_s))
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    if cable.delay_ms and not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun for cables that delay"
    mount = ("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    tried = subprocess.run(["unshare", *NAMESPACES, *PROCESSES, *mount], capture_output=True, text=True)
    return f"namespaces are refused: {tried.stderr.strip()}" if tried.returncode else None


def describe(folder: Path, names: Sequence[str], net: str = NET) -> None:
    """Write the description of hosts into a folder, from which `Hosts` are made: the first one's address is NET.1."""
    folder.mkdir(exist_ok=True)
    lines = ["127.0.0.1 localhost", *(f"{net}.{i + 1} {name}" for i, name in enumerate(names))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "shell").write_text(SHELL.format(folder=folder, namespaces=" ".join(NAMESPACES)))
    (folder / "shell").chmod(0o755)


@contextmanager
def hosts(folder: Path, size: int, cable: Cable = Cable()) -> Iterator[Hosts]:
    """Make hosts `n1`, `n2`, ... on one network, and take them away again. `folder`, empty, is to describe them."""
    describe(folder, [f"n{i + 1}" for i in range(size)])
    made = Hosts(folder)
    try:
        for name in made.names:
            made.start(name, cable)
        yield made
    finally:
        made.close()


class Hosts:
    """Start, reach and end the hosts that `folder` describes. Any process of this machine may reach those that run.

    Args:
        folder: a description's, as `describe` makes it.
        common: folders that all hosts see. Each then has processes, /run and /tmp of its own, as a machine has. None:
            all files are common, and hosts see each other's processes, as `launch` needs.

    Attributes:
        addresses: of each host, by its name.
    """

    def __init__(self, folder: Path, common: Sequence[Path] | None = None):
        self.folder, self._common = folder, common
        lines = [line.split() for line in (folder / "hosts").read_text().splitlines()[1:]]
        self.addresses = {name: address for address, name in lines}
        self.names = list(self.addresses)
        self._running: dict[str, subprocess.Popen] = {}  # the first process of each host that was started here
        self._relays: dict[str, subprocess.Popen] = {}  # of its cable, if that delays

    # --- hosts come and go ----------------------------------------------------------------------------------------
    def start(self, name: str, cable: Cable = Cable()) -> None:
        """Start a host that does not run, and join it to the switch.

        Raises:
            RuntimeError: it did not start. Shows what it wrote.
        """
        if SWITCH not in self._running:
            self._boot(SWITCH)
            self._ip(SWITCH, "link add bridge type bridge")
            self._ip(SWITCH, "link set bridge up")
        self._boot(name, self._common)
        self._plug(name, cable.delay_ms / 2e3)
        if cable.mbit_s is not None:
            self.shape(cable, name)

    def end(self, name: str) -> None:
        """End a host as a power failure does; nothing runs there any more when this returns."""
        if name in self._relays:
            self._relays[name].kill()
            self._relays.pop(name).communicate()
            (self.folder / f"{name}.relay.pid").unlink()
        self._running.pop(name).communicate()  # it ends with its standard input

    def close(self) -> None:
        """End all hosts that were started here, and the switch."""
        for name in reversed(list(self._running)):
            self.end(name)

    def _boot(self, name: str, common: Sequence[Path] | None = None) -> None:
        """Start a host's first process, and wait until it has made what is the host's alone."""
        namespaces = NAMESPACES if common is None else (*NAMESPACES, *PROCESSES)
        command = ["unshare", *namespaces, "bash", HOST, name, self.folder, *(common or ())]
        with open(self.folder / f"{name}.log", "w") as log:
            process = self._running[name] = subprocess.Popen(
                list(map(str, command)),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # else a terminal's Ctrl-C would end it before what runs there
            )
        pid = process.stdout.readline().strip()
        if not pid:
            said = (self.folder / f"{name}.log").read_text().strip()
            raise RuntimeError(f"host {name} must start; it ended and wrote: {said}")
        (self.folder / f"{name}.pid").write_text(pid)

    def _plug(self, name: str, delay_s: float) -> None:
        """Lay a cable from the switch to a host."""
        number = self.names.index(name)
        port, far = f"port{number}", f"far{number}"
        if delay_s:
            command = [*self.inside(SWITCH), sys.executable, "-I", relay.__file__, port, far, str(delay_s)]
            process = self._relays[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            (self.folder / f"{name}.relay.pid").write_text(str(process.pid))
            if not process.stdout.readline():
                raise RuntimeError(f"the relay of {name}'s cable must run; it has ended: see what it wrote to stderr")
            self._ip(SWITCH, f"link set {far} netns {self.pid(name)} name eth0")
        else:
            self._ip(SWITCH, f"link del {port}", check=False)  # of a host that was here before and is not quite gone
            self._ip(SWITCH, f"link add {port} type veth peer name eth0 netns {self.pid(name)}")
        self._ip(SWITCH, f"link set {port} master bridge up")
        self._ip(name, f"addr add {self.addresses[name]}/24 dev eth0")
        self._ip(name, "link set eth0 up")

    def _ip(self, name: str, command: str, check: bool = True) -> None:
        subprocess.run([*self.inside(name), "ip", *command.split()], check=check, capture_output=not check)

    # --- those that run -------------------------------------------------------------------------------------------
    def pid(self, name: str) -> int:
        """Return the process id of a host's first process."""
        return int((self.folder / f"{name}.pid").read_text())

    def inside(self, name: str) -> list[str]:
        """Return what to put before a command that is to run on a host; it begins in the root folder."""
        apart = name != SWITCH and self._common is not None
        return ["nsenter", "-t", str(self.pid(name)), *NAMESPACES, *["--pid"] * apart]

    def shape(self, cable: Cable, *names: str) -> None:
        """Make the cables of these hosts, or all, like that from now on. They can delay only if they were made so."""
        for name in names or self.names:
            for host, device in ((SWITCH, f"port{self.names.index(name)}"), (name, "eth0")):
                qdisc = [*self.inside(host), "tc", "qdisc"]
                if cable.mbit_s is None:
                    subprocess.run([*qdisc, "del", "dev", device, "root"], capture_output=True)  # there may be none
                else:
                    bucket = f"tbf rate {cable.mbit_s:g}mbit burst {BURST_BYTES} latency {QUEUE_MS}ms"
                    subprocess.run([*qdisc, "replace", "dev", device, "root", *bucket.split()], check=True)
            delays = self.folder / f"{name}.relay.pid"
            if delays.exists():
                os.kill(int(delays.read_text()), signal.SIGUSR1 if cable.delay_ms else signal.SIGUSR2)

    def launch(
        self,
        arguments: list,
        *,
        env: dict[str, str] | None = None,
        prefix: Path = Path(sys.prefix),
        timeout_s: float = 90,
        capture: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python *arguments` with one rank on each host, in this process's folder.

        Args:
            env: beside what this process's own environment says.
            prefix: the environment whose Python and MPI run.
            capture: keep what the ranks write, instead of passing it on.
        """
        shell, names = str(self.folder / "shell"), ",".join(self.names)
        if (prefix / "bin" / "mpiexec.hydra").exists():
            how = ["mpiexec", "-launcher", "ssh", "-launcher-exec", shell, "-hosts", names, "-iface", "eth0"]
        else:
            how = ["mpirun", "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", shell]
            how += ["--host", names, "--map-by", "ppr:1:node"]
        python = str(prefix / "bin" / "python")
        command = [*how, "-n", str(len(self.names)), python, *map(str, arguments)]
        settings = {**SETTINGS, **ONE_RANK_EACH, "PATH": f"{prefix}/bin:{os.environ['PATH']}"}
        settings["PRTE_MCA_prte_tmpdir_base"] = str(self.folder)  # else a killed mpirun leaves files in others' way
        if prefix != Path(sys.prefix):
            settings["MPI4PY_LIBMPI"] = str(next((prefix / "lib").glob("libmpi.so.*")))
        return subprocess.run(
            [*self.inside(self.names[0]), "env", "-C", os.getcwd(), *command],
            env={**unlaunched(os.environ), **settings, **(env or {})},
            capture_output=capture,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
