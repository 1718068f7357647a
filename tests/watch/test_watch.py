"""Runs that are watched: what is known of them, as text, over HTTP, and of a real run to its end."""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from harness import browser
from harness.launch import IMPORTS, find_mpirun, started, wait_until
from hpcdist.errors import ConfigError
from hpcdist.records import (
    Evaluation,
    RecordWriter,
    Sampler,
    StepRecord,
    append_evaluation,
    continue_records,
    locked,
    record_path,
    resources_path,
    write_summary,
)
from hpcdist.tools import cli
from hpcdist.tools.runs import Run
from hpcdist.tools.watch import page, terminal
from hpcdist.tools.watch.page import PageServer
from hpcdist.tools.watch.terminal import curve
from hpcdist.tools.watch.view import RunView, WatchedFolder, short_names, view
from study import evidence

ROOT = Path(__file__).parents[2]
SUMMARY = evidence.summary(
    strategy="softsync", ranks=3, samples=320, wall_s=20.0, metrics={"accuracy": 0.875, "loss": 0.5}, lost_ranks=[2]
)


def start(folder: Path, **changes) -> Path:
    """A run of three ranks with four epochs of 160 samples, whose first rank serves."""
    folder.mkdir(parents=True)
    changes["settings"] = {"strategy": {"name": "softsync"}, "epochs": 4} | changes.get("settings", {})
    (folder / "run.json").write_text(json.dumps(evidence.start(ranks=3, samples=160, **changes)))
    return folder


def train(folder: Path, steps: int = 10, first_step: int = 0, slow: float = 1.0) -> None:
    """Ten steps: seconds 0.5 computing, 0.25 communicating, 0.25 waiting of rank 1; rank 2 takes `slow` times more."""
    with RecordWriter(record_path(folder, 0), first_step=first_step) as server:
        for step in range(max(first_step, 1), steps + 1):
            server.write(StepRecord(step, staleness=(1, 2), waiting_s=1.0, bytes_sent=1000))
    for rank, times in ((1, 1.0), (2, slow)):
        with RecordWriter(record_path(folder, rank), first_step=first_step) as worker:
            for step in range(max(first_step, 1), steps + 1):
                seconds = {"computing_s": 0.5 * times, "communicating_s": 0.25 * times, "waiting_s": 0.25 * times}
                worker.write(StepRecord(step, samples=16, loss=4.0 / step, bytes_sent=500, **seconds))


def seen(folder: Path, **options) -> RunView:
    return view(folder.name, Run(folder, follow=True), **options)


# --- what is known of a run -------------------------------------------------------------------------------------------
def test_a_run_is_known_by_its_files_from_its_begin_to_its_end(tmp_path):
    folder = tmp_path / "run"
    run = Run(folder, follow=True)
    assert view("run", run).state == "waiting"
    start(folder)
    run.update()
    assert view("run", run).state == "starting"
    train(folder)
    append_evaluation(folder, Evaluation(10, 2, 320, 10.0, {"accuracy": 0.75, "loss": float("nan")}))
    run.update()
    now = view("run", run)
    assert (now.state, now.strategy, now.ranks_n, now.step, now.epoch) == ("training", "softsync", 3, 10, 2)
    assert (now.samples, now.seconds, now.fraction, now.left_s) == (320, 10.0, 0.5, 10.0)
    assert (now.rate_now, now.rate_mean, now.staleness, now.waiting) == (32.0, 32.0, 1.5, 0.25)
    assert now.bytes_per_step == 1000 and now.loss == 0.4 and now.limits == ("4 epochs",) and now.notes == ()
    assert now.loss_curve == [(step, 32 * step, step, 4.0 / step) for step in range(1, 11)]
    assert now.metric_curves["accuracy"] == [(10, 320, 10.0, 0.75)] and now.usage == {}
    assert [(one.rank, one.serves, one.step) for one in now.ranks] == [(0, True, 10), (1, False, 10), (2, False, 10)]
    assert (now.ranks[1].computing, now.ranks[1].communicating, now.ranks[1].slower) == (0.5, 0.25, None)
    write_summary(folder, SUMMARY)
    run.update()
    now = view("run", run)
    assert (now.state, now.fraction, now.left_s, now.seconds) == ("ended", 1.0, None, 20.0)
    assert now.metrics["accuracy"] == 0.875 and now.notes == ("it continued without rank 2",)
    assert seen(folder, curves=False, brief=True).loss is None, "its records are not read"


