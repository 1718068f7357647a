"""The data that the ranks of a job read whose model is in stages: the first stage x, the last one y."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import pytest

from hpcdist.data import hdf5, importers
from hpcdist.data.hdf5 import StoredRows
from train import staged

# Compressed: all that is read goes through `StoredRows`. Read on the rank's own thread.
JOB = replace(staged.job, data=lambda path: importers.load("digits")(None, path, compression="gzip"))
OPTIONS = ("data.prefetch=0", "budget.steps=5")


@pytest.fixture
def counted(monkeypatch):
    """Counts the bytes that each thread reads of each column; a rank is a thread, or a process."""
    read: Counter[tuple[int, str]] = Counter()
    take = StoredRows.take

    def counting(self, indices):
        values = take(self, indices)
        read[threading.get_ident(), self._column.name.rpartition("/")[2]] += values.nbytes
        return values

    def uncounted(*given):
        """All ranks compare a checksum of all data, which reads little of them where they are large."""
        before = read.copy()
        found = checksum(*given)
        for name in "xy":
            read[threading.get_ident(), name] = before[threading.get_ident(), name]
        return found

    checksum = hdf5._checksum
    monkeypatch.setattr(StoredRows, "take", counting)
    monkeypatch.setattr(hdf5, "_checksum", uncounted)
    return read


@pytest.mark.computes
@pytest.mark.sizes(4)
@pytest.mark.parametrize("stages", [2, 4])
def test_each_rank_reads_what_its_stages_need(ranks, shared_tmp_path, counted, stages):
    replicas = 4 // stages

    def body(comm):
        def read():
            return {name: counted[threading.get_ident(), name] for name in "xy"}

        staged.run(comm, shared_tmp_path, *OPTIONS, f"parallel.stages={stages}", job=JOB)
        own = read()
        staged.alone(comm, shared_tmp_path, *OPTIONS, f"batch_size={16 * replicas}", job=JOB)
        return own, {name: number - own[name] for name, number in read().items()}

    found = ranks(body)
    whole = found[0][1]
    assert whole["x"] == 8 * whole["y"] > 0, "64 pixels of a byte, and a class of 8 bytes"
    first, last = range(0, 4, stages), range(stages - 1, 4, stages)
    for name, needed in (("x", first), ("y", last)):
        of_ranks = [own[name] for own, _ in found]
        assert sum(of_ranks) == whole[name], "by all replicas together, once"
        assert [rank for rank, number in enumerate(of_ranks) if number] == list(needed)
