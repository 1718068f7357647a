"""Messages of the library: on standard error by themselves, or where the user's logging has them go."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from hpcdist import log

# Each case in a process of its own, forked from one that has imported the library.
SCRIPT = """
import json, logging, os, sys
from hpcdist import log

def case(number, before, after):
    os.mkdir(number)
    os.chdir(number)
    os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
    exec(before)
    log.set_up()
    log.set_up()
    exec(after)
    room = logging.getLogger("hpcdist.room")
    room.debug("detail")
    room.info("all is well")
    room.warning("100 % doubtful")
    log.before_end("it ends here")
    sys.exit()

for number, settings in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        case(str(number), *settings)
    assert os.wait()[1] == 0
"""
BOTH, END = "hpcdist: all is well\nhpcdist: 100 % doubtful\n", "hpcdist: it ends here\n"
BASIC = "logging.basicConfig(filename='user.log', format='%(levelname)s %(name)s %(message)s')"
LEVEL = "logging.getLogger('hpcdist').setLevel(logging.{})"
OWN = "logging.getLogger('hpcdist').addHandler(logging.{})"
LINES = "INFO hpcdist.room all is well\nWARNING hpcdist.room 100 % doubtful\n"


CASES = [  # settings, what is shown, and what is written
    ("", BOTH, None),
    (LEVEL.format("DEBUG"), f"hpcdist: detail\n{BOTH}", None),
    (LEVEL.format("WARNING"), "hpcdist: 100 % doubtful\n", None),
    (LEVEL.format("CRITICAL"), "", None),
    (BASIC, "", f"{LINES}ERROR hpcdist it ends here\n"),
    (f"{BASIC}\n{LEVEL.format('WARNING')}", "", f"{LINES.splitlines()[1]}\nERROR hpcdist it ends here\n"),
    (OWN.format("NullHandler()"), "", None),
    (OWN.format("FileHandler('user.log')"), "", "all is well\n100 % doubtful\nit ends here\n"),
]


def test_messages_go_where_the_user_wants_them(tmp_path):
    """As does the reason of a job's end, which is shown in any case. Settings are made before or after our own."""
    settings = [pair for words, *_ in CASES for pair in ((words, ""), ("", words))]
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings)]
    subprocess.run(command, cwd=tmp_path, timeout=60, check=True)
    for number in range(len(settings)):
        _, shown, written = CASES[number // 2]
        assert (tmp_path / str(number) / "stderr").read_text() == shown + END, settings[number]
        found = tmp_path / str(number) / "user.log"
        assert (found.read_text() if found.exists() else None) == written, settings[number]


def test_a_handler_that_hangs_does_not_keep_the_job_from_ending(monkeypatch, capsys):
    monkeypatch.setattr(log, "PATIENCE_S", 0.1)
    stuck = logging.NullHandler()
    stuck.handle = lambda record: stuck.acquire()
    monkeypatch.setattr(log._library, "handlers", [stuck])
    stuck.createLock()
    stuck.acquire()  # as the thread that hangs does, in the middle of a message
    log.before_end("it ends here")
    stuck.release()
    assert capsys.readouterr().err == END
