"""What lies on this rank of tensors that torch spreads over ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["final_gradient", "local_tensor"]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def final_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The local gradient of a parameter, in the placement of the parameter: tensor parallel may leave partial sums behind."""
    grad = parameter.grad
    if grad is None:
        return None
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return local_tensor(grad)
