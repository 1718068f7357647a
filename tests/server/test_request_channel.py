"""Channels of requests: these are taken in order of arrival, once each; they and their replies arrive whole."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Exponential, Network, run_virtual
from hpcdist.errors import DeadlineError, DeadlockError
from hpcdist.strategies.server.channel import FETCH, GRADIENT, PAUSE, PUSH, Reply, RequestChannel
from hpcdist.strategies.server.placement import assign, create_shards

NAMES = 3


def _like():
    return [torch.zeros(7, dtype=torch.float64), torch.zeros(4, dtype=torch.float32)]


def _channel(comm, servers=1, clocks=1):
    roles, like = assign(comm.size, servers), _like()
    shards = dict(zip(roles.servers, create_shards(like, len(roles.servers)), strict=True))
    return RequestChannel(comm, roles, shards, like, NAMES, clocks), roles, shards


def _filled(value):
    return [flat + value for flat in _like()]


def _used(number):
    return torch.tensor([bool(number >> bit & 1) for bit in range(NAMES)])


@pytest.mark.sizes(2, 4)
def test_requests_and_replies_arrive_whole_and_once(ranks):
    """Workers push numbered requests; servers reply to each with its tensors times 2, and tell what came."""
    servers, rounds = 2 if ranks.size > 2 else 1, 20

    def body(comm):
        channel, roles, _ = _channel(comm, servers)
        found = []
        if comm.rank in roles.servers:
            for _ in range(rounds * len(roles.workers)):
                request = channel.inbox.next()
                values = [tensor.unique().tolist() for tensor in request.tensors]
                found.append((request.source, request.clocks, request.weight, request.used.tolist(), values))
                doubled = [2 * t for t in request.tensors]
                channel.inbox.reply(Reply(request, request.clocks[0] + 1, doubled, blocker=5, held_s=0.25))
        else:
            for value in range(100 * comm.rank, 100 * comm.rank + rounds):
                comm.compute()
                clocks, used = [[value + i] for i in range(servers)], _used(value % 100)
                channel.client.push(GRADIENT, clocks, _filled(value), used, weight=value + 0.125)
                replies = channel.client.wait()
                found.append(([t.tolist() for t in channel.down.whole], replies))
        comm.barrier()
        channel.close()
        return found

    found = ranks(body, compute=Exponential(0.1))
    for server in range(servers):
        took = {(source, clocks[0] - server) for source, clocks, *_ in found[server]}
        assert took == {(r, 100 * r + step) for r in range(servers, ranks.size) for step in range(rounds)}
        for source, (clock,), weight, used, values in found[server]:
            value = clock - server
            assert weight == value + 0.125 and used == _used(value - 100 * source).tolist()
            assert all(part in ([], [value]) for part in values) and any(values)
    for rank in range(servers, ranks.size):
        for value, (tensors, replies) in enumerate(found[rank], 100 * rank):
            assert tensors == [t.tolist() for t in _filled(2 * value)]
            assert replies == ([value + i + 1 for i in range(servers)], {5: 0.25})


def test_requests_that_wait_are_taken_in_order_of_arrival():
    order = (3, 1, 4, 2)

    def body(comm):
        channel, *_ = _channel(comm)
        for rank in order:
            if comm.rank == rank:
                channel.client.push(FETCH, [[0]])
            comm.barrier()
        if comm.rank == 0:
            assert channel.inbox.poll() is not None
            sources = [order[0], *(channel.inbox.next().source for _ in order[1:])]
            assert channel.inbox.poll() is None
            return sources
        return None

    assert run_virtual(body, 5)[0] == list(order)


@pytest.mark.sizes(3)
def test_a_push_without_tensors_leaves_what_lies_in_the_slot(ranks):
    def body(comm):
        channel, roles, _ = _channel(comm)
        found = []
        if comm.rank == 0:
            for _ in range(3 * len(roles.workers)):
                request = channel.inbox.next()
                found.append((request.kind, request.weight, request.clocks, request.tensors[0].tolist()))
                channel.inbox.reply(Reply(request, 9))
        else:
            channel.client.push(PUSH, [[1]], _filled(4), _used(7), weight=2.0)
            channel.client.wait()
            channel.client.push(GRADIENT, [[2]])
            channel.client.wait()
            channel.client.push(PAUSE)
            found.append(channel.client.wait())
        comm.barrier()
        channel.close()
        return found

    server, *workers = ranks(body)
    assert all(found == [([9], {})] for found in workers)
    for kind, weight, clocks in [(PUSH, 2.0, (1,)), (GRADIENT, 0.0, (2,)), (PAUSE, 0.0, ())]:
        assert server.count((kind, weight, clocks, [4.0] * 7)) == len(workers)


@pytest.mark.sizes(3)
def test_a_request_may_be_a_sum_of_several_gradients(ranks):
    def body(comm):
        channel, roles, _ = _channel(comm, clocks=4)
        if comm.rank > 0:
            channel.client.push(GRADIENT, [list(range(comm.rank + 1))], _filled(1))
            channel.client.wait()
            return None
        found = {}
        for _ in roles.workers:
            request = channel.inbox.next()
            found[request.source] = request.clocks
            channel.inbox.reply(Reply(request, 0))
        return found

    found = ranks(body)[0]
    assert found == {rank: tuple(range(rank + 1)) for rank in range(1, len(found) + 1)}


@pytest.mark.sizes(3)
def test_next_gives_up_in_time_and_takes_what_comes_later(ranks):
    def body(comm):
        channel, roles, _ = _channel(comm)
        if comm.rank == 0:
            before = comm.now()
            nothing, passed_s = channel.inbox.next(timeout_s=0.05), comm.now() - before
            comm.barrier()
            sources = sorted(channel.inbox.next(timeout_s=100.0).source for _ in roles.workers)
            return nothing, passed_s, sources
        comm.barrier()
        channel.client.push(FETCH, [[0]])
        return None

    nothing, passed_s, sources = ranks(body)[0]
    assert nothing is None and 0.05 <= passed_s < 60
    assert sources == list(range(1, len(sources) + 1))


@pytest.mark.mpi(min_size=2)
def test_past_the_deadline_both_sides_say_whom_they_wait_for(ranks):
    def body(comm):
        channel, *_ = _channel(comm)
        comm.failures.deadline_s = 0.2
        if comm.rank == 0:
            with pytest.raises(DeadlineError, match="a request from any worker"):
                channel.inbox.next()
        elif comm.rank == 1:
            channel.client.pushed += 1  # as after a push that nobody has seen
            with pytest.raises(DeadlineError, match="the reply of server rank 0"):
                channel.client.wait()
        comm.failures.deadline_s = 30.0
        comm.barrier()
        channel.close()
        return True

    assert all(ranks(body))


def test_a_wait_without_end_is_a_deadlock_that_says_so():
    with pytest.raises(DeadlockError, match="a request from any worker"):
        run_virtual(lambda comm: _channel(comm)[0].inbox.next() if comm.rank == 0 else _channel(comm), 2)


@each("servers", [1, 2])
def test_what_a_request_and_its_reply_cost(servers):
    rounds = 10

    def body(comm):
        channel, roles, _shards = _channel(comm, servers)
        comm.barrier()
        before = comm.trace.traffic.copy()
        for step in range(rounds):
            if comm.rank in roles.servers:
                for _ in roles.workers:
                    request = channel.inbox.next()
                    channel.inbox.reply(Reply(request, step, request.tensors))
            else:
                channel.client.push(GRADIENT, [[step]] * servers, _filled(step), _used(7), weight=1.0)
                channel.client.wait()
        return comm.trace.traffic - before

    found = run_virtual(body, servers + 2, network=Network(1e-5, 1e9))
    n_bytes, word = sum(t.nbytes for t in _like()), 8
    for traffic in found[servers:]:  # kind, weight, number of clocks, clock; ticket drawn and raised
        flags = servers * NAMES  # sent when they change: once
        assert traffic.bytes_sent == rounds * (n_bytes + servers * 6 * word) + flags
        assert traffic.messages_sent <= rounds * (len(_like()) + servers - 1 + 3 * servers) + servers
        assert traffic.bytes_fetched == 0
    for traffic in found[:servers]:  # clock, blocker, seconds; how many were replyed
        assert traffic.messages_sent <= 2 * rounds * (len(_like()) + 2)
    assert sum(t.bytes_sent for t in found[:servers]) == 2 * rounds * (n_bytes + servers * 4 * word)


@pytest.mark.sizes(2, 4)
def test_a_rank_that_serves_itself_and_others(ranks):
    """Everyone pushes to everyone, and replies while it waits for its own replies."""
    rounds = 15

    def body(comm):
        channel, _roles, shards = _channel(comm, "colocated")
        taken, own = [], shards[comm.rank]
        for step in range(rounds):
            channel.client.push(GRADIENT, [[step]] * comm.size, _filled(10 * comm.rank + step), _used(7))
            while channel.client.missing() or len(taken) < (step + 1) * comm.size:
                if (request := channel.inbox.poll()) is not None:
                    assert all((t == 10 * request.source + request.clocks[0]).all() for t in request.tensors)
                    taken.append((request.source, request.clocks[0]))
                    channel.inbox.reply(Reply(request, comm.rank, [t + 1 for t in request.tensors]))
                elif channel.client.missing():
                    channel.inbox.wait_event()
            assert channel.client.wait().clocks == list(range(comm.size))
            assert all((t == 10 * comm.rank + step + 1).all() for t in channel.down.whole)
            comm.barrier()
        assert own.of(_like())
        channel.close()
        return sorted(taken)

    for taken in ranks(body):
        assert taken == sorted((rank, step) for rank in range(ranks.size) for step in range(rounds))
