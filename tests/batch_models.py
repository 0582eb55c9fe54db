"""Models and data for tests of batches, named in specs as "tests.batch_models:...": a loss of the model's own, tokens that do not count, data of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from multiprocessing import current_process

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from pdsl.data import python_source
from tests.user_models import Rows

__all__ = [
    "MixedRows",
    "again",
    "documents",
    "documents_rows",
    "failing",
    "mixed",
    "mixed_items",
    "mixed_rows",
    "noisy",
    "once",
    "own_loss",
    "own_token_loss",
    "split_by_process",
    "text",
    "vectors",
    "words",
    "words_rows",
]


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class _OwnLoss(nn.Module):
    """Computes the mean over its rows itself, so that nothing can be taken out of it again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Residual() for _ in range(4)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, target)


def own_loss() -> nn.Module:
    return _OwnLoss()


def noisy() -> nn.Sequential:
    """Drops and normalises, so that it has random numbers and running statistics."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))


def vectors(size: int) -> Rows:
    """Rows of eight numbers."""
    generator = torch.Generator().manual_seed(1)
    return Rows(x=torch.randn(size, 8, generator=generator), target=torch.randn(size, 8, generator=generator))


class _OwnTokenLoss(_OwnLoss):
    """A mean over tokens as people write it: the sum over the count, which is 0 / 0 where none counts."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        counts = (target != -100).float()
        each = nn.functional.cross_entropy(x.flatten(0, 1), target.clamp(min=0).flatten(), reduction="none")
        return (each * counts.flatten()).sum() / counts.sum()


def own_token_loss() -> nn.Module:
    return _OwnTokenLoss()


def words() -> nn.Sequential:
    """Eight classes for each of the tokens of a row."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))


def words_rows(size: int, empty: int = 0) -> Rows:
    """Rows of three tokens of which 1, 2, 3, 1, ... count; of the first `empty` rows none does."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(0, 8, (size, 3), generator=generator)
    for row in range(size):
        target[row, 0 if row < empty else row % 3 + 1 :] = -100
    return Rows(x=torch.randn(size, 3, 8, generator=generator), target=target)


class _Once:
    """A stream that is its own iterator: it ends when it has given `size` rows."""

    def __init__(self, size: int) -> None:
        self._rows = iter([vectors(size)[i] for i in range(size)])

    def __iter__(self) -> _Once:
        return self

    def __next__(self) -> dict[str, Tensor]:
        return next(self._rows)


def once(size: int) -> _Once:
    return _Once(size)


class _Again(IterableDataset[dict[str, Tensor]]):
    """A stream that begins anew whenever it is asked to."""

    def __init__(self, size: int) -> None:
        self._data = vectors(size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self._data[i] for i in range(len(self._data)))


def again(size: int) -> _Again:
    return _Again(size)


def split_by_process(size: int) -> _Once:
    """A stream that is a batch shorter in every second process."""
    return _Once(size - 8 * current_process().name.endswith("1"))


class _Failing(_Again):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from islice(super().__iter__(), 12)
        raise OSError("the disk is gone")


def failing(size: int) -> _Failing:
    return _Failing(size)


class _Text:
    """Forty rows of text, one after another, as often as asked."""

    def __init__(self, context: int) -> None:
        self._data = python_source(context=context, limit=40 * context + 1)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self._data[i] for i in range(len(self._data)))


def text(context: int) -> _Text:
    return _Text(context)


class _Mixed(_OwnLoss):
    """Tokens are mixed by a matrix that all rows share."""

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = mask @ block(x)
        return nn.functional.mse_loss(x, target)


def mixed() -> nn.Module:
    return _Mixed()


class MixedRows(Rows):
    """Rows of three tokens, and one matrix for all: as it is, or (`by_row`) once more with every row."""

    def __init__(self, size: int, by_row: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        super().__init__(x=torch.randn(size, 3, 8, generator=generator), target=torch.randn(size, 3, 8, generator=generator))
        self.mask, self._by_row = torch.randn(3, 3, generator=generator).tril(), by_row

    def rows(self, indices: Sequence[int]) -> dict[str, Tensor]:
        mask = self.mask.expand(len(indices), 3, 3) if self._by_row else self.mask
        return {**super().rows(indices), "mask": mask}


def mixed_rows(size: int, by_row: bool = False) -> Rows:
    return MixedRows(size, by_row)


class MixedItems:
    """The same, row by row."""

    def __init__(self, size: int) -> None:
        self._rows = MixedRows(size, by_row=False)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = self._rows.rows([index])
        return {"x": found["x"][0], "mask": found["mask"], "target": found["target"][0]}


def mixed_items(size: int) -> MixedItems:
    return MixedItems(size)


class _Documents(_OwnLoss):
    """Every token gets the mean of its document; the offsets of a row say where its documents begin and end."""

    def forward(self, x: Tensor, offsets: Tensor, target: Tensor) -> Tensor:
        means = [[row[a:b].mean(dim=0).expand(b - a, -1) for a, b in pairwise(at)] for row, at in zip(x, offsets.tolist(), strict=True)]
        x = x + torch.stack([torch.cat(row) for row in means])
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, target)


def documents() -> nn.Module:
    return _Documents()


def documents_rows(size: int) -> Rows:
    """Rows of five tokens, in documents of 3 + 2 and 2 + 3 in turn."""
    generator = torch.Generator().manual_seed(4)
    offsets = torch.tensor([[0, 3, 5], [0, 2, 5]]).repeat(size // 2, 1)
    return Rows(x=torch.randn(size, 5, 8, generator=generator), offsets=offsets, target=torch.randn(size, 5, 8, generator=generator))
