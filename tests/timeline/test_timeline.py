"""Timelines: their format, who waits for whom, their bounds, clocks that differ, and that nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpcdist.comm.communicator import ANY
from hpcdist.comm.traced import end_timeline, start_timeline
from hpcdist.comm.virtual import Constant, Network, Straggler, run_virtual
from hpcdist.errors import ConfigError, OutputError
from hpcdist.records.merged_timeline import RankTimeline, merge_timelines
from hpcdist.records.timeline import Timeline, rank_path, unused
from hpcdist.train import runs
from timeline.traces import Trace
from train import tiny

SLOW = Network(latency_s=1e-3, bandwidth_bytes_s=1e6)


def traced(path, body, **given):
    """What `body` does on a communicator with a timeline, as a function for `ranks`."""

    def whole(comm):
        made = start_timeline(comm, path, **given)
        result = body(made)
        end_timeline(made)
        return result

    return whole


# --- calls of the seam ------------------------------------------------------------------------------------------------
def calls(comm):
    """A call of each kind, most of them around a ring."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out, into = torch.arange(4.0) + comm.rank, torch.empty(4)
    comm.sendrecv(out, right, into, left, 3)
    sending = comm.isend(out, right, 4)
    comm.irecv(into, left, 4).wait()
    sending.wait()
    total = torch.ones(8)
    comm.allreduce(total)
    comm.broadcast(total, 0)
    around = comm.neighbourhood([left], [right])
    around.start(out, into).wait()
    around.close()
    window, words = comm.window(4), comm.window(1, torch.int64)
    window.put(out, right)
    comm.barrier()
    window.get(into, left)
    comm.barrier()  # what is read is not yet accumulated to
    window.accumulate(out, right)
    window.change(lambda elements, parts: None, right, out)
    words.fetch_add(1, right)
    words.wait(lambda word: word[0] == 1, what=f"the word of rank {left}")
    words.compare_and_swap(1, 2, comm.rank)
    comm.barrier()
    half = comm.split(comm.rank % 2)
    half.barrier()
    half.close()
    words.close()
    window.close()
    return into.tolist() + total.tolist()


@pytest.mark.sizes(4)
def test_every_call_is_an_event_and_receives_end_after_their_sends_began(ranks, shared_tmp_path):
    folder = shared_tmp_path
    with_timeline = ranks(traced(folder / "timeline.json", calls), network=SLOW)
    assert with_timeline == ranks(calls, network=SLOW), "results are those without a timeline"
    trace = Trace(folder / "timeline.json")
    trace.check()
    size = ranks.size
    assert len(trace.of("split")) == size and trace.content["otherData"]["ranks"] == size
    names = trace.names("process_name")
    assert all(names[rank][0].startswith(f"rank {rank} (host ") for rank in range(size))
    assert not list(folder.glob("timeline-rank*")), "the ranks' own files are merged"
    for name in ("send and receive", "put", "get", "accumulate", "fetch and add", "wait", "receive from neighbours"):
        assert {e["pid"] for e in trace.of(name)} == set(range(size)), name
    for rank in range(size):
        changes = [event["args"] for event in trace.of("change", rank)]
        assert changes == [{"of": (rank + 1) % size, "bytes": 16}] * ranks.real, "others make it of other calls"
        assert trace.of("put", rank)[0]["args"] == {"to": (rank + 1) % size, "bytes": 16}
        assert trace.of("wait", rank)[0]["args"]["for"] == f"the word of rank {(rank - 1) % size}"
    error_us = 1e6 * sum(clock["error, s"] for clock in trace.content["otherData"]["clocks"].values())
    arrows = list(trace.arrows())
    assert len(arrows) >= 2 * size
    for start, end in arrows:
        assert start["ts"] <= end["ts"] + error_us, "a receive does not end before its send began"


