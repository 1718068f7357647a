"""A host: a process with namespaces of its own, and its cable to the controller's bridge."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NET = "10.77.0"
SCRIPT = Path(__file__).with_name("host.sh")
UNSHARE = "unshare --net --uts --ipc --mount --pid --fork --kill-child --propagation private".split()
BURST_BYTES, QUEUE_MS = 1 << 17, 20  # of a slow cable: what may leave at once, and how long the rest may wait


class Host:
    """Starts at once, and waits with its daemon until `go`, for it has no network yet.

    Args:
        folder: the cluster's.
        common: further folders that all hosts see.
        daemon: Slurm's, with its arguments.
    """

    def __init__(self, name: str, folder: Path, common: Sequence[Path], daemon: Sequence[str]):
        self.name = name
        log = open(folder / "log" / f"host.{name}", "a")
        command = [*UNSHARE, "bash", SCRIPT, name, folder, *common, "--", *daemon]
        self._process = subprocess.Popen(
            list(map(str, command)), cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        log.close()
        told = self._process.stdout.readline()
        if not told.strip():
            raise RuntimeError(f"host {name} did not start: see {log.name}:\n{Path(log.name).read_text()}")
        self.pid = int(told)  # of the process that is number 1 there

    def inside(self, *namespaces: str) -> list[str]:
        """What to put before a command that is to run here, in all of the host's namespaces or in those."""
        return ["nsenter", "-t", str(self.pid), *(namespaces or ("-n", "-u", "-i", "-p", "-m")), "--"]

    def ip(self, *command: str, check: bool = True) -> None:
        """Runs `ip` in the host's network."""
        self._network("ip", *command, check=check)

    def _network(self, *command: str, check: bool = True) -> None:
        subprocess.run([*self.inside("-n"), *command], check=check, capture_output=not check)

    def bridge(self) -> None:
        """Makes this host the one that joins the others."""
        self.ip("link", "set", "lo", "up")
        self.ip("link", "add", "bridge", "type", "bridge", "forward_delay", "0", "stp_state", "0")
        self.ip("addr", "add", f"{NET}.254/24", "dev", "bridge")
        self.ip("link", "set", "bridge", "up")

    def plug(self, controller: Host, port: str, number: int) -> None:
        """Lays a cable from this host to the controller's bridge."""
        self._port = port
        controller.ip("link", "del", port, check=False)  # of a host that was here before and is not quite gone
        controller.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        controller.ip("link", "set", port, "master", "bridge", "up")
        self.ip("link", "set", "lo", "up")
        self.ip("addr", "add", f"{NET}.{number}/24", "dev", "eth0")
        self.ip("link", "set", "eth0", "up")

    def shape(self, controller: Host, mbit_s: float | None) -> None:
        """How fast this host's cable is."""
        for host, device in ((controller, self._port), (self, "eth0")):
            qdisc = ("tc", "qdisc")
            if mbit_s is None:
                host._network(*qdisc, "del", "dev", device, "root", check=False)
            else:
                bucket = ("rate", f"{mbit_s:g}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
                host._network(*qdisc, "replace", "dev", device, "root", "tbf", *bucket)

    def go(self) -> None:
        """Starts the daemon."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Ends the host; returns when nothing runs there any more."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # takes all others with it, and is waited for by `unshare`
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                stream.close()