def test_what_the_user_should_look_at_is_noted(tmp_path):
    folder = start(tmp_path / "run", resumed=[])
    train(folder)
    run = Run(folder, follow=True)
    _ = run.records
    train(folder, steps=12, first_step=6)
    started = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**started, "ended": "2026-01-31T12:05:00Z", "resumed": [started]}))
    run.update()
    now = view("run", run)
    assert (now.step, now.samples, now.state, now.notes) == (12, 384, "training", ("start 2 of this run",))
    (folder / "run.json").write_text(json.dumps({**started, "ended": "2026-01-31T12:05:00Z"}))
    assert seen(folder).left_s is None, "nobody is at work"
    assert seen(folder).state == "dead" and "it is dead: no process" in seen(folder).notes[0]
    (folder / "failure.txt").write_text("exit status 1\nRuntimeError: no\n")
    assert seen(folder).state == "failed" and seen(folder).notes[0] == "failed: exit status 1 | RuntimeError: no"
    (folder / "run.json").write_text("{")
    assert "run.json must be what a run was started with" in seen(folder).notes[1]


def test_ranks_that_a_run_goes_on_without_and_skipped_steps_are_noted(tmp_path):
    folder = start(tmp_path / "run")
    with RecordWriter(record_path(folder, 0), first_step=1) as server:
        server.write(StepRecord(1, event="goes on without rank 1: it has died; goes on without rank 2: it is silent"))
        server.flush()
        assert seen(folder).notes == ("it continued without rank 1, 2",)
        server.write(StepRecord(2, event="rank 2 is back"))
        server.write(StepRecord(3, event="skipped: NaN"))
    notes = ("it continued without rank 1", "1 steps skipped for NaN or infinite gradients")
    assert seen(folder).notes == notes and "\n".join(notes) in terminal.frame(seen(folder), 100).plain


def killed(folder: Path, host: str, quiet_s: float) -> None:
    """Leave a lock of a process that is gone, and files that are as old as that."""
    (folder / ".lock").write_text(f"process 4194304 on host {host} since 2026-01-31 12:00:00 +0000\n" if host else "")
    for path in folder.iterdir():
        os.utime(path, (time.time() - quiet_s,) * 2)


def test_a_run_without_a_process_is_dead(tmp_path):
    here = platform.node()
    cases = [("", 0.0, "training"), ("", 3.0, "dead"), (here, 25.0, "training"), (here, 35.0, "dead")]
    cases += [("another", 35.0, "training"), ("another", 305.0, "dead")]
    for number, (host, quiet_s, state) in enumerate(cases):
        folder = start(tmp_path / f"run{number}")
        train(folder)
        killed(folder, host, quiet_s)
        assert seen(folder).state == state, (host, quiet_s)
        with locked(folder):
            os.utime(folder / ".lock", (0, 0))
            assert seen(folder).state == "training", "a process is at work"
        write_summary(folder, SUMMARY)
        assert seen(folder).state == "ended"


def test_the_end_of_a_run_without_a_process_has_a_status(tmp_path, capsys):
    folder = tmp_path / "before-its-first-record"
    folder.mkdir()
    killed(folder, platform.node(), 100.0)
    for path, which in ((folder, "it has"), (tmp_path / "run", "it has"), (tmp_path / "several", "2 of 3 runs have")):
        if path.name == "run":
            train(start(path))
            killed(path, "", 100.0)
        if path.name == "several":
            for name in "abc":
                train(start(path / name))
                killed(path / name, "", 100.0)
            write_summary(path / "b", SUMMARY)
        for once in (True, False):
            assert not terminal.watch(path, 0.01, once=once)
        assert f"no process is running in {path}, and {which} no summary" in capsys.readouterr().err


@pytest.mark.parametrize("outcome", ["interrupted", "failed"])
def test_why_a_run_has_ended_is_told_once(tmp_path, capsys, outcome):
    train(start(tmp_path / "run", ended="2026-01-31T12:00:00Z", outcome=outcome, reason="SIGUSR1"))
    killed(tmp_path / "run", "", 100.0)
    why = "was interrupted at" if outcome == "interrupted" else "failed, and ended at"
    for path, once in ((tmp_path / "run", True), (tmp_path / "run", False), (tmp_path, False)):
        assert not terminal.watch(path, 0.01, once=once)
        shown, said = capsys.readouterr()
        assert (shown + said).count(why) == 1 and "no process" not in said and (why in shown) == once


