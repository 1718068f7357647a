"""Neighbour exchange: one contract for virtual and real ranks."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from harness.cases import each
from hpcdist.comm.communicator import Neighbourhood
from hpcdist.comm.virtual import Constant, Network, run_virtual
from hpcdist.errors import CommunicationError, DeadlineError, MismatchError

pytestmark = pytest.mark.sizes(1, 2, 4)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]


def ring(comm) -> list[int]:
    return sorted({(comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size} - {comm.rank})


def one_way(comm) -> tuple[list[int], list[int]]:
    """Everybody sends to all greater ranks; the last one sends to rank 0."""
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    sources = [*range(comm.rank), *([comm.size - 1] if first and not last else [])]
    return sources[::-1], [*([0] if last and not first else []), *range(comm.rank + 1, comm.size)]


def from_the_first(comm) -> tuple[list[int], list[int]]:
    """Rank 0 sends to all but the last of more than two ranks, which has no neighbours."""
    receivers = list(range(1, max(2, comm.size - 1)))[: comm.size - 1]
    return [0] if comm.rank in receivers else [], receivers if comm.rank == 0 else []


def values(rank: int, count: int, dtype: torch.dtype, step: int) -> torch.Tensor:
    return ((torch.arange(count) + 7 * rank + 3 * step) % 11).to(dtype)


@each("made", ["graph", "messages"])
@each("lists", [one_way, from_the_first])
@each("dtype", DTYPES)
def test_every_source_s_tensor_arrives_bit_by_bit(ranks, dtype, lists, made):
    """Empty, short, and longer than MPI sends at once; sources in the order given; nothing else is written."""

    def body(comm):
        sources, destinations = lists(comm)
        found = (comm.neighbourhood if made == "graph" else partial(Neighbourhood, comm))(sources, destinations)
        for step, count in enumerate((0, 1, 5, 20_000, 3)):
            send = values(comm.rank, count, dtype, step)
            received, before = torch.zeros(len(sources) * count, dtype=dtype), comm.trace.traffic.copy()
            found.start(send, received).wait()
            moved = comm.trace.traffic - before
            assert (moved.bytes_sent, moved.messages_sent) == (send.nbytes * len(destinations), len(destinations))
            assert moved.bytes_fetched == 0 and (made == "messages" or moved.waiting_s == 0)
            expected = [values(source, count, dtype, step) for source in sources]
            assert torch.equal(received, torch.cat(expected) if expected else received)
            assert torch.equal(send, values(comm.rank, count, dtype, step))
        found.close()
        return True

    assert all(ranks(body))


@pytest.mark.sizes(2, 3)
def test_several_exchanges_may_be_under_way_and_match_in_order(ranks):
    """They are complete when they are waited for, or asked for often enough."""

    def body(comm):
        found = comm.neighbourhood(ring(comm), ring(comm))
        sent = [torch.full((1000,), 10.0 * step + comm.rank) for step in range(5)]
        received = [torch.empty(1000 * len(ring(comm))) for _ in sent]
        requests = [found.start(s, r) for s, r in zip(sent, received, strict=True)]
        for step in reversed(range(5)):
            while step % 2 and not requests[step].done():
                pass
            requests[step].wait()
            parts = [part[0].item() for part in received[step].split(1000)]
            assert parts == [10 * step + rank for rank in ring(comm)]
            assert requests[step].done()
        found.close()
        return True

    assert all(ranks(body, network=Network(1e-3, 1e6)))


@pytest.mark.sizes(2, 4)
def test_messages_of_the_communicator_do_not_mix_with_an_exchange(ranks):
    def body(comm):
        found = comm.neighbourhood(ring(comm), ring(comm))
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        received, other = torch.empty(8 * len(ring(comm))), torch.empty(8)
        request = found.start(torch.full((8,), float(comm.rank)), received)
        comm.sendrecv(torch.full((8,), -1.0), after, other, before)
        request.wait()
        found.close()
        return other.unique().tolist(), received[::8].tolist()

    found = ranks(body)
    for rank, (other, received) in enumerate(found):
        assert other == [-1.0]
        assert received == sorted({float((rank - 1) % len(found)), float((rank + 1) % len(found))})


def test_tensors_that_do_not_fit_are_refused(ranks):
    def body(comm):
        found = comm.neighbourhood(ring(comm), ring(comm))
        n = 3 * len(ring(comm))
        message = f"received must have {n} elements of torch.float32 .*; got {n + 1} of"
        with pytest.raises(CommunicationError, match=message):
            found.start(torch.zeros(3), torch.zeros(n + 1))
        with pytest.raises(CommunicationError, match="received must have .*; got .* of torch.float64. Allocate"):
            found.start(torch.zeros(3), torch.zeros(n, dtype=torch.float64))
        with pytest.raises(CommunicationError, match=r"send must be flat \(1 dimension\) and contiguous"):
            found.start(torch.zeros(3, 1), torch.zeros(n))
        found.close()
        return True

    assert all(ranks(body))


@pytest.mark.sizes(2, 4)
def test_wrong_lists_of_one_rank_are_refused_on_all(ranks):
    """A rank twice, one beyond the end, oneself; and a source that does not send."""

    def body(comm):
        for wrong in ([0, 0], [99], [1]):
            message = rf"sources must be distinct ranks other than the rank itself; got \{wrong} on rank 1 of"
            with pytest.raises(CommunicationError, match=message):
                comm.neighbourhood(wrong if comm.rank == 1 else [], [])
        message = r"destinations of rank 0 must be the ranks that have rank 0 as a source, \[1\]; got \[\]"
        with pytest.raises(MismatchError, match=message):
            comm.neighbourhood([0] if comm.rank == 1 else [], [])

    ranks(body)


def test_the_exchange_goes_on_while_a_rank_computes():
    """Two messages of 1 s each on a rank's link, beside 3 s of computation: 3 s in all, without which 2.5 s."""

    def body(comm, overlapped):
        found = comm.neighbourhood(ring(comm), ring(comm))
        start = comm.now()
        request = found.start(torch.zeros(100), torch.empty(200))
        if overlapped:
            comm.compute()
        request.wait()
        took_s = comm.now() - start
        found.close()
        return took_s

    network = Network(0.5, 400.0)
    for overlapped, expected_s in ((True, 3.0), (False, 2.5)):
        taken_s = run_virtual(lambda comm: body(comm, overlapped), 4, network=network, compute=Constant(3.0))
        assert taken_s == [pytest.approx(expected_s)] * 4


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline():
    def body(comm):
        found = comm.neighbourhood(ring(comm), ring(comm))
        if comm.rank == 0:
            return
        found._comm.failures.deadline_s = 5.0
        found.start(torch.zeros(4), torch.empty(8)).wait()

    with pytest.raises(DeadlineError, match="a message from rank 0"):
        run_virtual(body, 3)


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_a_thread_makes_progress_between_nodes_while_ranks_compute(ranks):
    def running() -> bool:
        return "hpcdist-mpi-progress" in [thread.name for thread in threading.enumerate()]

    def body(comm):
        far, found = comm.apart("tcp"), []
        with comm.overlapping():
            found.append(running())
        with far.overlapping():
            with far.overlapping():
                found.append(running())
            found.append(running())
        found.append(running())
        far.close()
        return found

    assert all(found == [False, True, True, False] for found in ranks(body))
