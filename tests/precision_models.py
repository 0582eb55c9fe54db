"""Models of which formats are asked that they were not written for, named in specs as "tests.precision_models:..."."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.user_models import Rows

__all__ = ["doubled", "halved", "mixed", "normed", "rows", "tabled", "tied"]

WIDTH = 8


class _Block(nn.Module):
    """A linear map between a norm and what is added; `table` scales by a buffer in fp32, and `casts` says whether it is cast first."""

    def __init__(self, *, table: bool = False, casts: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH) if table else None)
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.table is not None:
            y = y * (self.table.to(y.dtype) if self.casts else self.table)
        y = y.to(self.up.weight.dtype) if self.casts else y
        return x + self.down(F.gelu(self.up(y)).to(self.down.weight.dtype))


class _Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y


def tabled(casts: bool = True) -> nn.Module:
    return _Chain([_Block(table=True, casts=casts) for _ in range(3)])


def halved() -> nn.Module:
    return _Chain([_Block() for _ in range(3)]).bfloat16()


def doubled() -> nn.Module:
    return _Chain([_Block() for _ in range(3)]).double()


def mixed() -> nn.Module:
    """A model in bf16 with one part in fp32."""
    model = _Chain([_Block() for _ in range(3)])
    for block in model.blocks:
        block.up.bfloat16()
    return model


def normed() -> nn.Module:
    """Batch statistics between the layers."""
    parts: list[nn.Module] = []
    for _ in range(3):
        parts += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(WIDTH, WIDTH))


class _Tied(nn.Module):
    """The head is the embedding, used by the model's own code: what the last module gives is no output but goes into a product with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([_Block() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        for block in self.blocks:
            y = block(y)
        return F.linear(self.norm(y), self.tokens.weight)


def tied() -> nn.Module:
    return _Tied()


def rows(kind: str = "float32") -> Rows:
    """16 rows; `kind` is the dtype of the input, `tokens` for integers."""
    generator = torch.Generator().manual_seed(3)
    if kind == "tokens":
        return Rows(x=torch.randint(0, 11, (16, 4), generator=generator), target=torch.randint(0, 11, (16, 4), generator=generator))
    dtype = getattr(torch, kind)
    return Rows(x=torch.randn(16, WIDTH, generator=generator).to(dtype), target=torch.randn(16, WIDTH, generator=generator).to(dtype))
