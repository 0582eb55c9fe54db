"""A spread of sixty combinations of everything equals one process; `make equality` compares four hundred."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.pool import Pool
from tests.product import MESHES, SCHEDULES, TOLERANCE, Combination, combinations, deviation

COUNT = 60


@lru_cache(maxsize=1)
def _spread() -> tuple[Combination, ...]:
    return tuple(combinations(COUNT))


@pytest.mark.parametrize("index", range(COUNT))
def test_a_combination_equals_one_process(pool: Pool, index: int) -> None:
    one = _spread()[index]
    distance, what = deviation(pool, one)
    assert distance <= TOLERANCE[one.precision], f"{one}: {what} is off by {distance:.2e}"


def test_the_spread_has_every_mesh_and_every_schedule() -> None:
    spread = _spread()
    assert {c.mesh for c in spread} == set(MESHES)
    assert {c.schedule for c in spread} - {""} == set(SCHEDULES)
    assert len(set(spread)) == COUNT
