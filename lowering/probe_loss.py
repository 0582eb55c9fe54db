"""How a call of torch's cross entropy is read where the scores of its classes lie split over tensor ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

__all__ = ["CrossEntropy"]


@frozen
class CrossEntropy:
    """The arguments of a call. `dim` is the one of the classes."""

    scores: Tensor
    target: Tensor
    weight: Tensor | None = None
    ignored: int = -100
    reduction: str = "mean"
    smoothing: float = 0.0

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CrossEntropy:
        """Those of `torch.nn.functional.cross_entropy`, as a mode or a subclass of torch's tensor is given them."""
        given = dict(
            zip(("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"), args, strict=False)
        )
        given.update(kwargs)
        reduction = given.get("reduction", "mean")
        averages, reduces = given.get("size_average"), given.get("reduce")  # torch's older names for the same
        if averages is not None or reduces is not None:
            reduction = "none" if reduces is False else "sum" if averages is False else "mean"
        smoothing, ignored = given.get("label_smoothing", 0.0), given.get("ignore_index", -100)
        return cls(given["input"], given["target"], given.get("weight"), ignored, reduction, smoothing)

    @property
    def dim(self) -> int:
        return 0 if self.scores.dim() == 1 else 1

    @property
    def refused(self) -> str:
        """Why it cannot be computed from parts of the scores; "" if it can."""
        if self.weight is not None:
            return "cross_entropy with weights of classes takes the scores of all classes"
        if self.target.is_floating_point():
            return "cross_entropy with a target of probabilities takes the scores of all classes"
        return ""

    def of_part(self) -> Tensor:
        """A loss of the right shape from the part of the scores that a rank has, with targets among its own classes."""
        width = self.scores.shape[self.dim]
        target = torch.where(self.target == self.ignored, self.ignored, self.target % width)
        return F.cross_entropy(self.scores, target, ignore_index=self.ignored, reduction=self.reduction, label_smoothing=self.smoothing)
