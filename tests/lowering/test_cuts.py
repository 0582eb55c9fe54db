from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsl.lowering.cuts import Cut, CutError, LayerCost, bottleneck, cut, cuts_for_all, step_time
from pdsl.lowering.schedules import one_f_one_b


def chain(*times: float, memory: tuple[int, ...] = ()) -> list[LayerCost]:
    return [LayerCost(t, 2 * t, memory[i] if memory else 0) for i, t in enumerate(times)]


def partitions(count: int, stages: int) -> list[Cut]:
    """All cuts, in lexicographic order of their starts."""
    return [tuple(zip((0, *inner), (*inner, count), strict=True)) for inner in combinations(range(1, count), stages - 1)]


def test_the_largest_stage_is_as_small_as_can_be():
    assert cut(chain(1, 1, 1, 1), 2) == ((0, 2), (2, 4))
    assert cut(chain(5, 1, 1, 1, 1, 1), 3) == ((0, 1), (1, 2), (2, 6))
    assert bottleneck(chain(5, 1, 1, 1, 1, 1), ((0, 1), (1, 2), (2, 6))) == 15
    assert cut(chain(3, 1, 4, 1, 5), 5) == tuple((i, i + 1) for i in range(5))
    assert cut(chain(3, 1, 4, 1, 5), 1) == ((0, 5),)


def test_a_tie_goes_to_the_smallest_starts():
    assert cut(chain(1, 1, 1, 1, 1, 1, 1, 1), 3) == ((0, 2), (2, 5), (5, 8))


costs = st.lists(st.integers(0, 6), min_size=1, max_size=9)


@given(costs, st.data())
def test_cuts_equal_brute_force_with_forbidden_places_limits_and_capacities(times, data):
    count = len(times)
    stages = data.draw(st.integers(1, count))
    memory = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    allowed = data.draw(st.lists(st.booleans(), min_size=count, max_size=count) | st.none())
    limit = data.draw(st.integers(0, 20) | st.none() | st.lists(st.integers(0, 20), min_size=stages, max_size=stages))
    capacity = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages) | st.none())
    layers = chain(*times, memory=tuple(memory))
    limits = limit if isinstance(limit, list) else [limit] * stages

    def fits(ranges: Cut) -> bool:
        if allowed is not None and not all(allowed[start] for start, _ in ranges[1:]):
            return False
        return all(cap is None or sum(memory[a:b]) <= cap for (a, b), cap in zip(ranges, limits, strict=True))

    possible = [c for c in partitions(count, stages) if fits(c)]
    if not possible:
        with pytest.raises(CutError):
            cut(layers, stages, allowed=allowed, memory_limit=limit, capacity=capacity)
        return
    best = min(possible, key=lambda c: (bottleneck(layers, c, capacity), c))
    assert cut(layers, stages, allowed=allowed, memory_limit=limit, capacity=capacity) == best


@given(costs, st.integers(1, 12) | st.none())
def test_cutting_for_all_counts_equals_cutting_for_each(times, limit):
    layers = chain(*times, memory=(1,) * len(times))
    found = cuts_for_all(layers, len(times) + 1, memory_limit=limit)
    for stages in range(1, len(times) + 1):
        try:
            expected = cut(layers, stages, memory_limit=limit)
        except CutError:
            expected = None
        assert found[stages - 1] == expected
    assert found[-1] is None


def test_cutting_for_all_counts_ends_where_the_places_end():
    found = cuts_for_all(chain(1, 2, 3, 4), allowed=(True, False, True, False))
    assert found == (((0, 4),), ((0, 2), (2, 4)))


@given(st.lists(st.integers(0, 6), min_size=2, max_size=8), st.data())
def test_the_score_decides_between_all_cuts_of_equal_bottleneck(times, data):
    stages = data.draw(st.integers(1, len(times)))
    layers = chain(*times)
    score = step_time(layers, one_f_one_b(stages, 2 * stages), hop=1)
    best = min(partitions(len(times), stages), key=lambda c: (bottleneck(layers, c), score(c), c))
    assert cut(layers, stages, score=score) == best


