from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsl.lowering.bounds import lower_bound
from pdsl.lowering.exact_search import exact_search
from pdsl.lowering.list_schedule import HOLDS, RANKS, list_schedule
from pdsl.lowering.local_search import fused, improve
from pdsl.lowering.periods import lengthened, shortened
from pdsl.lowering.portfolio import named, relatives
from pdsl.lowering.schedule import Op, ScheduleError, loop_placement, peak_activations, v_placement
from pdsl.lowering.schedule_check import check_schedule
from pdsl.lowering.schedules import SCHEDULES
from pdsl.lowering.search import Candidate, NothingFits, placement_text, search
from pdsl.lowering.search_problem import Problem, problem_of
from pdsl.lowering.simulate import StageCosts, simulate
from tests.optimum import Pipeline, optimum

Caps = int | tuple[int, ...] | None


def problem(
    positions: int, microbatches: int, *, hop: int = 0, caps: Caps = None, costs: StageCosts | None = None, split: bool = True
) -> Problem:
    """One stage per position, unit costs unless said, activations of size 1."""
    costs = costs or StageCosts.equal(positions)
    given_caps = (caps,) * positions if isinstance(caps, int) else caps
    return problem_of(loop_placement(positions), microbatches, costs, hop=hop, caps=given_caps, split=split)


def unsplit(*forward: int) -> StageCosts:
    return StageCosts(forward, tuple(2 * f for f in forward), (0,) * len(forward))


def candidates(positions: int, forward: tuple[int, ...], caps: tuple[int, ...] | None = None) -> tuple[Candidate, ...]:
    """One stage, a loop of two, and a V; the costs of a position are the same in each, and so is what it holds: 2 per microbatch."""
    found = []
    for placement in (loop_placement(positions), loop_placement(positions, 2), v_placement(positions)):
        each = len(placement) // positions
        costs = tuple(Fraction(forward[r], each) for r in placement)
        found.append(Candidate(placement, StageCosts(costs, costs, costs), (Fraction(2, each),) * len(placement), caps))
    return tuple(found)


# --- the flat simulator -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("hop", [0, Fraction(1, 3)])
def test_the_flat_simulator_agrees_with_the_simulator(name, hop):
    family = SCHEDULES[name]
    made = family.build(3, 7, 2 if family.virtual else 1)
    costs = StageCosts(
        tuple(2 + s % 3 for s in range(made.stages)),
        tuple(Fraction(3 + s % 2, 2) for s in range(made.stages)),
        tuple(1 + s % 4 for s in range(made.stages)),
    )
    flat = problem_of(made.placement, 7, costs, hop=hop, sizes=[1 + s for s in range(made.stages)])
    rows = flat.rows_of(made)
    expected = simulate(made, costs, hop)
    ends = flat.ends(rows)
    assert ends is not None
    assert tuple(tuple(end * flat.unit for end in row) for row in ends) == expected.end
    assert flat.peaks(rows) == tuple(peak for peak, _ in peak_activations(made, [1 + s for s in range(made.stages)]))
    assert flat.in_order(rows)
    assert flat.schedule_of(rows, made.name) == made


def test_rows_that_cannot_progress_have_no_ends():
    flat = problem(2, 1)
    rows = flat.rows_of(SCHEDULES["gpipe"].build(2, 1, 1))
    assert flat.ends([rows[0][::-1], rows[1]]) is None
    assert not flat.in_order([rows[0][::-1], rows[1]])


def test_a_row_without_one_of_its_operations_is_not_in_order():
    flat = problem(2, 2)
    rows = flat.rows_of(SCHEDULES["one_f_one_b"].build(2, 2, 1))
    assert flat.in_order(rows)
    assert not flat.in_order([rows[0][:-1], rows[1]])
    assert not flat.in_order([rows[1], rows[0]])


def test_costs_of_the_wrong_length_or_sign_are_refused():
    with pytest.raises(ScheduleError, match="each of 2 stages"):
        problem_of((0, 1), 2, StageCosts.equal(3))
    with pytest.raises(ScheduleError, match="not be negative"):
        problem_of((0, 1), 2, StageCosts.equal(2), hop=-1)
    with pytest.raises(ScheduleError, match="1 caps for 2 positions"):
        problem_of((0, 1), 2, StageCosts.equal(2), caps=[1])


# --- proven optima -----------------------------------------------------------------------------------------------------------------------

