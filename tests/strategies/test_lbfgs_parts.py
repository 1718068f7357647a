"""The parts of distributed L-BFGS, without ranks: recursion, line search, portions, shards' sums."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from harness.cases import each
from hpcdist.strategies.common.state import copy_all
from hpcdist.strategies.lbfgs.algorithm import CurvaturePairs, Lbfgs, LbfgsConfig
from hpcdist.strategies.lbfgs.line_search import strong_wolfe
from hpcdist.strategies.lbfgs.portions import JointBatch, Pace, Portions, divide
from hpcdist.strategies.lbfgs.vectors import DIRECTION, GRADIENT, HistoryShard, LocalVectors, RemoteVectors, X

D = 12
generator = torch.Generator().manual_seed(5)


def vector():
    return torch.randn(D, generator=generator, dtype=torch.float64)


class Vectors(LocalVectors):
    def fill(self, number, parts):
        copy_all(self[number], parts)


# --- the two-loop recursion -------------------------------------------------------------------------------------------
def _history(pairs, vectors, made, gradient):
    for s, y in made:
        vectors.fill(pairs.spare.s, [s])
        vectors.fill(pairs.spare.y, [y])
        assert pairs.add()
    vectors.fill(GRADIENT, [gradient])
    pairs.direction(DIRECTION, GRADIENT)
    return vectors[DIRECTION][0]


def _pairs(count):
    steps = [vector() for _ in range(count)]
    return [(s, s * torch.linspace(0.5, 3, D, dtype=torch.float64)) for s in steps]


@each("count", [0, 1, 3, 9])
def test_the_recursion_is_the_product_with_the_bfgs_matrix(count):
    """H ← (1 − ρsyᵀ)H(1 − ρysᵀ) + ρssᵀ for the newest 5 pairs, from γ times the identity."""
    made, gradient = _pairs(count), vector()
    vectors = Vectors([torch.zeros(D, dtype=torch.float64)])
    found = _history(CurvaturePairs(vectors, 5), vectors, made, gradient)
    kept = made[-5:]
    identity = torch.eye(D, dtype=torch.float64)
    matrix = identity * (kept[-1][0] @ kept[-1][1] / (kept[-1][1] @ kept[-1][1]) if kept else 1.0)
    for s, y in kept:
        left = identity - torch.outer(s, y) / (s @ y)
        matrix = left @ matrix @ left.T + torch.outer(s, s) / (s @ y)
    torch.testing.assert_close(found, -matrix @ gradient, rtol=1e-12, atol=1e-12)


def test_pairs_beyond_a_smaller_history_are_dropped_with_a_warning(caplog):
    """So is the one in the making, whose s would be missing."""
    saved = [[place, 1.0, 2.0] for place in (2, 3, 4, 0)]
    algorithm = Lbfgs(LbfgsConfig(history=2), RemoteVectors(lambda words: []))
    algorithm.load_state_dict({"pairs": saved, "known": None, "pending": 5, "spare": 5})
    state = algorithm.state_dict()
    assert (state["pairs"], state["pending"], state["spare"]) == ([saved[0], saved[3]], 0, 1)
    assert "strategy.history is 2, less than in the run that saved the checkpoint: 2 of its 4 pairs" in caplog.text


@each("count", [1, 3, 5])
def test_on_vectors_in_parts_it_is_the_same(count):
    """Operations that return nothing wait for one that does: 2m messages of dot products, and one at the end."""
    made, gradient = _pairs(3), vector()
    whole = Vectors([torch.zeros(D, dtype=torch.float64)])
    expected = _history(CurvaturePairs(whole, 5), whole, made, gradient)

    class Parts(RemoteVectors):
        def __init__(self):
            cuts = [D * i // count for i in range(count + 1)]
            self.parts = [(a, b, Vectors([torch.zeros(b - a, dtype=torch.float64)])) for a, b in pairwise(cuts)]
            self.messages = 0
            super().__init__(self.run)

        def run(self, words):
            self.messages += 1
            results = []
            for _, _, own in self.parts:
                shard = HistoryShard.__new__(HistoryShard)
                shard.vectors = own
                results.append(shard.run(words))
            return [sum(column) for column in zip(*results, strict=True)]

        def fill(self, number, whole):
            self.flush()
            for a, b, own in self.parts:
                own.fill(number, [whole[0][a:b]])

        def __getitem__(self, number):
            self.flush()
            return [torch.cat([own[number][0] for *_, own in self.parts])]

    vectors = Parts()
    found = _history(CurvaturePairs(vectors, 5), vectors, made, gradient)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert vectors.messages == 3 * 3 + 2 * 3 + 1


def test_a_pair_without_curvature_is_left_out():
    vectors = Vectors([torch.zeros(D, dtype=torch.float64)])
    pairs, s = CurvaturePairs(vectors, 2), vector()
    for y in (-s, torch.zeros_like(s), torch.full_like(s, math.nan)):
        vectors.fill(pairs.spare.s, [s])
        vectors.fill(pairs.spare.y, [y])
        assert not pairs.add() and pairs.kept == []


# --- line search ------------------------------------------------------------------------------------------------------
def _search(function, first=1.0, c1=1e-4, c2=0.9, evaluations=20):
    """The result, and all lengths tried; `function` gives value and slope."""
    search, tried = strong_wolfe(*function(0.0), first, c1=c1, c2=c2, evaluations=evaluations), []
    length = next(search)
    while True:
        tried.append(length)
        try:
            length = search.send(function(length))
        except StopIteration as end:
            return end.value, tried


FUNCTIONS = {  # More and Thuente's, 1994, and others; value and slope at t
    "quadratic": lambda t: ((t - 3) ** 2, 2 * (t - 3)),
    "mt1": lambda t: (-t / (t * t + 2), (t * t - 2) / (t * t + 2) ** 2),
    "mt2": lambda t: ((t + 0.004) ** 5 - 2 * (t + 0.004) ** 4, 5 * (t + 0.004) ** 4 - 8 * (t + 0.004) ** 3),
    "cosine": lambda t: (1 - t + t * t / 4 + math.cos(5 * t) / 4, -1 + t / 2 - 1.25 * math.sin(5 * t)),
    "wall": lambda t: ((1 - t) ** 2 - 0.5 * t, 2 * (t - 1) - 0.5) if t < 1.5 else (math.inf, math.nan),
    "nan beyond": lambda t: (math.exp(-t), -math.exp(-t)) if t < 4 else (math.nan, math.nan),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@each("first", [1e-3, 1.0, 50.0])
@each("c2", [0.1, 0.9])
def test_a_step_satisfies_the_strong_wolfe_conditions(name, first, c2):
    function = FUNCTIONS[name]
    found, tried = _search(function, first, c2=c2)
    loss, slope = function(0.0)
    assert found.length == tried[-1] > 0 and len(tried) <= 20
    assert found.loss <= loss + 1e-4 * found.length * slope
    assert abs(found.slope) <= c2 * abs(slope)


def test_a_search_that_ends_early_takes_the_best_and_tries_it_last():
    found, tried = _search(FUNCTIONS["mt1"], 40.0, c2=1e-6, evaluations=4)
    assert found.length == tried[-1] and 4 <= len(tried) <= 5
    assert found.loss < FUNCTIONS["mt1"](0.0)[0]


@each("value", [math.nan, math.inf, 5.0])
def test_a_search_that_finds_nothing_says_so(value):
    found, tried = _search(lambda t: (0.0, -1.0) if t == 0 else (value, 1.0), evaluations=6)
    assert found is None and len(tried) == 6 and tried == sorted(tried, reverse=True)


def test_a_loss_that_falls_for_ever_ends_with_the_last_length():
    found, tried = _search(lambda t: (-t, -1.0), evaluations=5)
    assert found.length == tried[-1] == max(tried) and len(tried) == 5


# --- portions ---------------------------------------------------------------------------------------------------------
@each("samples", [1, 2, 3, 17, 64, 100])
@each("count", [1, 4, 12])
@pytest.mark.parametrize(("head", "tail"), [(0, 0), (0, 5), (5, 5), (5, 0)])
def test_a_batch_is_cut_into_portions_of_about_one_size(samples, count, head, tail):
    if head + tail > samples:
        return  # a batch is at least as long as what it shares
    division = divide(JointBatch(samples, head=head, tail=tail), count)
    sizes = np.diff(division.bounds)
    assert division.bounds[0] == 0 and division.bounds[-1] == samples and (sizes > 0).all()
    assert (
        division.bounds[division.heads] == head and division.bounds[division.count - division.tails] == samples - tail
    )
    assert sum(map(division.weight, range(division.count))) == pytest.approx(1)
    assert [division.portion(i) for i in range(division.count)][-1].stop == samples
    if not head and not tail and samples >= 2 * count:
        assert division.count == count and sizes.max() - sizes.min() <= 1


def test_portions_are_handed_out_once_and_late_ones_twice():
    portions = Portions(3, pace := Pace())
    assert [portions.give(worker, 0.0) for worker in (5, 6, 7)] == [0, 1, 2]
    assert pace.due(0.0) == {}, "nothing is known yet of how long they take"
    pace.end(6, 2.0)
    assert portions.take(1)
    assert portions.give(6, 2.0) is None and pace.due(2.0) == pytest.approx({5: 2, 7: 2}), "neither is late yet"
    assert portions.give(6, 2.001) == 0, "the one that is out for longest"
    pace.end(7, 3.0)
    assert portions.take(2)
    assert portions.give(7, 9.0) is None and pace.due(9.0) == {}, "two workers have it"
    assert portions.take(0) and portions.is_complete
    assert not portions.take(0), "the first result counts"
    assert portions.give(5, 9.0) is None


def _known(seconds):
    """The pace of workers that have had portions before."""
    pace = Pace()
    for worker, each_s in seconds.items():
        pace.start(worker, 0.0)
        pace.end(worker, each_s)
    return pace


def test_late_is_what_takes_longer_than_four_of_five_do():
    pace = _known({1: 1.0})
    for seconds in (1.0, 1.0, 1.3, 1.0, 1.0, 9.0, 1.0, 1.2, 1.0, 1.0, 1.0):
        pace.start(1, 0.0)
        pace.end(1, seconds)
        pace.start(1, 0.0)
        pace.end(1, 2 * pace.mean_s(1) - seconds)
    pace.start(1, 50.0)
    assert pace.end_of(1) == pytest.approx(50 + pace.mean_s(1))
    assert 1.0 < pace.due(50.0)[1] - 50.0 < 2.0, "one that took nine times as long is not how it is as a rule"


def test_a_slow_worker_has_none_of_the_last_portions():
    pace = _known({1: 1.0, 2: 1.0, 3: 4.0})
    for waiting, given in ((6, None), (7, 3)):
        portions = Portions(3 + waiting, pace)
        assert [portions.give(worker, now) for worker, now in ((3, 10.0), (1, 14.0), (2, 14.0))] == [0, 1, 2]
        pace.end(3, 14.0)
        assert portions.take(0)
        assert portions.give(3, 14.5) == given, "by 18.5 s the others have completed three more each"


def test_a_worker_that_was_too_slow_is_tried_again_now_and_then():
    pace = _known({1: 1.0})
    for worker, seconds in ((1, 1.0),) * 5 + ((3, 40.0),):
        pace.start(worker, 0.0)
        pace.end(worker, seconds)
    assert Portions(39, pace).give(3, 50.0) is None, "the other one has them all by 90 s"
    assert Portions(40, pace).give(3, 50.0) == 0
    pace.end(3, 90.0)
    assert Portions(1, pace).give(3, 489.0) is None
    assert Portions(1, pace).give(3, 491.0) == 0, "it has waited for ten times as long as its portion took"


def test_what_a_slow_worker_has_is_repeated_before_it_is_late():
    portions = Portions(2, pace := _known({1: 1.0, 2: 1.0, 3: 4.0}))
    assert [portions.give(worker, 50.0) for worker in (3, 1)] == [0, 1]
    assert portions.give(2, 50.5) == 0, "it has it by 51.5 s, and worker 3 by 54 s"
    pace.end(1, 51.0)
    assert portions.take(1) and portions.give(1, 51.0) is None, "nobody will be sooner"


def test_what_a_slow_worker_repeats_is_repeated_again():
    portions = Portions(1, pace := _known({1: 1.0, 2: 1.0, 3: 4.0}))
    assert portions.give(1, 10.0) == 0 and portions.give(3, 11.5) == 0, "the first is late"
    assert portions.give(2, 12.0) == 0, "it has it by 13 s, and worker 3 by 15.5 s"
    pace.forget([2])
    portions.forget([2])
    assert pace.mean_s(2) == pytest.approx(2.5), "of one of which nothing is known what the others take"
    assert portions.give(2, 12.5) == 0


def test_nobody_is_given_what_it_has():
    portions = Portions(1, Pace())
    assert portions.give(1, 0.0) == 0 and portions.give(1, 9.0) is None
    assert portions.give(2, 9.0) == 0 and portions.give(3, 9.0) is None


def test_what_the_dead_had_is_handed_out_again():
    portions = Portions(2, Pace())
    assert [portions.give(worker, 0.0) for worker in (1, 2, 3)] == [0, 1, 0]
    portions.forget([2, 3])
    assert portions.give(4, 1.0) == 1, "which nobody has any more"
    assert portions.give(4, 1.0) == 0, "rank 1 alone still has it"
    assert not portions.is_complete
    assert portions.take(0) and portions.take(1) and portions.is_complete


def test_x_is_a_vector_of_its_own():
    """Of half precision are only those that others see."""
    vectors = Vectors([torch.ones(3, dtype=torch.bfloat16)])
    vectors.copy(X, 0)
    vectors.axpy(X, X, 1e-3)
    vectors.copy(0, X)
    assert vectors[X][0].dtype == torch.float32 and vectors[0][0].dtype == torch.bfloat16
    assert vectors.dot(X, X) == pytest.approx(3 * 1.001**2, rel=1e-6)
