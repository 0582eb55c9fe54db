"""Optima that an exhaustive search proves, beside what the named schedules reach: published tables, and the reason for each choice of a schedule.

Times are whole numbers in one unit. A frontier is the optimum for a cap of 1, 2, 3, ... activations on every position.
"""

from __future__ import annotations

import itertools
import random

import pytest

from pdsl.lowering.schedule import Op, Operation, peak_in_flight
from pdsl.lowering.schedule import Schedule as Rows
from pdsl.lowering.schedules import SCHEDULES, one_f_one_b, zero_bubble, zero_bubble_2
from pdsl.lowering.simulate import StageCosts, simulate
from tests.optimum import Pipeline, lower_bound, optimum

V, LOOP = (0, 1, 1, 0), (0, 1, 0, 1)


def frontier(caps: int, **how) -> tuple[int, ...]:
    return tuple(optimum(Pipeline.equal(**how, cap=cap)) for cap in range(1, caps + 1))


# --- whole backwards --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "step"),
    [
        ((2, 1), 6),
        ((2, 2), 9),
        ((2, 3), 12),
        ((2, 4), 15),
        ((2, 8), 27),
        ((3, 1), 9),
        ((3, 2), 12),
        ((3, 3), 15),
        ((3, 4), 18),
        ((3, 6), 24),
        ((4, 1), 12),
        ((4, 2), 15),
        ((4, 3), 18),
        ((4, 4), 21),
        ((4, 8), 33),
    ],
)
def test_with_whole_backwards_and_without_latency_no_order_beats_gpipe_and_1f1b(size, step):
    assert optimum(Pipeline.equal(*size)) == step
    for name in ("gpipe", "one_f_one_b", "eager_1f1b"):
        assert simulate(SCHEDULES[name].build(*size, 1), StageCosts.equal(size[0])).makespan == step


@pytest.mark.parametrize("size", [(2, 4), (3, 4), (4, 4)])
def test_with_one_activation_each_nothing_overlaps(size):
    assert optimum(Pipeline.equal(*size, cap=1)) == 3 * size[0] * size[1]


@pytest.mark.parametrize(
    ("size", "steps"), [((2, 6), (48, 27, 23, 23)), ((3, 6), (78, 42, 33, 29, 28, 28)), ((4, 8), (144, 75, 57, 46, 43, 39, 39))]
)
def test_latency_makes_memory_worth_time(size, steps):
    assert frontier(len(steps), positions=size[0], microbatches=size[1], hop=1) == steps


@pytest.mark.parametrize(
    ("forward", "best", "within_1f1b", "gpipe_step", "named"),
    [
        ((1, 2), 27, 27, 27, 27),
        ((2, 1), 24, 25, 27, 25),
        ((1, 1, 2), 30, 30, 30, 30),
        ((1, 2, 1), 27, 28, 30, 28),
        ((2, 1, 1), 24, 26, 30, 26),
        ((1, 1, 1, 2), 33, 33, 33, 33),
    ],
)
def test_unequal_stages_with_whole_backwards(forward, best, within_1f1b, gpipe_step, named):
    p = len(forward)
    caps = tuple(range(p, 0, -1))
    of = Pipeline(forward, tuple(2 * f for f in forward), None, tuple(range(p)), 4)
    assert (lower_bound(of), optimum(of)) == (best, best)
    assert optimum(Pipeline(of.forward, of.backward, None, of.place, 4, caps=caps)) == within_1f1b
    costs = StageCosts(forward, forward, forward)
    assert simulate(SCHEDULES["gpipe"].build(p, 4, 1), costs).makespan == gpipe_step
    assert simulate(one_f_one_b(p, 4), costs).makespan == named


@pytest.mark.parametrize(("size", "gpipe_step", "named"), [((2, 4), 17, 19), ((3, 4), 22, 26), ((4, 4), 27, 31), ((4, 8), 39, 49)])
def test_latency_reverses_the_ranking_of_gpipe_and_1f1b_and_1f1b_is_best_within_its_memory(size, gpipe_step, named):
    p, _ = size
    costs = StageCosts.equal(p)
    assert simulate(SCHEDULES["gpipe"].build(*size, 1), costs, hop=1).makespan == gpipe_step
    assert simulate(one_f_one_b(*size), costs, hop=1).makespan == named
    assert optimum(Pipeline.equal(*size, hop=1)) == gpipe_step
    of = Pipeline.equal(*size, hop=1)
    assert optimum(Pipeline(of.forward, of.backward, None, of.place, size[1], 1, tuple(range(p, 0, -1)))) == named


def test_twice_the_microbatches_in_flight_hide_the_latency():
    eager = SCHEDULES["eager_1f1b"].build(4, 8, 1)
    assert simulate(eager, StageCosts.equal(4), hop=1).makespan == 39
    assert peak_in_flight(eager) == (7, 5, 3, 1)