def test_a_loop_whose_steps_record_no_samples_has_workers(tmp_path):
    with RecordWriter(record_path(start(tmp_path / "run"), 0)) as worker:
        worker.write(StepRecord(7, computing_s=1.0))
    assert (seen(tmp_path / "run").step, [one.serves for one in seen(tmp_path / "run").ranks]) == (7, [False])


def test_ranks_of_an_earlier_start_have_no_speed(tmp_path):
    folder = start(tmp_path / "run")
    train(folder)
    assert seen(folder).rate_now == 2 * 16
    content = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**content, "resumed": [{**content, "ranks": 2}]}))
    now = seen(folder)
    assert (now.rate_now, now.samples, [rank.rank for rank in now.ranks]) == (16, 320, [0, 1])
    with RecordWriter(record_path(folder, 2), first_step=11) as former:
        former.write(StepRecord(11, samples=16, loss=9.0))
    assert seen(folder).loss == Run(folder, follow=True).loss == pytest.approx(0.4), "that of rank 1"


def test_the_seconds_of_a_curve_are_the_mean_of_the_ranks_that_took_the_step(tmp_path):
    folder = start(tmp_path / "run")
    train(folder)
    train(folder, steps=12, first_step=11)
    continue_records(folder, 0, 2, 9, saved=(8, 12, 8)).close()
    curve = view("run", Run(folder, follow=True), curves=True).loss_curve
    assert [moment.seconds for moment in curve] == pytest.approx(list(range(1, 13)))


def test_the_limit_that_comes_first_says_what_is_left(tmp_path):
    budget = {"samples": 3200, "steps": 20, "seconds": None}
    folder = start(tmp_path / "run", settings={"budget": budget, "epochs": None})
    train(folder)
    assert (seen(folder).fraction, seen(folder).limits) == (0.5, ("3,200 samples", "20 steps"))


def test_stragglers_and_silent_ranks_are_named(tmp_path, monkeypatch):
    folder = start(tmp_path / "run")
    train(folder, slow=2.0)
    run = Run(folder, follow=True)
    assert [one.slower for one in view("run", run).ranks] == [None, None, 2.0]
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    train(folder, steps=12, first_step=11, slow=2.0)
    run.update()
    clock[0] = 100.0
    with open(record_path(folder, 1), "a") as file:
        file.write('{"step":13,"samples":16,"computing_s":0.75}\n')
    run.update()
    assert [one.silent_s for one in view("run", run).ranks] == [100.0, None, 100.0]
    clock[0] = 145.0
    text = terminal.frame(view("run", run), 100).plain
    assert "2.0 times slower, silent for 1 min 40 s" in text and "no rank has written a record for 45 s" in text


# --- folders ----------------------------------------------------------------------------------------------------------
def test_runs_of_a_folder_are_found_when_they_begin(tmp_path):
    watched = WatchedFolder(tmp_path)
    watched.update()
    assert watched.runs == {} and not watched.ended
    train(start(tmp_path / "a"))
    train(start(tmp_path / "deep" / "b"))
    watched.update()
    assert list(watched.runs) == ["a", "deep/b"]
    for name in ("a", "deep/b"):
        write_summary(tmp_path / name, SUMMARY)
    watched.update()
    assert watched.ended
    with pytest.raises(ConfigError, match="folder must be a run's, or hold runs; got .*none, which is not a folder"):
        WatchedFolder(tmp_path / "none")


def test_a_comparison_ends_with_its_last_planned_run_or_its_process(tmp_path):
    runs = [{"folder": f"runs/{name}", "name": name, "ranks": 3, "seed": 0} for name in "ba"]
    (tmp_path / "comparison.json").write_text(json.dumps({"version": 1, "runs": runs}))
    write_summary(start(tmp_path / "runs" / "b"), SUMMARY)
    watched = WatchedFolder(tmp_path)
    watched.update()
    assert list(watched.runs) == ["b"] and watched.planned == 2 and not watched.ended
    assert not watched.abandoned, "nobody has been at work yet"
    killed(tmp_path, "", 100.0)
    assert not watched.abandoned, "its run has just ended"
    killed(tmp_path / "runs" / "b", "", 100.0)
    assert watched.abandoned and not watched.ended
    write_summary(start(tmp_path / "runs" / "a"), SUMMARY)
    watched.update()
    assert watched.ended
    (tmp_path / "comparison.json").write_text("{")
    other = WatchedFolder(tmp_path)
    other.update()
    assert other.runs == {}, "it is being written"