FRONTIER = [  # (positions, microbatches, hop, whole backward, cap on every position, optimum)
    *((4, 8, 0, False, k, t) for k, t in enumerate((72, 41, 31, 27, 27), 1)),
    *((2, 4, 0, False, k, t) for k, t in enumerate((20, 13, 13), 1)),
    *((3, 4, 0, False, k, t) for k, t in enumerate((28, 17, 14, 14), 1)),
    *((3, 6, 0, False, k, t) for k, t in enumerate((42, 25, 20, 20), 1)),
    *((4, 6, 0, False, k, t) for k, t in enumerate((54, 31, 24, 21, 21), 1)),
    *((3, 6, 1, False, k, t) for k, t in enumerate((66, 36, 28, 25, 22, 22), 1)),
    *((4, 6, 1, False, k, t) for k, t in enumerate((90, 48, 36, 33, 30, 25), 1)),
    *((2, 6, 1, True, k, t) for k, t in enumerate((48, 27, 23, 23), 1)),
    *((3, 6, 1, True, k, t) for k, t in enumerate((78, 42, 33, 29, 28, 28), 1)),
    *((4, 8, 1, True, k, t) for k, t in enumerate((144, 75, 57, 46, 43, 39, 39), 1)),
]


@pytest.mark.parametrize(("p", "m", "hop", "whole", "cap", "optimum"), FRONTIER)
def test_the_exact_search_proves_the_frontier_of_memory_and_time(p, m, hop, whole, cap, optimum):
    flat = problem(p, m, hop=hop, caps=cap, costs=unsplit(*(1,) * p) if whole else None, split=not whole)
    found = exact_search(flat, nodes=20_000)
    assert found.proven
    assert found.makespan == optimum
    assert found.rows is not None
    assert flat.makespan(found.rows) == optimum
    assert flat.fits(found.rows)
    assert flat.in_order(found.rows)
    assert lower_bound(flat) <= optimum


TWO_CHUNKS = [  # (placement, microbatches, cap, optimum), positions 2, unit chunks
    *((v_placement(2), m, k, t) for m, row in ((2, (17, 15, 13)), (3, (25, 21, 19)), (4, (33, 27, 25))) for k, t in enumerate(row, 2)),
    *(
        (loop_placement(2, 2), m, k, t)
        for m, row in ((2, (17, 14, 13)), (3, (25, 20, 19)), (4, (33, 26, 25)))
        for k, t in enumerate(row, 2)
    ),
]


@pytest.mark.parametrize(("placement", "m", "cap", "optimum"), TWO_CHUNKS)
def test_the_exact_search_proves_optima_of_two_stages_per_position(placement, m, cap, optimum):
    flat = problem_of(placement, m, StageCosts.equal(4), caps=(cap, cap))
    found = exact_search(flat, nodes=20_000)
    assert found.proven
    assert found.makespan == optimum
    assert lower_bound(flat) <= optimum


UNEQUAL = [  # (F, I, W by stage; microbatches; hop; caps; optimum)
    ((1, 2), (1, 2), (1, 2), 4, 0, None, 25),
    ((1, 2), (1, 2), (1, 2), 4, 0, (2, 1), 25),
    ((1, 1, 2), (1, 1, 2), (1, 1, 2), 4, 0, None, 26),
    ((1, 1, 2), (1, 1, 2), (1, 1, 2), 4, 0, (3, 2, 1), 27),
    ((1, 2, 1), (1, 2, 1), (1, 2, 1), 4, 0, None, 25),
    ((2, 1, 1), (2, 1, 1), (2, 1, 1), 4, 0, (3, 2, 1), 24),
    ((2, 2, 2), (3, 3, 3), (1, 1, 1), 4, 0, None, 31),
    ((2, 2, 2), (3, 3, 3), (1, 1, 1), 4, 0, (3, 3, 3), 32),
    ((2, 2, 2), (3, 3, 3), (1, 1, 1), 4, 0, (3, 2, 1), 34),
    ((2, 2, 2), (2, 2, 2), (1, 1, 1), 4, 0, (3, 2, 1), 28),
    ((1, 1, 1), (1, 1, 1), (1, 1, 1), 4, 1, None, 17),
    ((1, 1, 1), (1, 1, 1), (1, 1, 1), 4, 1, (3, 3, 3), 22),
    ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), 8, 1, (4, 4, 4, 4), 39),
    ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), 8, 1, (4, 3, 2, 1), 41),
]