def test_a_collective_call_names_the_rank_that_came_last(tmp_path):
    def body(comm):
        for _ in range(2):
            comm.compute()
            comm.barrier()

    compute = Straggler(Constant(0.1), rank=2, factor=3)
    run_virtual(traced(tmp_path / "timeline.json", body), 3, compute=compute)
    trace = Trace(tmp_path / "timeline.json")
    for rank in (0, 1):
        waits = trace.of("barrier", rank)
        assert [wait["args"]["waited for"] for wait in waits] == ["rank 2"] * 2
        assert [wait["args"]["waited, ms"] for wait in waits] == [200.0, 200.0]
        assert waits[0]["dur"] == pytest.approx(2e5)
    assert all("waited for" not in wait["args"] for wait in trace.of("barrier", 2))
    assert trace.of("forward and backward", 2)[0]["dur"] == pytest.approx(3e5), "virtual seconds"
    assert trace.content["otherData"]["seconds"] == "virtual"


def test_receives_from_anybody_have_no_arrows_that_may_be_wrong(tmp_path):
    """And what is polled for is an event too."""

    def body(comm):
        if comm.rank == 0:
            for _ in range(2):
                envelope = comm.probe(ANY, 1)
                comm.irecv(torch.empty(1), ANY, 1).wait()
                comm.irecv(torch.empty(1), envelope.source, 2).wait()
            polled = comm.irecv(torch.empty(1), 1, 3)
            while not polled.done():
                pass
            polled.wait()
        else:
            for tag in (1, 2, 3):
                comm.isend(torch.ones(1), 0, tag).wait()

    run_virtual(traced(tmp_path / "timeline.json", body), 3, network=SLOW)
    trace = Trace(tmp_path / "timeline.json")
    assert list(trace.arrows()) == []
    assert sorted(wait["args"]["from"] for wait in trace.of("wait for a message", 0)) == [1, 2]
    polled = trace.of("receive", 0)[-1]
    assert polled["args"] == {"from": 1} and polled["dur"] == 0.0


# --- runs -------------------------------------------------------------------------------------------------------------
def train(comm, folder, *overrides):
    return tiny.run(comm, folder, "epochs=1", "log_every=1000", *overrides)[0]


def run(folder, size, *overrides, compute=None):
    """The trace of a run on virtual ranks, which is the same without one: to the bit, and to the virtual second."""
    compute = compute or Straggler(Constant(0.01), rank=size - 1, factor=2)
    (folder / "plain").mkdir()
    (folder / "traced").mkdir()
    plain = run_virtual(lambda comm: train(comm, folder / "plain", *overrides), size, network=SLOW, compute=compute)
    path = folder / "timeline.json"
    body = traced(path, lambda comm: train(comm, folder / "traced", *overrides))
    summary = run_virtual(body, size, network=SLOW, compute=compute)[0]
    assert summary.sha256 == plain[0].sha256 and summary.wall_s == pytest.approx(plain[0].wall_s, rel=1e-9)
    return Trace(path)


def test_a_run_with_a_server(tmp_path):
    trace = run(tmp_path, 3, "strategy=ssp", "strategy.bound=1")
    trace.check()
    names = trace.names("process_name")
    assert [names[rank][0].split(",")[0] for rank in range(3)] == ["rank 0 (server", "rank 1 (worker", "rank 2 (worker"]
    steps = len(trace.of("SSP", 1))
    assert steps > 2 and len(trace.of(f"step {steps}", 1)) == 1
    assert len(trace.of("update", 0)) >= steps and trace.of("update", 1) == [], "the server updates"
    assert len(trace.of("request of rank 1", 0)) == len(trace.of("request of rank 2", 0)) == steps
    assert trace.of("puts", 1)[0]["args"]["to"] == [0] and trace.of("puts", 1)[0]["args"]["bytes"] > 0
    assert trace.of("wait", 1)[-1]["args"]["for"] == "the reply of server rank 0"
    held = [step["args"]["held up, s"] for step in trace.of("SSP", 1) if "held up, s" in step["args"]]
    assert held and list(held[-1]) == ["by rank 2"], "the straggler"
    assert len(trace.of("evaluation")) == 3


def test_a_run_of_allreduce(tmp_path):
    trace = run(tmp_path, 2, "strategy=allreduce", "strategy.algorithm=ring", "checkpoint.every_steps=5")
    trace.check()
    assert trace.of("checkpoint", 0) and trace.of("update", 1) and trace.of("backward", 0)
    assert trace.of("average a bucket", 0)[0]["args"]["bytes"] > 0
    assert trace.of("all-reduce by ring", 0) and list(trace.arrows())


