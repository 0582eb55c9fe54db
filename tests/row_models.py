"""Models whose forward looks at rows together, draws random numbers or writes into tensors: named in specs as "tests.row_models:..."."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.user_models import Rows

__all__ = ["Normed", "inplace", "inplace_rows", "normed", "normed_rows", "reading", "tuned", "tuned_rows"]

WIDTH = 8


class Normed(nn.Module):
    """A block that normalises over its rows; what it adds is small, so that deep chains stay tame."""

    def __init__(self, *, affine: bool, momentum: float | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=affine, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.norm(self.linear(x)))
        return y


class Chain(nn.Module):
    """Blocks with a convolution and its own normalisation before them, and a head."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 2, 5)
        self.stem_norm = nn.BatchNorm1d(2)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x[:, None])).relu().flatten(1)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x)[:, 0], target)


def normed(blocks: int = 4, affine: bool = True, momentum: float = 0.1) -> nn.Module:
    """Batch normalisation in every layer; a `momentum` of 0 stands for the plain average."""
    return Chain([Normed(affine=affine, momentum=momentum or None) for _ in range(blocks)])


def normed_rows(size: int = 96) -> Rows:
    generator = torch.Generator().manual_seed(5)
    return Rows(x=torch.randn(size, WIDTH, generator=generator), target=torch.randn(size, generator=generator))


class _Reading(nn.Module):
    """Its loss depends on the running statistics: where they are not the same, losses are not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Normed(affine=True, momentum=0.3) for _ in range(4)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        norm = self.blocks[-1].norm
        return nn.functional.mse_loss(x.mean(1) * norm.running_var.detach().mean() + norm.running_mean.detach().sum(), target)


def reading() -> nn.Module:
    return _Reading()


class Inplace(nn.Module):
    """Blocks that write into what they are given, or into views of it, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.way == "input":
            x += 0.5
        elif self.way == "relu":
            x = nn.functional.relu(x, inplace=True)
        elif self.way == "view":
            x.view(len(x), -1)[:, : WIDTH // 2].mul_(2.0)
        elif self.way == "mask":
            mask.mul_(0.5)
        y = torch.tanh(self.linear(x)) * mask
        y += 0.1
        return y


class InplaceChain(nn.Module):
    """In-place blocks between a stem and a head; `mask` is made by the model itself and given to every block."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Inplace(way) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, mask)
        x.add_(1.0)
        return nn.functional.mse_loss(self.head(x)[:, 0], target)


def inplace(way: str = "input") -> nn.Module:
    return InplaceChain(way)


inplace_rows = normed_rows


def tuned(kind: str) -> nn.Module:
    """A small decoder of which some parameters are frozen or shared, as `kind` says."""
    from pdsl.models import gpt

    model = gpt(layers=4, width=16, heads=2, context=8, tie=kind == "tied ends")
    frozen = {
        "mixed": [m for layer in model.layers for m in (layer.attn, layer.mlp_norm)],
        "first": [model.tok_embeddings, *model.layers[:2]],
        "middle": [*model.layers[1:3]],
        "last": [model.norm, model.output, model.layers[3]],
        "all but one": [model.tok_embeddings, model.norm, model.output, *model.layers[:2], *model.layers[3:]],
    }
    for part in frozen.get(kind, []):
        part.requires_grad_(requires_grad=False)
    first = model.layers[0]
    if kind == "tied in a layer":
        for layer in model.layers:
            layer.attn.wk.weight = layer.attn.wq.weight
    if kind == "tied over layers":
        for layer in model.layers[1:]:
            layer.mlp.w1.weight = first.mlp.w1.weight
    if kind == "one module":
        for layer in model.layers[2:]:
            layer.mlp = first.mlp
    if kind == "parts":
        table = torch.cat([first.attn.wq.weight.detach(), first.attn.wk.weight.detach()])
        first.attn.wq.weight, first.attn.wk.weight = nn.Parameter(table[:16]), nn.Parameter(table[16:])
    return model


def tuned_rows() -> Rows:
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, 256, (96, 9), generator=generator)
    return Rows(tokens=tokens[:, :-1], targets=tokens[:, 1:])
