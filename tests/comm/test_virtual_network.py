"""Virtual time of transfers, to the last bit where nothing is in the way, and what ranks count of them."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import each
from hpcdist.comm.virtual import Constant, Network, Straggler, run_virtual

LATENCY_S, BANDWIDTH = 2.0**-10, 2.0**20  # powers of two: sums are exact
NETWORK = Network(LATENCY_S, BANDWIDTH)
N_BYTES = 2**15
WIRE_S = N_BYTES / BANDWIDTH


def data(n_bytes: int = N_BYTES) -> torch.Tensor:
    return torch.zeros(n_bytes, dtype=torch.uint8)


# --- messages ---------------------------------------------------------------------------------------------------------
@settings(max_examples=10, deadline=None)
@given(st.floats(0, 10), st.floats(1e-3, 1e12) | st.just(math.inf), st.integers(0, 10**5))
def test_an_uncontended_message_takes_latency_plus_bytes_over_bandwidth(latency_s, bandwidth, n_bytes):
    def body(comm):
        if comm.rank == 0:
            request = comm.isend(data(n_bytes), 1)
            request.wait()
        else:
            comm.irecv(data(n_bytes), 0).wait()
        return comm.now()

    sender_s, receiver_s = run_virtual(body, 2, network=Network(latency_s, bandwidth))
    assert sender_s == n_bytes / bandwidth
    assert receiver_s == latency_s + n_bytes / bandwidth


@each("sends", [True, False])
def test_messages_queue_at_the_outgoing_link_of_their_sender_and_at_the_incoming_one_of_their_receiver(sends):
    def body(comm):
        others = range(1, comm.size) if comm.rank == 0 else [0]
        requests = [(comm.isend if sends == (comm.rank == 0) else comm.irecv)(data(), peer) for peer in others]
        return [(request.wait(), comm.now())[1] for request in requests]

    first, *others = run_virtual(body, 5, network=NETWORK)
    queued_s = [WIRE_S * k for k in (1, 2, 3, 4)]
    if sends:
        assert first == queued_s and others == [[LATENCY_S + seconds] for seconds in queued_s]
    else:
        assert first == [LATENCY_S + seconds for seconds in queued_s] and others == [[WIRE_S]] * 4


def test_an_incoming_link_serves_in_the_order_of_first_bytes_and_idles_in_between():
    """Rank 1's second message is posted first but leaves later than rank 2's, which goes through before it."""

    def body(comm):
        if comm.rank == 1:
            comm.isend(data(), 3)
            comm.isend(data(), 0)
        elif comm.rank == 2:
            comm.compute()
            comm.isend(data(N_BYTES // 4), 0)
        elif comm.rank == 0:
            times = []
            for source in (2, 1):
                comm.irecv(data(), source).wait()
                times.append(comm.now())
            return times

    times = run_virtual(body, 4, network=NETWORK, compute=Constant(WIRE_S / 2))[0]
    assert times == [LATENCY_S + WIRE_S * 3 / 4, LATENCY_S + WIRE_S * 2]


def test_a_message_to_oneself_and_an_empty_one():
    def body(comm):
        comm.sendrecv(data(), comm.rank, data(), comm.rank)
        first = comm.now()
        peer = (comm.rank + 1) % comm.size
        comm.sendrecv(data(0), peer, data(0), (comm.rank - 1) % comm.size)
        return first, comm.now()

    assert run_virtual(body, 3, network=NETWORK) == [(0.0, LATENCY_S)] * 3


# --- nodes ------------------------------------------------------------------------------------------------------------
def test_ranks_of_a_node_share_its_links_and_have_their_own_inside():
    network = Network(LATENCY_S, BANDWIDTH, 2, LATENCY_S / 4, BANDWIDTH * 8)

    def body(comm):
        across, beside = (comm.rank + 2) % 4, comm.rank ^ 1
        sending = comm.isend(data(), across, 1)
        comm.sendrecv(data(), beside, data(), beside)
        inside_s = comm.now()
        comm.irecv(data(), across, 1).wait()
        sending.wait()
        return comm.nodes, inside_s, comm.now()

    results = run_virtual(body, 4, network=network)
    assert [nodes for nodes, _, _ in results] == [(0, 0, 1, 1)] * 4
    assert [inside for _, inside, _ in results] == [LATENCY_S / 4 + WIRE_S / 8] * 4
    assert [across for _, _, across in results] == [LATENCY_S + WIRE_S, LATENCY_S + 2 * WIRE_S] * 2


def test_the_two_directions_of_a_link_are_independent_and_inside_a_node_the_networks_figures_hold_unless_given():
    def body(comm):
        comm.sendrecv(data(), comm.rank ^ 1, data(), comm.rank ^ 1)
        return comm.now()

    for ranks_per_node in (None, 2):
        assert run_virtual(body, 2, network=Network(LATENCY_S, BANDWIDTH, ranks_per_node)) == [LATENCY_S + WIRE_S] * 2
    assert run_virtual(body, 2, network=Network(1, 1, 2, 0, math.inf)) == [0.0] * 2


def test_nodes_of_sub_communicators_are_numbered_from_zero():
    def body(comm):
        return comm.nodes, comm.split(comm.rank % 2).nodes, comm.split(comm.rank // 4).nodes

    network = Network(0, 1, ranks_per_node=3)
    results = run_virtual(body, 8, network=network)
    assert results[0] == ((0, 0, 0, 1, 1, 1, 2, 2), (0, 0, 1, 2), (0, 0, 0, 1))
    assert results[7] == ((0, 0, 0, 1, 1, 1, 2, 2), (0, 1, 1, 2), (0, 0, 1, 1))
    assert run_virtual(lambda comm: comm.nodes, 3) == [(0, 1, 2)] * 3


# --- collective calls -------------------------------------------------------------------------------------------------


COLLECTIVE_CALLS = [
    (lambda comm: comm.barrier(), lambda p, lg: lg * LATENCY_S),
    (
        lambda comm: comm.allreduce(data()),
        lambda p, lg: 2 * (p - 1) * LATENCY_S + 2 * (p - 1) * N_BYTES / p / BANDWIDTH,
    ),
    (lambda comm: comm.broadcast(data(), comm.size - 1), lambda p, lg: lg * (LATENCY_S + WIRE_S)),
    (
        lambda comm: comm.gather(bytes(64 * comm.rank)),
        lambda p, lg: (p - 1) * (LATENCY_S + 64 * (p - 1) / BANDWIDTH),
    ),
    (lambda comm: comm.split(0), lambda p, lg: lg * LATENCY_S),
    (lambda comm: comm.window(5), lambda p, lg: lg * LATENCY_S),
    (lambda comm: comm.memory.attach(data()), lambda p, lg: lg * LATENCY_S),
    (lambda comm: comm.close(), lambda p, lg: lg * LATENCY_S),
]


@each("case", COLLECTIVE_CALLS)
@each("size", [1, 2, 3, 8, 9])
def test_collective_calls_end_together_their_formula_after_the_last_arrival(size, case):
    call, seconds = case

    def body(comm):
        comm.compute()
        call(comm)
        return comm.now()

    results = run_virtual(body, size, network=NETWORK, compute=Straggler(Constant(1.0), size - 1, 8.0))
    assert results == [8.0 + seconds(size, math.ceil(math.log2(size)))] * size


def test_a_collective_call_inside_a_node_takes_the_nodes_time():
    def body(comm):
        node = comm.split(comm.nodes[comm.rank])
        start = comm.now()
        node.barrier()
        middle = comm.now()
        comm.barrier()
        return middle - start, comm.now() - middle

    network = Network(LATENCY_S, BANDWIDTH, 4, LATENCY_S / 8, BANDWIDTH)
    assert run_virtual(body, 8, network=network) == [(2 * LATENCY_S / 8, 3 * LATENCY_S)] * 8


# --- windows ----------------------------------------------------------------------------------------------------------
WORDS = torch.zeros(N_BYTES // 8, dtype=torch.int64)
CALLS = [
    (lambda window, peer: window.get(WORDS, peer), 2 * LATENCY_S + WIRE_S),
    (lambda window, peer: window.put(WORDS, peer), 2 * LATENCY_S + WIRE_S),
    (lambda window, peer: window.accumulate(WORDS, peer), 2 * LATENCY_S + WIRE_S),
    (lambda window, peer: window.wait(lambda e: True, rank=peer), 2 * LATENCY_S),
    (lambda window, peer: window.wait(lambda e: True), 0.0),
    (lambda window, peer: window.fetch_add(1, peer), 2 * LATENCY_S),
    (lambda window, peer: window.compare_and_swap(1, 2, peer), 2 * LATENCY_S),
]


@each("case", CALLS)
def test_window_calls_take_the_time_of_their_formula(case):
    call, seconds = case

    def body(comm):
        window = comm.window(len(WORDS), torch.int64)
        start = comm.now()
        if comm.rank == 1:
            call(window, 0)
        elapsed, start = comm.now() - start, comm.now()
        call(window, comm.rank)
        return elapsed, comm.now() - start

    results = run_virtual(body, 3, network=NETWORK)
    assert results == [(0.0, 0.0), (seconds, 0.0), (0.0, 0.0)]


def test_gets_from_one_owner_queue_at_its_outgoing_link_and_puts_at_its_incoming_one():
    def body(comm):
        window, times = comm.window(N_BYTES, torch.uint8), []
        for call in (window.get, window.put):
            comm.barrier()
            start = comm.now()
            if comm.rank > 0:
                call(data(), 0)
            times.append(comm.now() - start)
        return times

    results = run_virtual(body, 4, network=NETWORK)
    assert results[1:] == [[2 * LATENCY_S + WIRE_S * k] * 2 for k in (1, 2, 3)]


# --- accounts ---------------------------------------------------------------------------------------------------------
@each("size", [1, 2, 3, 4, 7, 16])
def test_traffic_is_that_of_the_formulas(size):
    lg, tree = math.ceil(math.log2(size)), []

    def body(comm):
        peer, counted = (comm.rank + 1) % size, []
        attached = comm.memory.attach(data(8))
        for call in (
            lambda: comm.sendrecv(data(100), peer, data(100), (comm.rank - 1) % size),
            lambda: comm.allreduce(data(size * 10)),
            lambda: comm.gather(bytes(7)),
            lambda: comm.barrier(),
            lambda: attached.get(data(8), peer),
            lambda: comm.broadcast(data(10), size // 2),
        ):
            before = comm.trace.traffic.copy()
            call()
            moved = comm.trace.traffic - before
            counted.append((moved.bytes_sent, moved.messages_sent, moved.bytes_fetched, moved.messages_fetched))
        return counted

    for *counted, broadcast in run_virtual(body, size, network=NETWORK):
        assert counted == [
            (100, 1, 0, 0),
            (20 * (size - 1), 2 * (size - 1), 0, 0),
            (7 * (size - 1), size - 1, 0, 0),
            (0, lg, 0, 0),
            (0, 0, 8, 1) if size > 1 else (0, 0, 0, 0),  # one's own memory is no traffic
        ]
        assert broadcast[0] == 10 * broadcast[1] and broadcast[1] <= lg
        tree.append(broadcast[1])
    assert sum(tree) == size - 1  # everyone but the root gets it once
    assert tree[size // 2] == lg


def test_seconds_are_counted_as_communicating_or_waiting():
    def body(comm):
        window = comm.window(4)
        if comm.rank == 0:
            comm.compute()
            comm.isend(torch.zeros(256), 1).wait()
            window.put(torch.ones(4), 1)
            comm.compute()
            comm.isend(torch.zeros(1), 1, tag=1)
        else:
            comm.irecv(torch.zeros(256), 0).wait()
            window.wait(lambda e: (e > 0).all())
            comm.probe(0, 1)
            comm.irecv(torch.zeros(1), 0, 1).wait()
        comm.barrier()
        return comm.trace.traffic, comm.now()

    results = run_virtual(body, 2, network=NETWORK, compute=Constant(1.0))
    for (traffic, end_s), computed_s in zip(results, (2.0, 0.0)):
        assert traffic.communicating_s + traffic.waiting_s == end_s - computed_s
    sender, receiver = (traffic for traffic, _ in results)
    setup_s = LATENCY_S  # of the window
    assert sender.communicating_s == 1024 / BANDWIDTH + 2 * LATENCY_S + 16 / BANDWIDTH
    assert receiver.communicating_s == 1 + LATENCY_S + 1024 / BANDWIDTH
    assert receiver.waiting_s > 1.0 + setup_s
