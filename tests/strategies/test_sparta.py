"""SPARTA: which elements are averaged, and when; as local SGD, alone, with a delay; under a slow momentum."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Constant, Network, Straggler, run_virtual
from hpcdist.config.settings import Named
from strategies import problem, replicas

pytestmark = pytest.mark.computes

NAME = "sparta"
STEPS = 12
STILL = {"share": 0.25, "selection": "partition"}


def still(comm, options, steps, seed=0, name=NAME):
    """Collective. Parameters after each step of ranks that begin apart and do not move by themselves."""
    strategy, local = replicas.make(comm, name, options, "sgd")
    noise = torch.randn(len(strategy.model.params[0]), generator=torch.Generator().manual_seed(comm.rank + 10 * seed))
    strategy.model.params[0].add_(noise)
    found = [strategy.model.params[0].clone()]
    for _ in range(steps):
        replicas.stay(strategy, local)
        found.append(strategy.model.params[0].clone())
    replicas.end(strategy)
    return torch.stack(found)


@pytest.mark.sizes(1, 3)
def test_all_parameters_in_every_step_are_local_sgd(ranks):
    def body(comm):
        own, _ = replicas.train(comm, NAME, {"share": 1.0}, "adam", STEPS)
        local, _ = replicas.train(comm, "local_sgd", {"period": 1}, "adam", STEPS)
        torch.testing.assert_close(own, local, rtol=0, atol=1e-12)

    ranks(body)


@each("case", [(0.3, "random"), (0.3, "shuffled"), (0.3, "partition"), (0.0, "random")])
@pytest.mark.sizes(3)
def test_averaging_leaves_the_mean_and_all_other_elements_as_they_are(ranks, case):
    share, selection = case
    found = torch.stack(ranks(lambda comm: still(comm, {"share": share, "selection": selection}, 6)))
    means = found.mean(dim=0)
    torch.testing.assert_close(means, means[0].expand_as(means), rtol=0, atol=1e-12)
    for step in range(6):
        before, after = found[:, step], found[:, step + 1]
        met = (after != before).any(dim=0)
        assert (after[:, met] == after[0, met]).all() and met.float().mean() <= 0.6


@each("parts", [3, 6, 7, 9, 10, 200])
def test_a_share_of_one_in_so_many_makes_so_many_parts(parts):
    def taken(comm):
        strategy, _ = replicas.make(comm, NAME, {"share": 1 / parts, "selection": "partition"}, "sgd")
        found = [strategy._select(step)[0].tolist() for step in range(parts)]
        replicas.end(strategy)
        return sorted(sum(found, [])) == list(range(len(strategy.model.params[0])))

    assert all(run_virtual(taken, 2))


def test_orders_are_drawn_again_in_each_round_of_a_partition():
    def parts(comm, selection):
        strategy, _ = replicas.make(comm, NAME, {**STILL, "selection": selection}, "sgd")
        found = [strategy._select(step)[0].tolist() for step in range(8)]
        replicas.end(strategy)
        return found

    shuffled, partition = (run_virtual(lambda comm, s=s: parts(comm, s), 2)[0] for s in ("shuffled", "partition"))
    assert shuffled[:4] == shuffled[4:] and partition[:4] != partition[4:]
    assert sorted(sum(partition[4:], [])) == sorted(sum(shuffled[:4], []))


def test_random_elements_meet_at_their_probability():
    share, steps = 0.05, 40

    def drawn(comm):
        module = torch.nn.Linear(100, 50, bias=False)
        strategy = problem.make(comm, NAME, module, share=share)
        found = [strategy._select(step)[0] for step in range(steps)]
        strategy.close()
        return found

    found = run_virtual(drawn, 2)
    assert all(map(torch.equal, found[0], found[1]))
    assert all((part[1:] > part[:-1]).all() for part in found[0])
    sizes = torch.tensor([float(len(part)) for part in found[0]])
    assert sizes.mean() == pytest.approx(share * 5000, rel=0.05)
    assert sizes.std() == pytest.approx((5000 * share * (1 - share)) ** 0.5, rel=0.4)
    met = len(torch.cat(found[0]).unique()) / 5000
    assert met == pytest.approx(1 - (1 - share) ** steps, rel=0.03)


@each("merge", ["shift", "plain"])
@each("selection", ["shuffled", "random"])
@pytest.mark.sizes(2, 3)
def test_after_a_delay_the_mean_comes_with_or_without_what_was_done_meanwhile(ranks, merge, selection):
    """By hand: the movement since a part was sent, less the jumps to means of other parts in which elements were."""
    delay = 2
    options = {"share": 0.5, "selection": selection, "delay": delay, "merge": merge}

    def body(comm):
        strategy, local = replicas.make(comm, NAME, options, "sgd")
        values, _ = replicas.go(strategy, local, range(STEPS))
        parts = [strategy._select(step)[0] for step in range(STEPS)]
        replicas.end(strategy)
        return values, parts

    found = ranks(body)
    size, parts = len(found), found[0][1]
    hand, late = replicas.ByHand(size, "sgd"), {}
    jumps = [torch.zeros_like(own) for own in hand.params]
    for step in range(STEPS):
        hand.steps()
        late[step] = [(own.clone(), jumped.clone()) for own, jumped in zip(hand.params, jumps, strict=True)]
        if step >= delay:
            at, sent = parts[step - delay], late.pop(step - delay)
            mean = sum(then for then, _ in sent)[at] / size
            for own, jumped, (then, jumped_then) in zip(hand.params, jumps, sent, strict=True):
                by_itself = (own - jumped) - (then - jumped_then)
                new = mean + by_itself[at] if merge == "shift" else mean
                jumped[at] += new - own[at]
                own[at] = new
        for rank, own in enumerate(hand.params):
            torch.testing.assert_close(found[rank][0][step], own, rtol=0, atol=1e-12)


@each("case", [("random", "shift"), ("shuffled", "plain"), ("partition", "shift")])
@pytest.mark.sizes(3)
def test_replicas_that_stay_come_together_whatever_share_and_delay(ranks, case):
    given = {"selection": case[0], "merge": case[1]}

    def body(comm):
        grid = [{"share": share, "delay": delay, **given} for share in (0.1, 1.0) for delay in (1, 10)]
        slow = {"period": 13, "base": Named(name=NAME, **grid[1])}
        return torch.stack([*(still(comm, options, 26) for options in grid), still(comm, slow, 26, name="slowmo")])

    found = torch.stack(ranks(body))
    means = found.mean(dim=0, keepdim=True)
    spread = (found - means).square().sum(dim=(0, 3)).sqrt()  # of each run, after each step
    assert (spread <= spread[:, :1] * (1 + 1e-12)).all() and (spread[:, -1] < 0.99 * spread[:, 0]).all()
    assert (spread[2:4, -1] < 1e-12).all() and (spread[4, 13:] < 1e-12).all(), "large parts, and a slow step"
    unmoved = (means - means[:, :, :1])[0, :4], (means - means[:, :, :1])[0, 4:, :13]
    assert all(moved.abs().max() < 1e-12 for moved in unmoved)


def test_an_exchange_within_the_delay_takes_no_time():
    def seconds(delay):
        def body(comm):
            strategy, local = replicas.make(comm, NAME, {"share": 0.5, "delay": delay}, "sgd")
            start_s = comm.now()
            replicas.go(strategy, local, range(6))
            taken_s = comm.now() - start_s
            replicas.end(strategy)
            return taken_s

        return max(run_virtual(body, 2, network=Network(0.03, 1e12), compute=Constant(0.1)))

    assert seconds(1) == pytest.approx(0.6) and seconds(0) > 0.9


@each("delay", [1, 3])
def test_the_seconds_of_a_mean_that_comes_late_are_no_more_than_those_of_the_steps(delay):
    def body(comm):
        start_s = comm.now()
        run = problem.train(comm, NAME, {"share": 0.5, "delay": delay}, epochs=2)
        return comm.now() - start_s, sum(record.seconds for record in run.records)

    late = Straggler(Constant(0.01), rank=1, factor=3)
    for passed_s, recorded_s in run_virtual(body, 3, network=Network(0.003, 1e9), compute=late):
        assert 0.85 * passed_s < recorded_s <= passed_s


@pytest.mark.sizes(2)
def test_bytes_are_those_of_the_part(ranks):
    options = {"share": 0.25, "selection": "partition"}

    def body(comm):
        strategy, local = replicas.make(comm, NAME, options, "sgd")
        lengths = [8 * len(strategy._select(step)[0]) for step in range(4)]
        _, records = replicas.go(strategy, local, range(4))
        replicas.end(strategy)
        return lengths, [record.bytes_sent for record in records]

    for lengths, sent in ranks(body):
        assert all(abs(n - length) <= 16 for n, length in zip(sent, lengths, strict=True))


@pytest.mark.sizes(2)
def test_under_a_slow_momentum_its_bytes_count_too(ranks):
    def body(comm):
        options = {"share": 0.25, "selection": "partition"}
        slow = {"period": 4, "base": Named(name=NAME, **options)}
        both, of_parts, of_periods = (
            [record.bytes_sent for record in replicas.train(comm, name, given, "sgd", 8)[1]]
            for name, given in (("slowmo", slow), (NAME, options), ("slowmo", {"period": 4}))
        )
        assert both == [one + other for one, other in zip(of_parts, of_periods, strict=True)] and min(both) > 0

    ranks(body)


@each("then", [{"seed": 1}, {"share": 0.125}, {"delay": 0}])
@each("merge", ["shift", "plain"])
def test_with_other_options_a_loaded_part_is_merged_with_the_same_result(merge, then):
    """It has the elements that were sent, and not those that the options now select in that step."""

    def body(comm):
        options = {**STILL, "selection": "shuffled", "delay": 2, "merge": merge}
        strategy, local, again, local_again = replicas.taken_up(comm, NAME, options, 4, then)
        sent, indices = 2, strategy._select(2)[0]
        assert sent in again._parts
        values = [
            replicas.go(which, optimizer, range(4, 5))[0][-1]
            for which, optimizer in ((strategy, local), (again, local_again))
        ]
        return [tensor[indices] for tensor in values]

    for expected, found in run_virtual(body, 2):
        assert torch.equal(expected, found)
