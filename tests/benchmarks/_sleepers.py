"""A model whose layers do nothing but take time, each part of its own: forward, input half and weight half of the backward."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from pdsl.lowering.plan import Plan
from pdsl.runtime.session import Session

__all__ = ["rows", "sleepers", "step_times"]


class _Pass(torch.autograd.Function):
    """Hands on what it gets, and sleeps on both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, forward: float, backward: float) -> Tensor:
        time.sleep(forward)
        ctx.backward_time = backward
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.backward_time)
        return gradient, torch.zeros(1), None, None


class _Weigh(torch.autograd.Function):
    """Hands on a weight, and sleeps on the way back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward: float) -> Tensor:
        ctx.backward_time = backward
        return weight * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_time)
        return gradient, None


class Sleeper(nn.Module):
    """Times in seconds. The anchor lets the first layer, which gets no gradient to hand on, sleep in its backward as the others do."""

    def __init__(self, forward: float, backward_input: float, backward_weight: float) -> None:
        super().__init__()
        self.times = forward, backward_input, backward_weight
        self.anchor, self.weight = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        forward, backward_input, backward_weight = self.times
        passed: Tensor = _Pass.apply(x, self.anchor, forward, backward_input)
        weight: Tensor = _Weigh.apply(self.weight, backward_weight)
        return passed + weight


def sleepers(layers: int, forward: float, backward_input: float, backward_weight: float, uneven: float = 0.0) -> nn.Sequential:
    """Layers of these times; every other one takes `1 + uneven` times as long."""
    factors = [1.0 + uneven * (i % 2) for i in range(layers)]
    return nn.Sequential(*[Sleeper(forward * f, backward_input * f, backward_weight * f) for f in factors])


class _Rows:
    def __len__(self) -> int:
        return 64

    def rows(self, indices: Any) -> dict[str, Tensor]:
        return {"x": torch.ones(len(indices), 4), "target": torch.zeros(len(indices), 4)}


def rows() -> _Rows:
    """Something to feed them."""
    return _Rows()


def step_times(rank: int, world: int, store: Any, plan: str, steps: int) -> list[float]:
    """Seconds of steps of one rank. All begin together, as the step before ended with all."""
    made = Plan.from_json(plan)
    batch = rows().rows(range(made.job.batch))
    with Session(made, rank, store) as session:
        return [session.step(batch).seconds for _ in range(1 + steps)][1:]
