"""Every schedule can be executed, keeps few activations, and has the bubble of its paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.parallel import schedules
from hpcdist.parallel.schedules import Operation

SIZES = [(p, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 4, 6, 7, 8, 15)]
ONE_CHUNK = ("one_f_one_b", "zero_bubble")


def thirds(chunks=1):
    """A backward pass takes twice a forward pass, and each of its halves as long."""
    return {"F": 1 / chunks, "B": 2 / chunks, "I": 1 / chunks, "W": 1 / chunks}


def timing(name, ranks, micro_batches, chunks=1):
    return schedules.simulate(schedules.create(name, ranks, micro_batches, chunks), thirds(chunks))


@pytest.mark.parametrize("name", schedules.available())
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_table_can_be_executed_and_its_bubble_is_known(name, chunks):
    """`make` checks each table. Few micro-batches are in one rank at a time, which costs the others their chunks."""
    if chunks > 1 and name in ONE_CHUNK:
        with pytest.raises(ConfigError, match=f"chunks must be 1 with the schedule {name}; got {chunks}"):
            schedules.create(name, 2, 4, chunks)
        return
    for p, m in SIZES:
        bubble_s = timing(name, p, m, chunks).makespan_s - 3 * m
        few = max(0, p - m)
        if name == "zero_bubble":
            assert bubble_s == pytest.approx(p - 1 + few), (p, m)
        else:
            assert bubble_s == pytest.approx((3 * (p - 1) + 3 * few * (chunks - 1)) / chunks), (p, m)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@given(st.sampled_from(SIZES), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_share_of_the_bubble_whatever_the_backward_pass_takes(name, sizes, forward, backward):
    p, m = sizes
    found = schedules.simulate(schedules.create(name, p, m), {"F": forward, "B": backward})
    assert found.bubbles == pytest.approx([(p - 1) / (m + p - 1)] * p) and found.bubble == pytest.approx(
        found.bubbles[0]
    )


def test_micro_batches_kept():
    for p, m in SIZES:
        assert timing("gpipe", p, m).peaks == [m] * p
        assert timing("one_f_one_b", p, m).peaks == [min(m, p - rank) for rank in range(p)]
        assert max(timing("zero_bubble", p, m).peaks) <= min(m, p), "no more than 1F1B"
        assert max(timing("interleaved", p, m, 2).peaks) <= min(2 * m, 3 * p + max(0, m % p))


def test_one_chunk_of_interleaved_is_1f1b():
    for p, m in SIZES:
        assert schedules.create("interleaved", p, m) == schedules.create("one_f_one_b", p, m)


def test_results_that_travel():
    table = schedules.create("gpipe", 2, 1)
    found = schedules.simulate(table, {"F": 1, "B": 2}, transfer_s=lambda operation: 0.5)
    assert (
        found.makespan_s == 7
        and found.spans_s == [[(0, 1), (5, 7)], [(1.5, 2.5), (2.5, 4.5)]]
        and found.bubbles == pytest.approx([4 / 7] * 2)
    )
    alone = schedules.create("gpipe", 1, 1, 2)
    assert schedules.simulate(alone, {"F": 1, "B": 2}, transfer_s=lambda operation: 0.5).makespan_s == 6


def test_seconds_of_each_operation():
    found = schedules.simulate(schedules.create("gpipe", 2, 2), lambda op: 1.0 + op.stage)
    assert found.makespan_s == 10 and found.bubbles == pytest.approx([0.6, 0.2])


# --- tables that can't be executed ------------------------------------------------------------------------------------
def F(stage, micro_batch):
    return Operation("F", stage, micro_batch)


def B(stage, micro_batch):
    return Operation("B", stage, micro_batch)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[]], "table must have one list for each of 2 ranks; got 1"),
        ([[Operation("X", 0, 0)], []], "kind must be one of F, B, I, W; got 'X'"),
        ([[F(1, 0)], []], "stage must be one that rank 0 of 2 has; got F0 of stage 1"),
        ([[F(0, 0)], []], r"of stage 0 must be 0 to 0, each once .* \(gradients of inputs\); got none"),
        ([[F(0, 0), B(0, 0), B(0, 0)], []], r"each once and in this order \(gradients of inputs\); got 0, 0"),
        ([[F(0, 0), Operation("I", 0, 0)], []], r"each once and in this order \(gradients of weights\); got none"),
        ([[B(0, 0), F(0, 0)], [F(1, 0), B(1, 0)]], "none waits for ever; got rank 0 at B0 of stage 0, rank 1 at F0 of"),
        (
            [[F(0, 0), Operation("W", 0, 0), Operation("I", 0, 0)], [F(1, 0), B(1, 0)]],
            "none waits for ever; got rank 0 at W0 of stage 0",
        ),
    ],
)
def test_a_table_is_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        schedules.check(table, ranks=2, micro_batches=1)


def test_numbers_are_refused():
    with pytest.raises(ConfigError, match="micro_batches of a schedule must be at least 1; got 0"):
        schedules.create("gpipe", 2, 0)
    with pytest.raises(UnknownNameError, match=r"schedule must be one of gpipe, .*; got 'gpip'\. Did you mean 'gpipe'"):
        schedules.create("gpip", 2, 1)
