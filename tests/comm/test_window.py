"""Windows: one contract for virtual ranks, for real ones of one node, and across nodes by both ways."""

from __future__ import annotations

import threading

import pytest
import torch

from comm.dtypes import DTYPES
from harness.cases import each
from hpcdist.comm.communicator import Put
from hpcdist.comm.single_rank import SingleRankCommunicator
from hpcdist.comm.virtual import Exponential, Network, run_virtual
from hpcdist.errors import CommunicationError, DeadlineError

pytestmark = pytest.mark.sizes(1, 2, 3)
REAL = pytest.mark.mpi(min_size=2)
ways = pytest.mark.parametrize("way", ["node", pytest.param("tcp", marks=REAL), pytest.param("rma", marks=REAL)])
SLOW = {"network": Network(2.0**-10, 2.0**20), "compute": Exponential(1e-3)}


@pytest.fixture
def placed(ranks, way):
    """Runs a body on ranks of one node (`node`), or on ranks that count as being on nodes of their own.

    Virtual ranks run it twice: where nothing takes time, and where everything does. So does one rank without MPI.
    """

    def run(body):
        def there(comm):
            if way == "node":
                return body(comm)
            apart = comm.apart(way)
            result = body(apart)
            apart.close()
            return result

        if not ranks.real:
            ranks(there)
            if ranks.size == 1:
                body(SingleRankCommunicator(deadline_s=1))
        return ranks(there, **SLOW)

    return run


# --- get, put, read ---------------------------------------------------------------------------------------------------
@ways
@each("dtype", [*DTYPES, torch.bool])
def test_every_rank_reads_what_every_rank_wrote(placed, dtype):
    def body(comm):
        window = comm.window(comm.size * 3 + comm.rank, dtype)
        assert window.local.dtype == dtype and len(window.local) == comm.size * 3 + comm.rank
        assert not window.local.any(), "a window is made of zeros"
        comm.barrier()
        for peer in range(comm.size):
            window.put(torch.tensor([1, 0, comm.rank + 1]).to(dtype), peer, offset=3 * comm.rank)
        comm.barrier()
        expected = torch.tensor([[1, 0, r + 1] for r in range(comm.size)]).to(dtype).flatten()
        for peer in range(comm.size):
            out = torch.ones(3 * comm.size, dtype=dtype)
            window.get(out, peer)
            assert torch.equal(out, expected)
            assert window.read(peer, 3 * comm.size - 1, 1) == expected[-1]
            for call in (window.get, window.put, window.accumulate)[: 2 + (dtype != torch.bool)]:
                call(torch.empty(0, dtype=dtype), peer, 3 * comm.size + peer)  # nothing, at the very end
            if dtype == torch.bool:
                with pytest.raises(CommunicationError, match="dtype of a sum must be numeric; got torch.bool"):
                    window.accumulate(expected, peer)
        assert torch.equal(window.local[: 3 * comm.size], expected)
        window.close()
        return hasattr(window, "local")

    assert not any(placed(body))


@ways
def test_long_transfers_arrive_whole(placed):
    """Longer than any message that an MPI sends at once, and than two of the parts that are added over TCP."""

    def body(comm):
        window, count = comm.window(600_001 if comm.rank == 0 else 0), 600_000
        values = torch.arange(count, dtype=torch.float32)
        if comm.rank == comm.size - 1:
            out = torch.empty(count)
            window.put(values, 0, 1)
            window.accumulate(values, 0, 1)
            window.get(out, 0, 1)
            assert torch.equal(out, 2 * values)
        comm.barrier()
        if comm.rank == 0:
            assert torch.equal(window.local[1:], 2 * values) and window.local[0] == 0
        window.close()

    placed(body)


# --- accumulate, atomics ----------------------------------------------------------------------------------------------
@ways
@each("dtype", DTYPES)
def test_concurrent_accumulates_add_up(placed, dtype):
    def body(comm):
        window, times = comm.window(40 if comm.rank == 0 else 0, dtype), 5
        comm.barrier()
        for _ in range(times):
            comm.compute()
            window.accumulate(torch.full((30,), 2).to(dtype), 0, offset=5)
        comm.barrier()
        total = 2 * times * comm.size
        assert torch.equal(window.read(0, 0, 40), torch.tensor([0] * 5 + [total] * 30 + [0] * 5).to(dtype))
        comm.barrier()
        window.close()

    placed(body)