def test_the_simulated_step_time_chooses_a_faster_cut_of_the_same_largest_stage():
    layers = chain(1, 2, 1, 4, 4, 4)
    time = step_time(layers, one_f_one_b(3, 6))
    plain, scored = cut(layers, 3), cut(layers, 3, score=time)
    assert (plain, time(plain)) == (((0, 1), (1, 4), (4, 6)), 168)
    assert (scored, time(scored)) == (((0, 4), (4, 5), (5, 6)), 152)


def test_beyond_the_bound_a_search_still_keeps_the_bottleneck_and_never_scores_worse_than_the_plain_cut():
    layers = chain(*[1 + (i * 7) % 3 for i in range(40)], 60)
    score = step_time(layers, one_f_one_b(5, 10))
    plain, searched = cut(layers, 5), cut(layers, 5, score=score, candidates=50)
    assert bottleneck(layers, searched) == bottleneck(layers, plain)
    assert score(searched) <= score(plain)
    assert cut(layers, 5, score=score, candidates=50) == searched


# --- exactness and memory ---------------------------------------------------------------------------------------------------------------


def test_fractions_are_compared_exactly_where_floats_would_tie_or_differ():
    third = Fraction(1, 3)
    layers = [LayerCost(third, 0), LayerCost(third, 0), LayerCost(third, 0), LayerCost(1 + Fraction(1, 10**30), 0)]
    assert bottleneck(layers, cut(layers, 2)) == 1 + Fraction(1, 10**30)
    exact = cut([LayerCost(1, 0)] * 4, 2, capacity=(3, 1))
    assert exact == ((0, 3), (3, 4))


def test_memory_moves_a_cut_that_time_alone_would_make():
    layers = chain(1, 1, 1, 1, memory=(10, 10, 1, 1))
    assert cut(layers, 2) == ((0, 2), (2, 4))
    assert cut(layers, 2, memory_limit=(10, 30)) == ((0, 1), (1, 4))


def test_memory_may_depend_on_the_stage_as_activations_in_flight_do():
    def in_flight(stage, stages, start, stop):
        return (stop - start) * (stages - stage)

    layers = chain(*[1] * 6)
    assert cut(layers, 3, memory_of=in_flight, memory_limit=4) == ((0, 1), (1, 3), (3, 6))
    assert cuts_for_all(layers, 3, memory_of=in_flight, memory_limit=4) == (None, ((0, 2), (2, 6)), ((0, 1), (1, 3), (3, 6)))


def test_what_does_not_fit_says_the_smallest_that_would():
    layers = chain(1, 1, 1, memory=(4, 7, 2))
    with pytest.raises(CutError, match="no cut into 2 stages fits in memory 8 per stage: the smallest that can be had is 9"):
        cut(layers, 2, memory_limit=8)
    assert cut(layers, 2, memory_limit=9) == ((0, 1), (1, 3))
    with pytest.raises(CutError, match=r"its stages \(3, 20\): at best one of them lacks 1"):
        cut(layers, 2, memory_limit=(3, 20))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 4}, "4 stages need at least 4 layers, but there are 3"),
        ({"stages": 0}, "at least 1 stage, not 0"),
        ({"stages": 3, "allowed": (True, False, True)}, "3 stages need 2 places to cut, but the 3 layers allow 1"),
        ({"stages": 2, "allowed": (True,)}, "1 marks of allowed cuts for 3 layers"),
        ({"stages": 2, "capacity": (1, 0)}, "one positive number per stage"),
        ({"stages": 2, "memory_limit": (1,)}, "1 memory limits for 2 stages"),
    ],
)
def test_impossible_requests_are_told_with_their_numbers(arguments, message):
    with pytest.raises(CutError, match=message):
        cut(chain(1, 1, 1), **arguments)


def test_negative_costs_are_refused():
    with pytest.raises(CutError, match="layer 1 has a negative cost"):
        cut(chain(1, -1), 1)


def test_96_layers_in_64_stages_take_less_than_50_ms():
    layers = chain(*[1 + (i * 37) % 11 for i in range(96)])
    spent = []
    for _ in range(3):  # the best of three: the machine may be busy
        before = perf_counter()
        ranges = cut(layers, 64)
        spent.append(perf_counter() - before)
    assert min(spent) < 0.05
    assert len(ranges) == 64
    assert (ranges[0][0], ranges[-1][1]) == (0, 96)
    assert all(a[1] == b[0] and a[0] < a[1] for a, b in pairwise(ranges))
