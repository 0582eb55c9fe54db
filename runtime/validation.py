"""The loss on held-out data, without a trace of it in what is trained.

The model runs as it does in use, without gradients, forwards alone go through the pipelines, and every sample counts once, whatever their number:
the last batch is filled as one of training is. Every rank gets the same number, and random state is as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Protocol

import torch
from attrs import define, frozen

from pdsl.grammar.errors import RunError
from pdsl.lowering.forward_program import forward_program
from pdsl.lowering.plan import Plan
from pdsl.lowering.probe_rows import is_stream
from pdsl.runtime.engine import Engine, Totals, same_data
from pdsl.runtime.executor import Executor, StepSums
from pdsl.runtime.faults import PeerFault, in_words
from pdsl.runtime.feed import StreamSamples, call_source
from pdsl.runtime.rows import StepRows, rank_rows, read_rows, shares

__all__ = ["Validated", "Validator", "make_validator"]

_Agree = Callable[[Totals | None], Totals | None]


@frozen
class Validated:
    """The loss over `samples` held-out samples after so many steps, the same on every rank."""

    steps: int
    loss: float
    samples: int
    seconds: float


class _HeldOut(Protocol):
    """Held-out samples in batches: their order is that of the data."""

    def count(self, step: int) -> int: ...

    def take(self, step: int, places: Mapping[int, range]) -> StepRows: ...


@frozen(eq=False)
class _InOrder:
    """The first `size` rows of a data set with an index."""

    data: Any
    size: int
    batch: int
    shared: tuple[str, ...]

    def count(self, step: int) -> int:
        return max(0, min(self.batch, self.size - step * self.batch))

    def take(self, step: int, places: Mapping[int, range]) -> StepRows:
        first = step * self.batch
        return shares(places, self.count(step), lambda chosen: read_rows(self.data, [first + i for i in chosen], self.shared))


class Validator:
    """When the loss on held-out data is due, and how it is had. `make` gives the data anew."""

    def __init__(self, every: int, make: Callable[[], _HeldOut]) -> None:
        self._every, self._make = every, make
        self._done = -1

    def due(self, steps: int, *, last: bool = False) -> bool:
        """Whether it is due after so many steps, of which no more may follow."""
        return self._every > 0 and 0 < steps != self._done and (last or steps % self._every == 0)

    def again(self) -> None:
        """Some rank may not know what came of the last time: it is due once more on all of them."""
        self._done = -1

    def run(self, plan: Plan, engine: Engine, steps: int, agree: _Agree = lambda totals: totals) -> Validated:
        """The loss after so many steps under a plan. All ranks come here together.

        `agree` gets what this rank learned of a batch, None if it was cut off, and gives what its island learned. Raises PeerFault if a peer is gone or
        silent, RunError if ranks see different data or if nothing of it counts.
        """
        begin = time.perf_counter()
        held, places = self._make(), rank_rows(plan, engine.program.rank)
        forwards = _Forwards.of(plan, engine)
        loss, over, samples, batch = 0.0, 0.0, 0, 0
        coming = held.count(0)
        with _evaluating(engine, plan.job.seed):
            while coming:
                rows = held.take(batch, places)
                totals = forwards.batch(rows, held.count(batch + 1), agree)
                loss, over = loss + totals.loss, over + totals.over
                samples, batch, coming = samples + rows.samples, batch + 1, totals.coming
        mean = engine.objective.loss.name == "mean"
        if mean and not over:
            raise RunError(f"no {'token' if samples else 'sample'} of the held-out data counts: its mean loss is undefined")
        self._done = steps
        return Validated(steps, loss / over if mean else loss, samples, time.perf_counter() - begin)


@define
class _ForwardExecutor(Executor):
    """Runs a program of forwards."""

    def run(self, rows: StepRows) -> StepSums:
        sums = StepSums()
        with in_words(self._where, self.plan.silence):
            self._run(rows, sums)
        self._flying.clear()
        return sums


@frozen(eq=False)
class _Forwards:
    """The forwards of batches on one rank. `executor` is None in a pipeline that takes no microbatches."""

    plan: Plan
    engine: Engine
    executor: _ForwardExecutor | None

    @classmethod
    def of(cls, plan: Plan, engine: Engine) -> _Forwards:
        program, part = forward_program(plan, engine.program.rank), engine.part
        if not program.actions:
            return cls(plan, engine, None)
        return cls(plan, engine, _ForwardExecutor(plan, program, engine.groups, part.runner, engine.objective, engine.reducer, part.units))

    def batch(self, rows: StepRows, coming: int, agree: _Agree) -> Totals:
        """Sums over one batch, agreed on by all ranks: the loss, what it is to be divided by, the samples of the next batch."""
        sums, totals, fault = StepSums(), None, ""
        if self.executor is not None:
            # a step of one sample: losses weigh by their own samples, and the sum is divided at the end
            sums = self.executor.run(StepRows({m: self.engine.placed(share) for m, share in rows.shares.items()}, 1))
        try:
            with in_words(lambda: "at the loss on held-out data", self.plan.silence):
                totals = self._agreed(sums, rows.samples, coming)
                if self.executor is not None:
                    self.executor.settle()
        except PeerFault as error:
            totals, fault = None, str(error)
            if self.executor is not None:
                with suppress(RuntimeError):
                    self.executor.deliver()
        with in_words(lambda: "at the end of a batch of held-out data", self.plan.silence):
            totals = agree(totals)
        if totals is None:
            raise PeerFault(fault)
        return totals

    def _agreed(self, sums: StepSums, samples: int, coming: int) -> Totals:
        loss, tokens = (sums.loss, sums.tokens) if self.engine.counts else (0.0, 0)
        groups = self.engine.groups
        if groups.control is not None:
            bits = torch.tensor([loss], dtype=torch.float64).view(torch.int64)
            mine = torch.cat([bits, torch.tensor([tokens, coming], dtype=torch.int64)]).to(groups.device)
            everyone = torch.stack(groups.control.gather(mine)).cpu()
            loss = float(everyone[:, 0].contiguous().view(torch.float64).sum())
            tokens = int(everyone[:, 1].sum())
            same_data(self.plan, "held-out data", everyone[:, 2].tolist())
        return Totals(loss, 0.0, float(tokens if self.engine.objective.over_tokens else samples), 0, coming=coming)


@contextmanager
def _evaluating(engine: Engine, seed: int) -> Iterator[None]:
    """The model as it is in use, without gradients; modules and random numbers afterwards as before."""
    part, device = engine.part, engine.groups.device
    modes = [(module, module.training) for module in part.runner.modules()]
    drawing, part.runner.before_segment = part.runner.before_segment, None
    part.model.eval()
    part.formats.refresh()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield
    finally:
        for module, training in modes:
            module.training = training
        part.runner.before_segment = drawing
        if part.units is not None:
            part.units.rest()


def make_validator(plan: Plan) -> Validator:
    """The held-out data of a plan; without any it is never due. Raises RunError or ModelError if it cannot be read."""
    asked, job = plan.validation, plan.job
    if asked is None:
        return Validator(0, _none)
    data = call_source(asked.data, job.directory)
    if is_stream(data):
        source = asked.data
        return Validator(
            asked.every,
            lambda: StreamSamples(
                lambda: islice(iter(call_source(source, job.directory)), asked.samples), batch=job.batch, pad=True, shared=job.shared
            ),
        )
    size = len(data) if asked.samples is None else min(len(data), asked.samples)
    if not size:
        raise RunError("the held-out data has no samples")
    held = _InOrder(data, size, job.batch, job.shared)
    return Validator(asked.every, lambda: held)


def _none() -> _HeldOut:
    raise RunError("the spec names no held-out data: a block validate { data = ... } does")
