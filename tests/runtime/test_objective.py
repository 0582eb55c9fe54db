"""Objectives take outputs and targets of shapes that fit, and nothing that torch would broadcast in silence."""

from __future__ import annotations

import pytest
import torch

from pdsl.grammar.errors import ModelError
from pdsl.runtime.objective import flat_cross_entropy, strict_mse


def test_mse_refuses_a_column_against_a_row():
    """torch would subtract each of three targets from each of three outputs: 4/3 in place of 0."""
    column = torch.tensor([[0.0], [1.0], [2.0]])
    assert strict_mse(column, column.clone()) == 0
    with pytest.raises(ModelError, match=r"the output is \(3, 1\), the target \(3,\)"):
        strict_mse(column, column.flatten())


def test_cross_entropy_has_its_classes_in_the_last_dim():
    output = torch.zeros(2, 3, 4)
    assert flat_cross_entropy(output, torch.zeros(2, 3, dtype=torch.long)) == pytest.approx(torch.tensor(4.0).log())
    square = torch.zeros(2, 4, 4)  # classes in the middle, as many as places: torch could not tell
    with pytest.raises(ModelError, match=r"the target \(2, 1, 4\), not \(2, 4\)"):
        flat_cross_entropy(square, torch.zeros(2, 1, 4, dtype=torch.long))
