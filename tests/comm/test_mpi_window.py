"""Windows: one contract for virtual ranks, for real ones of one node, and across nodes by both ways."""

from __future__ import annotations

import threading

import pytest
import torch

from hpcdist.errors import CommunicationError, DeadlineError

DTYPES = [
    *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
REAL = pytest.mark.mpi(min_size=2)
ways = pytest.mark.parametrize("way", ["node", pytest.param("tcp", marks=REAL), pytest.param("rma", marks=REAL)])


@pytest.fixture
def placed(ranks, way):
    """Runs a body on ranks of one node (`node`), or on ranks that count as being on nodes of their own."""

    def run(body):
        def there(comm):
            if way == "node":
                return body(comm)
            apart = comm.apart(way)
            result = body(apart)
            apart.close()
            return result

        return ranks(there)

    return run


@ways
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
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
            one = torch.empty(1, dtype=dtype)
            window.get(one, peer, 3 * comm.size - 1)
            assert one == expected[-1]
            window.get(torch.empty(0, dtype=dtype), peer, 3 * comm.size + peer)  # nothing, at the very end
        assert torch.equal(window.local[: 3 * comm.size], expected)
        window.close()

    placed(body)


@ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_concurrent_accumulates_add_up(placed, dtype):
    def body(comm):
        window, times = comm.window(40 if comm.rank == 0 else 0, dtype), 5
        comm.barrier()
        for _ in range(times):
            window.accumulate(torch.full((30,), 2).to(dtype), 0, offset=5)
        comm.barrier()
        out = torch.empty(40, dtype=dtype)
        window.get(out, 0)
        total = 2 * times * comm.size
        assert torch.equal(out, torch.tensor([0] * 5 + [total] * 30 + [0] * 5).to(dtype))
        window.close()

    placed(body)


@ways
def test_long_transfers_arrive_whole(placed):
    """Longer than any message that an MPI sends at once."""

    def body(comm):
        window, count = comm.window(300_001 if comm.rank == 0 else 0), 300_000
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


@ways
def test_fetch_add_hands_out_every_number_once(placed):
    def body(comm):
        window = comm.window(2, torch.int64)
        tickets = [window.fetch_add(5, comm.size - 1, offset=1) for _ in range(25)]
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
    """A counter is read and written in two calls: without the lock, updates would be lost."""

    def body(comm):
        lock, counter, value = comm.window(1, torch.int64), comm.window(1), torch.zeros(1)
        for _ in range(8):
            while (found := lock.compare_and_swap(0, comm.rank + 1, 0)) != 0:
                assert 1 <= found <= comm.size
                lock.wait(lambda e: e[0] == 0, rank=0, what="the lock")
            counter.get(value, 0)
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
def test_atomics_wrap_and_refuse_what_does_not_fit(placed):
    def body(comm):
        window = comm.window(1, torch.int64)
        if comm.rank == comm.size - 1:
            assert window.fetch_add(2**63 - 1, 0) == 0
            assert window.fetch_add(1, 0) == 2**63 - 1
            assert window.compare_and_swap(7, 1, 0) == -(2**63), "not equal: nothing is written"
            assert window.compare_and_swap(-(2**63), -5, 0) == -(2**63)
            assert window.fetch_add(0, 0) == -5
            for call in (lambda: window.fetch_add(2**63, 0), lambda: window.compare_and_swap(0, -(2**63) - 1, 0)):
                with pytest.raises(CommunicationError, match="operand of an atomic must fit in 64 bits; got"):
                    call()
        window.close()

    placed(body)


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


@ways
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, t, p: w.get(t, p, 2), r"elements of a window call must lie within rank \d's 4 .* got \[2, 5\)"),
        (lambda w, t, p: w.put(t, p, -1), r"within rank \d's 4 elements; got \[-1, 2\)"),
        (lambda w, t, p: w.accumulate(t, p, 5), r"within rank \d's 4 elements; got \[5, 8\)"),
        (lambda w, t, p: w.wait(bool, rank=p, offset=3, count=2), r"within rank \d's 4 elements; got \[3, 5\)"),
        (lambda w, t, p: w.get(t, 99), r"rank of a window must be a rank in 0\.\.\d; got 99"),
        (lambda w, t, p: w.wait(bool, rank=-2), r"rank of a window must be a rank in .* got -2"),
        (lambda w, t, p: w.put(t.double(), p), r"dtype must be that of the window, torch.float32; got torch.float64"),
        (lambda w, t, p: w.put(torch.ones(2, 2), p), r"flat \(1 dimension\) and contiguous"),
        (lambda w, t, p: w.get(torch.ones(6)[::2], p), r"flat \(1 dimension\) and contiguous"),
        (lambda w, t, p: w.fetch_add(1, p), r"fetch_add must be used on an int64 window; got a window of torch"),
        (lambda w, t, p: w.compare_and_swap(0, 1, p), r"compare_and_swap must be used on an int64 window"),
    ],
)
def test_bad_calls_are_refused(placed, call, message):
    def body(comm):
        window = comm.window(4)
        for peer in range(comm.size):
            with pytest.raises(CommunicationError, match=message):
                call(window, torch.ones(3), peer)
        comm.barrier()
        assert not window.local.any()
        window.close()

    placed(body)


@ways
def test_atomics_out_of_range_are_refused(placed):
    def body(comm):
        window = comm.window(2, torch.int64)
        for offset in (-1, 2):
            with pytest.raises(CommunicationError, match=r"must lie within rank 0's 2 elements; got \["):
                window.fetch_add(1, 0, offset)
        window.close()

    placed(body)


@ways
def test_traffic_counts_what_goes_to_others(placed):
    def body(comm):
        window, ints, four = comm.window(4), comm.window(1, torch.int64), torch.ones(4)
        counts = []
        for peer in (comm.rank, (comm.rank + 1) % comm.size):
            start = comm.trace.traffic.copy()
            window.put(four, peer)
            window.get(four, peer)
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
    other = (16 + 8 + 8 + 8, 4, 16, 1) if len(results) > 1 else (0, 0, 0, 0)
    assert results == [[(0, 0, 0, 0), other]] * len(results)


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


@pytest.mark.mpi(min_size=3)
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