@pytest.mark.parametrize(("f", "i", "w", "m", "hop", "caps", "optimum"), UNEQUAL)
def test_auto_finds_the_proven_optimum_of_unequal_stages(f, i, w, m, hop, caps, optimum):
    one = Candidate(loop_placement(len(f)), StageCosts(f, i, w), (1,) * len(f), caps)
    found = search((one,), m, hop=hop)
    assert found.makespan == optimum
    assert found.optimal
    assert simulate(found.schedule, one.costs, hop).makespan == optimum


# --- what auto promises ----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.sampled_from([(0, 1), (0, 1, 2), loop_placement(2, 2), v_placement(2)]),
    st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=4, max_size=4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.none() | st.integers(2, 5),
    st.booleans(),
)
def test_the_exact_search_agrees_with_an_independent_one(placement, times, m, hop, cap, split):
    forward, gradient, weight = zip(*times[: len(placement)], strict=True)
    positions = max(placement) + 1
    caps = None if cap is None else (cap,) * positions
    whole = tuple(map(sum, zip(gradient, weight, strict=True)))
    independent = Pipeline(forward, gradient if split else whole, weight if split else None, placement, m, hop, caps)
    flat = problem_of(placement, m, StageCosts(forward, gradient, weight), hop=hop, caps=caps, split=split)
    found = exact_search(flat, nodes=200_000)
    assert found.proven
    assert found.makespan is not None
    assert found.makespan * flat.unit == optimum(independent, 500_000)


@st.composite
def cases(draw):
    positions = draw(st.integers(1, 4))
    forward = tuple(draw(st.integers(1, 4)) for _ in range(positions))
    caps = draw(st.none() | st.tuples(*(st.integers(2, 2 * positions + 2) for _ in range(positions))))
    return positions, forward, caps, draw(st.integers(1, 7)), draw(st.sampled_from([0, Fraction(1, 2), 2])), draw(st.booleans())


@settings(max_examples=30, derandomize=True, deadline=None)
@given(cases())
def test_auto_is_never_slower_than_a_named_schedule_that_fits_and_never_below_its_bound(case):
    positions, forward, caps, m, hop, split = case
    given_ = candidates(positions, forward, caps)
    found = search(given_, m, hop=hop, split=split)
    chosen = given_[found.candidate]
    assert check_schedule(found.schedule) == ()
    assert found.schedule.placement == chosen.placement
    assert simulate(found.schedule, chosen.costs, hop).makespan == found.makespan >= found.bound
    assert all(t.makespan is None or found.makespan <= t.makespan for t in found.tried)
    peaks = [peak for peak, _ in peak_activations(found.schedule, chosen.sizes)]
    assert caps is None or all(peak <= cap for peak, cap in zip(peaks, caps, strict=True))
    for family in SCHEDULES.values():
        each = len(chosen.placement) // positions
        if family.per_position(each if family.virtual else 1) != each or (not split and family.split):
            continue
        made = family.build(positions, m, each if family.virtual else 1)
        fits = caps is None or all(a[0] <= b for a, b in zip(peak_activations(made, chosen.sizes), caps, strict=True))
        if made.placement == chosen.placement and fits:
            assert found.makespan <= simulate(made, chosen.costs, hop).makespan


@settings(max_examples=12, derandomize=True, deadline=None)
@given(cases(), st.integers(2, 5))
def test_times_grow_with_the_costs(case, factor):
    positions, forward, caps, m, hop, split = case
    one = search(candidates(positions, forward, caps), m, hop=hop, split=split)
    scaled = search(candidates(positions, tuple(factor * f for f in forward), caps), m, hop=factor * hop, split=split)
    assert scaled.makespan == factor * one.makespan
    assert scaled.schedule == one.schedule


@settings(max_examples=25, derandomize=True, deadline=None)
@given(st.tuples(*(st.integers(1, 3) for _ in range(3))), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3))
def test_more_memory_less_latency_and_lower_costs_never_raise_the_optimum(forward, m, hop, cap):
    def optimum(costs, hop, cap):
        flat = problem(3, m, hop=hop, caps=cap, costs=costs)
        found = exact_search(flat, nodes=50_000)
        assert found.proven
        return found.makespan * flat.unit

    costs = StageCosts(forward, forward, forward)
    dearer = StageCosts((forward[0] + 1, *forward[1:]), forward, forward)
    here = optimum(costs, hop, cap)
    assert optimum(costs, hop, cap + 1) <= here <= optimum(costs, hop + 1, cap)
    assert here <= optimum(dearer, hop, cap)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(st.tuples(*(st.integers(1, 4) for _ in range(6))), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3))
