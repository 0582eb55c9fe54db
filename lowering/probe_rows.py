"""Rows of a data set as a batch, with what is wrong with them in the user's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from pdsl.grammar.errors import ModelError

__all__ = ["difference", "is_indexed", "is_shared", "is_stream", "marked", "probe_batch", "read_rows", "sample_count", "stack_rows"]


_MARK = "pdsl_shared"


def marked(batch: Mapping[str, Tensor], shared: Sequence[str]) -> dict[str, Tensor]:
    """A batch whose entries in `shared` are known to have no rows. Raises ModelError if one of them is not in it."""
    absent = next((name for name in shared if name not in batch), None)
    if absent is not None:
        raise ModelError(f'train {{ shared = ["{absent}"] }} names no entry of the data, which has {_listed(batch)}')
    found = {name: tensor.view_as(tensor) if name in shared else tensor for name, tensor in batch.items()}
    for name in shared:
        setattr(found[name], _MARK, True)
    return found


def is_shared(tensor: Tensor) -> bool:
    """Whether an entry of a marked batch has no rows."""
    return bool(getattr(tensor, _MARK, False))


def is_indexed(dataset: Any) -> bool:
    """Whether a data set has a length and gives rows by index. torch's iterable data sets inherit an index that only raises."""
    by_index = hasattr(dataset, "__getitem__") or hasattr(dataset, "rows")
    return hasattr(dataset, "__len__") and by_index and not isinstance(dataset, IterableDataset)


def is_stream(dataset: Any) -> bool:
    """Whether a data set only gives its rows one after another."""
    return not is_indexed(dataset) and hasattr(dataset, "__iter__")


def sample_count(dataset: Any) -> int | None:
    """How many samples a data set has; None for one that is iterated."""
    return len(dataset) if is_indexed(dataset) else None


def difference(batch: Mapping[str, Tensor], held_out: Mapping[str, Tensor]) -> str:
    """In what held-out rows differ from those that are trained on, so that the model could not take them; empty if in nothing."""
    if batch.keys() != held_out.keys():
        return f"its rows have {_listed(held_out)}, those that are trained on have {_listed(batch)}"
    for name, tensor in held_out.items():
        other = batch[name]
        if tensor.dim() != other.dim() or tensor.dtype != other.dtype:
            kinds = [f"{str(t.dtype).removeprefix('torch.')} with {t.dim()} dims" for t in (tensor, other)]
            return f'"{name}" is {kinds[0]}, and {kinds[1]} in the data that is trained on'
    return ""


def probe_batch(dataset: Any, rows: int = 3, shared: Sequence[str] = ()) -> dict[str, Tensor]:
    """The first rows of a data set as a batch; what is read of an iterable is gone from it. `shared` are entries without rows.

    Raises ModelError if it is no data set, is empty, or if its rows are no dicts of tensors.
    """
    if is_stream(dataset):
        found = list(islice(iter(dataset), rows))
        if not found:
            raise ModelError("the data set is empty")
        return marked(stack_rows(found, range(len(found)), shared), shared)
    if not is_indexed(dataset):
        raise ModelError(
            f"a {type(dataset).__name__} is no data set: that has a length and gives row i by [i] or several by rows(indices), or is iterable"
        )
    count = min(rows, len(dataset))
    if count == 0:
        raise ModelError("the data set is empty")
    return marked(read_rows(dataset, range(count), shared), shared)


def read_rows(dataset: Any, indices: Sequence[int], shared: Sequence[str] = ()) -> dict[str, Tensor]:
    """Rows of a data set, stacked by name; `rows(indices)` of the data set is used where it has one. Entries that are `shared` have no rows: they come as they
    are, and must be the same in all rows.

    Raises ModelError if rows are no dicts, differ in their entries or in the shape of one, or hold what is no tensor, number or array.
    """
    if hasattr(dataset, "rows"):
        return _whole(dataset.rows(list(indices)), indices, shared)
    return stack_rows([dataset[i] for i in indices], indices, shared)


def stack_rows(found: Sequence[Any], indices: Sequence[int], shared: Sequence[str] = ()) -> dict[str, Tensor]:
    """Rows, whose numbers are `indices`, as a batch. See `read_rows`."""
    wrong = next((row for row in found if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise ModelError(f"a row of the data set is a {type(wrong).__name__}: expected a dict of tensors by name")
    for index, row in zip(indices, found, strict=True):
        if row.keys() != found[0].keys():
            raise ModelError(f"row {index} has the entries {_listed(row)}, row {indices[0]} has {_listed(found[0])}")
    columns = {name: [_tensor(name, row[name]) for row in found] for name in found[0]}
    return {name: _same(name, indices, c) if name in shared else _stacked(name, indices, c) for name, c in columns.items()}


def _whole(batch: Any, indices: Sequence[int], shared: Sequence[str]) -> dict[str, Tensor]:
    if not isinstance(batch, Mapping):
        raise ModelError(f"rows(indices) of the data set gave a {type(batch).__name__}: expected a dict of tensors by name")
    found = {name: _tensor(name, value) for name, value in batch.items()}
    for name, tensor in found.items():
        if name not in shared and (tensor.dim() == 0 or tensor.shape[0] != len(indices)):
            raise ModelError(
                f'rows(indices) gave "{name}" with shape {tuple(tensor.shape)} for {len(indices)} rows; '
                f'what all rows share is named in train {{ shared = ["{name}"] }}'
            )
    return found


def _same(name: str, indices: Sequence[int], tensors: list[Tensor]) -> Tensor:
    for index, tensor in zip(indices, tensors, strict=True):
        if tensor.shape != tensors[0].shape or not torch.equal(tensor, tensors[0]):
            raise ModelError(f'entry "{name}" is shared by all rows, and is another in row {index} than in row {indices[0]}')
    return tensors[0]


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ModelError(f'entry "{name}" of a row is a {type(value).__name__}: expected a tensor, a number or an array') from None


def _stacked(name: str, indices: Sequence[int], tensors: list[Tensor]) -> Tensor:
    for index, tensor in zip(indices, tensors, strict=True):
        if tensor.shape != tensors[0].shape:
            raise ModelError(
                f'entry "{name}" is {tuple(tensors[0].shape)} in row {indices[0]} and {tuple(tensor.shape)} in row {index}: '
                "rows are stacked, so pad them to one shape, or give the data set a method rows(indices) that does"
            )
    return torch.stack(tensors)


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "none"
