from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations
from time import perf_counter

from hypothesis import given
from hypothesis import strategies as st

from pdsl.lowering.flow import balance, max_flow
from pdsl.lowering.rounds import colour

EDGES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=60)


@given(EDGES)
def test_there_are_as_many_rounds_as_the_busiest_rank_has_messages_and_nobody_has_two_in_one(edges):
    rounds = colour(edges)
    degree = max([*Counter(a for a, _ in edges).values(), *Counter(b for _, b in edges).values()], default=0)
    assert set(rounds) == set(range(degree))
    assert len({(a, r) for (a, _), r in zip(edges, rounds, strict=True)}) == len(edges)
    assert len({(b, r) for (_, b), r in zip(edges, rounds, strict=True)}) == len(edges)


def test_a_ring_takes_one_round_and_a_star_one_for_each_point():
    assert colour([(0, 1), (1, 2), (2, 0)]) == (0, 0, 0)
    assert sorted(colour([(0, 1), (0, 2), (0, 3)])) == [0, 1, 2]
    assert colour([]) == ()


def test_a_path_of_alternating_rounds_is_swapped_where_no_round_is_free_at_both_ends():
    # sender 0 has round 1 free and receiver 11 round 0 after the first four
    edges = [(0, 10), (1, 10), (1, 11), (2, 12), (2, 11), (0, 12)]
    rounds = colour(edges)
    assert max(rounds) == 1
    assert len({(b, r) for (_, b), r in zip(edges, rounds, strict=True)}) == len(edges)


def test_the_flow_of_a_small_network_is_its_cut():
    arcs = [(0, 1, 3), (0, 2, 2), (1, 2, 5), (1, 3, 2), (2, 3, 3)]
    value, flows, side = max_flow(4, arcs, 0, 3)
    assert value == 5
    assert flows[3] + flows[4] == 5
    assert sum(room for a, b, room in arcs if a in side and b not in side) == 5


SETS = st.dictionaries(
    st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True).map(lambda s: tuple(sorted(s))), st.integers(0, 1000), max_size=6
)


@given(SETS, st.dictionaries(st.integers(0, 5), st.integers(0, 500)))
def test_the_busiest_sender_has_what_the_tightest_set_of_senders_must_send(classes, loads):
    least, shares = balance(classes, loads)
    senders = sorted({s for c, size in classes.items() if size for s in c})
    bounds = [
        Fraction(sum(size for c, size in classes.items() if set(c) <= set(some)) + sum(loads.get(s, 0) for s in some), len(some))
        for count in range(1, len(senders) + 1)
        for some in combinations(senders, count)
    ]
    assert least == max([*bounds, *loads.values()], default=0)
    total = dict(loads)
    for c, size in classes.items():
        assert sum(shares.get(c, {}).values()) == size
        assert set(shares.get(c, {})) <= set(c)
        for s, share in shares.get(c, {}).items():
            total[s] = total.get(s, 0) + share
    assert max(total.values(), default=0) <= least


def test_many_messages_are_coloured_quickly():
    edges = [(i * 7919 % 512, i * 104729 % 509) for i in range(40_000)]
    begin = perf_counter()
    colour(edges)
    assert perf_counter() - begin < 2