# --- text -------------------------------------------------------------------------------------------------------------
def test_a_frame_fits_its_width(tmp_path):
    folder = start(tmp_path / "run")
    train(folder, slow=2.0)
    append_evaluation(folder, Evaluation(5, 1, 160, 5.0, {"accuracy": 0.25, "loss": 1.5}))
    append_evaluation(folder, Evaluation(10, 2, 320, 10.0, {"accuracy": 0.75, "loss": 0.625}))
    now = seen(folder)
    narrow, wide = (terminal.frame(now, columns, braille=False).plain.splitlines() for columns in (60, 100))
    assert "".join(narrow).isascii() and max(map(len, narrow)) <= 60 and max(map(len, wide)) <= 100
    assert len(wide) < len(narrow), "the plots are side by side"
    assert narrow[0] == f"{'run  softsync on 3 ranks':<52}training" and narrow[1].endswith("  50%  20 s, 20 s left")
    assert narrow[2:6] == [
        "epoch 2, step 10, 320 samples (ends after 4 epochs)",
        "24 samples/s now, 16 mean   staleness 1.50   1 kB/step",
        "waiting 25%",
        "loss 0.4000   accuracy 0.7500   test loss 0.6250",
    ]
    assert narrow[-3] == "     0  ..........   0%   0% 100%  step 10, serves"
    assert narrow[-1] == "     2  #####===..  50%  25%  25%  step 10, 2.0 times slower"


def test_a_line_per_run(tmp_path):
    train(start(tmp_path / "first"))
    write_summary(start(tmp_path / "second"), SUMMARY)
    views = [seen(tmp_path / name) for name in ("second", "first")]
    table = terminal.table(views, 100, planned=3, left_s=70.0, braille=False).plain.splitlines()
    assert table[0].rstrip() == "1 of 3 runs have ended, about 1 min 10 s left for all"
    assert [line.split() for line in table[1:]] == [
        ["run", "done", "left", "accuracy", "loss", "step", "samples/s"],
        ["first", "####....", "50%", "10", "s", "0.4000", "10", "32"],
        ["second", "########", "ended", "0.8750", "16"],
    ]
    narrow = terminal.table(views, 40, braille=False).plain.splitlines()
    assert narrow[1].split() == ["run", "done", "left", "accuracy"], "columns that don't fit are left out"
    long = terminal.table([replace(views[0], label="gossip_pull-with-a-long-name-4-seed0")], 60).plain.splitlines()
    assert max(map(len, long)) <= 60 and long[2].startswith("gossip") and "…" in long[2] and "0.8750" in long[2]


def test_names_have_only_what_tells_runs_apart():
    for names, short in (
        (["digits-softsync-4", "digits-gossip_pull-4"], ["softsync", "gossip_pull"]),
        (["a/digits-4", "b/digits-4"], ["a", "b"]),
        (["lr-0.1", "lr-0.01"], ["0.1", "0.01"]),
        (["allreduce", "allreduce-2"], ["allreduce", "allreduce-2"]),
        (["one"], ["one"]),
        ([], []),
    ):
        assert short_names(names) == short


def test_the_time_that_all_runs_take_is_estimated_together(tmp_path):
    """One run took 100 s; the other has done half of its work; two have not begun: 2.5 runs of 100 s."""
    plan = [{"folder": f"runs/{name}", "name": name, "ranks": 3, "seed": 0} for name in "abcd"]
    (tmp_path / "comparison.json").write_text(json.dumps({"version": 1, "runs": plan}))
    write_summary(start(tmp_path / "runs" / "a", ended="2026-01-31T12:01:40Z"), SUMMARY)
    began = datetime.now(timezone.utc) - timedelta(seconds=50)
    train(start(tmp_path / "runs" / "b", started=began.strftime("%Y-%m-%dT%H:%M:%SZ")))
    watched = WatchedFolder(tmp_path)
    watched.update()
    assert [one.state for one in watched.views()] == ["ended", "training"]
    assert watched.left_s(watched.views()) == pytest.approx(250, rel=0.1)
    killed(tmp_path / "runs" / "b", "", 100.0)
    watched.update()
    assert watched.left_s(watched.views()) is None, "no run is at work"


