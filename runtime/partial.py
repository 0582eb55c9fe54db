"""What is done of a step that is under way: it survives an event if the rank's pipeline does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from attrs import define, field

from pdsl.runtime.executor import StepSums

__all__ = ["Partial"]


@define(eq=False)
class Partial:
    """`sums` and `finished` are over all microbatches whose gradients this rank has; `kept` are gradients that were taken out of the part
    because more follow. `clean` tells that the rank was not cut short inside the model.
    """

    sums: StepSums = field(factory=StepSums)
    finished: frozenset[int] = frozenset()
    kept: Mapping[str, torch.Tensor] = field(factory=dict)
    clean: bool = True

    def add(self, sums: StepSums, microbatches: Iterable[int]) -> None:
        """More microbatches are finished."""
        self.sums = StepSums([*self.sums.losses, *sums.losses], self.sums.tokens + sums.tokens)
        self.finished |= frozenset(microbatches)

    def keep(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Gradients that were computed so far; what is kept already is added to."""
        summed = {n: self.kept[n] + gradients[n] for n in self.kept.keys() & gradients.keys()}
        self.kept = {**self.kept, **gradients, **summed}

    def forget(self) -> None:
        """The step is committed, or begins anew."""
        self.sums, self.finished, self.kept = StepSums(), frozenset(), {}
