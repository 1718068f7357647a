"""Plans: the best cut under a limit, the predicted time and memory, and their drawing."""

from dataclasses import replace

import pytest

from hpcdist.errors import ConfigError
from hpcdist.parallel import by_hand, schedules
from hpcdist.parallel.cost import LayerCost
from hpcdist.parallel.plan import compare, predict
from hpcdist.parallel.schedules.base import gantt
from hpcdist.tools.cli.plan import plan_rows, rank_rows, stage_rows

LAYER = LayerCost("0 Linear", 0.001, 0.002, 0.001, 1000, 500, 100)
EIGHT = [*[LAYER] * 7, replace(LAYER, boundary_bytes=0)]


def test_a_plan_of_equal_layers():
    plan = predict(EIGHT, 4, micro_batches=8)
    assert plan.cut.sizes == (2, 2, 2, 2) and plan.timing.bubble == pytest.approx(3 / 11) == plan.equal_bubble
    assert plan.timing.makespan_s == pytest.approx(11 * 0.006)
    assert plan.memory_bytes == (4000 + 4 * 1000, 4000 + 3 * 1100, 4000 + 2 * 1100, 4000 + 1100)
    assert [stage.sent_bytes for stage in plan.stages] == [100, 100, 100, 0]
    with_messages = predict(EIGHT, 2, micro_batches=1, transfer_s=lambda n_bytes: n_bytes / 1e5)
    assert with_messages.timing.makespan_s == pytest.approx(8 * 0.003 + 2 * 0.001)


def test_unequal_layers_have_a_larger_bubble():
    slow = replace(LAYER, forward_s=0.01, backward_s=0.02)
    plan = predict([*EIGHT[:-1], slow], 2, micro_batches=4)
    assert plan.cut.sizes == (7, 1) and plan.timing.bubble > plan.equal_bubble == pytest.approx(1 / 5)


def test_stages_of_a_rank_are_smaller():
    plan = predict(EIGHT, 2, micro_batches=4, schedule="interleaved", chunks=2)
    assert plan.cut.stages == 4 and [stage.rank for stage in plan.stages] == [0, 1, 0, 1]
    assert plan.equal_bubble == pytest.approx(1 / 9) == plan.timing.bubble


def test_halves_of_backward_passes():
    halves = predict(EIGHT, 4, micro_batches=8, schedule="zero_bubble")
    whole = predict(EIGHT, 4, micro_batches=8)
    work = 8 * 0.006
    assert halves.timing.makespan_s - work == pytest.approx((whole.timing.makespan_s - work) / 3)


def test_recomputation_keeps_inputs_only():
    plain, again = (predict(EIGHT, 2, micro_batches=8, schedule="gpipe", recompute=on) for on in (False, True))
    assert plain.memory_bytes == (8000 + 8 * 2000, 8000 + 8 * 2100)
    assert again.memory_bytes == (8000 + 2000, 8000 + 8 * 100 + 2000)
    assert again.timing.makespan_s == pytest.approx(plain.timing.makespan_s * 4 / 3)


def test_recomputed_activations_are_kept_for_the_gradients_of_weights():
    """Rank r of zero_bubble makes these r micro-batches later: it keeps r + 1 of them, and p inputs."""
    plain, again = (
        predict(EIGHT, 4, micro_batches=8, schedule="zero_bubble", cut=by_hand([2] * 4, 8), recompute=on)
        for on in (False, True)
    )
    assert plain.memory_bytes == (4000 + 4 * 1000, *[4000 + 4 * 1100] * 3)
    assert again.memory_bytes == (4000 + 1000, *(4000 + 4 * 100 + kept * 1000 for kept in (2, 3, 4)))
    assert again.timing.peaks == plain.timing.peaks == [4] * 4
    work = 8 * 0.006
    assert again.timing.makespan_s - work * 4 / 3 == pytest.approx(3 * (0.002 + 0.004 - 0.002))
    assert {plan.schedule for plan in compare(EIGHT, 2, recompute=True)} == set(schedules.available())
    limited = predict(EIGHT, 4, micro_batches=8, schedule="zero_bubble", recompute=True, limit_bytes=8000)
    assert max(limited.memory_bytes) <= 8000 < max(again.memory_bytes)


def test_a_limit_moves_the_cut():
    """The first rank keeps two micro-batches, the second one only one."""
    heavy = [replace(LAYER, parameter_bytes=1, activation_bytes=1000)] * 8
    assert predict(heavy, 2).cut.sizes == (4, 4)
    limited = predict(heavy, 2, limit_bytes=6200)
    assert limited.cut.sizes == (3, 5) and max(limited.memory_bytes) <= 6200
    with pytest.raises(ConfigError, match=r"at most 5000 bytes; got 6006 of stage 0 \(layers 0 to 2\) in the cut that"):
        predict(heavy, 2, limit_bytes=5000)


def test_schedules_are_compared():
    found = compare(EIGHT, 2, micro_batches=8)
    assert [(row["schedule"], row["stages\nper rank"]) for row in plan_rows(found)] == [
        ("gpipe", 1), ("gpipe", 2), ("interleaved", 2), ("one_f_one_b", 1), ("zero_bubble", 1),
    ]  # fmt: skip
    fastest = min(found, key=lambda plan: plan.timing.makespan_s)
    assert fastest.schedule == "zero_bubble" and found[3].timing == predict(EIGHT, 2, micro_batches=8).timing


def test_rows_and_json():
    plan = predict(EIGHT, 2)
    assert [*stage_rows(plan)[1].values()] == [1, 1, "4 to 7", 4.0, 8.0, 0.004, 0.002, 0.0]
    assert [*rank_rows(plan)[0].values()] == [0, "20.0%", 2, 0.012]
    assert plan.as_dict()["stages"][1]["layers"] == [4, 5, 6, 7] and plan.as_dict()["ranks"][1]["micro_batches"] == 1


def test_drawings():
    def drawn(name, ranks, micro_batches, chunks=1, columns=100):
        table = schedules.create(name, ranks, micro_batches, chunks)
        return gantt(table, schedules.simulate(table, {"F": 1, "B": 2, "I": 1, "W": 1}), columns)

    assert drawn("one_f_one_b", 2, 3) == [
        "rank 0  F0-F1-      B0----F2-B1----   B2----",
        "rank 1     F0-B0----F1-B1----F2-B2----",
    ]
    assert drawn("zero_bubble", 2, 2) == ["rank 0  F0-F1-   I0-W0-I1-W1-", "rank 1     F0-I0-F1-I1-W0-W1-"]
    assert drawn("gpipe", 2, 1, 2) == [
        "rank 0  F0a-    F0b-            B0b-----        B0a-----",
        "rank 1      F0a-    F0b-B0b-----        B0a-----",
    ]
    assert drawn("gpipe", 2, 1, 2, columns=24)[0] == "rank 0  F0  F0      B0b-    B0a-"
    assert drawn("gpipe", 2, 2, columns=9) == ["rank 0  FF   B0B1", "rank 1   FFB0B1"]
