"""`auto`: which algorithm at which length, the measured table and its file."""

from __future__ import annotations

import itertools
import json
import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import each
from hpcdist.collectives import load
from hpcdist.collectives.auto import Auto
from hpcdist.collectives.tuning import table as table_module
from hpcdist.collectives.tuning.table import (
    SIZES,
    SLOW_S,
    SWITCHED,
    TimingTable,
    cached_table,
    candidates,
    measure_table,
    predicted_ranges,
)
from hpcdist.comm.virtual import Network, run_virtual

NETWORK = Network(1e-3, 1e9, ranks_per_node=4)  # slow, so that few calls fill the time for measuring
SMALL = (64, 4096)


def table(**seconds):
    return TimingTable(sizes=(1024, 4096, 16384), seconds=seconds)


# --- the table ----------------------------------------------------------------------------------------------------
def test_ranges_end_half_way_between_sizes_and_join_neighbours():
    found = table(native=(1.0, 9.0, 9.0), ring=(2.0, 2.0, 2.0), tree=(3.0, 6.0, None)).ranges()
    assert found == [(2048.0, "native"), (math.inf, "ring")]
    found = table(native=(9.0, 1.0, 9.0), ring=(2.0, 9.0, 2.0)).ranges()
    assert found == [(2048.0, "ring"), (8192.0, "native"), (math.inf, "ring")]


CHOICES = {
    "native is kept unless another is clearly faster": [
        ({"native": (1.0, 1.0, 1.0), "ring": (0.9, 0.85, 0.9)}, "native native native"),
        ({"native": (1.0, 1.0, 1.0), "ring": (0.7, 0.7, 0.7)}, "ring ring ring"),
    ],
    "no other is chosen where native was faster": [
        ({"native": (2.0, 1.0, 2.0), "ring": (1.0, 1.01, 1.0)}, "ring native ring"),
        ({"native": (2.0, 1.0, 1.0), "ring": (1.0, 1.01, 1.01)}, "ring native native"),
    ],
    "the last size counts for all longer ones": [
        ({"native": (1.0, 1.0, 1.0), "ring": (1.5, 1.5, 0.8)}, "native native ring"),
        ({"native": (1.0, 1.0, 1.0), "ring": (1.5, 0.8, 1.5)}, "native native native"),
    ],
    "one lucky measurement changes nothing": [
        ({"native": (1.0, 1.0, 1.0), "tree": (2.0, 0.7, 2.0)}, "native native native"),
        ({"native": (1.0, 1.0, 1.0), "tree": (2.0, 0.4, 2.0)}, "native tree native"),
    ],
    "one disturbed measurement changes nothing": [
        ({"native": (1.0, 4.0, 4.0), "ring": (3.0, 2.0, 2.0), "tree": (9.0, 1.9, 9.0)}, "native ring ring"),
        ({"native": (2.0, 2.0, 2.0), "ring": (1.0, None, 1.0)}, "ring native ring"),
    ],
    "without native the fastest counts": [
        ({"ring": (2.0, 2.0, 1.0), "tree": (1.9, 2.0, 2.0)}, "ring ring ring"),
        ({"ring": (9.0, 4.0, 1.0), "tree": (1.9, 2.0, 2.0)}, "tree tree ring"),
    ],
    "times of zero choose native": [
        ({"ring": (0.0, 0.0, 0.0), "native": (0.0, 0.0, 0.0)}, "native native native"),
    ],
}


@each("rule", CHOICES)
def test_the_choice_follows_what_is_fast_over_a_range_of_sizes(rule):
    for seconds, expected in CHOICES[rule]:
        assert table(**seconds).choice() == expected.split()


@settings(max_examples=30)
@given(st.data())
def test_no_other_choice_costs_less(data):
    """The dynamic programme against all sequences."""
    time = st.one_of(st.none(), st.floats(1e-6, 1.0))
    rows = {name: data.draw(st.tuples(time, time, time)) for name in ("native", "ring", "tree")}
    rows["direct"] = data.draw(st.tuples(*[st.floats(1e-6, 1.0)] * 3))
    found = table(**rows)

    def cost(names):
        switches = sum(a != b for a, b in itertools.pairwise(names))
        return sum(found._excess(name, size) for size, name in enumerate(names)) + switches * math.log(SWITCHED)

    best = min(cost(names) for names in itertools.product(rows, repeat=3))
    assert cost(found.choice()) == pytest.approx(best)


