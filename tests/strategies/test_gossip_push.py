"""Push gossip: every message counts once and whole."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Jitter, Network, run_virtual
from strategies import problem

pytestmark = pytest.mark.computes

NAME = "gossip_push"


def _make(comm, features=3, **options):
    """Rank r starts at r everywhere."""
    strategy = problem.make(comm, NAME, torch.nn.Linear(features, 2, dtype=torch.float64), **options)
    strategy.model.params[0].fill_(comm.rank)
    return strategy


def _step(strategy, peer):
    """A step without learning in which this rank draws `peer`."""
    strategy.sampler.sample = lambda *_, **__: [peer]
    strategy.step(lambda: None)
    return strategy.model.params[0].clone()


@pytest.mark.sizes(3)
def test_a_step_averages_the_own_parameters_with_every_message(ranks):
    """Rank 0 pushes twice to rank 2, other values each time, and rank 1 once, before rank 2 looks: all three count."""

    def body(comm):
        strategy, rank = _make(comm), comm.rank
        if rank == 0:
            _step(strategy, 2)
            strategy.model.params[0].fill_(10.0)
        comm.barrier()
        if rank < 2:
            _step(strategy, 2)
        comm.barrier()
        found = []
        if rank == 2:
            found += [_step(strategy, 2), _step(strategy, 2), _step(strategy, 0)]
        comm.barrier()
        if rank == 0:
            found = [_step(strategy, 1)]
        strategy.close()
        return found

    first, second, third = ranks(body)[2]
    drew_itself = (2 * 2.0 + (0.0 + 10.0) + 1.0) / (2 + 3)
    assert torch.allclose(first, torch.full_like(first, drew_itself), rtol=0, atol=1e-15)
    assert torch.equal(second, first) and torch.equal(third, first), "a message was counted again"


@pytest.mark.sizes(2)
def test_messages_of_float16_may_have_a_sum_beyond_its_range(ranks):
    """Three wait in a slot: their mean is (4 · 10⁴ + 2 · 10⁴ + 3 · 10⁴)/3 in both parameters."""

    def body(comm):
        strategy = problem.make(comm, NAME, torch.nn.Linear(1, 1).half())
        for value in (40_000, 20_000, 30_000):
            strategy.model.params[0].fill_(value)
            if comm.rank == 0:
                strategy._push(1)
        comm.barrier()
        if comm.rank == 1:
            strategy._average(1)
        found = strategy.model.params[0].tolist()
        strategy.close()
        return found

    assert ranks(body)[1] == [30_000] * 2


@pytest.mark.sizes(3)
def test_a_slot_that_is_written_while_it_is_copied_is_left_for_the_next_step(ranks):
    """Rank 1 pushes 1, and 3 between rank 0's copy of the slot and its attempt to empty it."""

    def body(comm):
        strategy, found = _make(comm), []
        copy = strategy._copy

        def slowly(slot):
            copy(slot)
            comm.barrier()
            comm.barrier()

        if comm.rank == 1:
            _step(strategy, 0)
        comm.barrier()
        if comm.rank == 0:
            strategy._copy = slowly
            found.append(_step(strategy, 1)[0].item())
            strategy._copy = copy
            found.append(_step(strategy, 1)[0].item())
        else:
            comm.barrier()
            if comm.rank == 1:
                strategy.model.params[0].fill_(3.0)
                strategy._push(0)
            comm.barrier()
        strategy.close()
        return found

    assert ranks(body)[0] == [0.0, (0.0 + 1.0 + 3.0) / (1 + 2)]


@each("size", [3, 8])
def test_messages_are_whole_and_counted_once_on_a_network_slower_than_the_steps(size):
    """All elements of a rank's parameters are equal, and stay so: a torn message would mix two.

    The steps meet slots that are being written, and ones in which several messages have come together.
    """
    met, several = [], []

    def body(comm):
        strategy = _make(comm, features=500, seed=1)
        look = strategy._arrived

        def looking():
            counts = look()
            met.append(min(counts) < 0)
            several.append(max(counts) > 1)
            return counts

        strategy._arrived = looking
        for step in range(60):
            comm.compute()
            strategy.step(lambda: strategy.model.params[0].fill_(1000 * comm.rank + step))
            values = strategy.model.params[0]
            assert values.max() - values.min() < 1e-9, "a message was torn"
        strategy.close()

    network = Network(latency_s=1e-3, bandwidth_bytes_s=1e5)  # 8 kB: 80 ms
    run_virtual(body, size, network=network, compute=Jitter(0.05, 1.0))
    assert sum(met) > 5
    assert sum(several) > (5 if size < 8 else 0)


