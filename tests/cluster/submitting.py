"""What a user's script does with `hpcdist.submit`, run on the controller; it prints what came of it, as JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import hpcdist as hd


def place(scale: float) -> tuple[str, float]:
    hd.init()
    print("told by a rank")
    return socket.gethostname(), float(hd.allreduce(float(hd.rank()))) * scale


def fails() -> None:
    hd.init()
    if hd.rank() == 1:
        raise LookupError("on one rank")
    hd.barrier()


def dies() -> None:
    """Once its words have arrived: srun drops what is still on its way when it hears that a task was killed."""
    print("it dies", file=sys.stderr, flush=True)
    job = Path(os.environ["HPCDIST_RUN"]).parent
    while not any("it dies" in path.read_text() for path in job.glob("*.err")):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    site = {"site": "./site.toml", "time_min": 10}
    whole = hd.submit(place, 10.0, nodes=4, **site)
    failing, dying = hd.submit(fails, nodes=2, **site), hd.submit(dies, **site)
    held = hd.submit(time.sleep, 100, directives={"add": {"hold": True}}, **site)
    found = {"held": held.state, "waits": not held.done()}
    held.cancel()
    error = failing.exception()
    found |= {
        "results": whole.results(),
        "stdout": whole.stdout(),
        "stderr": whole.stderr(),
        "state": whole.state,
        "error": repr(error),
        "cause": str(error.__cause__),
        "died": repr(dying.exception()),
        "cancelled": repr(held.exception()),
    }
    print(json.dumps(found))
