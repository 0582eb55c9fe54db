"""Units reduce in the weight half as soon as they can, in an order that all ranks share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pdsl.runtime.unit_ends import UnitEnds


class Unit:
    """As much of a unit of FSDP2 as is looked at: its gathered parameters."""

    def __init__(self, name: str, *weights: Tensor) -> None:
        self.name = name
        self._state = SimpleNamespace(
            _fsdp_param_groups=[SimpleNamespace(fsdp_params=[SimpleNamespace(_unsharded_param=w) for w in weights])]
        )

    def _get_fsdp_state(self) -> SimpleNamespace:
        return self._state


def ends(units: list[Any], awaited: list[Tensor]) -> tuple[UnitEnds, list[str]]:
    told: list[str] = []
    made = UnitEnds(units, awaited, lambda unit: told.append(unit.name), lambda: told.append("end"))  # type: ignore[attr-defined]
    return made, told


def weights(count: int) -> list[Tensor]:
    return [torch.zeros(2) for _ in range(count)]


def test_a_unit_reduces_when_the_last_of_its_weights_is_complete() -> None:
    a, b, c = weights(3)
    found, told = ends([Unit("deep", a, b), Unit("shallow", c)], [a, b, c])
    found.done([a])
    assert told == []
    found.done([b])
    assert told == ["deep"]
    found.done([c])
    assert told == ["deep", "shallow"]
    found.finish()
    assert told == ["deep", "shallow", "end"]


def test_no_unit_overtakes_another() -> None:
    a, b = weights(2)
    found, told = ends([Unit("deep", a), Unit("shallow", b)], [a, b])
    found.done([b])
    assert told == []
    found.done([a])
    assert told == ["deep", "shallow"]


def test_weights_that_get_no_gradient_are_not_waited_for() -> None:
    a, b, c = weights(3)
    found, told = ends([Unit("deep", a, b), Unit("nothing to come", c)], [a])
    found.done([a])
    assert told == ["deep", "nothing to come"]


def test_what_was_never_told_of_reduces_at_the_end() -> None:
    a, b = weights(2)
    found, told = ends([Unit("deep", a), Unit("shallow", b)], [a, b])
    found.finish()
    assert told == ["deep", "shallow", "end"]
