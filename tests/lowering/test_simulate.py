from __future__ import annotations

from fractions import Fraction
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsl.lowering.schedule import Operation, Schedule, ScheduleError, repeat
from pdsl.lowering.schedules import SCHEDULES, gpipe, interleaved_1f1b, one_f_one_b, single
from pdsl.lowering.simulate import StageCosts, StuckSchedule, simulate


def unsplit(*forward: int) -> StageCosts:
    """Backward takes twice the forward."""
    return StageCosts(forward, tuple(2 * f for f in forward), (0,) * len(forward))


def rows(placement: tuple[int, ...], microbatches: int, *texts: str) -> Schedule:
    return Schedule("rows", len(placement), microbatches, placement, tuple(tuple(map(Operation.parse, t.split())) for t in texts))


# --- published figures ------------------------------------------------------------------------------------------------------------------

EQUAL = {
    (2, 1): 6, (2, 2): 9, (2, 3): 12, (2, 4): 15, (2, 8): 27, (3, 1): 9, (3, 2): 12, (3, 3): 15, (3, 4): 18, (3, 6): 24,
    (4, 1): 12, (4, 2): 15, (4, 3): 18, (4, 4): 21, (4, 8): 33,
}  # fmt: skip
LOOPED = {(2, 2): 15, (2, 4): 27, (2, 8): 51, (3, 3): 24, (3, 6): 42, (4, 4): 33, (4, 8): 57}  # in half units: F = 1, B = 2 per chunk


@pytest.mark.parametrize(("count", "makespan"), EQUAL.items())
def test_gpipe_and_1f1b_take_the_optimal_time_on_equal_stages(count, makespan):
    costs = unsplit(*(1,) * count[0])
    assert simulate(gpipe(*count), costs).makespan == makespan
    assert simulate(one_f_one_b(*count), costs).makespan == makespan


@pytest.mark.parametrize(("count", "makespan"), LOOPED.items())
def test_interleaving_halves_the_bubble_with_two_chunks(count, makespan):
    assert simulate(interleaved_1f1b(*count, 2), unsplit(*(1,) * (2 * count[0]))).makespan == makespan
    halves = StageCosts.equal(2 * count[0], Fraction(1, 2), Fraction(1, 2), Fraction(1, 2))
    assert simulate(interleaved_1f1b(*count, 2), halves).makespan == Fraction(makespan, 2)


@pytest.mark.parametrize(
    ("count", "forward", "slow_gpipe", "slow_1f1b"),
    [
        ((2, 4), (1, 2), 27, 27),
        ((2, 4), (2, 1), 27, 25),
        ((3, 4), (1, 1, 2), 30, 30),
        ((3, 4), (1, 2, 1), 30, 28),
        ((3, 4), (2, 1, 1), 30, 26),
        ((4, 4), (1, 1, 1, 2), 33, 33),
    ],
)
def test_unequal_stages_take_the_proven_times(count, forward, slow_gpipe, slow_1f1b):
    assert simulate(gpipe(*count), unsplit(*forward)).makespan == slow_gpipe
    assert simulate(one_f_one_b(*count), unsplit(*forward)).makespan == slow_1f1b


@pytest.mark.parametrize(("count", "slow_gpipe", "slow_1f1b"), [((2, 4), 17, 19), ((3, 4), 22, 26), ((4, 4), 27, 31), ((4, 8), 39, 49)])
def test_latency_costs_1f1b_more_than_gpipe(count, slow_gpipe, slow_1f1b):
    costs = unsplit(*(1,) * count[0])
    assert simulate(gpipe(*count), costs, hop=1).makespan == slow_gpipe
    assert simulate(one_f_one_b(*count), costs, hop=1).makespan == slow_1f1b


def test_a_split_backward_fills_the_bubble():
    zero_bubble = rows(
        (0, 1, 2),
        4,
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    )
    assert simulate(zero_bubble, StageCosts.equal(3)).makespan == 14
    assert simulate(zero_bubble, StageCosts((1, 1, 2), (1, 1, 2), (1, 1, 2))).makespan == 26
    assert simulate(zero_bubble, StageCosts.equal(3, 2, 3, 1)).makespan == 32
    assert simulate(zero_bubble, StageCosts.equal(3), hop=1).makespan == 22


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_the_bubble_is_the_exact_rational(p, m):
    assert simulate(gpipe(p, m), StageCosts.equal(p)).bubble == Fraction(p - 1, m + p - 1)
    assert simulate(one_f_one_b(p, m), StageCosts.equal(p)).bubble == Fraction(p - 1, m + p - 1)
    for v in (2, 4):
        assert simulate(interleaved_1f1b(p, m, v), StageCosts.equal(p * v)).bubble == Fraction(p - 1, v * m + p - 1)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(2, 4), st.fractions(Fraction(1, 4), 4), st.fractions(Fraction(1, 4), 4))
def test_the_formula_of_whole_backwards_equals_the_simulation_for_every_count(p, m, v, forward, backward):
    for family in (f for f in SCHEDULES.values() if not f.split):
        virtual = v if family.virtual else 1
        if family.accepts(p, m, virtual) is None:
            costs = StageCosts.equal(p * virtual, forward, backward, 0)
            assert simulate(family.generate(p, m, virtual), costs).bubble == family.bubble(p, m, virtual)