@ways
@pytest.mark.sizes(1, 2, 4)
def test_fetch_add_hands_out_every_number_once(placed):
    def body(comm):
        window, tickets = comm.window(2, torch.int64), []
        for _ in range(25):
            comm.compute()
            tickets.append(window.fetch_add(5, comm.size - 1, offset=1))
        comm.barrier()
        mine = window.local.tolist()
        window.close()
        return tickets, mine

    results = placed(body)
    tickets = [ticket for mine, _ in results for ticket in mine]
    assert sorted(tickets) == list(range(0, 5 * len(tickets), 5))
    assert all(mine == sorted(mine) for mine, _ in results)
    assert [local for _, local in results] == [[0, 0]] * (len(results) - 1) + [[0, 5 * len(tickets)]]


@ways
def test_compare_and_swap_makes_a_lock(placed):
    """A counter is read, held for a while, and written: without the lock, updates would be lost."""

    def body(comm):
        lock, counter, value = comm.window(1, torch.int64), comm.window(1), torch.zeros(1)
        for _ in range(8):
            while (found := lock.compare_and_swap(0, comm.rank + 1, 0)) != 0:
                assert 1 <= found <= comm.size
                lock.wait(lambda e: e[0] == 0, rank=0, what="the lock")
            counter.get(value, 0)
            comm.compute()
            counter.put(value + 1, 0)
            assert lock.compare_and_swap(comm.rank + 1, 0, 0) == comm.rank + 1
        comm.barrier()
        counter.get(value, 0)
        lock.close()
        counter.close()
        return value.item()

    results = placed(body)
    assert results == [8.0 * len(results)] * len(results)


@ways
def test_atomics_wrap(placed):
    def body(comm):
        window = comm.window(1, torch.int64)
        if comm.rank == comm.size - 1:
            assert window.fetch_add(2**63 - 1, 0) == 0
            assert window.fetch_add(1, 0) == 2**63 - 1
            assert window.compare_and_swap(7, 1, 0) == -(2**63), "not equal: nothing is written"
            assert window.compare_and_swap(-(2**63), -5, 0) == -(2**63)
            assert window.fetch_add(0, 0) == -5
        window.close()

    placed(body)


@pytest.mark.mpi(min_size=3)
@pytest.mark.sizes(4)
@pytest.mark.parametrize("way", ["tcp", "rma"])
def test_two_ranks_of_one_node_and_others_elsewhere(ranks, way):
    """Node-mates go through shared memory, others through the network; accumulates of both exclude each other."""

    def body(comm):
        nodes = tuple(min(rank, comm.size - 2) for rank in range(comm.size))  # the last two share a node
        mixed = comm.apart(way, nodes)
        for dtype in (torch.float32, torch.bfloat16):
            window = mixed.window(8, dtype)
            for _ in range(10):
                window.accumulate(torch.ones(8, dtype=dtype), mixed.size - 1)
            mixed.barrier()
            out = torch.empty(8, dtype=dtype)
            window.get(out, mixed.size - 1)
            assert (out == 10 * mixed.size).all()
            window.close()
        mixed.close()

    ranks(body)


# --- wait -------------------------------------------------------------------------------------------------------------
@ways
def test_wait_returns_when_the_predicate_holds(placed):
    def body(comm):
        window, one = comm.window(3, torch.int64), torch.ones(1, dtype=torch.int64)
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        if comm.rank == 0:
            window.put(one, after, 1)
        window.wait(lambda e: e[0] == 1, offset=1, count=1, what=f"a token from rank {before}")
        if comm.rank > 0:
            window.put(one, after, 1)
        window.wait(lambda e: len(e) == 3 and e[1] == 1, rank=after)  # sees the neighbour's memory too
        window.wait(lambda e: len(e) == 2, rank=after, offset=1)
        window.close()

    placed(body)


@ways
def test_a_wait_ends_at_its_deadline(placed):
    def body(comm):
        window = comm.window(1)
        for rank in range(comm.size):
            with pytest.raises(DeadlineError, match=rf"rank {comm.rank}\b.*news of rank {rank}"):
                window.wait(lambda e: e[0] > 0, rank=rank, what=f"news of rank {rank}", deadline_s=0.02)
        comm.barrier()
        window.put(torch.ones(1), comm.rank)
        window.wait(lambda e: e[0] > 0, deadline_s=0.05)  # holds already
        window.close()

    placed(body)


