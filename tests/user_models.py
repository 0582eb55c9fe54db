"""Models and data as a user would write them, named in the specs of tests as "tests.user_models:...": the small ones of public bug reports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = [
    "Rows",
    "four_linears",
    "four_linears_rows",
    "idle",
    "idle_rows",
    "masked_square",
    "one_linear",
    "one_linear_rows",
    "shared_shift",
    "shared_shift_rows",
]


class Rows:
    """A data set of given tensors; row i of each."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def rows(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return {name: column[list(indices)] for name, column in self.columns.items()}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def four_linears() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def four_linears_rows() -> Rows:
    generator = torch.Generator().manual_seed(1)
    return Rows(x=torch.randn(8, 8, generator=generator), target=torch.zeros(8, 8))


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x + shift))


class _SharedShift(nn.Module):
    """Blocks that are all given one parameter of the model itself, which lies in none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((8,), 0.1))
        self.blocks = nn.ModuleList([_Shifted() for _ in range(4)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.shift)
        return nn.functional.mse_loss(x, target)


def shared_shift() -> nn.Module:
    return _SharedShift()


def shared_shift_rows() -> Rows:
    generator = torch.Generator().manual_seed(1)
    return Rows(x=torch.randn(64, 8, generator=generator), target=torch.zeros(64, 8))


class _Idle(nn.Module):
    """One parameter that nothing reads, and one that only rows of the second half of the data read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.idle = nn.Parameter(torch.ones(3))
        self.rare = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, late: Tensor, target: Tensor) -> Tensor:
        y = self.linear(x)
        return nn.functional.mse_loss(y + late[:, None] * self.rare if late.any() else y, target)


def idle() -> nn.Module:
    return _Idle()


def idle_rows() -> Rows:
    generator = torch.Generator().manual_seed(1)
    return Rows(x=torch.randn(4, 8, generator=generator), late=torch.tensor([0.0, 0.0, 0.0, 1.0]), target=torch.zeros(4, 8))


def one_linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 1, bias=False))


def one_linear_rows() -> Rows:
    """Two sequences: one token of ones, three tokens of twos; padding does not count."""
    x = torch.stack([torch.full((3, 4), 1.0), torch.full((3, 4), 2.0)])
    return Rows(x=x, target=torch.tensor([[0, -100, -100], [0, 0, 0]]))


def masked_square(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the tokens that count of the squared output."""
    return output.squeeze(-1)[target != -100].square().mean()