def test_a_run_that_goes_on_keeps_its_earlier_timeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = (Path(tiny.__file__), None, ["data.path=digits.h5", "epochs=1"], Path("run"))
    for resume in (False, True):
        run_virtual(lambda comm: runs.train(comm, *arguments, resume, timeline=True), 2)
    for name in ("timeline.json", "timeline-2.json"):
        trace = Trace(Path("run", name))
        trace.check()
        assert len(trace.of("evaluation")) == 2, name
    Path("run/timeline-3-rank0000.json").touch()  # of a start that was killed
    assert unused(Path("run/timeline.json")) == Path("run/timeline-4.json")


# --- bounds -----------------------------------------------------------------------------------------------------------
def test_beyond_the_limit_the_first_and_the_last_events_stay(tmp_path):
    def body(comm):
        for i in range(3000):
            with comm.trace.span(f"event {i}", "test"):
                pass

    run_virtual(traced(tmp_path / "timeline.json", body, max_events=1000), 1)
    trace = Trace(tmp_path / "timeline.json")
    trace.check()
    kept = [int(event["name"].split()[1]) for event in trace.spans if event["cat"] == "test"]
    assert sorted(kept)[:400] == list(range(400)) and sorted(kept)[-400:] == list(range(2600, 3000))
    dropped = trace.content["otherData"]["dropped"]["0"]
    assert len(trace.spans) == 1000 and dropped >= 2000
    (note,) = [event for event in trace.events if event["ph"] == "i"]
    assert note["name"] == f"{dropped:,} events dropped before this one"


@pytest.mark.computes
@pytest.mark.sizes(2)
def test_without_a_timeline_nothing_is_noted(ranks):
    def body(comm):
        with comm.trace.span("nothing", "test", rank=1) as details:
            return comm.trace.timeline is None and details is None

    assert all(ranks(body))


# --- files and clocks -------------------------------------------------------------------------------------------------
def test_clocks_are_corrected_with_a_drift_between_begin_and_end(tmp_path):
    path, clock = tmp_path / "timeline.json", iter((10.0, 11.0, 110.0, 111.0, 5010.2, 5011.0, 5110.4, 5111.4))
    ranks = []
    for rank, ahead in enumerate(([0.0, 0.0], [5000.0, 5000.4])):
        timeline = Timeline(path, rank, lambda: next(clock))
        for _ in range(2):
            with timeline.span("event", "test"):
                pass
        timeline.close()
        moments = [(10.0, ahead[0]), (110.0, ahead[1])] if rank == 0 else [(5010.0, ahead[0]), (5110.4, ahead[1])]
        ranks.append(RankTimeline(rank=rank, name=f"rank {rank}", clock=moments))
    merge_timelines(path, ranks)
    first, last = Trace(path).of("event", 0)
    theirs_first, theirs_last = Trace(path).of("event", 1)
    assert (first["ts"], last["ts"]) == (0.0, 100e6)
    assert theirs_last["ts"] == pytest.approx(100e6), "0.4 s more ahead than at the begin"
    assert theirs_first["ts"] == pytest.approx(0.2e6, rel=0.01), "between the two"


def test_a_file_that_ends_in_the_middle_of_a_line_is_merged(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, 0, lambda: 1.0)
    with timeline.span("event", "test"):
        pass
    timeline.close()
    with timeline.span("too late", "test"):
        pass
    timeline.close()
    own = rank_path(path, 0)
    events = json.loads(own.read_text())
    assert [event["name"] for event in events] == ["process_name", "thread_name", "event"], "it is whole by itself"
    own.write_text(own.read_text()[:-20])
    merge_timelines(path, [RankTimeline(rank=0, name="rank 0", clock=[(0.0, 0.0)])])
    assert Trace(path).spans == []


def test_refusals(tmp_path):
    def twice(comm):
        made = start_timeline(comm, tmp_path / "timeline.json")
        with pytest.raises(ConfigError, match="timeline must be started once; got one already, .*timeline.json"):
            start_timeline(made, tmp_path / "other.json")
        end_timeline(made)

    run_virtual(twice, 2)
    with pytest.raises(ConfigError, match="timeline must be started before it is ended; got none"):
        run_virtual(end_timeline, 2)
    with pytest.raises(OutputError, match="missing"):
        run_virtual(lambda comm: start_timeline(comm, tmp_path / "missing" / "timeline.json"), 2)
