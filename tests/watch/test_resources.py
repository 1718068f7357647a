"""What ranks use of processors, memory, network and GPUs: recorded by real runs, read while they go on."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from harness.launch import wait_until
from hpcdist.records import Resources, Sampler, resources, resources_path
from hpcdist.tools.runs import Run


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(resources, "EVERY_S", 0.05)


def test_a_process_at_work_is_sampled_until_its_end(tmp_path):
    sampler, until = Sampler(resources_path(tmp_path, 3)), time.monotonic() + 0.3
    while time.monotonic() < until:
        sum(range(10000))
    run = Run(tmp_path, follow=True)
    early = len(run.resources[3])
    sampler.close()
    run.update()
    samples = run.resources[3]
    assert early >= 1 and len(samples) > early and list(run.resources) == [3]
    assert max(one.cores for one in samples) > 0.1 and samples[-1].gpu is None
    own = psutil.Process().memory_info().rss
    assert all(abs(one.memory_bytes - own) < own / 2 and one.sent_bytes_s >= 0 for one in samples)
    assert [one.time for one in samples] == sorted(one.time for one in samples)
    assert abs(samples[-1].time - time.time()) < 60


def test_samples_of_a_long_run_become_rare(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "SPARING", 2)
    sampler = Sampler(resources_path(tmp_path, 0))
    (found := Resources(tmp_path)).read()
    wait_until(lambda: found.read() or len(found.samples.get(0, ())) >= 6)
    sampler.close()
    first, *_, before, last = [one.time for one in found.samples[0][:6]]
    assert last - before > 0.1, f"{last - first} s"


def test_a_damaged_line_is_left_out_and_a_pipe_is_not_read(tmp_path):
    for rank in (0, 1):
        Sampler(resources_path(tmp_path, rank)).close()
    with open(resources_path(tmp_path, 1), "a") as file:
        file.write('{"time":1,"co')  # of a process that was killed
    Sampler(resources_path(tmp_path, 1)).close()  # it goes on
    Sampler(resources_path(tmp_path, 1)).close()
    os.mkfifo(resources_path(tmp_path, 2))
    (tmp_path / "resources-rank3.jsonl").write_text("of another program")
    (found := Resources(tmp_path)).read()
    assert {rank: len(samples) for rank, samples in found.samples.items()} == {0: 1, 1: 2}


def test_training_goes_on_where_no_sample_can_be_written(tmp_path, caplog):
    sampler = Sampler(resources_path(tmp_path / "none", 0))
    sampler.close()
    assert "processor, memory, network and GPU are recorded no longer: " in caplog.text and "none" in caplog.text


def test_networks_are_counted_once_and_infiniband_too(tmp_path, monkeypatch):
    class Counters:
        def __init__(self, received: int, sent: int):
            self.bytes_recv, self.bytes_sent = received, sent

    found = {"lo": Counters(1, 1), "eth0": Counters(10, 20), "bond0": Counters(10, 20)}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: found)
    assert resources.network_bytes(tmp_path) == (20, 40)
    (tmp_path / "class" / "net" / "eth0" / "device").mkdir(parents=True)
    assert resources.network_bytes(tmp_path) == (10, 20)
    for name, words in (("mlx5_0", "100"), ("mlx5_1", "no")):
        folder = tmp_path / "class" / "infiniband" / name / "ports" / "1" / "counters"
        folder.mkdir(parents=True)
        for direction in ("rcv", "xmit"):
            (folder / f"port_{direction}_data").write_text(f"{words}\n")
    assert resources.network_bytes(tmp_path) == (410, 420)
