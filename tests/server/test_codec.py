"""Compressed requests and replies: what is not sent is kept, both ends go by the same numbers, no byte too many."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Exponential
from hpcdist.compress import CompressionConfig, Span
from hpcdist.errors import ConfigError
from hpcdist.strategies.common.state import State
from hpcdist.strategies.server.channel import FETCH, GRADIENT, SUM, Reply, RequestChannel
from hpcdist.strategies.server.codec import Codec, CodedSlots, TensorSlots
from hpcdist.strategies.server.placement import Shard, assign, create_shards

pytestmark = pytest.mark.computes

COUNTS = (300, 96)
SPANS = [[Span(0, 280, (28, 10)), Span(280, 300, (20,))], [Span(0, 96, (8, 3, 4))]]
COMPRESSIONS = [
    {"name": "threshold", "density": 0.05},
    {"name": "threshold", "tau": 0.5},
    {"name": "powersgd"},
    {"name": "onebit"},
    {"name": "fp16"},
]


def _like():
    return [torch.zeros(count, dtype=torch.float64) for count in COUNTS]


def _gradient(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(count, generator=generator, dtype=torch.float64) ** 3 for count in COUNTS]


def _channel(comm, compression, servers=1, up="gradients", down="values"):
    roles, like = assign(comm.size, servers), _like()
    shards = dict(zip(roles.servers, create_shards(like, len(roles.servers)), strict=True))
    config = CompressionConfig.from_mapping(compression)
    ways = [
        partial(CodedSlots, Codec(config, name, content, SPANS, State(comm, None))) if content else TensorSlots
        for name, content in (("requests", up), ("replies", down))
    ]
    return RequestChannel(comm, roles, shards, like, 1, 1, *ways), roles, shards


def _serve(channel, steps, reply):
    """Reply to so many requests."""
    for _ in range(steps):
        request = channel.inbox.next()
        channel.inbox.reply(Reply(request, 0, reply(request)))


@each("compression", COMPRESSIONS)
@pytest.mark.sizes(3, 4)
def test_gradients_are_what_was_sent_and_what_is_left(ranks, compression):
    """From two workers to one server or two."""
    steps, servers = 8, ranks.size - 2

    def body(comm):
        channel, roles, shards = _channel(comm, compression, servers)
        serves = comm.rank in roles.servers
        sums = [part.clone() for part in (shards[comm.rank].of(_like()) if serves else _like())]

        def add(parts):
            for total, part in zip(sums, parts, strict=True):
                total.add_(part)
            return ()

        if serves:
            _serve(channel, steps * len(roles.workers), lambda request: add(request.tensors))
        else:
            for step in range(steps):
                channel.client.push(SUM, [[0]] * servers, _gradient(comm.rank, step), weight=1.0)
                channel.client.wait()
                add(_gradient(comm.rank, step))
        found = serves, sums, shards[comm.rank].ranges if serves else channel.up.whole
        comm.barrier()
        channel.close()
        return found

    arrived, computed, left = _like(), _like(), _like()
    for serves, sums, more in ranks(body, compute=Exponential(0.1)):
        if serves:
            for whole, part, (start, stop) in zip(arrived, sums, more, strict=True):
                whole[start:stop] = part
        else:
            for own, rest, total, residual in zip(computed, left, sums, more, strict=True):
                own.add_(total)
                rest.add_(residual)
    for sent, own, rest in zip(arrived, computed, left, strict=True):
        torch.testing.assert_close(sent + rest, own, rtol=0, atol=1e-11 if compression["name"] == "powersgd" else 1e-12)
    assert any(rest.abs().max() > 0 for rest in left)


@each("compression", COMPRESSIONS)
@pytest.mark.sizes(3)
def test_both_ends_have_the_same_values_and_come_closer(ranks, compression):
    """Of a vector that changes for a while, and then no more."""
    moving, still = 5, 300 if compression["name"] == "onebit" else 150

    def body(comm):
        channel, roles, _ = _channel(comm, compression)
        values, child = _like(), comm.size - 1
        if comm.rank in roles.servers:
            for step in range(moving + still):
                for value, change in zip(values, _gradient(0, step), strict=True):
                    value.add_(change if step < moving else 0.0)
                _serve(channel, len(roles.workers), lambda request: values)
            told = channel.down._common[child]
        else:
            for _ in range(moving + still):
                channel.client.push(FETCH, [[0]])
                channel.client.wait()
            told = channel.down.whole
        told = [part.clone() for part in told]
        channel.close()
        return told, values

    (kept, values), *_, (has, _) = ranks(body)
    for a, b, value in zip(kept, has, values, strict=True):
        assert torch.equal(a, b)
        # τ that doesn't fall sends no less than τ.
        torch.testing.assert_close(b, value, rtol=0, atol=0.51 if "tau" in compression else 0.02 * value.abs().max())


@each("compression", COMPRESSIONS)
@pytest.mark.sizes(2)
def test_moves_are_known_to_both(ranks, compression):
    def body(comm):
        channel, roles, _ = _channel(comm, compression, up="values", down="moves")
        found = []
        for step in range(5):
            if comm.rank in roles.servers:
                request = channel.inbox.next()
                moves = _gradient(0, step)
                channel.inbox.reply(Reply(request, 0, moves))
                found += [part.clone() for part in channel.down.sent(request.source, moves)]
            else:
                channel.client.push(FETCH, [[0]], _gradient(1, step))
                channel.client.wait()
                found += [part.clone() for part in channel.down.whole]
        channel.close()
        return found

    first, second = ranks(body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and any(part.any() for part in first)


@pytest.mark.sizes(2)
def test_only_the_bytes_of_messages_travel(ranks):
    """Of fp16 2 of 8 bytes per element; head, two lengths, and a flag beside them."""
    steps, n, word = 10, sum(COUNTS), 8

    def body(comm):
        channel, roles, _ = _channel(comm, {"name": "fp16"})
        comm.barrier()
        before = comm.trace.traffic.copy()
        if comm.rank in roles.servers:
            values = _gradient(0, 0)
            _serve(channel, steps, lambda request: values)
        else:
            for step in range(steps):
                channel.client.push(SUM, [[0]], _gradient(1, step))
                channel.client.wait()
        spent = comm.trace.traffic - before
        comm.barrier()
        channel.close()
        return spent.bytes_sent

    server, worker = ranks(body)
    assert worker == steps * (2 * n + (4 + 2 + 2) * word)
    assert server == steps * (2 * n + (3 + 2 + 1) * word)


def _sent(comm, compression, steps, **contents):
    """Bytes of the requests of one worker, one after the other, and what arrives of them."""
    channel, roles, _ = _channel(comm, compression, **contents)
    found = []
    for step in range(steps):
        before = comm.trace.traffic.bytes_sent
        if comm.rank in roles.servers:
            request = channel.inbox.next()
            found.append([part.clone() for part in request.tensors])
            channel.inbox.reply(Reply(request, 0))
        else:
            channel.client.push(GRADIENT, [[0]], _gradient(1, step))
            found.append(comm.trace.traffic.bytes_sent - before - 8 * 8)
            channel.client.wait()
    channel.close()
    return found


@each("up", ["gradients", "values"])
@pytest.mark.sizes(2)
def test_what_would_be_longer_is_sent_as_it_is(ranks, up):
    compression = {"name": "topk", "ratio": 1.0, "values": "fp64"}
    arrived, sent = ranks(lambda comm: _sent(comm, compression, 4, up=up, down=None))
    assert sent == [8 * sum(COUNTS)] * 4
    for step, parts in enumerate(arrived):
        for part, gradient in zip(parts, _gradient(1, step), strict=True):
            torch.testing.assert_close(part, gradient, rtol=0, atol=1e-15)


@each("up", ["gradients", "values"])
@pytest.mark.sizes(2)
def test_the_first_ones_are_sent_as_they_are(ranks, up):
    compression = {"name": "topk", "ratio": 0.01, "warmup_steps": 2}
    arrived, sent = ranks(lambda comm: _sent(comm, compression, 4, up=up, down=None))
    assert sent[:2] == [8 * sum(COUNTS)] * 2 and max(sent[2:]) < 100
    for step in range(2):
        assert all(torch.equal(a, b) for a, b in zip(arrived[step], _gradient(1, step), strict=True))
    assert sum(int((part != 0).sum()) for part in arrived[3]) == (4 if up == "gradients" else sum(COUNTS))


def test_differences_that_would_grow_are_refused():
    config, state = (
        CompressionConfig.from_mapping({"name": "qsgd", "levels": 1, "error_feedback": False}),
        State(None, None),
    )
    Codec(config, "replies", "gradients", SPANS, state)
    Codec(config, "replies", "moves", SPANS, state)
    with pytest.raises(ConfigError, match="strategy.compression must lose less than there is where differences of par"):
        Codec(config, "replies", "values", SPANS, state)


@each("count", [1, 3, 7, 40])
def test_shards_know_their_parts_of_parameters(count):
    """All elements, once each, in order; and whole rows of a matrix stay one matrix."""
    for shard in create_shards(_like(), count):
        for (start, stop), own, chunks in zip(shard.ranges, SPANS, shard.spans(SPANS), strict=True):
            ends = [0, *(chunk.stop for chunk in chunks)]
            assert [chunk.start for chunk in chunks] == ends[:-1] and ends[-1] == stop - start
            for chunk in chunks:
                assert torch.Size(chunk.shape).numel() == chunk.stop - chunk.start
                (span,) = [s for s in own if s.start <= start + chunk.start < s.stop]
                if len(chunk.shape) > 1:
                    assert chunk.shape[1:] == span.shape[1:]


def test_a_cut_through_rows_leaves_a_matrix_and_two_vectors():
    ((chunks,),) = [Shard(((7, 95),)).spans(SPANS[:1])]
    assert chunks == [Span(0, 3, (3,)), Span(3, 83, (8, 10)), Span(83, 88, (5,))]