@each(
    "case",
    [
        ('{"sizes": [4, 2], "seconds": {"ring": [1, 1]}}', r"sizes of a table must ascend; got \[4, 2\]"),
        ('{"sizes": [], "seconds": {"ring": []}}', r"sizes of a table must ascend; got \[\]"),
        ('{"sizes": [2, 4], "seconds": {"ring": [1]}}', "must have one figure for each of its 2 sizes"),
        ('{"sizes": [2], "seconds": {"ring": [null]}}', "must have a figure of at least one algorithm for each size"),
        ('{"sizes": [2], "seconds": {}}', "must have a figure of at least one algorithm for each size"),
        ('{"sizes": [2], "seconds": {"ring": [-1]}}', "greater than or equal to 0"),
        ('{"sizes": [2], "seconds": {"ring": [1]}, "more": 1}', "more"),
        ('{"sizes": [2], "sec', "Invalid JSON"),
    ],
)
def test_a_broken_table_is_refused(case):
    text, rule = case
    with pytest.raises(ValueError, match=rule):
        TimingTable.model_validate_json(text)


@each("cluster", [(6, 1), (8, 1), (12, 4), (9, 9)])
def test_virtual_ranks_take_the_algorithm_that_is_fastest_on_their_network(cluster):
    """Each algorithm is timed on the virtual clock, and `auto` beside them."""
    size, ranks_per_node = cluster
    lengths = (256, 4096, 80_000, 240_000, 1_600_000)
    flat = ("native", "ring", "recursive_doubling", "halving_doubling", "tree", "hierarchical")

    def body(comm):
        taken_s = {}
        for name in [name for name in flat if load(name).suits(comm)] + ["auto"]:
            reduce = load(name)(comm)
            for n_bytes in lengths:
                comm.barrier()
                start_s = comm.now()
                reduce(torch.zeros(n_bytes // 4))
                taken_s[name, n_bytes] = comm.now() - start_s
            reduce.close()
        return taken_s

    network = Network(5e-5, 1.25e8, ranks_per_node)
    results = run_virtual(body, size, network=network)
    last_s = {key: max(taken_s[key] for taken_s in results) for key in results[0]}  # the whole call's seconds
    for n_bytes in lengths:
        best_s = min(taken_s for (name, length), taken_s in last_s.items() if length == n_bytes and name != "auto")
        assert last_s["auto", n_bytes] <= 1.35 * best_s, (n_bytes, last_s)
        if ranks_per_node == 1 and size.bit_count() == 1:
            assert last_s["auto", n_bytes] == pytest.approx(best_s)


def test_predicted_ranges_follow_the_formulas():
    alone = run_virtual(lambda comm: predicted_ranges(comm, 5e-5, 8e-9), 8)
    assert all(found == alone[0] for found in alone)
    assert [name for _, name in alone[0]] == ["recursive_doubling", "halving_doubling"]
    folded = run_virtual(lambda comm: predicted_ranges(comm, 5e-5, 8e-9), 6)[0]
    assert [name for _, name in folded] == ["recursive_doubling", "native"]


def test_candidates_are_what_has_a_point_on_these_ranks():
    def body(comm):
        first = candidates(comm)
        comm.memory.can_attach = False
        return first, candidates(comm)

    flat = {"halving_doubling", "native", "recursive_doubling", "ring", "tree"}
    assert [set(c) for c in run_virtual(body, 4, network=NETWORK)[0]] == [
        flat | {"direct", "hierarchical", "shared_memory"}, flat | {"hierarchical", "shared_memory"}
    ]  # fmt: skip
    assert [set(c) for c in run_virtual(body, 4)[0]] == [flat | {"direct"}, flat]
    crowded = run_virtual(candidates, 9, network=Network(1e-3, 1e9, ranks_per_node=9))[0]
    assert set(crowded) == flat | {"direct", "hierarchical"}  # nine ranks read too much


THREE = ["ring", "recursive_doubling", "native"]


def measured(size: int, sizes: tuple[int, ...], latency_s: float) -> dict:
    """Seconds of three algorithms, at 100 MB/s."""
    body = lambda comm: measure_table(comm, sizes, THREE, budget_s=1e-9).seconds  # noqa: E731
    return run_virtual(body, size, network=Network(latency_s, 1e8))[0]


def test_what_did_badly_is_not_tried_on_long_tensors(monkeypatch):
    monkeypatch.setattr("hpcdist.collectives.tuning.table.LONG", 500_000)
    found = measured(16, (400_000, 800_000), 1e-6)  # 4n/b beside 15n/8b
    assert found["recursive_doubling"][0] > 0 and found["recursive_doubling"][1] is None
    for name in ("ring", "native"):
        assert found[name][1] == pytest.approx(load(name).cost_s(800_000, 16, 1e-6, 1e-8))


def test_on_a_slow_network_long_tensors_are_not_measured():
    """4 hosts at 100 Mbit/s: 16 MiB alone would take a second and a half at best, each time."""

    def body(comm):
        return measure_table(comm), comm.now()

    found, taken_s = run_virtual(body, 4, network=Network(1e-4, 12.5e6))[0]
    assert found.sizes == SIZES[: len(found.sizes)] and found.sizes[-1] == 1 << 20
    assert [min(s for s in column if s is not None) < SLOW_S for column in zip(*found.seconds.values())][-2:] == [1, 0]
    assert taken_s < 12


def test_measured_on_a_virtual_clock_the_formulas_come_out():
    for name, (found_s,) in measured(2, (800_000,), 1e-3).items():
        assert found_s == pytest.approx(load(name).cost_s(800_000, 2, 1e-3, 1e-8))
    found = measured(16, (8000,), 1e-3)
    assert found["ring"] == (None,)  # 30 steps against 4: not plausible
    for name in ("native", "recursive_doubling"):  # native whatever its formula and its first calls say
        assert found[name][0] == pytest.approx(load(name).cost_s(8000, 16, 1e-3, 1e-8))


# --- its file -----------------------------------------------------------------------------------------------------
@pytest.fixture
def measurements(monkeypatch):
    """Makes measuring quick, and counts it."""
    done = []

    def quickly(comm, algorithms):
        done.append(comm.rank)
        return measure_table(comm, SMALL, algorithms, budget_s=1e-3)

    monkeypatch.setattr(table_module, "measure_table", quickly)
    return done


def once(comm, folder, library="MPI 1", **options):
    part = comm.split(0)
    part.platform.library = library
    found = cached_table(part, folder, **options).model_dump_json()
    part.close()
    return found


def test_a_machine_is_measured_once(ranks, shared_tmp_path, measurements):
    folder = shared_tmp_path / "not" / "yet" / "there"

    def found(library):
        """The table, and whether it was measured, on each rank."""

        def body(comm):
            measurements.clear()
            comm.barrier()
            before, table = comm.trace.traffic.bytes_sent, once(comm, folder, library)
            assert sorted(json.loads(table)["seconds"]) == candidates(comm)
            assert comm.trace.traffic.bytes_sent - before < 1000, "what is measured is not counted"
            return table, comm.rank in measurements

        return ranks(body, network=NETWORK)

    first = found("MPI 1")
    assert len(set(first)) == 1 and first[0][1]
    assert found("MPI 1") == [(first[0][0], False)] * ranks.size
    assert all(measured for _, measured in found("MPI 2"))


OUTDATED = b'{"sizes": [2], "seconds": {"ring": [1.0]}}'  # a table of other algorithms


@each("content", [None, OUTDATED, b"{", b"\xff\xfe", b'{"sizes": [2], "seconds": {}}'])
def test_a_file_is_measured_anew_to_refresh_it_and_where_it_is_out_of_date_or_corrupt(tmp_path, measurements, content):
    good = run_virtual(lambda comm: once(comm, tmp_path), 2, network=NETWORK)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content or path.read_bytes())
    measurements.clear()
    message = r"allreduce-\w+\.json is not a table of all-reduce times .*measuring again"
    with nullcontext() if content in (None, OUTDATED) else pytest.warns(UserWarning, match=message):
        assert run_virtual(lambda comm: once(comm, tmp_path, refresh=content is None), 2, network=NETWORK) == good
    assert len(measurements) == 2 and json.loads(path.read_text()) == json.loads(good[0])
    path.unlink()


def test_a_file_per_ranks_and_nodes_and_library(tmp_path, measurements):
    flat = Network(1e-3, 1e9)
    for size, network, library in [(2, NETWORK, "A"), (3, flat, "A"), (3, NETWORK, "A"), (3, NETWORK, "B")]:
        run_virtual(lambda comm: once(comm, tmp_path, library), size, network=network)
    run_virtual(lambda comm: once(comm, tmp_path, "B"), 3, network=NETWORK)
    assert len(measurements) == 2 + 3 + 3 + 3
    assert len(list(tmp_path.iterdir())) == 4  # and nothing temporary
    assert all(path.suffix == ".json" for path in tmp_path.iterdir())


def test_a_folder_that_can_not_be_written_costs_only_a_warning(tmp_path, measurements):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="all-reduce times can't be cached in .*file/allreduce-"):
        found = run_virtual(lambda comm: once(comm, tmp_path / "file"), 2, network=NETWORK)
    assert found[0] == found[1] and len(measurements) == 2


