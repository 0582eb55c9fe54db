"""Templates for every size: exact in their largest stage, the best simulated among equals, and one and the same every time."""

from __future__ import annotations

import itertools
import random

import pytest
from attrs import evolve

from pdsl.lowering.makespan import makespan
from pdsl.lowering.plan import Budget, StageCut
from pdsl.lowering.schedule import ScheduleError
from pdsl.lowering.schedule_check import check_schedule
from pdsl.lowering.schedules import SCHEDULES
from pdsl.lowering.templates import balanced_cut, cuts_for_sizes, forward_flops, schedule_for, stage_cuts, template_of
from tests.plans import facts


def chain(flops: list[int], closed: set[int] = frozenset()):
    made = facts(len(flops) - 2)
    layers = (
        evolve(layer, flops=f, cut_before="closed" if i in closed else "")
        for i, (layer, f) in enumerate(zip(made.layers, flops, strict=True))
    )
    return evolve(made, layers=tuple(layers))


def every_cut(flops: list[int], stages: int, closed: set[int]):
    places = [i for i in range(1, len(flops)) if i not in closed]
    for starts in itertools.combinations(places, stages - 1):
        yield tuple(itertools.pairwise((0, *starts, len(flops))))


def random_chains(count: int, seed: int):
    draw = random.Random(seed)
    for _ in range(count):
        flops = [draw.randint(1, 20) for _ in range(draw.randint(3, 11))]
        yield flops, {i for i in range(1, len(flops)) if draw.random() < 0.15}


def test_every_cut_is_the_best_of_all_cuts_in_its_largest_stage_and_then_in_its_step_time():
    for flops, closed in random_chains(120, seed=1):
        made = chain(flops, closed)
        for positions in range(1, len(flops) - len(closed) + 1):

            def worth(bounds, flops=flops):
                sums = [sum(flops[a:b]) for a, b in bounds]
                return max(sums), makespan("one_f_one_b", len(sums), sums, 2 * len(sums)), bounds

            assert balanced_cut(made, positions) == min(every_cut(flops, positions, closed), key=worth), (flops, closed, positions)


def test_memory_is_kept_and_the_largest_stage_is_the_least_that_it_allows():
    draw = random.Random(2)
    for flops, closed in random_chains(150, seed=3):
        made, weights, limit = chain(flops, closed), [draw.randint(1, 9) for _ in flops], draw.randint(8, 40)
        for positions in range(1, len(flops) - len(closed) + 1):

            def fits(stage, stages, start, stop, weights=weights, limit=limit):
                return sum(weights[start:stop]) + (stages - stage) * (stop - start) <= limit

            allowed = [
                max(sum(flops[a:b]) for a, b in bounds)
                for bounds in every_cut(flops, positions, closed)
                if all(fits(s, positions, a, b) for s, (a, b) in enumerate(bounds))
            ]
            found = balanced_cut(made, positions, fits=fits)
            if not allowed:
                assert found is None
                continue
            assert all(fits(s, positions, a, b) for s, (a, b) in enumerate(found))
            assert max(sum(flops[a:b]) for a, b in found) == min(allowed)


def test_sizes_that_the_layers_do_not_allow_are_missing():
    found = cuts_for_sizes(chain([5, 5, 5], {1}), range(1, 4))
    assert [None if c is None else [(s.start, s.stop, s.position) for s in c] for c in found] == [[(0, 3, 0)], [(0, 2, 0), (2, 3, 1)], None]


def test_virtual_stages_go_around_the_positions():
    (stages,) = cuts_for_sizes(chain([4] * 8), [2], schedule="interleaved_1f1b", virtual=2)
    assert [(s.start, s.stop, s.position) for s in stages] == [(0, 2, 0), (2, 4, 1), (4, 6, 0), (6, 8, 1)]


def test_twenty_runs_give_one_answer_for_96_layers_on_64_nodes():
    draw = random.Random(4)
    made = chain([draw.randint(80, 120) for _ in range(96)])
    assert len({cuts_for_sizes(made, range(1, 65)) for _ in range(20)}) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rounds", [1, 3])
def test_templates_run_any_count_of_microbatches(schedule, rounds):
    virtual = 2 if SCHEDULES[schedule].virtual else 1
    cuts = cuts_for_sizes(chain([3, 4, 5, 4, 3, 4, 5, 6]), (1, 2, 3), schedule=schedule, virtual=virtual)
    budget = Budget(1, 1, cuts, schedule, virtual)
    for nodes in budget.sizes:
        for count in range(1, 12):
            template = template_of(budget, nodes, count, rounds)
            assert check_schedule(template.schedule) == ()
            assert (template.positions, template.schedule.microbatches, template.stages) == (nodes, count, budget.cut(nodes))
    with pytest.raises(IndexError, match="no template for 4 nodes, only for 1 to 3"):
        template_of(budget, 4, 4)
    with pytest.raises(ScheduleError, match="at least 1 microbatch, not 0"):
        template_of(budget, 1, 0)


def test_stages_of_a_v_go_there_and_back():
    (stages,) = cuts_for_sizes(chain([4] * 8), [2], schedule="zbv")
    assert [(s.start, s.stop, s.position) for s in stages] == [(0, 2, 0), (2, 4, 1), (4, 6, 1), (6, 8, 0)]
    assert stage_cuts(((0, 1), (1, 2)), 1, "v") == (StageCut(0, 1, 0), StageCut(1, 2, 0))


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "v_half", "interleaved_zero_bubble"])
def test_the_cut_is_the_one_with_the_shortest_step_among_the_most_even(schedule):
    virtual = 2 if SCHEDULES[schedule].virtual else 1
    flops = [3, 1, 2, 2, 1, 3, 1]
    stages = 2 * SCHEDULES[schedule].per_position(virtual)
    sums = [[sum(flops[a:b]) for a, b in cut] for cut in every_cut(flops, stages, set())]
    least = min(max(found) for found in sums)
    best = min(makespan(schedule, 2, found, 4) for found in sums if max(found) == least)
    (cut,) = cuts_for_sizes(chain(flops), [2], schedule=schedule, virtual=virtual)
    found = forward_flops(chain(flops), cut)
    assert (max(found), makespan(schedule, 2, found, 4)) == (least, best)


def test_gpipe_holds_no_more_than_one_round():
    schedule = schedule_for("gpipe", 2, 1, 7, rounds=3)
    held, peak = 0, 0
    for o in schedule.rows[0]:
        held += 1 if o.op.value == "F" else -1
        peak = max(peak, held)
    assert peak == 3


def test_flops_of_stages_are_at_least_one():
    (stages,) = cuts_for_sizes(chain([0, 7, 9]), [3])
    assert forward_flops(chain([0, 7, 9]), stages) == (1, 7, 9)
