"""Mailboxes: letters are taken in order of arrival, once each, and arrive and are answered whole."""

from __future__ import annotations

import pytest
import torch

from hpcdist.comm.virtual import Constant, Exponential, Network, Straggler, run_virtual
from hpcdist.errors import DeadlineError, DeadlockError
from hpcdist.server.mailbox import FETCH, GRADIENT, NOBODY, PAUSE, PUSH, Mailbox, Reply
from hpcdist.server.roles import COLOCATED, assign
from hpcdist.server.shards import cut

NAMES = 3


def _like():
    return [torch.zeros(7, dtype=torch.float64), torch.zeros(4, dtype=torch.float32)]


def _mailbox(comm, servers=1, clocks=1):
    roles, like = assign(comm.size, servers), _like()
    shards = dict(zip(roles.servers, cut(like, len(roles.servers)), strict=True))
    return Mailbox(comm, roles, shards, like, NAMES, clocks), roles, shards


def _filled(value):
    return [flat + value for flat in _like()]


def _used(number):
    return torch.tensor([bool(number >> bit & 1) for bit in range(NAMES)])


def _echo(comm, rounds, servers=1):
    """Workers post numbered letters; servers answer each with its tensors times 2, and tell what came."""
    mailbox, roles, shards = _mailbox(comm, servers)
    found = []
    if comm.rank in roles.servers:
        for _ in range(rounds * len(roles.workers)):
            letter = mailbox.next()
            values = [tensor.unique().tolist() for tensor in letter.tensors]
            found.append((comm.now(), letter.source, letter.clocks, letter.weight, letter.used.tolist(), values))
            mailbox.reply(Reply(letter, letter.clocks[0] + 1, [2 * t for t in letter.tensors], blocker=5, held_s=0.25))
    else:
        for step in range(rounds):
            comm.compute()
            value = 100 * comm.rank + step
            posted_at = comm.now()
            mailbox.post(
                GRADIENT, [[value + i] for i in range(servers)], _filled(value), _used(step), weight=value + 0.125
            )
            answers = mailbox.wait()
            found.append((posted_at, [t.tolist() for t in mailbox.answer], answers))
    comm.barrier()
    mailbox.close()
    return found


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("servers", [1, 2])
def test_letters_and_answers_arrive_whole_and_once(ranks, servers):
    if servers >= ranks.size:
        servers = 1
    rounds = 20
    found = ranks(lambda comm: _echo(comm, rounds, servers), compute=Exponential(0.1))
    for server in range(servers):
        took = {(source, clocks[0] - server) for _, source, clocks, *_ in found[server]}
        assert took == {(r, 100 * r + step) for r in range(servers, ranks.size) for step in range(rounds)}
        for _, source, (clock,), weight, used, values in found[server]:
            value = clock - server
            assert weight == value + 0.125 and used == _used(value - 100 * source).tolist()
            assert all(part in ([], [value]) for part in values) and any(values)
    for rank in range(servers, ranks.size):
        for step, (_, tensors, answers) in enumerate(found[rank]):
            value = 100 * rank + step
            assert tensors == [t.tolist() for t in _filled(2 * value)]
            told = [(answer.clock, answer.blocker, answer.held_s) for answer in answers]
            assert told == [(value + i + 1, 5, 0.25) for i in range(servers)]


@pytest.mark.parametrize("compute", [Exponential(0.1), Straggler(Constant(0.1), 2, 5.0)], ids=repr)
def test_the_order_is_that_of_arrival(compute):
    found = run_virtual(lambda comm: _echo(comm, 30), 5, compute=compute)
    taken = [(at, source) for at, source, *_ in found[0]]
    posted = sorted((at, rank) for rank in range(1, 5) for at, *_ in found[rank])
    if isinstance(compute, Exponential):  # else several arrive at the same moment
        assert taken == posted
    assert [at for at, _ in taken] == sorted(at for at, _ in posted)


def test_letters_that_wait_are_taken_in_order_of_arrival():
    order = (3, 1, 4, 2)

    def body(comm):
        mailbox, *_ = _mailbox(comm)
        for rank in order:
            if comm.rank == rank:
                mailbox.post(FETCH, [[0]])
            comm.barrier()
        if comm.rank == 0:
            assert mailbox.poll() is not None
            sources = [order[0], *(mailbox.next().source for _ in order[1:])]
            assert mailbox.poll() is None
            return sources
        return None

    assert run_virtual(body, 5)[0] == list(order)


@pytest.mark.sizes(2, 3)
def test_a_post_without_tensors_leaves_what_lies_in_the_slot(ranks):
    def body(comm):
        mailbox, roles, _ = _mailbox(comm)
        found = []
        if comm.rank == 0:
            for _ in range(3 * len(roles.workers)):
                letter = mailbox.next()
                found.append((letter.kind, letter.weight, letter.clocks, letter.tensors[0].tolist()))
                mailbox.reply(Reply(letter, 9))
        else:
            mailbox.post(PUSH, [[1]], _filled(4), _used(7), weight=2.0)
            mailbox.wait()
            mailbox.post(GRADIENT, [[2]])
            mailbox.wait()
            mailbox.post(PAUSE)
            (answer,) = mailbox.wait()
            found.append((answer.clock, answer.blocker, answer.held_s))
        comm.barrier()
        mailbox.close()
        return found

    server, *workers = ranks(body)
    assert all(found == [(9, NOBODY, 0.0)] for found in workers)
    for kind, weight, clocks in [(PUSH, 2.0, (1,)), (GRADIENT, 0.0, (2,)), (PAUSE, 0.0, ())]:
        assert server.count((kind, weight, clocks, [4.0] * 7)) == len(workers)


