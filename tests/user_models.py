"""Models and data as a user would write them, named in the specs of tests as "tests.user_models:...": the small ones of public bug reports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = [
    "Rows",
    "column_mean",
    "column_sum",
    "four_linears",
    "four_linears_rows",
    "frozen_start",
    "frozen_start_rows",
    "idle",
    "idle_rows",
    "masked_square",
    "one_linear",
    "one_linear_rows",
    "prescribed",
    "prescribed_rows",
    "shared_shift",
    "shared_shift_rows",
    "two_linears",
    "two_linears_rows",
    "wide_head",
    "wide_head_rows",
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


def frozen_start() -> nn.Sequential:
    """The first two of four layers are not trained, so a stage of them has nothing to do but to pass on."""
    model = four_linears()
    for layer in model[:2]:
        layer.requires_grad_(False)
    return model


frozen_start_rows = four_linears_rows


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


class _Prescribed(nn.Module):
    """Adds weight * slope * (column 0) to column 1: each row's gradient is the slope times its own column 0, whatever the weights."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, 0], x[:, 1] + self.weight * self.slope * x[:, 0]], dim=1)


def prescribed(first: float = 1.0, second: float = 1.0) -> nn.Sequential:
    """Two layers of one weight with gradients of a given size."""
    return nn.Sequential(_Prescribed(first), _Prescribed(second))


def prescribed_rows() -> Rows:
    return Rows(x=torch.tensor([[1.0, 0.0]]).repeat(8, 1), target=torch.zeros(8))


def column_mean(output: Tensor, target: Tensor) -> Tensor:
    return output[:, 1].mean()


def column_sum(output: Tensor, target: Tensor) -> Tensor:
    return output[:, 1].sum()


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def two_linears_rows() -> Rows:
    """Four sequences of three places, of which one, three, two and three count."""
    generator = torch.Generator().manual_seed(1)
    target = torch.zeros(4, 3, dtype=torch.int64)
    target[0, 1:] = target[2, 2:] = -100
    return Rows(x=torch.randn(4, 3, 4, generator=generator), target=target)


def wide_head() -> nn.Sequential:
    """Nearly all parameters are in the last layer: 64 + 8 before it, 8 * 1024 + 1024 in it."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1024))


def wide_head_rows() -> Rows:
    return Rows(x=torch.ones(8, 8), target=torch.zeros(8, 1024))
