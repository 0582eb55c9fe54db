from __future__ import annotations

from itertools import permutations
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsl.lowering.roles import assign_roles

WEIGHT = st.one_of(st.integers(0, 3), st.integers(0, 10**12))


@st.composite
def tables(draw):
    roles = draw(st.integers(1, 5))
    nodes = draw(st.integers(roles, 6))
    weights = draw(st.lists(st.lists(WEIGHT, min_size=nodes, max_size=nodes), min_size=roles, max_size=roles))
    current = draw(st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, nodes - 1)), min_size=roles, max_size=roles)))
    return weights, current


@given(tables())
def test_most_bytes_stay_then_most_roles_then_the_lowest_nodes_come_first(table):
    weights, current = table
    nodes = range(len(weights[0]))

    def worth(chosen):
        bytes_kept = sum(weights[r][n] for r, n in enumerate(chosen))
        unchanged = sum(current is not None and current[r] == n for r, n in enumerate(chosen))
        return bytes_kept, unchanged, tuple(-n for n in chosen)

    assert assign_roles(weights, current) == max(permutations(nodes, len(weights)), key=worth)


def test_equal_weights_give_the_order_of_the_nodes_unless_roles_can_stay():
    assert assign_roles([[0, 0, 0]] * 3) == (0, 1, 2)
    assert assign_roles([[0, 0, 0]] * 3, [2, None, 1]) == (2, 0, 1)
    assert assign_roles([[5, 5, 5, 5]] * 2, [3, 3]) == (0, 3)
    assert assign_roles([]) == ()


def test_a_byte_counts_more_than_all_roles_that_could_stay():
    assert assign_roles([[0, 1, 0], [0, 0, 0], [0, 0, 0]], [0, 1, 2]) == (1, 0, 2)


@pytest.mark.parametrize("kind", ["random", "equal", "sparse"])
def test_sixty_four_roles_are_matched_in_fifty_milliseconds(kind):
    weights = [
        [{"random": r * 7919 * n * 104729 % 10**9, "equal": 7, "sparse": 10**11 if (r * 31 + n) % 9 == 0 else 0}[kind] for n in range(64)]
        for r in range(64)
    ]
    took = []
    for _ in range(3):
        begin = perf_counter()
        assign_roles(weights)
        took.append(perf_counter() - begin)
    assert min(took) < 0.05


def test_tables_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="different lengths"):
        assign_roles([[1, 2], [1]])
    with pytest.raises(ValueError, match="3 roles for 2 nodes"):
        assign_roles([[1, 2]] * 3)
    with pytest.raises(ValueError, match="0 or more"):
        assign_roles([[-1]])