def test_reversing_time_keeps_the_optimum():
    draw = random.Random(5)
    for _ in range(25):
        p = draw.randint(2, 3)
        forward, backward = (tuple(draw.randint(1, 4) for _ in range(p)) for _ in range(2))
        m, hop, cap = draw.randint(1, 4), draw.randint(0, 2), draw.randint(1, 4)
        one = Pipeline(forward, backward, None, tuple(range(p)), m, hop, (cap,) * p)
        other = Pipeline(backward, forward, None, tuple(range(p)), m, hop, (cap,) * p)
        assert optimum(one) == optimum(other)


def test_room_never_costs_time_and_latency_and_work_never_save_it():
    draw = random.Random(6)
    for _ in range(20):
        p, m = draw.randint(2, 3), draw.randint(2, 4)
        times = [tuple(draw.randint(1, 4) for _ in range(p)) for _ in range(3)]
        hop, cap, place = draw.randint(0, 2), draw.randint(1, 3), tuple(range(p))
        here = optimum(Pipeline(*times, place, m, hop, (cap,) * p))
        assert optimum(Pipeline(*times, place, m, hop, (cap + 1,) * p)) <= here
        assert optimum(Pipeline(*times, place, m, hop + 1, (cap,) * p)) >= here
        kind, stage = draw.randrange(3), draw.randrange(p)
        slower = [tuple(t + (k == kind and s == stage) for s, t in enumerate(row)) for k, row in enumerate(times)]
        assert optimum(Pipeline(*slower, place, m, hop, (cap,) * p)) >= here
        double = [tuple(2 * t for t in row) for row in times]
        assert optimum(Pipeline(*double, place, m, 2 * hop, (cap,) * p)) == 2 * here


def test_no_named_schedule_beats_the_optimum():
    draw = random.Random(9)
    for _ in range(15):
        p, m = draw.randint(2, 3), draw.randint(2, 5)
        times = [tuple(draw.randint(1, 4) for _ in range(p)) for _ in range(3)]
        hop, costs = draw.randint(0, 2), StageCosts(*times)
        split = optimum(Pipeline(*times, tuple(range(p)), m, hop))
        whole = optimum(Pipeline(times[0], tuple(map(sum, zip(*times[1:], strict=True))), None, tuple(range(p)), m, hop))
        assert split <= whole
        for name in ("gpipe", "one_f_one_b", "eager_1f1b"):
            assert simulate(SCHEDULES[name].build(p, m, 1), costs, hop=hop).makespan >= whole
        for name in ("zero_bubble", "zero_bubble_2"):
            assert simulate(SCHEDULES[name].build(p, m, 1), costs, hop=hop).makespan >= split


# --- backwards in halves ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "step"),
    [
        ((2, 4), 13),
        ((3, 4), 14),
        ((3, 6), 20),
        ((4, 4), 15),
        ((4, 6), 21),
        ((4, 8), 27),
        ((2, 1), 5),
        ((3, 1), 7),
        ((3, 2), 9),
        ((4, 1), 9),
        ((4, 2), 11),
        ((4, 3), 13),
    ],
)
def test_zero_bubble_takes_the_least_time_that_halves_allow(size, step):
    assert optimum(Pipeline.equal(*size, 1, 1, 1)) == step
    assert simulate(zero_bubble(*size), StageCosts.equal(size[0])).makespan == step


@pytest.mark.parametrize(("size", "step"), [((2, 4), 14), ((4, 8), 30)])
def test_within_the_memory_of_1f1b_halves_win_less(size, step):
    p, m = size
    of = Pipeline.equal(p, m, 1, 1, 1)
    assert optimum(Pipeline(of.forward, of.backward, of.weight, of.place, m, caps=tuple(range(p, 0, -1)))) == step


@pytest.mark.parametrize(
    ("size", "steps"),
    [
        ((2, 4), (20, 13, 13)),
        ((3, 4), (28, 17, 14, 14)),
        ((3, 6), (42, 25, 20, 20)),
        ((4, 6), (54, 31, 24, 21, 21)),
        ((4, 8), (72, 41, 31, 27)),
    ],
)
def test_memory_and_time_of_halves_without_latency(size, steps):
    assert frontier(len(steps), positions=size[0], microbatches=size[1], backward=1, weight=1) == steps


@pytest.mark.parametrize(("size", "steps"), [((3, 6), (66, 36, 28, 25, 22, 22)), ((4, 6), (90, 48, 36, 33))])
def test_memory_and_time_of_halves_with_latency(size, steps):
    assert frontier(len(steps), positions=size[0], microbatches=size[1], backward=1, weight=1, hop=1) == steps