# --- refused, counted, closed -----------------------------------------------------------------------------------------
REFUSED = [
    (lambda w, t, p: w.get(t, p, 2), r"elements of a window call must lie within rank \d's 4 .* got \[2, 5\)"),
    (lambda w, t, p: w.put(t, p, -1), r"within rank \d's 4 elements; got \[-1, 2\)"),
    (lambda w, t, p: w.accumulate(t, p, 5), r"within rank \d's 4 elements; got \[5, 8\)"),
    (lambda w, t, p: w.read(p, 2, 3), r"within rank \d's 4 elements; got \[2, 5\)"),
    (lambda w, t, p: w.wait(bool, rank=p, offset=3, count=2), r"within rank \d's 4 elements; got \[3, 5\)"),
    (lambda w, t, p: w.wait(bool, rank=p, count=-1), r"within rank \d's 4 elements; got \[0, -1\)"),
    (lambda w, t, p: w.get(t, 99), r"rank of a window must be a rank in 0\.\.\d; got 99"),
    (lambda w, t, p: w.wait(bool, rank=-2), r"rank of a window must be a rank in .* got -2"),
    (lambda w, t, p: w.put(t.double(), p), r"dtype must be the window's, torch.float32; got torch.float64"),
    (lambda w, t, p: w.put(torch.ones(2, 2), p), r"flat \(1 dimension\) and contiguous"),
    (lambda w, t, p: w.get(torch.ones(6)[::2], p), r"flat \(1 dimension\) and contiguous"),
    (lambda w, t, p: w.fetch_add(1, p), r"fetch_add must be used on an int64 window; got a window of torch.float32"),
    (lambda w, t, p: w.compare_and_swap(0, 1, p), r"compare_and_swap must be used on an int64 window"),
]
REFUSED_ATOMICS = [
    (lambda w: w.fetch_add(2**63, 0), "operand of an atomic must fit in 64 bits; got 922337"),
    (lambda w: w.compare_and_swap(0, -(2**63) - 1, 0), "operand of an atomic must fit in 64 bits; got -922337"),
    (lambda w: w.fetch_add(1, 0, -1), r"must lie within rank 0's 2 elements; got \[-1, 0\)"),
    (lambda w: w.fetch_add(1, 0, 2), r"must lie within rank 0's 2 elements; got \[2, 3\)"),
]


@ways
def test_bad_calls_are_refused(placed):
    def body(comm):
        window, words = comm.window(4), comm.window(2, torch.int64)
        for call, message in REFUSED:
            for peer in range(comm.size):
                with pytest.raises(CommunicationError, match=message):
                    call(window, torch.ones(3), peer)
        for call, message in REFUSED_ATOMICS:
            with pytest.raises(CommunicationError, match=message):
                call(words)
        comm.barrier()
        assert not window.local.any() and not words.local.any()
        for made in (window, words):
            made.close()
        with pytest.raises(CommunicationError, match="a window must not be used once it is closed"):
            window.get(torch.zeros(1), 0)

    placed(body)


@ways
def test_traffic_counts_what_goes_to_others(placed):
    def body(comm):
        window, ints, four = comm.window(4), comm.window(1, torch.int64), torch.ones(4)
        counts = []
        for peer in (comm.rank, (comm.rank + 1) % comm.size):
            start = comm.trace.traffic.copy()
            comm.put_all([])
            comm.put_all([Put(window, four[:2], peer, 0), Put(window, four[:2], peer, 2)])
            window.put(four, peer)
            window.get(four, peer)
            window.read(peer, 1, 2)
            window.accumulate(four[:2], peer)
            ints.fetch_add(1, peer)
            ints.compare_and_swap(0, 1, peer)
            spent = comm.trace.traffic - start
            counts.append((spent.bytes_sent, spent.messages_sent, spent.bytes_fetched, spent.messages_fetched))
        comm.barrier()
        window.close()
        ints.close()
        return counts

    results = placed(body)
    other = (2 * 8 + 16 + 8 + 8 + 8, 6, 16 + 8, 2) if len(results) > 1 else (0, 0, 0, 0)
    assert results == [[(0, 0, 0, 0), other]] * len(results)


# --- many puts at once ------------------------------------------------------------------------------------------------
COUNT = 5_000


@ways
def test_a_flag_is_seen_after_the_data_put_before_it(placed):
    """Rank 0 puts data and then a flag into all memories; the others look at the data when they see the flag."""

    def body(comm):
        data, flags = comm.window(COUNT), comm.window(1, torch.int64)
        for step in range(1, 51):
            if comm.rank == 0:
                values, flag = torch.full((COUNT,), float(step)), torch.tensor([step])
                comm.put_all(
                    put for rank in range(comm.size) for put in (Put(data, values, rank, 0), Put(flags, flag, rank, 0))
                )
            flags.wait(lambda words, step=step: int(words[0]) == step)
            assert (data.local == step).all()
            comm.barrier()
        for window in (data, flags):
            window.close()

    placed(body)


