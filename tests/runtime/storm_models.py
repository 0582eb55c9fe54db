"""Models and data as a user would write them, for runs with faults: named in specs as "tests.runtime.storm_models:..."."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pdsl.models.gpt import GPT
from tests.user_models import Rows

__all__ = ["cursed_rows", "frozen_blocks", "normed", "normed_rows", "patient_rows"]


def frozen_blocks(layers: int, width: int, heads: int, context: int) -> nn.Module:
    """A language model whose embedding and second block are not trained."""
    model = GPT(layers=layers, width=width, heads=heads, context=context, vocabulary=256, positions="rotary", dropout=0.0, tie=False)
    for part in (model.tok_embeddings, model.layers[1]):
        part.requires_grad_(False)
    return model


def normed() -> nn.Sequential:
    """Layers that keep running means of what they see."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4)])


def normed_rows() -> Rows:
    generator = torch.Generator().manual_seed(1)
    return Rows(x=torch.randn(512, 8, generator=generator), target=torch.ones(512, 8))


class _Cursed:
    """Text with a row that cannot be read, wherever it is read."""

    def __init__(self, context: int, after: int) -> None:
        from pdsl.data import python_source

        self._rows = python_source(context)
        self._left, self._after = 0, after

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: Sequence[int]) -> dict[str, Tensor]:
        if any(i % 211 == self._after for i in indices):
            raise ValueError(f"row {self._after} is damaged")
        return self._rows.rows(indices)


def cursed_rows(context: int, after: int = 7) -> _Cursed:
    return _Cursed(context, after)


class _Patient:
    """Text that is read slowly until a file is there: on a fast machine too a run goes on while a node is on its way."""

    def __init__(self, context: int, until: str) -> None:
        from pdsl.data import python_source

        self._rows, self._until = python_source(context), Path(until)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: Sequence[int]) -> dict[str, Tensor]:
        if not self._until.exists():
            time.sleep(0.05)
        return self._rows.rows(indices)


def patient_rows(context: int, until: str) -> _Patient:
    return _Patient(context, until)