def test_the_longest_pipeline_with_latency():
    place = tuple(range(4))
    of = Pipeline.equal(4, 8, 1, 1, 1, hop=1)
    assert (lower_bound(of), optimum(of)) == (30, 30)
    within = [optimum(Pipeline(of.forward, of.backward, of.weight, place, 8, 1, caps)) for caps in ((4, 4, 4, 4), (4, 3, 2, 1))]
    assert within == [39, 41]
    found = [simulate(make(4, 8), StageCosts.equal(4), hop=1).makespan for make in (one_f_one_b, zero_bubble, zero_bubble_2)]
    assert found == [49, 41, 30]


@pytest.mark.parametrize(
    ("forward", "split", "hop", "bound", "named", "best", "within_p", "within_1f1b"),
    [
        ((1, 2), None, 0, 25, (27, 25, 25), 25, 25, 25),
        ((1, 1, 2), None, 0, 26, (30, 26, 26), 26, 26, 27),
        ((1, 2, 1), None, 0, 25, (28, 25, 25), 25, 25, 25),
        ((2, 1, 1), None, 0, 24, (26, 24, 24), 24, 24, 24),
        ((2,) * 3, (3, 1), 0, 31, (36, 32, 31), 31, 32, 34),
        ((2,) * 3, (2, 1), 0, 25, (30, 26, 25), 25, 26, 28),
        ((1,) * 3, None, 1, 17, (26, 22, 17), 17, 22, 22),
        ((1,) * 4, None, 1, 21, (31, 25, 21), 21, 21, 26),
    ],
)
def test_unequal_halves(forward, split, hop, bound, named, best, within_p, within_1f1b):
    p = len(forward)
    halves = (forward, forward) if split is None else ((split[0],) * p, (split[1],) * p)
    place = tuple(range(p))
    costs = StageCosts(forward, *halves)
    found = tuple(simulate(make(p, 4), costs, hop=hop).makespan for make in (one_f_one_b, zero_bubble, zero_bubble_2))
    assert found == named
    of = Pipeline(forward, *halves, place, 4, hop)
    assert lower_bound(of) == bound
    assert optimum(of) == best
    assert optimum(Pipeline(forward, *halves, place, 4, hop, (p,) * p)) == within_p
    assert optimum(Pipeline(forward, *halves, place, 4, hop, tuple(range(p, 0, -1)))) == within_1f1b


@pytest.mark.parametrize(
    ("place", "microbatches", "steps"),
    [
        (V, 2, (17, 15, 13, 13)),
        (V, 3, (25, 21, 19, 19)),
        (LOOP, 2, (17, 14, 13, 13)),
        (LOOP, 3, (25, 20, 19, 19)),
        (V, 4, (33, 27, 25, 25)),
        (LOOP, 4, (33, 26, 25, 25)),
    ],
)
def test_two_stages_on_each_of_two_positions(place, microbatches, steps):
    ones = (1,) * 4
    found = tuple(
        optimum(Pipeline(ones, ones, ones, place, microbatches, caps=(cap, cap) if cap else None), 500_000) for cap in (2, 3, 4, 0)
    )
    assert found == steps


# --- the search itself ------------------------------------------------------------------------------------------------------------------


def orders(of: Pipeline) -> list[int]:
    """The step of every order of the rows of a pipeline with one stage on each position, as far as it ends and stays within the caps."""
    m, kinds = of.microbatches, ((Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if of.weight else (Op.FORWARD, Op.BACKWARD))
    weight = of.weight or tuple(0 for _ in of.forward)
    costs = StageCosts(of.forward, of.backward, weight)
    rows: list[list[tuple[Operation, ...]]] = []
    for stage in range(of.positions):
        words = set(itertools.permutations([k for k in range(len(kinds)) for _ in range(m)]))
        mine = []
        for word in words:
            counts = [0] * len(kinds)
            row = []
            for k in word:
                row.append(Operation(kinds[k], stage, counts[k]))
                counts[k] += 1
                if any(later > before for before, later in itertools.pairwise(counts)):
                    break
            else:
                mine.append(tuple(row))
        rows.append(mine)
    found = []
    for chosen in itertools.product(*rows):
        schedule = Rows("rows", of.positions, m, of.place, chosen)
        if of.caps is not None and any(held > cap for held, cap in zip(peak_in_flight(schedule), of.caps, strict=True)):
            continue
        try:
            found.append(int(simulate(schedule, costs, hop=of.hop).makespan))
        except ValueError:
            continue
    return found


def test_the_search_finds_what_trying_every_order_finds():
    draw = random.Random(7)
    for case in range(24):
        p, m, split = draw.choice([(2, 2, False), (2, 3, False), (3, 2, False), (2, 2, True)])
        forward, backward, weight = (tuple(draw.randint(1, 4) for _ in range(p)) for _ in range(3))
        caps = tuple(draw.randint(1, m) for _ in range(p)) if case % 2 else None
        of = Pipeline(forward, backward, weight if split else None, tuple(range(p)), m, draw.randint(0, 2), caps)
        assert optimum(of) == min(orders(of)), of
        assert lower_bound(of) <= optimum(of)