def test_reversed_time_keeps_the_optimum_of_whole_backwards(times, m, hop, cap):
    forward, backward = times[:3], times[3:]
    there = problem(3, m, hop=hop, caps=cap, costs=StageCosts(forward, backward, (0,) * 3), split=False)
    back = problem(3, m, hop=hop, caps=cap, costs=StageCosts(backward, forward, (0,) * 3), split=False)
    assert exact_search(there).makespan == exact_search(back).makespan


def test_one_position_runs_its_microbatches_in_turn():
    found = search(candidates(1, (2,)), 5)
    assert found.makespan == 5 * 3 * 2
    assert found.schedule.stages == 1
    assert found.optimal


def test_latency_turns_the_ranking_around():
    fast = search(candidates(4, (1,) * 4), 8)
    slow = search(candidates(4, (1,) * 4), 8, hop=1)
    assert (fast.makespan, fast.schedule.stages) == (Fraction(51, 2), 8)
    assert (slow.makespan, slow.schedule.stages) == (30, 4)


def test_tight_memory_is_met_by_the_patterns_in_a_v():
    found = search(candidates(4, (1,) * 4, (4,) * 4), 8)
    assert found.makespan <= Fraction(59, 2)  # what v_min takes; 1F1B with room for two microbatches takes far longer
    assert placement_text(found.schedule.placement) == "v"


def test_what_does_not_fit_says_what_would():
    with pytest.raises(NothingFits) as caught:
        search(candidates(2, (1, 1), (1, 1)), 4)
    assert caught.value.short == ((0, 2, 1),) * 3
    assert "position 0 must hold 2 and has room for 1" in str(caught.value)


def test_the_table_says_why_a_schedule_does_not_count():
    found = search(candidates(3, (1, 1, 1), (4,) * 3)[:1], 6, split=False)
    reasons = {t.name: t.reason for t in found.tried if t.makespan is None}
    assert reasons["gpipe"] == "it holds 12 on position 0, which has room for 4"
    assert reasons["zero_bubble"] == "it splits the backward"


def test_another_process_finds_the_same_schedule():
    script = (
        "from tests.lowering.test_search import candidates\n"
        "from pdsl.lowering.search import search\n"
        "found = search(candidates(3, (1, 2, 1), (5, 6, 4)), 6, hop=1)\n"
        "print(found.way, found.makespan); print(found.schedule)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for seed in ("1", "2")
    }
    here = search(candidates(3, (1, 2, 1), (5, 6, 4)), 6, hop=1)
    assert runs == {f"{here.way} {here.makespan}\n{here.schedule}\n"}


# --- its parts -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [loop_placement(3), loop_placement(3, 2), v_placement(3)])
@pytest.mark.parametrize("cap", [None, 2, 4])
@pytest.mark.parametrize("split", [True, False])
def test_list_schedules_are_valid_and_keep_to_the_caps(placement, cap, split):
    flat = problem_of(placement, 5, StageCosts.equal(len(placement)), hop=1, caps=None if cap is None else (cap,) * 3, split=split)
    for rank in RANKS:
        for hold in HOLDS:
            rows = list_schedule(flat, rank, hold)
            assert rows is not None
            assert flat.in_order(rows)
            assert flat.fits(rows)
            made = flat.schedule_of(rows, "x")
            assert check_schedule(made) == ()
            assert simulate(made, StageCosts.equal(len(placement)), 1).makespan == flat.makespan(rows) * flat.unit


@pytest.mark.parametrize("placement", [loop_placement(3), loop_placement(3, 2), v_placement(3)])
@pytest.mark.parametrize("cap", [4, 5, 9])
def test_what_stands_between_the_halves_of_a_backward_counts(placement, cap):
    stages = len(placement)
    flat = problem_of(placement, 5, StageCosts.equal(stages), sizes=(2,) * stages, between=(0, *(1,) * (stages - 1)), caps=(cap,) * 3)
    seeds = [list_schedule(flat, rank, hold) for rank in RANKS for hold in HOLDS] + [seed.rows for seed in relatives(flat)]
    for rows in seeds:
        assert rows is not None
        assert flat.in_order(rows)
        assert flat.makespan(rows) is not None
        for row in flat.schedule_of(rows, "x").rows:
            held = 0
            for o in row:
                more = 1 if o.stage else 0
                held += {Op.FORWARD: 2, Op.BACKWARD_INPUT: more, Op.BACKWARD_WEIGHT: -2 - more, Op.BACKWARD: -2}[o.op]
                assert held <= cap
    one = Candidate(placement, StageCosts.equal(stages), (2,) * stages, (cap,) * 3, (0, *(1,) * (stages - 1)))
    found = search((one,), 5)
    assert flat.fits(flat.rows_of(found.schedule))
    assert found.bound <= found.makespan