@ways
def test_after_a_refused_one_of_many_puts_windows_still_work(placed):
    def body(comm):
        window, peer = comm.window(4), (comm.rank + 1) % comm.size
        with pytest.raises(CommunicationError, match=r"must lie within rank \d's 4 elements; got \[3, 5\)"):
            comm.put_all([Put(window, torch.ones(1), peer, 0), Put(window, torch.ones(2), peer, 3)])
        comm.barrier()
        window.put(torch.full((4,), 7.0), peer)
        comm.barrier()
        assert window.local.tolist() == [7.0] * 4
        window.close()

    placed(body)


def test_all_puts_together_take_one_round_trip():
    latency_s, bandwidth_bytes_s, size = 1e-3, 1e6, 9

    def body(comm):
        window = comm.window(250)
        start = comm.now()
        if comm.rank == 0:
            comm.put_all([Put(window, torch.ones(250), rank, 0) for rank in range(1, size)])
        passed_s = comm.now() - start
        window.close()
        return passed_s

    found = run_virtual(body, size, network=Network(latency_s, bandwidth_bytes_s))
    assert found[0] == pytest.approx(2 * latency_s + (size - 1) * 1000 / bandwidth_bytes_s)


# --- changes in place -------------------------------------------------------------------------------------------------
LONG = (1 << 18) + 5  # more than a piece


@pytest.mark.mpi
@pytest.mark.sizes(1, 3)
def test_a_change_is_made_there_and_here_and_counts_both_ways(ranks):
    def body(comm):
        window, own = comm.window(LONG), torch.full((LONG,), 4.0)
        lengths, before = [], comm.trace.traffic.copy()

        def meet(theirs, ours):
            lengths.append(len(theirs))
            half = ours.sub(theirs).mul_(0.5)
            theirs.add_(half)
            ours.sub_(half)

        assert window.read(comm.rank, 1, 2).data_ptr() == window.local[1:].data_ptr(), "in a node nothing is copied"
        comm.barrier()
        if comm.rank == 0:
            assert window.change(meet, comm.size - 1, own)
            assert own.eq(2.0).all() and lengths == [1 << 18, 5]
        comm.barrier()
        spent, found = comm.trace.traffic - before, window.local.unique().tolist()
        comm.barrier()
        window.close()
        return found, spent.bytes_fetched, spent.bytes_sent

    n_bytes = 4 * LONG * (ranks.size > 1)
    found = ranks(body)
    assert found[-1][0] == [2.0] and all(values == [0.0] for values, *_ in found[:-1])
    assert found[0][1:] == (n_bytes, n_bytes) and all(spent == [0, 0] for _, *spent in found[1:])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
@each("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_nothing_is_lost_where_many_change_and_add_at_once(ranks, dtype):
    def body(comm):
        count = LONG if dtype == torch.float64 else 3
        window, ones = comm.window(count, dtype), torch.ones(count, dtype=dtype)
        comm.barrier()
        for _ in range(10):
            assert window.change(lambda theirs: theirs.add_(1), 0)
            window.accumulate(ones, 0)
        comm.barrier()
        found = window.local.unique().tolist()
        comm.barrier()
        window.close()
        return found

    assert ranks(body)[0] == [20.0 * ranks.size]


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3)
def test_a_change_that_fails_or_is_refused_leaves_the_memory_free_for_others(ranks):
    def body(comm):
        window = comm.window(3)
        comm.barrier()
        with pytest.raises(ZeroDivisionError):
            window.change(lambda theirs: 1 / 0, 0)
        with pytest.raises(CommunicationError, match="rank of a window must be"):
            window.change(torch.Tensor.zero_, comm.size)
        window.accumulate(torch.ones(3), 0)
        comm.barrier()
        found = window.local.tolist()
        window.close()
        return found

    assert ranks(body)[0] == [float(ranks.size)] * 3


def test_on_another_node_and_on_virtual_ranks_a_change_has_to_be_made_by_messages(ranks):
    def body(comm):
        place = comm.apart("tcp") if ranks.real else comm
        window = place.window(3)
        changed = window.change(torch.Tensor.fill_, (comm.rank + 1) % comm.size)
        found = window.local.tolist()
        place.barrier()
        window.close()
        return changed, found

    if not ranks.real or ranks.size > 1:
        assert ranks(body) == [(False, [0.0] * 3)] * ranks.size


@ways
@pytest.mark.mpi
def test_windows_and_their_threads_leave_nothing_behind(placed):
    def body(comm):
        for _ in range(30):
            copy = comm.split(0)
            windows = [copy.window(3, dtype) for dtype in (torch.float32, torch.bfloat16)]
            windows[1].accumulate(torch.ones(1, dtype=torch.bfloat16), 0)
            for window in windows:
                window.close()
            copy.close()
        return threading.active_count()

    assert max(placed(body)) < 12
