"""Models and data for tests of batches, named in specs as "tests.batch_models:...": a loss of the model's own, tokens that do not count, data of any size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.user_models import Rows

__all__ = ["own_loss", "own_token_loss", "vectors", "words", "words_rows"]


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