def _push_ones(comm, module, steps):
    """How many messages this rank pushed, all of ones, and how many it received; every sum is of whole ones."""
    strategy = problem.make(comm, NAME, module, seed=4)
    received, pushed, take, draw = 0, 0, strategy._take, strategy.sampler.sample

    def counting(slot, count):
        nonlocal received
        taken = take(slot, count)
        if taken:
            received += count
            assert all((sums == count).all() for sums in strategy._taken), "a sum of other than `count` messages"
        return taken

    strategy._take = counting
    for _ in range(steps):
        comm.compute()
        (peer,) = draw()
        pushed += peer != comm.rank
        for params in strategy.model.params:
            params.fill_(1.0)
        _step(strategy, peer)
    comm.barrier()
    _step(strategy, comm.rank)
    strategy.close()
    strategy.comm.close()
    return pushed, received


def test_every_message_arrives_exactly_once():
    network, compute = Network(latency_s=1e-3, bandwidth_bytes_s=1e5), Jitter(0.05, 1.0)

    found = run_virtual(
        lambda comm: _push_ones(comm, torch.nn.Linear(400, 2), 100), 3, network=network, compute=compute
    )
    assert sum(pushed for pushed, _ in found) == sum(received for _, received in found) > 100


@each("way", ["node", "tcp", "rma"])
@pytest.mark.mpi(min_size=2)
def test_every_message_arrives_exactly_once_while_nobody_waits(ranks, way):
    """Longer ones, in two dtypes, on ranks that do nothing else."""

    def body(comm):
        place = comm if way == "node" else comm.apart(way)
        layers = torch.nn.Linear(20_000, 1), torch.nn.Linear(5_000, 1, dtype=torch.bfloat16)
        found = _push_ones(place, torch.nn.ModuleList(layers), 100)
        if place is not comm:
            place.close()
        return found

    found = ranks(body)
    assert sum(pushed for pushed, _ in found) == sum(received for _, received in found) > 50


@pytest.mark.sizes(2)
def test_the_state_includes_what_has_arrived(ranks):
    """Rank 1 is saved with two messages in its slot, and averages them once the state is loaded."""

    def body(comm):
        strategy = _make(comm, seed=6)
        if comm.rank == 0:
            _step(strategy, 1)
            strategy.model.params[0].fill_(5.0)
            _step(strategy, 1)
        comm.barrier()
        state, params = strategy.state.save(), strategy.model.params[0].clone()
        following = [strategy.sampler.generator.get_state()]
        other = {"steps": strategy.steps}  # of another world: generators stay, slots are empty
        strategy.close()

        strategy, found = _make(comm, seed=7), []
        for loaded in (state, other):
            strategy.model.params[0].copy_(params)
            strategy.state.load(loaded)
            following.append(strategy.sampler.generator.get_state())
            if comm.rank == 1:
                found.append(_step(strategy, 1)[0].item())
            comm.barrier()
        strategy.close()
        assert all(torch.equal(following[0], generator) for generator in following[1:])
        return found

    assert ranks(body)[1] == [(2 * 1.0 + 0.0 + 5.0) / (2 + 2), 1.0]


@each("precisions", [("none", "fp16"), ("fp16", "none"), ("bf16", "fp16"), ("fp16", "bf16")])
def test_messages_are_taken_up_in_another_precision(precisions):
    """Rank 1 is saved with messages 0 and 5, which all types represent."""

    def body(comm):
        before, after = (_make(comm, compression=precision) for precision in precisions)
        if comm.rank == 0:
            _step(before, 1)
            before.model.params[0].fill_(5.0)
            _step(before, 1)
        comm.barrier()
        after.model.params[0].copy_(before.model.params[0])
        after.state.load(before.state.save())
        return _step(after, comm.rank)[0].item()

    assert run_virtual(body, 2)[1] == (2 * 1.0 + 0.0 + 5.0) / (2 + 2)
