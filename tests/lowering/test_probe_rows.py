"""Rows of data sets become batches, and what is wrong with them is told by row and entry."""

from __future__ import annotations

import pytest
import torch

from pdsl.grammar.errors import ModelError
from pdsl.lowering.probe_rows import probe_batch, read_rows


def test_the_batch_of_a_probe_is_the_first_rows():
    rows = [{"x": torch.full((2,), float(i)), "y": i} for i in range(9)]
    batch = probe_batch(rows)
    assert torch.equal(batch["x"], torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))
    assert torch.equal(batch["y"], torch.tensor([0, 1, 2]))
    with pytest.raises(ModelError, match="empty"):
        probe_batch([])
    with pytest.raises(ModelError, match="a row of the data set is a tuple"):
        probe_batch([(1, 2)])


class Padded:
    """Rows of any length; a batch is as long as its longest row."""

    def __len__(self) -> int:
        return 9

    def rows(self, indices):
        return {"x": torch.zeros(len(indices), max(indices) + 1)}


def test_a_data_set_may_make_its_batches_itself():
    assert probe_batch(Padded())["x"].shape == (3, 3)
    assert read_rows(Padded(), (4, 7))["x"].shape == (2, 8)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"x": 1, "name": "a"}], 'entry "name" of a row is a str: expected a tensor, a number or an array'),
        ([{"x": None}], 'entry "x" of a row is a NoneType'),
        ([{"x": torch.zeros(3)}, {"x": torch.zeros(4)}], r'entry "x" is \(3,\) in row 0 and \(4,\) in row 1: rows are stacked, so pad'),
        ([{"x": 1, "y": 2}, {"x": 1}], "row 1 has the entries x, row 0 has x, y"),
        ((row for row in ()), "the data set is empty"),
        (object(), "a object is no data set: that has a length"),
        (None, "a NoneType is no data set"),
    ],
)
def test_rows_that_make_no_batch(rows, message):
    with pytest.raises(ModelError, match=message):
        probe_batch(rows)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(2, 5)}, r'rows\(indices\) gave "x" with shape \(2, 5\) for 3 rows'),
        ({"x": 1.0}, r'gave "x" with shape \(\) for 3 rows'),
        (torch.zeros(3), r"rows\(indices\) of the data set gave a Tensor"),
    ],
)
def test_a_batch_of_another_size_than_asked_for(batch, message, monkeypatch):
    monkeypatch.setattr(Padded, "rows", lambda self, indices: batch)
    with pytest.raises(ModelError, match=message):
        read_rows(Padded(), (0, 1, 2))
