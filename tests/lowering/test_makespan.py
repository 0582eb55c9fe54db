"""Fast step times against the simulator."""

from __future__ import annotations

import random

import pytest

from pdsl.lowering.makespan import StepTimes, makespan
from pdsl.lowering.schedules import SCHEDULES
from pdsl.lowering.simulate import StageCosts, simulate


def simulated(schedule: str, positions: int, forward: list[int], microbatches: int) -> int:
    virtual = len(forward) // positions
    made = SCHEDULES[schedule].build(positions, microbatches, virtual)
    costs = tuple(forward)
    return int(simulate(made, StageCosts(costs, costs, costs)).makespan)


def cases(count: int, seed: int, most: int = 20):
    draw = random.Random(seed)
    for _ in range(count):
        schedule = draw.choice([*SCHEDULES, "gpipe", "one_f_one_b", "one_f_one_b", "interleaved_1f1b"])
        positions = draw.randint(1, 8)
        virtual = SCHEDULES[schedule].per_position(draw.randint(2, 3))
        yield schedule, positions, [draw.randint(1, 20) for _ in range(positions * virtual)], draw.randint(1, most)


def test_the_step_time_is_that_of_the_simulator():
    for schedule, positions, forward, count in cases(700, seed=1):
        assert makespan(schedule, positions, forward, count) == simulated(schedule, positions, forward, count), (schedule, forward, count)


def test_many_microbatches_follow_the_line_of_the_steady_state():
    for schedule, positions, forward, count in cases(40, seed=2, most=120):
        assert StepTimes(schedule, positions, forward).time(count) == simulated(schedule, positions, forward, count), (
            schedule,
            forward,
            count,
        )


def test_the_room_within_a_deadline_is_found_exactly_and_never_beyond_its_bound():
    draw = random.Random(3)
    for schedule, positions, forward, _ in cases(900, seed=4, most=12):
        if schedule not in ("gpipe", "one_f_one_b", "zero_bubble"):  # of others the step time may fall where a count fits better
            continue
        times = StepTimes(schedule, positions, forward)
        deadline = draw.randint(1, 2 * times.time(30))
        expected = max((c for c in range(1, 51) if times.time(c) <= deadline), default=0)
        assert times.most(deadline, 50) == expected
        assert min(50, times.bound(deadline)) >= expected
        assert all(times.least(c) <= times.time(c) for c in range(1, 12))


def test_no_run_is_shorter_than_its_least_time_or_longer_than_its_bound():
    for schedule, positions, forward, _ in cases(150, seed=5):
        times = StepTimes(schedule, positions, forward)
        for count in (1, 2, 3, 5, 8, 13):
            step = times.time(count)
            assert times.least(count) <= step, (schedule, forward, count)
            assert times.bound(step) >= count, (schedule, forward, count)


def test_stages_without_work_count_as_one():
    assert makespan("one_f_one_b", 2, [0, 5], 3) == makespan("one_f_one_b", 2, [1, 5], 3)


def test_a_huge_batch_needs_no_walk_of_its_own():
    times = StepTimes("one_f_one_b", 4, [3, 5, 2, 4])
    assert times.time(10**9) == times.time(1000) + (10**9 - 1000) * 15
    assert times.most(times.time(10**9), 10**12) == 10**9


@pytest.mark.parametrize(("schedule", "expected"), [("gpipe", 3 * (10 + 3 * 4)), ("one_f_one_b", 3 * (10 + 3 * 4))])
def test_a_step_of_a_slow_last_stage_fills_once_and_then_follows_it(schedule, expected):
    assert makespan(schedule, 3, [3, 3, 4], 4) == expected


@pytest.mark.parametrize("schedule", [name for name, family in SCHEDULES.items() if name not in ("gpipe", "one_f_one_b")])
def test_the_pace_of_the_slowest_position_is_kept_once_it_is_reached(schedule):
    draw = random.Random(8)
    reached = 0
    for _ in range(12):
        positions = draw.randint(2, 4)
        forward = [draw.randint(6, 12) for _ in range(positions * SCHEDULES[schedule].per_position(2))]
        times = StepTimes(schedule, positions, forward)
        for count in (3 * positions + 1, 4 * positions, 6 * positions + 1):
            assert times.time(count) == simulated(schedule, positions, forward, count), (forward, count)
        reached += times._saturated
    assert (reached > 0) is (schedule not in ("interleaved_1f1b", "interleaved_zero_bubble"))
