"""Data sets as sources of the rows of steps: which samples a step takes, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdsl.grammar.errors import ModelError, RunError
from pdsl.lowering.factory import call_factory, plain_arguments, resolve
from pdsl.lowering.plan import Plan
from pdsl.lowering.spec import CallValue
from pdsl.runtime.rows import Samples, StepRows, read_rows, real_places, shares, step_indices, steps_per_epoch

__all__ = ["IndexedSamples", "make_dataset", "make_samples"]


class IndexedSamples:
    """A data set with a length and rows by index, shuffled anew in each epoch by the seed; in its own order if that is None."""

    def __init__(self, dataset: Any, *, seed: int, batch: int, pad: bool, shared: Sequence[str] = ()) -> None:
        self._data, self._size = dataset, len(dataset)
        self._seed, self._batch, self._pad, self._shared = seed, batch, pad, tuple(shared)
        steps_per_epoch(self._size, batch, pad=pad)

    def _order(self, step: int) -> tuple[int, ...]:
        return step_indices(self._seed, step, self._size, self._batch, pad=self._pad)

    def count(self, step: int) -> int:
        return len(self._order(step))

    def ids(self, step: int, places: Mapping[int, range]) -> dict[int, Sequence[int]]:
        order = self._order(step)
        return {m: [order[i] for i in real_places(part, len(order))] for m, part in places.items()}

    def take(self, step: int, places: Mapping[int, range]) -> StepRows:
        order = self._order(step)
        return shares(places, len(order), lambda chosen: read_rows(self._data, [order[i] for i in chosen], self._shared))


def make_samples(plan: Plan) -> Samples:
    """The samples that a plan is trained on. Raises RunError if there are none, ModelError if the factory of the data cannot be called."""
    job = plan.job
    return IndexedSamples(make_dataset(plan), seed=job.seed, batch=job.batch, pad=job.last == "pad", shared=job.shared)


def make_dataset(plan: Plan) -> Any:
    """The data set of a plan. Raises RunError if it names none, ModelError if its factory cannot be called."""
    if plan.job.data is None:
        raise RunError("the plan names no data; use a session and give it your own batches")
    return call_source(plan.job.data, plan.job.directory)


def call_source(data: CallValue, directory: str) -> Any:
    """The data set that `source("module:factory", ...)` names. Raises ModelError if the factory cannot be called, or gives no data set."""
    name = str(data.positional[0])
    found = call_factory(resolve(name, directory), plain_arguments(data.keywords), name)
    if not hasattr(found, "__len__") or not (hasattr(found, "__getitem__") or hasattr(found, "rows")):
        raise ModelError(f"{name} gave a {type(found).__name__}; a data set has a length and gives rows by index")
    return found
