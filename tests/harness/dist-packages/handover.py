"""Have a fork run what this process was started for: see `forkserver.py`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress

PASSED_ON = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CONT")


def hand_over(address: str) -> None:
    """Ends this process as the fork ends. Returns where it was started for neither a script nor a module or text."""
    first = sys.orig_argv[1]
    if first.startswith("-") and first not in ("-m", "-c"):
        return
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(address)
    program = {
        "command": sys.orig_argv,
        "path": sys.path,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": list(os.sched_getaffinity(0)),
    }
    socket.send_fds(server, [json.dumps(program).encode()], [0, 1, 2])

    def pass_on(number: int, frame: object) -> None:
        with suppress(OSError):  # the fork has ended
            server.send(str(int(number)).encode())

    for name in PASSED_ON:
        signal.signal(getattr(signal, f"SIG{name}"), pass_on)
    try:
        message = server.recv(16)
    except ConnectionResetError:  # a signal was passed on when the fork had ended: what it said lies behind the error
        message = server.recv(16)
    status = int(message or signal.SIGKILL)  # nothing: the server has been killed
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
