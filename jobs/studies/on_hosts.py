"""Starts ranks on hosts made for them on this machine, one on each, whose cables are slow: a launcher. Needs root.

    hpcdist compare jobs/transformer.py --ranks 4 --launcher 'python jobs/studies/on_hosts.py 100' \\
        --set internode=tcp:eth0 ...    # 100 Mbit/s; `kit.hosts` says what such a host has
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from kit.hosts import Cable, hosts, why_not

TIME_LIMIT_S = 1800  # of a run


def main(mbit_s: str, ranks: str, *command: str) -> int:
    """Run a command of Python, and return its exit status; 124 where it takes too long.

    Args:
        mbit_s: what a cable carries, in 10⁶ bits per second each way.
        command: Python and its arguments.
    """
    cable = Cable(float(mbit_s))
    if reason := why_not(cable):
        sys.exit(f"error: this launcher must be able to make hosts on this machine; {reason}.")
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder), int(ranks), cable) as made:
        try:
            return made.launch(list(command[1:]), timeout_s=TIME_LIMIT_S, capture=False).returncode
        except subprocess.TimeoutExpired:
            print(f"error: a run must end within {TIME_LIMIT_S} s; this one did not.", file=sys.stderr)
            return 124


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
