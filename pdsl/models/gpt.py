"""A plain decoder for language: RMSNorm before each part, causal attention, a GELU MLP of four times the width, no biases."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "gpt"]

IGNORED = -100  # targets of this value do not count, as in torch's own cross entropy


class Attention(nn.Module):
    """Causal self-attention. The number of heads follows from the width of the projections, so a tensor-parallel rank may hold some of them."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.dropout = dropout
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """`x` is (B, S, width); `rotation` is cosine and sine, (S, head_dim) each, or None."""
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        y: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return y


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, 4 * width, bias=False)
        self.w2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) to the same."""
        y: Tensor = self.w2(F.gelu(self.w1(x)))
        return y


class Block(nn.Module):
    """Attention and MLP, each normed before and added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """(B, S, width) to the same."""
        x = x + self.dropout(self.attn(self.attn_norm(x), rotation))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class GPT(nn.Module):
    """Token embedding, blocks, norm, projection to the vocabulary. See `gpt` for the arguments."""

    def __init__(
        self, *, layers: int, width: int, heads: int, context: int, vocabulary: int, positions: str, dropout: float, tie: bool
    ) -> None:
        super().__init__()
        self.context = context
        self.head_dim = width // heads
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.pos_embeddings = nn.Embedding(context, width) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.initialize()
        if tie:
            self.output.weight = self.tok_embeddings.weight

    @torch.no_grad()
    def initialize(self) -> None:
        """Normal with deviation 0.02; what is added to the stream is scaled down by the number of additions, as in GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
                continue
            adds = name.endswith(("attn.wo.weight", "mlp.w2.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(self.layers)) if adds else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens (B, S) to logits (B, S, vocabulary); with targets (B, S), to the mean cross entropy over the targets that are not -100."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"a sequence of {length} tokens is longer than the context of {self.context}")
        x = self.tok_embeddings(tokens)
        rotation = None
        if self.pos_embeddings is None:
            rotation = rotation_table(length, self.head_dim, tokens.device)
        else:
            x = x + self.pos_embeddings(torch.arange(length, device=tokens.device))
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, rotation)
        logits: Tensor = self.output(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def rotation_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine, (length, head_dim) each, of position times frequency: rotary embedding, arXiv 2104.09864, with base 10000."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles: Tensor = torch.outer(torch.arange(length, device=device, dtype=torch.float32), 10000.0**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of `x` (B, H, S, head_dim) by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def gpt(
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 64,
    vocabulary: int = 256,
    positions: str = "rotary",
    dropout: float = 0.0,
    tie: bool = False,
) -> GPT:
    """A decoder of `layers` blocks; 12 * layers * width**2 parameters and two tables of vocabulary * width, one if `tie`.

    `positions` is `rotary` or `learned`. Raises ValueError on arguments that do not fit together.
    """
    if positions not in {"rotary", "learned"}:
        raise ValueError(f'positions is "{positions}": it is "rotary" or "learned"')
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}")
    if positions == "rotary" and (width // heads) % 2:
        raise ValueError(f"rotary positions turn pairs: width / heads is {width // heads}, it must be even")
    return GPT(
        layers=layers, width=width, heads=heads, context=context, vocabulary=vocabulary, positions=positions, dropout=dropout, tie=tie
    )
