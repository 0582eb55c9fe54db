"""A small decoder that returns scores, rows in which some targets do not count, and three losses over them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pdsl.models import GPT, gpt
from tests.user_models import Rows

__all__ = ["OBJECTIVES", "decoder", "ragged_rows", "rows", "total"]

CONTEXT, VOCABULARY = 8, 32
IGNORED = -100


def decoder(layers: int = 6) -> GPT:
    return gpt(layers=layers, width=32, heads=4, context=CONTEXT, vocabulary=VOCABULARY)


def ragged_rows(size: int = 64) -> Rows:
    """Random tokens; in each row between one and all of the targets count."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (size, CONTEXT), generator=generator)
    labels = torch.randint(VOCABULARY, (size, CONTEXT), generator=generator)
    counting = torch.randint(1, CONTEXT + 1, (size, 1), generator=generator)
    labels[torch.arange(CONTEXT).expand(size, -1) >= counting] = IGNORED
    return Rows(tokens=tokens, labels=labels)


def rows(output: Tensor, target: Tensor) -> Tensor:
    """The mean over rows of the mean over what counts in each."""
    each = functional.cross_entropy(output.transpose(1, 2), target, ignore_index=IGNORED, reduction="none").sum(1)
    return (each / (target != IGNORED).sum(1)).mean()


def total(output: Tensor, target: Tensor) -> Tensor:
    """The sum over all that counts."""
    return functional.cross_entropy(output.transpose(1, 2), target, ignore_index=IGNORED, reduction="sum")


def _tokens(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), target, ignore_index=IGNORED)


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"rows": rows, "tokens": _tokens, "total": total}