def test_memory_between_the_halves_costs_time_and_the_optimum_knows():
    free = exact_search(problem(3, 4, caps=2))
    tight = problem_of(loop_placement(3), 4, StageCosts.equal(3), sizes=(2,) * 3, between=(1,) * 3, caps=(4,) * 3)
    found = exact_search(tight, nodes=50_000)
    assert found.proven
    assert found.rows is not None
    assert tight.fits(found.rows)
    assert free.makespan is not None
    assert found.makespan is not None
    assert free.makespan <= found.makespan <= 28  # one microbatch after the other
    auto = search((Candidate(loop_placement(3), StageCosts.equal(3), (2,) * 3, (4,) * 3, (1,) * 3),), 4)
    assert auto.makespan == found.makespan


def test_a_list_schedule_gives_up_where_one_microbatch_does_not_fit():
    assert list_schedule(problem_of(v_placement(2), 2, StageCosts.equal(4), caps=(1, 1)), "deepest") is None


@pytest.mark.parametrize("cap", [None, 1, 3])
def test_relatives_are_valid_and_the_first_are_1f1b_and_zero_bubble(cap):
    flat = problem(4, 8, caps=cap)
    found = {seed.name: seed.rows for seed in relatives(flat)}
    assert len(found) == 25
    for rows in found.values():
        assert rows is not None
        assert flat.in_order(rows)
        assert flat.fits(rows)
        assert flat.makespan(rows) is not None
    if cap is None:
        assert found["zero bubble, 0/2 more ahead, W delayed by r"] == flat.rows_of(SCHEDULES["zero_bubble"].build(4, 8, 1))


def test_all_schedules_of_a_placement_are_begun_with():
    assert {s.name for s in named(problem(4, 8))} == {n for n, f in SCHEDULES.items() if f.stages_per_position == 1}
    v = problem_of(v_placement(4), 8, StageCosts.equal(8))
    assert {s.name for s in named(v)} == {n for n, f in SCHEDULES.items() if f.placement == "v"}


def test_local_search_improves_what_list_scheduling_leaves():
    flat = problem(4, 6, hop=1, caps=4)
    rows = list_schedule(flat, "deepest")
    assert rows is not None
    found = improve(flat, rows, visits=100_000, goal=33)
    assert (flat.makespan(rows), found.makespan) == (35, 33)
    assert found.moves > 0
    assert flat.makespan(found.rows) == 33
    assert flat.fits(found.rows)
    assert flat.in_order(found.rows)
    assert improve(flat, rows, visits=0).rows == rows


def test_halves_of_a_backward_are_joined_where_nothing_is_lost():
    flat = problem(3, 4)
    split = flat.rows_of(SCHEDULES["zero_bubble"].build(3, 4, 1))
    joined = fused(flat, split, visits=10_000)
    assert flat.makespan(joined) == flat.makespan(split)
    assert flat.in_order(joined)
    assert sum(map(len, joined)) < sum(map(len, split))


def test_a_short_schedule_is_lengthened():
    long = problem(4, 64)
    short = shortened(long)
    assert short is not None
    assert short.microbatches == 14
    rows = short.rows_of(SCHEDULES["zero_bubble"].build(4, 14, 1))
    made = lengthened(short, rows, long)
    assert made is not None
    assert long.in_order(made)
    assert long.makespan(made) == 3 * 64 + 3
    assert long.peaks(made) == short.peaks(rows)
    assert shortened(problem(4, 16)) is None


def test_large_problems_take_a_bounded_amount_of_work():
    found = search(candidates(8, (2, 1, 1, 1, 1, 1, 1, 2), (12,) * 8), 48, hop=Fraction(1, 4))
    assert found.makespan <= min(t.makespan for t in found.tried if t.makespan is not None)
    assert check_schedule(found.schedule) == ()
