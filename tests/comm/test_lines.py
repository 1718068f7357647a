"""The line at which a thread is."""

from __future__ import annotations

import re
import runpy
import sys
import threading
from contextlib import suppress

import pytest

from hpcdist.comm.lines import AT_THE_END, line_of

# A script that waits in a library, as torch's loaders or a typer application do, and says where it is meanwhile.
SCRIPT = """
import queue, threading
from hpcdist.comm.lines import line_of

def work(thread):
    print(line_of(thread))
    results.put(None)

results = queue.Queue()
threading.Timer(0.5, work, [threading.get_ident()]).start()
results.get()  # waits here
"""
IN_PACKAGE = """
import threading
from hpcdist.comm.lines import line_of
from hpcdist.comm.waiting import wait_until
from hpcdist.faults import excepthook

def ready():
    return True

wait_until(lambda: print(line_of(threading.get_ident())) or True, 1.0, str)  # through the package
"""
TYPER = """
import threading, typer
from hpcdist.comm.lines import line_of
from hpcdist.comm.waiting import wait_until

app = typer.Typer()

@app.command()
def main():
    wait_for_all()  # the user's

def wait_for_all():
    typer.echo(line_of(threading.get_ident()))  # innermost

app()
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SCRIPT, r"script.py:\d+ in <module>: results.get\(\)  # waits here"),
        (IN_PACKAGE, r"script.py:\d+ in <lambda>: wait_until\(.*# through the package"),
        (TYPER, r"script.py:\d+ in wait_for_all: typer.echo.*# innermost"),
    ],
    ids=["library", "package", "typer"],
)
def test_it_is_the_users_innermost(tmp_path, monkeypatch, capsys, text, line):
    script = tmp_path / "script.py"
    script.write_text(text)
    monkeypatch.setattr(sys, "argv", [str(script)])
    with suppress(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    assert re.search(f"^{re.escape(str(tmp_path))}/{line}$", shown := capsys.readouterr().out.strip()), shown


def test_a_thread_that_is_no_more_is_at_its_end():
    thread = threading.Thread(target=str)
    thread.start()
    thread.join()
    assert line_of(thread.ident) == AT_THE_END