# --- what a timeline says ---------------------------------------------------------------------------------------------------------------


def test_a_timeline_has_start_end_and_idle_time_of_every_position():
    half = Fraction(1, 2)
    timeline = simulate(one_f_one_b(2, 2), StageCosts((1, 2), (1, 2), (1, 0)), hop=half)
    assert timeline.start == ((0, 1, 6, 10), (1 + half, 3 + half, 5 + half, 7 + half))
    assert timeline.end == ((1, 2, 8, 12), (3 + half, 5 + half, 7 + half, 9 + half))
    assert timeline.makespan == 12
    assert timeline.idle == (6, 4)
    assert timeline.bubble == Fraction(10, 24)


def test_whole_numbers_stay_whole_and_floats_give_floats():
    assert isinstance(simulate(gpipe(2, 2), StageCosts.equal(2)).makespan, int)
    timeline = simulate(gpipe(2, 2), StageCosts((0.5, Fraction(1, 2)), (1, 1), (0, 0)))
    assert timeline.makespan == pytest.approx(4.5)
    assert isinstance(timeline.bubble, float)
    assert timeline.bubble == pytest.approx(1 / 3)


def test_stages_on_one_position_have_no_hop_between_them():
    schedule = rows((0, 0), 1, "0F0 1F0 1B0 0B0")
    assert simulate(schedule, StageCosts.equal(2), hop=100).makespan == 6


def test_one_position_never_idles_and_no_work_has_no_bubble():
    assert simulate(single(7), StageCosts.equal(1)).idle == (0,)
    assert simulate(single(7), StageCosts.equal(1, 0, 0, 0)).bubble == 0


def test_rounds_pay_the_bubble_each_and_one_long_round_pays_it_once():
    costs = StageCosts.equal(3)
    assert simulate(repeat(one_f_one_b(3, 3), 2), costs).bubble == Fraction(2, 5)
    assert simulate(SCHEDULES["one_f_one_b"].accumulate(3, 3, rounds=2), costs).bubble == Fraction(2, 8)


@given(st.integers(1, 5), st.integers(1, 8), st.lists(st.fractions(0, 5), min_size=3, max_size=3), st.fractions(0, 3), st.integers(2, 7))
def test_times_scale_with_the_costs(p, m, times, hop, factor):
    def run(k):
        return simulate(one_f_one_b(p, m), StageCosts.equal(p, *(k * t for t in times)), k * hop).makespan

    assert run(factor) == factor * run(1)


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=5), st.integers(1, 8), st.integers(0, 4))
def test_no_schedule_beats_the_work_of_a_position_or_the_way_of_a_microbatch(stages, m, hop):
    p = len(stages)
    costs = StageCosts(*map(tuple, zip(*stages, strict=True)))
    way = sum(map(sum, stages)) + 2 * hop * (p - 1)
    for schedule in (gpipe(p, m), one_f_one_b(p, m)):
        timeline = simulate(schedule, costs, hop)
        assert timeline.makespan >= max(way, *(m * sum(s) for s in stages))
        assert timeline.idle == tuple(timeline.makespan - m * sum(s) for s in stages)


# --- rows that cannot run ---------------------------------------------------------------------------------------------------------------


def test_a_circle_is_told_with_what_everyone_waits_for():
    with pytest.raises(StuckSchedule) as caught:
        simulate(rows((0, 1), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), StageCosts.equal(2))
    assert caught.value.blocked == (
        "position 0, action 1: 0B0 waits for 1B0 (position 1, action 2)",
        "position 1, action 1: 1F1 waits for 0F1 (position 0, action 2)",
    )
    assert "does not progress: position 0, action 1" in str(caught.value)


def test_an_operation_that_is_nowhere_is_told():
    with pytest.raises(StuckSchedule, match="position 1, action 0: 1F0 waits for 0F0, which is in no row"):
        simulate(rows((0, 1), 1, "0B0", "1F0 1B0"), StageCosts.equal(2))


def test_costs_stages_and_repetitions_that_do_not_fit_are_refused():
    with pytest.raises(ScheduleError, match="2 forward costs for 3 stages"):
        simulate(gpipe(3, 1), StageCosts.equal(2))
    with pytest.raises(ScheduleError, match="position 0, action 1: 0F0 is computed a second time"):
        simulate(rows((0,), 1, "0F0 0F0"), StageCosts.equal(1))
    with pytest.raises(ScheduleError, match="position 0, action 0: 1F0 is outside 1 stages and 1 microbatches"):
        simulate(rows((0,), 1, "1F0"), StageCosts.equal(1))


def test_a_schedule_of_32768_operations_takes_less_than_a_second():
    schedule = interleaved_1f1b(16, 256, 4)
    assert sum(map(len, schedule.rows)) == 32_768
    before = perf_counter()
    timeline = simulate(schedule, StageCosts.equal(64))
    assert perf_counter() - before < 1
    assert timeline.bubble == Fraction(15, 1039)
