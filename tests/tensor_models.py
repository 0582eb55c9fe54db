"""Models as users write them, for tensor axes: grouped queries, norms of queries, biases, gates, fused projections, sizes that count on the whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.user_models import Rows

__all__ = ["class_rows", "classes", "classifier", "llama", "llama_rows", "squares"]

VOCABULARY = 48


class _Attention(nn.Module):
    """Causal attention with fewer heads of keys than of queries. `form` is how its code sees heads; `norm` scales each query and key to length one."""

    def __init__(self, width: int, heads: int, kv_heads: int, form: str, bias: bool, norm: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.form = heads, kv_heads, width // heads, form
        inner = kv_heads * self.head_dim
        self.wq = nn.Linear(width, width, bias=bias)
        self.wk = nn.Linear(width, inner, bias=False)  # the scores do not change with it: its gradient is rounding alone
        self.wv = nn.Linear(width, inner, bias=bias)
        self.wo = nn.Linear(width, width, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim) if norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._seen(self.wq(x), self.heads), self._seen(self.wk(x), self.kv_heads), self._seen(self.wv(x), self.kv_heads)
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def _seen(self, x: Tensor, heads: int) -> Tensor:
        if self.form == "named":  # counts on all heads
            return x.view(x.shape[0], x.shape[1], heads, self.head_dim)
        if self.form == "length":  # counts on all heads, and lets the length give way
            return x.view(x.shape[0], -1, heads, self.head_dim)
        return x.unflatten(-1, (-1, self.head_dim))


class _Fused(nn.Module):
    """Attention with one projection, cut in three."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(width, 3 * width, bias=bias)
        self.wo = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = (t.unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2) for t in self.wqkv(x).chunk(3, dim=-1))
        return self.wo(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class _Gated(nn.Module):
    def __init__(self, width: int, bias: bool, norm: bool) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, 2 * width, bias=bias), nn.Linear(width, 2 * width, bias=bias)
        self.w2 = nn.Linear(2 * width, width, bias=bias)
        self.inner_norm = nn.RMSNorm(2 * width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.inner_norm(F.silu(self.w1(x)) * self.w3(x)))


class _Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Llama(nn.Module):
    def __init__(self, blocks: list[nn.Module], width: int, tie: bool, padding: int | None) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, width, padding_idx=padding)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tie:
            self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def llama(
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    form: str = "inferred",
    bias: bool = False,
    norm: bool = False,
    inner_norm: bool = False,
    fused: bool = False,
    tie: bool = False,
    padding: int | None = None,
) -> nn.Module:
    """A decoder with grouped queries and gated MLPs; see the parts for the arguments."""

    def attention() -> nn.Module:
        return _Fused(width, heads, bias) if fused else _Attention(width, heads, kv_heads, form, bias, norm)

    blocks: list[nn.Module] = [_Block(attention(), _Gated(width, bias, inner_norm), width) for _ in range(layers)]
    model = _Llama(blocks, width, tie, padding)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))  # no bias is zero and no scale is one, so a missing one shows
    return model


def llama_rows(length: int = 8, count: int = 64) -> Rows:
    """Tokens and the tokens after them."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (count, length + 1), generator=generator)
    return Rows(tokens=text[:, :-1].contiguous(), targets=text[:, 1:].contiguous())


class _Classifier(nn.Module):
    """Features to classes, with a loss of its own: torch's, or one that is made of other functions."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(6, 16), nn.Linear(16, 8), loss
        self.other = nn.Linear(6, 8) if loss == "two heads" else None
        self.register_buffer("weight", torch.arange(1.0, 9.0), persistent=False)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        scores = self.head(F.relu(self.body(x)))
        if self.loss == "weights":
            return F.cross_entropy(scores, label, weight=self.weight)
        if self.loss == "parts":
            return F.nll_loss(F.log_softmax(scores, -1), label)
        if self.loss == "view":
            return F.cross_entropy(scores.view(-1, 8), label)
        if self.loss == "two heads":
            other = self.other(x)
            return F.cross_entropy(scores + other, label) + 0.3 * F.cross_entropy(other, label)
        if self.loss == "written":
            empty = torch.zeros(scores.shape)
            empty[:] = scores
            return F.cross_entropy(empty, label)
        if self.loss == "module":
            return nn.CrossEntropyLoss(label_smoothing=0.1)(scores, label)
        return F.cross_entropy(scores * 2.0, label) + 0.1 * F.cross_entropy(-scores, label, reduction="sum")


def classifier(loss: str = "torch") -> nn.Module:
    """Two matrices and a loss, which may be "torch", "module", "two heads", "view", "weights", "parts" or "written"."""
    return _Classifier(loss)


def classes(hidden: int = 16) -> nn.Module:
    """Scores of eight classes, for an objective."""
    return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 8))


def class_rows(count: int = 64) -> Rows:
    """Features and a class."""
    generator = torch.Generator().manual_seed(3)
    return Rows(x=torch.randn(count, 6, generator=generator), label=torch.randint(0, 8, (count,), generator=generator))


def squares(output: Tensor, label: Tensor) -> Tensor:
    """An objective of all scores."""
    return (output.square().sum(-1) * label).mean()
