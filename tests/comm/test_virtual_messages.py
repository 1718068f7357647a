"""Messages between virtual ranks: matching, order, requests, polling."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import each
from hpcdist.comm.communicator import ANY
from hpcdist.comm.virtual import Constant, Jitter, Network, Straggler, run_virtual
from hpcdist.errors import CommunicationError

NETWORK = Network(0.5, 8.0)


def ones(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count,), float(value))


# --- contents ---------------------------------------------------------------------------------------------------------
def test_a_send_copies_its_tensor_and_does_not_wait_for_the_receive_which_leaves_the_graph_alone():
    def body(comm):
        peer, sent, received = 1 - comm.rank, ones(2, comm.rank + 1), torch.zeros(3, requires_grad=True)
        sending = comm.isend(sent, peer)
        sent.zero_()
        sending.wait()
        comm.irecv(received, peer).wait()
        assert received.grad_fn is None and received.requires_grad
        return received.tolist()

    assert run_virtual(body, 2, network=NETWORK) == [[2, 2, 0], [1, 1, 0]]  # a shorter message fills the front


MISFITS = [
    (torch.zeros(5), torch.zeros(4), "got 20 bytes in elements of 4 from rank 0 with tag 3, for 16 bytes"),
    (torch.zeros(2), torch.zeros(2).double(), "got 8 bytes in elements of 4 .*, for 16 bytes in elements of 8"),
]


@each("case", MISFITS)
@each("posted_first", [True, False])
def test_a_message_that_does_not_fit_is_refused_at_the_receiver(case, posted_first):
    sent, received, message = case

    def body(comm):
        if (comm.rank == 0) == posted_first:
            comm.compute()
        if comm.rank == 0:
            comm.isend(sent, 1, tag=3).wait()
        else:
            with pytest.raises(CommunicationError, match=f"a message must fit the tensor .* {message}"):
                comm.irecv(received, 0).wait()

    run_virtual(body, 2, compute=Constant(1.0))


# --- matching ---------------------------------------------------------------------------------------------------------
@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 5),
    messages=st.lists(st.tuples(*(st.integers(0, most) for most in (4, 4, 2, 40))), max_size=25),
    seed=st.integers(0, 3),
)
def test_all_messages_arrive_and_none_overtakes_another_of_its_source(size, messages, seed):
    """Any pattern of messages (source, dest, tag, length), received from ANY or by tag."""
    messages = [(source % size, dest % size, tag, count) for source, dest, tag, count in messages]

    def body(comm):
        for number, (source, dest, tag, count) in enumerate(messages):
            if source == comm.rank:
                comm.compute()
                comm.isend(ones(count + 1, number), dest, tag)
        received = []
        for _ in range(sum(dest == comm.rank for _, dest, _, _ in messages)):
            envelope = comm.probe()
            tensor = ones(envelope.n_bytes // 4, -1)
            comm.irecv(tensor, envelope.source, envelope.tag).wait()
            assert messages[int(tensor[0])] == (envelope.source, comm.rank, envelope.tag, len(tensor) - 1)
            assert (tensor == tensor[0]).all()
            received.append(int(tensor[0]))
        assert comm.probe(block=False) is None
        return received

    results = run_virtual(body, size, seed=seed, network=Network(1.0, 64.0, 2, 0.1), compute=Jitter(1.0, 1.0))
    assert sorted(sum(results, [])) == list(range(len(messages)))
    for received in results:
        for source in range(size):
            numbers = [n for n in received if messages[n][0] == source]
            assert numbers == sorted(numbers)


def test_receives_match_by_source_and_tag_in_the_order_posted():
    def body(comm):
        if comm.rank > 0:
            for tag in (5, 6, 5, 7):
                comm.isend(torch.tensor([10 * comm.rank + tag]), 0, tag)
            for _ in range(comm.size - comm.rank):
                comm.compute()
            comm.isend(torch.tensor([10 * comm.rank + 8]), 0, 8)
            return None
        patterns = [(2, 6), (ANY, 5), (1, ANY), (2, 5), (ANY, ANY), (ANY, ANY)]
        tensors = [torch.zeros(1, dtype=torch.int64) for _ in patterns]
        for request in [comm.irecv(t, *pattern) for t, pattern in zip(tensors, patterns)]:
            request.wait()
        for _ in range(9):
            comm.compute()
        late = torch.zeros(4, dtype=torch.int64)
        for tensor in late.split(1):
            comm.irecv(tensor).wait()  # what has come before, the earliest first
        return [*map(int, tensors), *late.tolist()]

    # Arrivals in order of time, then of posting: 15, 16, 15, 17 from rank 1, then 25, 26, 25, 27 from rank 2.
    found = run_virtual(body, 3, network=Network(1.0, math.inf), compute=Constant(1.0))[0]
    assert found == [26, 15, 16, 25, 15, 17, 25, 27, 28, 18]


# --- requests and polling ---------------------------------------------------------------------------------------------
def test_a_request_is_done_at_its_time():
    def body(comm):
        peer, tensor, seen = 1 - comm.rank, torch.zeros(4), []
        sending, receiving = comm.isend(ones(4), peer), comm.irecv(tensor, peer)
        for _ in range(4):
            seen.append((comm.now(), sending.done(), receiving.done(), tensor[0].item()))
            comm.compute()
        sending.wait(), receiving.wait()
        assert sending.done() and receiving.done()
        return seen

    seen = run_virtual(body, 2, network=NETWORK, compute=Constant(1.0))[0]  # sent at 2 s, arrives at 2.5 s
    assert seen == [(0, False, False, 0), (1, False, False, 0), (2, True, False, 0), (3, True, True, 1)]


def test_polling_ends_when_the_answer_changes_and_not_later():
    def body(comm):
        if comm.rank == 0:
            comm.compute()
            comm.isend(ones(4), 1)
        elif comm.rank == 1:
            while comm.probe(0, block=False) is None:
                pass
            probed_s = comm.now()
            comm.irecv(torch.zeros(4)).wait()
            requests = [comm.irecv(torch.zeros(4), 2, tag) for tag in (1, 2)]
            while not any(request.done() for request in requests):
                pass
            return probed_s, comm.now()
        else:
            for _ in range(5):
                comm.compute()
            sending = comm.isend(ones(4), 1, 2)
            while not sending.done():
                pass
            return comm.now()

    results = run_virtual(body, 3, network=NETWORK, compute=Constant(1.0))
    assert results[1:] == [(1 + 2.5, 5 + 2.5), 5 + 2.0]


@each("network", [None, NETWORK])
@each("size", [2, 8])
def test_all_but_one_poll(network, size):
    """Nobody keeps another one from going on, even where nothing takes time."""

    def body(comm):
        if comm.rank > 0:
            while comm.probe(block=False) is None:
                pass
            started_s = comm.now()
            tensor = torch.zeros(1)
            request = comm.irecv(tensor)
            while not request.done():
                pass
            if comm.rank + 1 < size:
                comm.isend(tensor + 1, comm.rank + 1)
            return started_s, tensor.item()
        comm.compute()
        sending = comm.isend(ones(1), 1)
        comm.compute()
        while not sending.done():
            pass

    hop_s = 1.0 if network else 0.0
    results = run_virtual(body, size, network=network, compute=Constant(1.0))
    assert results[1:] == [(1 + hop_s * rank, rank) for rank in range(1, size)]


def test_one_fruitless_poll_takes_no_time_and_lets_nobody_in():
    def body(comm):
        for _ in range(5):
            assert comm.probe(block=False) is None
            start = comm.now()
            comm.isend(ones(1), comm.rank)  # it does something, so that the next poll is not idle
            assert comm.probe(comm.rank, block=False) is not None
            comm.irecv(torch.zeros(1)).wait()
            assert comm.now() == start
            comm.compute()

    run_virtual(body, 3, network=NETWORK, compute=Straggler(Constant(1.0), 0, 3.0))


def test_waiting_again_and_unused_requests_do_no_harm():
    def body(comm):
        tensor = torch.zeros(1)
        comm.irecv(torch.zeros(1), tag=4)  # never fulfilled
        comm.isend(ones(1), comm.rank, tag=5)  # never received
        comm.isend(ones(1), comm.rank)
        request = comm.irecv(tensor, tag=0)
        request.wait()
        tensor.zero_()
        request.wait()
        assert request.done()
        return tensor.item()

    assert run_virtual(body, 2) == [0.0, 0.0]