# --- the choice ---------------------------------------------------------------------------------------------------
def test_auto_runs_what_the_table_says(monkeypatch):
    told = [(64.0, "recursive_doubling"), (1024.0, "tree"), (math.inf, "ring")]
    monkeypatch.setattr("hpcdist.collectives.auto._ranges", lambda *args: told)

    def body(comm):
        reduce, sent = Auto(comm), {}
        for n_bytes in (8, 64, 68, 1024, 1028, 8192):
            before = comm.trace.traffic.messages_sent
            reduce(torch.ones(n_bytes // 4))
            sent[n_bytes] = comm.trace.traffic.messages_sent - before
        reduce.close()
        return sent

    found = run_virtual(body, 8)
    messages = {n_bytes: max(sent[n_bytes] for sent in found) for n_bytes in found[0]}
    assert messages == {8: 3, 64: 3, 68: 3, 1024: 3, 1028: 14, 8192: 14}  # lg p, lg p of the root, 2(p-1)
    assert found[7][68] == 1  # a leaf of the tree


def test_short_tensors_and_device_memory_that_is_not_staged_go_straight_to_the_library(monkeypatch):
    told = [(64.0, "native"), (math.inf, "ring")]
    monkeypatch.setattr("hpcdist.collectives.auto._ranges", lambda *args: told)

    def body(comm):
        seen = []
        comm.allreduce = seen.append
        reduce = Auto(comm)
        first, wide, device = torch.ones(16), torch.ones(16, dtype=torch.float64), torch.ones(32, device="meta")
        reduce(first)
        reduce(wide)  # 128 bytes
        comm.memory.host = lambda tensor, *, write=True: nullcontext(tensor)
        reduce(device)
        return [one is given for one, given in zip(seen, (first, device), strict=True)], wide.tolist()

    assert run_virtual(body, 3) == [([True, True], [3.0] * 16)] * 3


def test_auto_is_the_same_on_all_ranks_and_next_time(ranks, cache_dir):
    def body(comm):
        first, second = Auto(comm, cache_dir, refresh=True), Auto(comm, cache_dir)
        tensors = [torch.full((count,), 1.0 + comm.rank) for count in (1, 1000, 300_000)]
        for tensor in tensors:
            first(tensor)
        total = sum(range(1, comm.size + 1))
        assert all((tensor == total).all() for tensor in tensors)
        first.close()
        second.close()
        return first.ranges, second.ranges

    results = ranks(body, network=NETWORK)
    assert len({str(ranges) for pair in results for ranges in pair}) == 1


def test_auto_on_virtual_ranks_is_deterministic_and_touches_no_file(tmp_path):
    runs = [run_virtual(lambda comm: Auto(comm, tmp_path).ranges, 8, network=NETWORK) for _ in range(2)]
    assert runs[0] == runs[1] == [runs[0][0]] * 8
    assert list(tmp_path.iterdir()) == []
    assert run_virtual(lambda comm: Auto(comm, tmp_path).ranges, 8)[0] == [(math.inf, "native")]
