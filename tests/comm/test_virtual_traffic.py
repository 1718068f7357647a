"""What virtual ranks count: bytes and messages by the formulas, seconds as communicating or waiting."""

from __future__ import annotations

import math

import pytest
import torch

from hpcdist.comm.virtual import Constant, Network, run_virtual

LATENCY_S, BANDWIDTH = 2.0**-10, 2.0**20  # powers of two: sums are exact
NETWORK = Network(LATENCY_S, BANDWIDTH)


def data(n_bytes: int) -> torch.Tensor:
    return torch.zeros(n_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
def test_traffic_is_that_of_the_formulas(size):
    lg, tree = math.ceil(math.log2(size)), []

    def body(comm):
        peer, counted = (comm.rank + 1) % size, []
        window = comm.window(6, torch.int64)
        attached = comm.memory.attach(data(8))
        for call in (
            lambda: comm.sendrecv(data(100), peer, data(100), (comm.rank - 1) % size),
            lambda: comm.allreduce(data(size * 10)),
            lambda: comm.gather(bytes(7)),
            lambda: comm.barrier(),
            lambda: window.put(torch.zeros(5, dtype=torch.int64), peer),
            lambda: window.accumulate(torch.zeros(6, dtype=torch.int64), peer),
            lambda: window.fetch_add(1, peer),
            lambda: window.compare_and_swap(1, 1, peer),
            lambda: window.get(torch.zeros(3, dtype=torch.int64), peer),
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
            *([(40, 1, 0, 0), (48, 1, 0, 0), (8, 1, 0, 0), (8, 1, 0, 0)] if size > 1 else [(0, 0, 0, 0)] * 4),
            *([(0, 0, 24, 1), (0, 0, 8, 1)] if size > 1 else [(0, 0, 0, 0)] * 2),  # one's own memory is no traffic
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
