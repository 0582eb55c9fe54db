"""The closed form of coverage against an enumeration of sums."""

from __future__ import annotations

import random

import pytest

from pdsl.lowering.coverage import covered, least_count, losses_until_uncovered, pipeline_counts, usable


def sums(least: int, count: int, most: int) -> list[set[int]]:
    """For every total up to `most` the counts of pipelines with that sum, by adding one pipeline after another."""
    found: list[set[int]] = [set() for _ in range(most + 1)]
    found[0].add(0)
    for total in range(1, most + 1):
        for size in range(least, least + count):
            if size <= total:
                found[total] |= {c + 1 for c in found[total - size]}
    return found


def test_every_case_of_the_closed_form_agrees_with_an_enumeration():
    cases = 0
    for least in range(2, 9):
        for count in range(1, least + 2):
            known = sums(least, count, 80)
            for lose in range(5):
                for nodes in range(81):
                    expected = any(c >= lose + 1 for c in known[nodes])
                    assert covered(nodes, least, count, lose + 1) == expected, (least, count, lose, nodes)
                    cases += 1
    assert cases == 81 * 5 * sum(least + 1 for least in range(2, 9))


def test_twelve_thousand_random_cases_agree_with_an_enumeration():
    draw = random.Random(12)
    tables = {(least, count): sums(least, count, 60) for least in range(1, 10) for count in range(1, 12)}
    for _ in range(12_000):
        least, count, nodes = draw.randint(1, 9), draw.randint(1, 11), draw.randint(0, 60)
        fewest, most = draw.randint(1, 6), draw.choice([None, draw.randint(1, 12)])
        expected = sorted(c for c in tables[least, count][nodes] if c >= fewest and (most is None or c <= most))
        assert list(pipeline_counts(nodes, least, count, fewest, most)) == expected


@pytest.mark.parametrize(("lose", "counts"), [(0, (2, 3, 4, 8)), (1, (2, 2, 3, 5)), (2, (2, 2, 2, 4)), (3, (2, 2, 2, 3))])
def test_the_fewest_sizes_are_the_published_ones(lose, counts):
    assert tuple(least_count(least, lose) for least in (2, 3, 4, 8)) == counts


def test_the_fewest_sizes_cover_everything_and_one_less_does_not():
    for least in range(2, 9):
        for lose in range(5):
            count, first = least_count(least, lose), (lose + 1) * least
            assert all(covered(n, least, count, lose + 1) for n in range(first, 81 + first))
            assert not all(covered(n, least, count - 1, lose + 1) for n in range(first, 81 + first))


def test_losses_are_counted_to_the_first_total_that_leaves_nodes_idle():
    assert losses_until_uncovered(5, 2, 2) == 4  # 4 = 2 + 2, 3 and 2 are sizes, 1 is none
    assert losses_until_uncovered(5, 2, 2, at_least=2) == 2  # 3 nodes are one pipeline
    assert losses_until_uncovered(6, 2, 1) == 1
    assert losses_until_uncovered(1, 2, 2) == 0
    assert losses_until_uncovered(12, 4, 1, at_most=3) == 1


def test_the_nodes_that_can_be_used_are_the_most_that_are_covered():
    assert [usable(n, 4, 2) for n in range(12)] == [0, 0, 0, 0, 4, 5, 5, 5, 8, 9, 10, 10]
    assert usable(11, 4, 2, at_most=1) == 5


def test_sizes_below_one_node_are_refused():
    with pytest.raises(ValueError, match="begin at 0 and there are 2"):
        covered(4, 0, 2)
    with pytest.raises(ValueError, match="lose = -1"):
        least_count(2, -1)