@pytest.mark.sizes(2, 3)
def test_a_letter_may_be_a_sum_of_several_gradients(ranks):
    def body(comm):
        mailbox, roles, _ = _mailbox(comm, clocks=4)
        if comm.rank > 0:
            mailbox.post(GRADIENT, [list(range(comm.rank + 1))], _filled(1))
            mailbox.wait()
            return None
        found = {}
        for _ in roles.workers:
            letter = mailbox.next()
            found[letter.source] = letter.clocks
            mailbox.reply(Reply(letter, 0))
        return found

    found = ranks(body)[0]
    assert found == {rank: tuple(range(rank + 1)) for rank in range(1, len(found) + 1)}


@pytest.mark.sizes(2, 3)
def test_next_gives_up_in_time_and_takes_what_comes_later(ranks):
    def body(comm):
        mailbox, roles, _ = _mailbox(comm)
        if comm.rank == 0:
            before = comm.now()
            nothing, passed_s = mailbox.next(timeout_s=0.05), comm.now() - before
            comm.barrier()
            sources = sorted(mailbox.next(timeout_s=30.0).source for _ in roles.workers)
            return nothing, passed_s, sources
        comm.barrier()
        mailbox.post(FETCH, [[0]])
        return None

    nothing, passed_s, sources = ranks(body)[0]
    assert nothing is None and 0.05 <= passed_s < 5.0
    assert sources == list(range(1, len(sources) + 1))


@pytest.mark.mpi(min_size=2)
def test_past_the_deadline_both_sides_say_whom_they_wait_for(ranks):
    def body(comm):
        mailbox, *_ = _mailbox(comm)
        comm.deadline_s = 0.2
        if comm.rank == 0:
            with pytest.raises(DeadlineError, match="a letter from any worker"):
                mailbox.next()
        elif comm.rank == 1:
            mailbox.posted += 1  # as after a post that nobody has seen
            with pytest.raises(DeadlineError, match="the answer of server rank 0"):
                mailbox.wait()
        comm.deadline_s = 30.0
        comm.barrier()
        mailbox.close()
        return True

    assert all(ranks(body))


def test_a_wait_without_end_is_a_deadlock_that_says_so():
    with pytest.raises(DeadlockError, match="a letter from any worker"):
        run_virtual(lambda comm: _mailbox(comm)[0].next() if comm.rank == 0 else _mailbox(comm), 2)


@pytest.mark.parametrize("servers", [1, 2])
def test_what_a_letter_and_its_answer_cost(servers):
    rounds = 10

    def body(comm):
        mailbox, roles, shards = _mailbox(comm, servers)
        comm.barrier()
        before = comm.traffic.copy()
        for step in range(rounds):
            if comm.rank in roles.servers:
                for _ in roles.workers:
                    letter = mailbox.next()
                    mailbox.reply(Reply(letter, step, letter.tensors))
            else:
                mailbox.post(GRADIENT, [[step]] * servers, _filled(step), _used(7), weight=1.0)
                mailbox.wait()
        return comm.traffic - before

    found = run_virtual(body, servers + 2, network=Network(1e-5, 1e9))
    n_bytes, word = sum(t.nbytes for t in _like()), 8
    for traffic in found[servers:]:  # kind, weight, number of clocks, clock; ticket drawn and raised
        flags = servers * NAMES  # sent when they change: once
        assert traffic.bytes_sent == rounds * (n_bytes + servers * 6 * word) + flags
        assert traffic.messages_sent <= rounds * (len(_like()) + servers - 1 + 3 * servers) + servers
        assert traffic.bytes_fetched == 0
    for traffic in found[:servers]:  # clock, blocker, seconds; how many were answered
        assert traffic.messages_sent <= 2 * rounds * (len(_like()) + 2)
    assert sum(t.bytes_sent for t in found[:servers]) == 2 * rounds * (n_bytes + servers * 4 * word)


@pytest.mark.sizes(2, 3, 4)
def test_a_rank_that_serves_itself_and_others(ranks):
    """Everyone posts to everyone, and answers while it waits for its own answers."""
    rounds = 15

    def body(comm):
        mailbox, roles, shards = _mailbox(comm, COLOCATED)
        taken, own = [], shards[comm.rank]
        for step in range(rounds):
            mailbox.post(GRADIENT, [[step]] * comm.size, _filled(10 * comm.rank + step), _used(7))
            while not mailbox.answered() or len(taken) < (step + 1) * comm.size:
                if (letter := mailbox.poll()) is not None:
                    assert all((t == 10 * letter.source + letter.clocks[0]).all() for t in letter.tensors)
                    taken.append((letter.source, letter.clocks[0]))
                    mailbox.reply(Reply(letter, comm.rank, [t + 1 for t in letter.tensors]))
                elif not mailbox.answered():
                    mailbox.wait_event()
            assert [a.clock for a in mailbox.wait()] == list(range(comm.size))
            assert all((t == 10 * comm.rank + step + 1).all() for t in mailbox.answer)
            comm.barrier()
        assert own.of(_like())
        mailbox.close()
        return sorted(taken)

    for taken in ranks(body):
        assert taken == sorted((rank, step) for rank in range(ranks.size) for step in range(rounds))
