"""A small vision transformer: patches, a class token, learned positions, blocks that see everything, a linear head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ViT", "vit"]


class Attention(nn.Module):
    """Self-attention over all patches. The number of heads follows from the width of the projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) to the same."""
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v)
        y: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return y


class Block(nn.Module):
    """Attention and MLP, each normed before and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) to the same."""
        x = x + self.attn(self.attn_norm(x))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class ViT(nn.Module):
    """See `vit` for the arguments."""

    def __init__(self, *, layers: int, width: int, heads: int, image: int, patch: int, channels: int, classes: int) -> None:
        super().__init__()
        self.patch = patch
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.position_embeddings = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, width))
        self.patch_embeddings = nn.Linear(channels * patch * patch, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Normal with deviation 0.02 for all matrices and tables, scaled down where the result is added to the stream; biases are zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() < 2:
                nn.init.ones_(parameter)
            else:
                adds = name.endswith(("attn.wo.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(self.layers)) if adds else 0.02)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        """Pixels (B, channels, image, image) to logits (B, classes); with labels (B,), to the mean cross entropy."""
        patches = F.unfold(pixels, self.patch, stride=self.patch).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(pixels), -1, -1), self.patch_embeddings(patches)), dim=1)
        x = x + self.position_embeddings
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.classifier(self.norm(x[:, 0]))
        return logits if labels is None else F.cross_entropy(logits.float(), labels)


def vit(layers: int = 4, width: int = 64, heads: int = 4, image: int = 8, patch: int = 2, channels: int = 1, classes: int = 10) -> ViT:
    """A classifier of square images of `image` pixels a side. Raises ValueError on arguments that do not fit together."""
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}")
    if image % patch:
        raise ValueError(f"image {image} is not a multiple of patch {patch}")
    return ViT(layers=layers, width=width, heads=heads, image=image, patch=patch, channels=channels, classes=classes)