def test_what_ranks_use_is_shown(tmp_path):
    folder = start(tmp_path / "run")
    train(folder)
    for rank, cores in ((1, 0.5), (2, 1.0)):
        lines = [
            {"time": 1000.0 + 2 * n, "cores": cores * n / 4, "memory_bytes": 10**9, "received_bytes_s": 1500.0,
             "sent_bytes_s": 0.0, "gpu": 0.75 if rank == 2 else None}
            for n in range(5)
        ]  # fmt: skip
        resources_path(folder, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    now = seen(folder)
    assert list(now.usage) == ["cores", "memory_bytes", "received_bytes_s", "sent_bytes_s", "gpu"]
    assert now.usage["cores"] == {1: [(2 * n, n / 8) for n in range(5)], 2: [(2 * n, n / 4) for n in range(5)]}
    assert list(now.usage["gpu"]) == [2] and seen(folder, curves=False).usage == {}
    text = terminal.frame(now, 100).plain.splitlines()
    assert text[-3].split() == "rank cores GPU memory host receives host sends".split()
    assert text[-2].split() == "1 ▁▂▃▄▅ 0.50 1 GB 1.5 kB/s 0 B/s".split()
    assert text[-1].split() == "2 ▁▃▅▆█ 1.00 75% 1 GB 1.5 kB/s 0 B/s".split()
    narrow = terminal.frame(now, 30, braille=False).plain.splitlines()
    assert narrow[-1].split() == ["2", "1.00", "75%", "1", "GB"] and max(map(len, narrow)) <= 30


def test_curves_are_drawn_with_characters():
    assert curve([(1, 3.0), (2, float("nan")), (3, 1.0)], 12, 2, braille=False) == [
        "      3 *** ",
        "      1   **",
        "   step 1  3",
    ]
    assert curve([(1, 0.0), (2, 1.0)], 10, 1)[0] == "      1 ⣠⠞"
    assert curve([(1, 1.0), (2, 0.0)], 9, 2)[:2] == ["      1 ⢹", "      0 ⢸"], "a fall from the top is a line"
    assert curve([(5, 2.0)], 12, 3, braille=False)[1].startswith("      2 *")
    assert [line[:8] for line in curve([(1, 0.000891), (2, 1.0)], 12, 2)[:2]] == ["      1 ", "8.9e-04 "]
    assert curve([], 12, 2) == [" " * 12] * 3


# --- the page ---------------------------------------------------------------------------------------------------------
@contextmanager
def served(folder: Path, every_s: float = 0.0):
    with PageServer(folder, every_s=every_s) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(address: str) -> tuple[int, str, dict]:
    try:
        with urllib.request.urlopen(address, timeout=100) as reply:
            return reply.status, reply.read().decode(), dict(reply.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def test_the_page_and_its_state_are_for_those_who_have_the_token(tmp_path):
    train(start(tmp_path / "run"))
    append_evaluation(tmp_path / "run", Evaluation(10, 2, 320, 10.0, {"loss": float("nan")}))
    with served(tmp_path / "run") as server:
        port = server.server_port
        status, html, headers = get(server.address)
        assert status == 200 and "<title>hpcdist watch</title>" in html and "Copyright (c) 2022 Leon Sorokin" in html
        assert "http" not in html.replace("/*! https://github.com/leeoniya/uPlot", "")
        assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"
        status, text, _ = get(f"{server.address}state.json")
        state = json.loads(text)
        assert status == 200 and state["run"]["loss_curve"][0] == [1, 32, 1, 4.0] and state["runs"][0]["step"] == 10
        assert state["run"]["metrics"] == {"loss": None}, "JSON has no NaN"
        assert get(f"{server.address}etc/passwd")[0] == 404
        shorter = f"{server.token[:-1]}/"
        for wrong in ("", "state.json", f"{'x' * 32}/state.json", shorter, "%C3%A9/", "é/".encode().hex()):
            status, text, _ = get(f"http://127.0.0.1:{port}/{wrong}")
            assert (status, text) == (403, "The address must have the token that was printed.\n"), wrong
        assert server.tunnel.startswith(f"ssh -L {port}:127.0.0.1:{port} ")
        with pytest.raises(ConfigError, match="--host and --port must be an address of this machine that is free"):
            PageServer(tmp_path, port=port)


def test_a_wrong_or_silent_client_does_not_disturb_the_owner(tmp_path, capfd, monkeypatch):
    train(start(tmp_path / "run"))
    monkeypatch.setattr(page, "LONGEST_S", 0.5)
    monkeypatch.setattr(page, "MAX_OPEN", 4)
    with served(tmp_path / "run") as server:
        with socket.create_connection(("127.0.0.1", server.server_port)) as one:
            one.sendall(b"GET http://[ HTTP/1.1\r\n\r\n")
            assert one.recv(12) == b"HTTP/1.0 400"
        before = threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(2 * page.MAX_OPEN)]
        assert get(server.address)[0] == 200
        assert threading.active_count() - before <= page.MAX_OPEN + 1
        silent[-1].settimeout(20)
        assert silent[-1].recv(1) == b"", "it is not waited for any longer"
        for one in silent:
            one.close()
    assert capfd.readouterr().err == ""


def test_control_characters_of_a_run_are_shown_as_text(tmp_path, capsys):
    forged = SUMMARY | {"strategy": "soft\x1b]0;mine\x07", "metrics": {"a\x9b1m": 1.0}}
    write_summary(start(tmp_path / "a\x1b[2J"), forged)
    terminal.watch(tmp_path, 1.0, once=True)
    shown = capsys.readouterr().out
    assert r"a\x1b[2J" in shown and r"a\x9b1m" in shown and shown.replace("\n", "").isprintable()


def test_the_page_of_several_runs_has_the_chosen_ones_curves(tmp_path):
    train(start(tmp_path / "first"))
    train(start(tmp_path / "second"))
    write_summary(tmp_path / "second", SUMMARY)
    with served(tmp_path) as server:
        state = json.loads(get(f"{server.address}state.json")[1])
        assert [run["name"] for run in state["runs"]] == ["first", "second"] and state["run"] is None
        assert list(state["curves"]) == ["first", "second"] and len(state["curves"]["second"]["loss"]) == 10
        assert json.loads(get(f"{server.address}state.json?draw=&draw=first")[1])["curves"].keys() == {"first"}
        assert json.loads(get(f"{server.address}state.json?draw=")[1])["curves"] == {}
        chosen = json.loads(get(f"{server.address}state.json?run=second")[1])
        assert len(chosen["run"]["loss_curve"]) == 10 and chosen["run"]["state"] == "ended" and chosen["curves"] == {}


def until(page: browser.Browser, condition: str) -> None:
    wait_until(lambda: page.run(f"Boolean({condition})"), 30.0)


@pytest.mark.skipif(browser.program() is None, reason="there is no Chromium: apt-get install chromium")
def test_the_page_in_a_browser(tmp_path):
    """Several runs in one chart, values under the mouse, zoom, smoothing, and no scrolling to the side on a phone."""
    for name in ("digits-allreduce-4", "digits-gossip_pull-4"):
        folder = start(tmp_path / name)
        train(folder)
        append_evaluation(folder, Evaluation(5, 1, 160, 5.0, {"accuracy": 0.25}))
        append_evaluation(folder, Evaluation(10, 2, 320, 10.0, {"accuracy": 0.75}))
        Sampler(resources_path(folder, 1)).close()
    smooth = """
      document.getElementById('smoothing').value = 0.5;
      document.getElementById('controls').dispatchEvent(new Event('input'));
    """
    plot = "document.querySelector('.card:not([hidden]) .plot')"
    groups = "one => [...one.cells].map(cell => cell.innerText.trim()).join(' ')"
    legend = f"[...{plot}.querySelectorAll('.u-series:not(.faint)')].map({groups})"
    page = browser.Browser(browser.program())

    def mouse(kind: str, part: float, buttons: int = 0) -> None:
        """Moves or presses the mouse over the first chart, at this part of its width."""
        page.run(f"{plot}.scrollIntoView({{block: 'center'}})")
        left, top, width = page.run(
            f"(box => [box.left, box.top, box.width])({plot}.querySelector('.u-over').getBoundingClientRect())"
        )
        button = {"button": "left", "clickCount": 1} if buttons or kind == "mouseReleased" else {}
        at = {"x": left + part * width, "y": top + 30}
        page.call("Input.dispatchMouseEvent", type=kind, **at, buttons=buttons, **button)

    try:
        with served(tmp_path, every_s=0.2) as server:
            for width, dark in ((1400, False), (390, True)):
                page.visit(server.address, width, dark=dark)
                until(page, "document.querySelector('#plots canvas')")
                assert page.run("document.documentElement.scrollWidth <= innerWidth"), width
                names = page.run("[...document.querySelectorAll('td a')].map(one => one.innerText)")
                assert names == ["allreduce", "gossip_pull"]
                assert page.run(f"{plot}.querySelector('canvas').ariaLabel").startswith(
                    "training loss. Newest: allreduce"
                )
                mouse("mouseMoved", 0.99)
                shown = page.run(legend)
                assert shown == ["step 10", "allreduce 0.4", "gossip_pull 0.4"], shown
                page.run(smooth)
                mouse("mouseMoved", 0.98)
                assert "allreduce 0.4" not in page.run(legend) and page.run(
                    "!document.getElementById('smoothed').hidden"
                )

                whole = page.run(f"{plot}.chart.scales.x.max - {plot}.chart.scales.x.min")
                mouse("mousePressed", 0.3, 1)
                mouse("mouseMoved", 0.6, 1)
                mouse("mouseReleased", 0.6)
                zoomed = (
                    f"Math.abs({plot}.chart.scales.x.max - {plot}.chart.scales.x.min - 0.3 * {whole}) < 0.05 * {whole}"
                )
                until(page, zoomed)
                page.run("show()")  # what is new does not undo it
                assert page.run(f"new Promise(done => setTimeout(() => done({zoomed}), 500))")
                page.run(f"{plot}.focus()")
                page.run(f"{plot}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'Escape'}}))")
                until(page, f"{plot}.chart.scales.x.max - {plot}.chart.scales.x.min == {whole}")

                page.run("document.querySelector('td input').click()")
                until(page, f"{legend}.length == 2")
                ground = "rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)"
                assert page.run("getComputedStyle(document.body).backgroundColor") == ground
                page.run("document.querySelector('td a').click()")
                until(page, "/Cores busy/.test(document.body.innerText)")
                assert page.run("document.querySelector('h1').innerText") == "digits-allreduce-4"
            assert page.complaints == [] and all(server.address in url for url in page.requests if url != "about:blank")
    finally:
        page.close()


@pytest.mark.skipif(browser.program() is None, reason="there is no Chromium: apt-get install chromium")
def test_the_page_tells_its_own_failure_from_a_server_that_is_gone(tmp_path):
    """A state that the page cannot show is no silence of the server; both are said, and go away with the cause."""
    train(start(tmp_path / "run"))
    page = browser.Browser(browser.program())
    said = "document.getElementById('lost')?.innerText ?? ''"
    try:
        with served(tmp_path / "run", every_s=0.2) as server:
            page.visit(server.address, 1400)
            until(page, "document.querySelector('#plots canvas')")
            page.run("usual = detail; detail = () => { throw new Error('no <detail>') }; undefined")
            until(page, said)
            wrong = "This page has failed to show the runs, whose state it has: Error: no <detail>"
            assert page.run(said) == wrong
            page.run("detail = usual; undefined")
            until(page, f"!({said})")
        until(page, f"{said} == 'The server does not answer.'")
        assert page.run("document.querySelectorAll('#lost').length") == 1
    finally:
        page.close()


# --- a real run -------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")
def test_a_real_run_is_watched_to_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["-m", "hpcdist", "train", ROOT / "jobs" / "digits.py", "--set", "epochs=2", "--output", "run"]
    with started(2, arguments, tmp_path / "job.log", env=IMPORTS) as job:
        wait_until(lambda: Path("run").is_dir())
        cli._run(["watch", "run", "--every", "0.1"], True)
        assert job.wait() == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert shown.err == "" and len(lines) >= 2 and lines[0].startswith("run")
    assert "ended" in lines[-1] and "step 90" in lines[-1] and "accuracy 0." in lines[-1]
    log = Path("job.log").read_text()
    assert "left" in log and "\r" not in log and "\x1b" not in log, "the launcher's output goes to a file"
    assert list(Run("run").resources) == [0, 1]
