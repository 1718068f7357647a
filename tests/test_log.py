"""Messages of the library: on standard error by themselves, or where the user's logging has them go."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from hpcdist import log

SCRIPT = """
import logging
from hpcdist import log
{before}
log.set_up()
log.set_up()
{after}
room = logging.getLogger("hpcdist.room")
room.debug("detail")
room.info("all is well")
room.warning("100 % doubtful")
log.before_end("it ends here")
"""
BOTH, END = "hpcdist: all is well\nhpcdist: 100 % doubtful\n", "hpcdist: it ends here\n"
BASIC = "logging.basicConfig(filename='user.log', format='%(levelname)s %(name)s %(message)s')"
LEVEL = "logging.getLogger('hpcdist').setLevel(logging.{})"
OWN = "logging.getLogger('hpcdist').addHandler(logging.{})"
LINES = "INFO hpcdist.room all is well\nWARNING hpcdist.room 100 % doubtful\n"


@pytest.mark.parametrize(
    ("settings", "shown", "written"),
    [
        ("", BOTH, None),
        (LEVEL.format("DEBUG"), f"hpcdist: detail\n{BOTH}", None),
        (LEVEL.format("WARNING"), "hpcdist: 100 % doubtful\n", None),
        (LEVEL.format("CRITICAL"), "", None),
        (BASIC, "", f"{LINES}ERROR hpcdist it ends here\n"),
        (f"{BASIC}\n{LEVEL.format('WARNING')}", "", f"{LINES.splitlines()[1]}\nERROR hpcdist it ends here\n"),
        (OWN.format("NullHandler()"), "", None),
        (OWN.format("FileHandler('user.log')"), "", "all is well\n100 % doubtful\nit ends here\n"),
    ],
)
@pytest.mark.parametrize("where", ["before", "after"])
def test_messages_go_where_the_user_wants_them(tmp_path, settings, shown, written, where):
    """As does the reason of a job's end, which is shown in any case."""
    script = SCRIPT.format(**{"before": "", "after": "", where: settings})
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, shown + END)
    found = tmp_path / "user.log"
    assert (found.read_text() if found.exists() else None) == written


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
