"""From what a model returns to the weighted loss of one microbatch.

A microbatch never weighs by 1/replicas or 1/microbatches. Under `mean(over = samples)` it weighs by its rows over the global batch; under
`mean(over = tokens)` its loss is turned into a sum over its tokens, and the whole step is divided by the global count of tokens at the end;
`sum` takes the loss as the sum that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch.nn import functional

from pdsl.grammar.errors import ModelError
from pdsl.lowering.factory import resolve
from pdsl.lowering.facts import TARGETS, target_of
from pdsl.lowering.plan import Job
from pdsl.lowering.spec import CallValue
from pdsl.runtime.rows import Share

__all__ = ["IGNORED", "Objective", "WeightedLoss", "flat_cross_entropy", "make_objective", "strict_mse", "token_count"]

IGNORED = -100  # the label that torch's cross entropy skips


def token_count(batch: Mapping[str, torch.Tensor]) -> int:
    """How many targets of a batch count: all that are not -100 (for floating targets: all rows)."""
    target = target_of(batch)
    if target is None:
        raise ModelError(f"mean(over = tokens) counts targets, but the batch has none of {', '.join(TARGETS)}: {', '.join(batch)}")
    return int((target != IGNORED).sum()) if not target.is_floating_point() else target.shape[0]


@frozen
class WeightedLoss:
    """`loss` is what to differentiate, this microbatch's share of the loss of the step; `count` are the tokens it still must be divided by."""

    loss: torch.Tensor
    count: int


@frozen
class Objective:
    """How outputs become losses. `function` is None if the model returns its own loss."""

    loss: CallValue
    function: Callable[[Any, torch.Tensor], torch.Tensor] | None

    @property
    def over_tokens(self) -> bool:
        return self.loss.name == "mean" and self.loss.get("over") == "tokens"

    def __call__(self, output: Any, share: Share, samples: int) -> WeightedLoss:
        """The weighted loss of one microbatch, as `prepared` gives it, in a step of so many samples. One that does not count has the loss 0, and its backward
        gives zeros.
        """
        loss = self._plain(output, share.batch)
        if not share.counts:
            return WeightedLoss(torch.nan_to_num(loss) * 0.0, 0)
        if self.over_tokens:
            return WeightedLoss(loss * share.tokens, share.tokens)
        return WeightedLoss(loss * (share.size / samples) if self.loss.name == "mean" else loss, 0)

    def prepared(self, share: Share) -> Share:
        """A microbatch with its tokens counted, where they are. One in which none counts has no loss: its mean would be 0 / 0, and so would gradients. It runs with
        tokens that do, and weighs nothing.
        """
        if not self.over_tokens or not share.counts:
            return share
        if tokens := token_count(share.batch):
            return evolve(share, tokens=tokens)
        batch = {name: value.clamp(min=0) if name in TARGETS else value for name, value in share.batch.items()}
        return evolve(share, batch=batch, counts=False)

    def _plain(self, output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self.function is not None:
            target = target_of(batch)
            if target is None:
                raise ModelError(f"the objective needs a target, but the batch has none of {', '.join(TARGETS)}: {', '.join(batch)}")
            return self.function(output, target)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if isinstance(loss, tuple) and loss:
            loss = loss[0]
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise ModelError(f"the model returned {shape} where its loss was expected; name an objective in `train` if it returns outputs")
        return loss.reshape(())


def flat_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy over the last dim of the output; every other dim is a place with one target. Raises ModelError if the shapes differ there."""
    if output.shape[:-1] != target.shape:
        raise ModelError(
            "cross_entropy takes classes in the last dim of the output and one target for every other place: "
            f"the output is {tuple(output.shape)}, the target {tuple(target.shape)}, not {tuple(output.shape[:-1])}"
        )
    return functional.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1), ignore_index=IGNORED)


def strict_mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean squared difference. Raises ModelError if the shapes differ: torch would compare every row with every other."""
    if output.shape != target.shape:
        raise ModelError(f"mse compares place by place: the output is {tuple(output.shape)}, the target {tuple(target.shape)}")
    return functional.mse_loss(output, target)


_KNOWN: dict[str, Callable[[Any, torch.Tensor], torch.Tensor] | None] = {
    "model": None,
    "cross_entropy": flat_cross_entropy,
    "mse": strict_mse,
}


def make_objective(job: Job) -> Objective:
    """The objective that a job names: `model`, `cross_entropy`, `mse` or the user's "module:function", called with (output, target).

    Raises ModelError if the user's function cannot be found.
    """
    if job.objective in _KNOWN:
        return Objective(job.loss, _KNOWN[job.objective])
    return Objective(job.loss, resolve(job.objective, job.directory))
