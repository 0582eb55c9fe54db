"""Models of tests about backwards in halves, named in specs as "tests.split_models:..."."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.user_models import Rows

__all__ = [
    "branching",
    "branching_rows",
    "checkpointed",
    "checkpointed_rows",
    "frozen_between",
    "frozen_between_rows",
    "plain_between",
    "plain_between_rows",
    "residual_mlps",
    "residual_mlps_rows",
    "shared_twice",
    "shared_twice_rows",
]


class Residual(nn.Module):
    """x + d(gelu(u(x))), 8 to 16 and back."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.d = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.d(nn.functional.gelu(self.u(x)))


def residual_mlps(blocks: int = 4) -> nn.Sequential:
    return nn.Sequential(*[Residual() for _ in range(blocks)])


def residual_mlps_rows() -> Rows:
    generator = torch.Generator().manual_seed(1)
    return Rows(x=torch.randn(16, 8, generator=generator), target=torch.zeros(16, 8))


class Checkpointed(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda t: self.d(nn.functional.gelu(self.u(t))), x, use_reentrant=False)  # type: ignore[no-any-return]


def checkpointed() -> nn.Sequential:
    """Blocks that compute their insides again in the backward."""
    return nn.Sequential(*[Checkpointed() for _ in range(4)])


def frozen_between() -> nn.Sequential:
    """The first two blocks are not trained, nor is the gate of the third."""
    model = residual_mlps()
    for block in model[:2]:
        block.requires_grad_(False)
    model[2].u.requires_grad_(False)
    return model


class Rotate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, dims=-1) * 1.5


def plain_between() -> nn.Sequential:
    """Blocks without parameters in the middle and at the end, which make stages without any."""
    return nn.Sequential(Residual(), Rotate(), Residual(), Rotate())


class Twice(torch.autograd.Function):
    """x * (1 + w), with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * (1 + w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * (1 + w), (g * x).sum(0)


class Branch(nn.Module):
    """Takes and gives two tensors and a mask of whole numbers, writes into one of them, and uses a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.gain = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x: Tensor, side: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(self.norm(x))
        y += self.gain
        y[:, :2].mul_(0.5)
        y = Twice.apply(torch.tanh(self.linear(y)), self.gain)
        y = torch.where(mask > 0, y, side)
        if y.requires_grad:
            y.register_hook(lambda g: g * 0.5)
        return x + y, side, mask


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Branch() for _ in range(4)])

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        side = torch.sin(self.start(x))
        for block in self.blocks:
            x, side, mask = block(x, side, mask)
        return nn.functional.mse_loss(x + side, target)


def branching() -> nn.Module:
    """Several tensors cross each boundary: one that changes, one that is handed on unchanged, one of whole numbers."""
    return Branching()


def branching_rows() -> Rows:
    generator = torch.Generator().manual_seed(1)
    return Rows(
        x=torch.randn(32, 8, generator=generator),
        mask=torch.randint(0, 2, (32, 8), generator=generator),
        target=torch.randn(32, 8, generator=generator),
    )


class SharedTwice(nn.Module):
    """Blocks that use a weight of their own twice and are all given one of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((8,), 0.1))
        self.blocks = nn.ModuleList([TwiceGiven() for _ in range(4)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.shift)
        return nn.functional.mse_loss(x, target)


class TwiceGiven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + self.linear(torch.tanh(self.linear(x + shift)))


def shared_twice() -> nn.Module:
    return SharedTwice()


shared_twice_rows = checkpointed_rows = frozen_between_rows = plain_between_rows = residual_mlps_rows
