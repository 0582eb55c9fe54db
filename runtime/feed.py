"""Data sets as sources of the rows of steps: which samples a step takes, and how they are read.

A data set with a length and an index is shuffled by the seed and read where it is needed. An iterable is read in its own order by every rank, each
taking its rows: reading costs as much on every rank as on one, and no rank has to ask another which sample is whose. It ends when it says so. One
that can be iterated again begins again, as the next epoch; one that is its own iterator ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from attrs import frozen

from pdsl.grammar.errors import ModelError, RunError
from pdsl.lowering.factory import call_factory, describe_error, plain_arguments, resolve
from pdsl.lowering.plan import Plan
from pdsl.lowering.probe_rows import is_indexed, is_stream, stack_rows
from pdsl.lowering.spec import CallValue
from pdsl.runtime.rows import Samples, StepRows, read_rows, real_places, shares, step_indices, steps_per_epoch

__all__ = ["IndexedSamples", "StreamSamples", "call_source", "make_dataset", "make_samples"]

_KEPT = 3  # steps that can be asked for again: the one under way, the one before it, and the one that was looked ahead at


class IndexedSamples:
    """A data set with a length and rows by index, shuffled anew in each epoch by the seed."""

    def __init__(self, dataset: Any, *, seed: int, batch: int, pad: bool, shared: Sequence[str] = ()) -> None:
        self._data, self._size = dataset, len(dataset)
        self._seed, self._batch, self._pad, self._shared = seed, batch, pad, tuple(shared)
        self._per_epoch = steps_per_epoch(self._size, batch, pad=pad)

    def _order(self, step: int) -> tuple[int, ...]:
        return step_indices(self._seed, step, self._size, self._batch, pad=self._pad)

    def count(self, step: int) -> int:
        return min(self._batch, self._size - step % self._per_epoch * self._batch)

    def consumed(self, steps: int) -> int:
        epochs, index = divmod(steps, self._per_epoch)
        each = self._size if self._pad else self._per_epoch * self._batch
        return epochs * each + index * self._batch

    def ids(self, step: int, places: Mapping[int, range]) -> dict[int, Sequence[int]]:
        order = self._order(step)
        return {m: [order[i] for i in real_places(part, len(order))] for m, part in places.items()}

    def take(self, step: int, places: Mapping[int, range]) -> StepRows:
        order = self._order(step)
        return shares(places, len(order), lambda chosen: read_rows(self._data, [order[i] for i in chosen], self._shared))


@frozen(eq=False)
class _Piece:
    """The samples of one step: their rows, as the stream gave them, and the id of the first."""

    first: int
    rows: tuple[Any, ...]

    @property
    def ids(self) -> range:
        return range(self.first, self.first + len(self.rows))


class StreamSamples:
    """An iterable of rows. A sample's id is its place in the epoch. `make` gives the data set anew: a step long gone is come back to by reading again.

    Raises RunError if there is not even one batch, ModelError if reading raises.
    """

    def __init__(self, make: Callable[[], Any], *, batch: int, pad: bool, shared: Sequence[str] = ()) -> None:
        self._make, self._batch, self._pad, self._shared = make, batch, pad, tuple(shared)
        self._begin()
        if not self._piece(0).rows:
            raise RunError(f"the data ended before the first batch of {batch}: {self._lacking}")

    def _begin(self) -> None:
        self._data = self._make()
        self._rows: Iterator[Any] = iter(self._data)
        self._again = self._rows is not self._data
        self._place = 0  # in the epoch
        self._kept: dict[int, _Piece] = {}
        self._ends: list[int] = [0]  # samples before each step that was read, and after the last

    def count(self, step: int) -> int:
        return len(self._piece(step).rows)

    def consumed(self, steps: int) -> int:
        if steps:
            self._piece(steps - 1)
        return self._ends[min(steps, len(self._ends) - 1)]

    def ids(self, step: int, places: Mapping[int, range]) -> dict[int, Sequence[int]]:
        ids = self._piece(step).ids
        return {m: [ids[i] for i in real_places(part, len(ids))] for m, part in places.items()}

    def take(self, step: int, places: Mapping[int, range]) -> StepRows:
        piece = self._piece(step)
        return shares(
            places,
            len(piece.rows),
            lambda chosen: stack_rows([piece.rows[i] for i in chosen], [piece.ids[i] for i in chosen], self._shared),
        )

    def _piece(self, step: int) -> _Piece:
        if step < len(self._ends) - 1 and step not in self._kept:
            self._begin()
        while step not in self._kept:
            if len(self._ends) > 1 and self._ends[-1] == self._ends[-2]:
                return _Piece(0, ())  # it had ended before
            found = self._next()
            self._kept[len(self._ends) - 1] = found
            self._kept.pop(len(self._ends) - 1 - _KEPT, None)
            self._ends.append(self._ends[-1] + len(found.rows))
        return self._kept[step]

    def _next(self) -> _Piece:
        """The next batch, empty at the end of the data."""
        found = self._read()
        if not found.rows and self._again and self._place:
            self._rows, self._place = iter(self._data), 0
            found = self._read()
        return found

    def _read(self) -> _Piece:
        """What the epoch still has for one batch: nothing if it is not enough for one."""
        try:
            rows = tuple(islice(self._rows, self._batch))
        except Exception as error:
            raise ModelError(f"reading the data raised {describe_error(error)}") from error
        first = self._place
        self._place += len(rows)
        return _Piece(first, rows if self._pad or len(rows) == self._batch else ())

    @property
    def _lacking(self) -> str:
        return f"it gave {self._place} samples" + ("; train { last = pad } takes them" if self._place else "")


def make_samples(plan: Plan) -> Samples:
    """The samples that a plan is trained on. Raises RunError if there are none, ModelError if the factory of the data cannot be called."""
    job, dataset = plan.job, make_dataset(plan)
    pad = job.last == "pad"
    if is_stream(dataset):
        first = [dataset]  # made already; only a second reading makes another
        return StreamSamples(lambda: first.pop() if first else make_dataset(plan), batch=job.batch, pad=pad, shared=job.shared)
    return IndexedSamples(dataset, seed=job.seed, batch=job.batch, pad=pad, shared=job.shared)


def make_dataset(plan: Plan) -> Any:
    """The data set of a plan. Raises RunError if it names none, ModelError if its factory cannot be called."""
    if plan.job.data is None:
        raise RunError("the plan names no data; use a session and give it your own batches")
    return call_source(plan.job.data, plan.job.directory)


def call_source(data: CallValue, directory: str) -> Any:
    """The data set that `source("module:factory", ...)` names. Raises ModelError if the factory cannot be called, or gives no data set."""
    name = str(data.positional[0])
    found = call_factory(resolve(name, directory), plain_arguments(data.keywords), name)
    if not is_indexed(found) and not is_stream(found):
        raise ModelError(f"{name} gave a {type(found).__name__}; a data set has a length and gives rows by index, or is iterable")
    return found
