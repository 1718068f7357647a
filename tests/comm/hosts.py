"""Two or three hosts on this machine, joined by real TCP: network namespaces and virtual cables. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.launch import LAUNCHER_PREFIXES, SETTINGS

NET = "10.78.0"
INIT = """
mount --bind {folder}/hosts /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit 1
hostname {name} && ip link set lo up || exit 1
echo $$ > {folder}/{name}.pid
exec sleep 600
"""
SHELL = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter -t "$(cat {folder}/"$host".pid)" -n -u -m --wd="$PWD" -- /bin/sh -c "$*"
"""


def why_not() -> str | None:
    """Why hosts can't be made here; None if they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"namespaces are refused: {tried.stderr.strip()}" if tried.returncode else None


class Hosts:
    """Hosts `n1`, `n2`, ...; `folder` holds what describes them."""

    def __init__(self, folder: Path, names: list[str]):
        self.folder, self.names = folder, names

    def launch(
        self, arguments: list, *, env: dict | None = None, timeout_s: float = 90
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python *arguments` with one rank on each host."""
        shell, hosts = str(self.folder / "shell"), ",".join(self.names)
        if (Path(sys.prefix) / "bin" / "mpiexec.hydra").exists():
            how = ["mpiexec", "-launcher", "ssh", "-launcher-exec", shell, "-hosts", hosts, "-iface", "eth0"]
        else:
            how = ["mpirun", "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", shell]
            how += ["--host", hosts, "--map-by", "ppr:1:node"]
        size = str(len(self.names))
        command = [*how, "-n", size, sys.executable, *map(str, arguments)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
        settings = {**SETTINGS, "OMPI_MCA_btl_tcp_if_include": "eth0", "PRTE_ALLOW_RUN_AS_ROOT": "1"}
        settings |= {"PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "UCX_TLS": "self,tcp"}
        settings["PATH"] = f"{sys.prefix}/bin:{os.environ['PATH']}"
        first = (self.folder / "n1.pid").read_text().strip()
        inside = ["nsenter", "-t", first, "-n", "-u", "-m", f"--wd={os.getcwd()}", "--"]
        return subprocess.run(
            [*inside, *command],
            env={**inherited, **settings, **(env or {})},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )


@contextmanager
def hosts(folder: Path, size: int) -> Iterator[Hosts]:
    """Makes hosts on one network and takes them away again."""
    names = [f"n{i + 1}" for i in range(size)]
    lines = ["127.0.0.1 localhost", *(f"{NET}.{i + 1} {name}" for i, name in enumerate(names))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "shell").write_text(SHELL.format(folder=folder))
    (folder / "shell").chmod(0o755)
    inits = []
    try:
        for name in names:
            script = INIT.format(folder=folder, name=name)
            inits.append(subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sh", "-c", script]))
        for name in names:
            _until_exists(folder / f"{name}.pid")
        _connect(folder, names)
        yield Hosts(folder, names)
    finally:
        for init in inits:
            init.terminate()
            init.wait()


def _connect(folder: Path, names: list[str]) -> None:
    """A switch on the first host, and a cable from every host to it."""
    pids = [(folder / f"{name}.pid").read_text().strip() for name in names]
    first = ["nsenter", "-t", pids[0], "-n"]
    commands = [
        [*first, "ip", "link", "add", "switch", "type", "bridge"],
        [*first, "ip", "link", "set", "switch", "up"],
    ]
    for i, pid in enumerate(pids):
        cable, inside = f"port{i}", ["nsenter", "-t", pid, "-n", "ip"]
        commands += [
            [*first, "ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", pid],
            [*first, "ip", "link", "set", cable, "master", "switch"],
            [*first, "ip", "link", "set", cable, "up"],
            [*inside, "addr", "add", f"{NET}.{i + 1}/24", "dev", "eth0"],
            [*inside, "link", "set", "eth0", "up"],
        ]
    for command in commands:
        subprocess.run(command, check=True)


def _until_exists(path: Path, seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not (path.exists() and path.read_text().strip()):
        if time.monotonic() > until:
            raise TimeoutError(f"no host has written {path}")
        time.sleep(0.01)
