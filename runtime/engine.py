"""One rank in one generation: the program, the sums and the executor over the part that the rank owns.

A step has three phases. `compute` runs the program; `sum_up` waits for the sums and agrees with all ranks on loss and norm; `apply` writes the
weights. The commit point lies between the last two: whoever knows the agreed numbers knows that every rank has its gradients, and may step
without another word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import sqrt
from types import MappingProxyType

import torch
from attrs import define, evolve, field, frozen

from pdsl.grammar.errors import RunError
from pdsl.lowering.plan import Plan
from pdsl.lowering.program import Program
from pdsl.runtime.draws import Draws
from pdsl.runtime.executor import Executor, StepSums
from pdsl.runtime.faults import in_words
from pdsl.runtime.gradients import Reducer
from pdsl.runtime.groups import Groups
from pdsl.runtime.objective import Objective
from pdsl.runtime.optimizer import rate_at
from pdsl.runtime.part import BUFFER, Part
from pdsl.runtime.rows import Share, StepRows, rank_rows, row_hash

__all__ = ["Engine", "Totals", "same_data"]

_HASH_MASK = (1 << 63) - 1


@frozen
class Totals:
    """What all ranks agree on at the end of a step. `loss` and `squared` are sums before the division by `over`, the tokens that count (1 if
    samples are counted); `change` tells that some rank was asked to stop at this boundary; `seconds` are those of the slowest rank's step before; `saved` is the newest
    step of which every rank has its share of a checkpoint on disk; `coming` are the samples of the next step.
    """

    loss: float
    squared: float
    over: float
    digest: int
    change: bool = False
    seconds: float = 0.0
    saved: int = 0
    coming: int = 0

    @property
    def norm(self) -> float:
        return sqrt(self.squared) / self.over


@define(eq=False)
class Engine:
    """Runs the steps of one rank under one plan. `step` is the 0-based number of the step, which random numbers and messages depend on."""

    plan: Plan
    program: Program
    part: Part
    groups: Groups
    objective: Objective
    reducer: Reducer
    executor: Executor
    step: int = 0
    gradients: dict[str, torch.Tensor] | None = None
    on_gradients: Callable[[Mapping[str, torch.Tensor]], None] | None = None
    draws: Draws | None = None
    _starts: Mapping[int, int] = field(init=False)
    _rows: StepRows = field(factory=lambda: StepRows({}, 0), init=False)
    kept: Mapping[str, torch.Tensor] = field(factory=dict)  # shares in running statistics of an earlier part of the step

    def __attrs_post_init__(self) -> None:
        self._starts = {m: places.start for m, places in rank_rows(self.plan, self.program.rank).items()}

    @classmethod
    def of(
        cls,
        plan: Plan,
        program: Program,
        part: Part,
        groups: Groups,
        objective: Objective,
        kept: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> Engine:
        """`kept` are gradients of an earlier part of the same step, as `Part.take_gradients` gives them."""
        units = part.units
        reducer = Reducer(plan, program, part.parameters, part.formats, groups, part.settle, kept)
        made = cls(plan, program, part, groups, objective, reducer, Executor(plan, program, groups, part.runner, objective, reducer, units))
        part.runner.before_segment = None
        made.kept = {n.removeprefix(f"{BUFFER}/"): t for n, t in kept.items() if n.startswith(f"{BUFFER}/")}
        if plan.facts.random or part.statistics.modules:
            made.executor.before_forward = made._begin_forward
        if plan.facts.random:
            made.draws = draws = _draws(plan, program.rank, groups.device)
            part.recompute.within = draws.active
            part.runner.before_segment = lambda segment, owned: draws.begin_segment(segment, owned=owned)
        return made

    @property
    def counts(self) -> bool:
        """Whether the losses of this rank go into sums over all ranks: one of those that compute the same does."""
        at = self.plan.coordinate(self.program.rank)
        return at.position == self.plan.template(at.pipeline).stages[-1].position and at.tensor == 0

    def close(self) -> None:
        """Let go of the part: another engine may take it over."""
        self.reducer.close()

    def compute(self, rows: StepRows) -> StepSums:
        """Forward and backward of every microbatch of the program. Raises RunError if a peer in this pipeline is gone or silent."""
        self.gradients = None
        self.part.formats.refresh()
        placed = StepRows({m: self.placed(share) for m, share in rows.shares.items()}, rows.samples)
        self._rows = placed
        if self.draws is None:
            return self.executor.step(placed)
        self.draws.begin_step(self.step)
        with self.draws.active():
            return self.executor.step(placed)

    def placed(self, share: Share) -> Share:
        """Rows as they are run: on the device of this rank."""
        ready = self.objective.prepared(share)
        return evolve(ready, batch={name: tensor.to(self.groups.device) for name, tensor in ready.batch.items()})

    def sum_up(
        self,
        sums: StepSums,
        ids: Mapping[int, Sequence[int]],
        *,
        change: bool = False,
        seconds: float = 0.0,
        saved: int = 0,
        coming: int = 0,
    ) -> Totals:
        """Wait for the gradients of all ranks and agree on the numbers of the step. `coming` are the samples that this rank sees for the next one.

        Raises RunError if a peer is gone or silent, or if ranks see different data.
        """
        with in_words(lambda: f"at the sums of step {self.step}", self.plan.silence):
            self.gradients = self.reducer.finish()
            self.part.statistics.sum_up(self.plan, self.groups, self._rows.samples, self.kept)
            squared = self.reducer.squared_norm(self.gradients)
            totals = self._agree(sums, squared, ids, change=change, seconds=seconds, saved=saved, coming=coming)
            self.executor.settle()
            return totals

    def deliver(self) -> None:
        """After `sum_up` has failed, let the others of this pipeline have what they need to finish their own work."""
        with suppress(RuntimeError):
            self.executor.deliver()

    @torch.no_grad()
    def apply(self, totals: Totals) -> None:
        """Write the weights. Raises RunError if nothing of the batch counts."""
        if totals.over == 0:
            raise RunError(f"step {self.step}: no token of the batch counts; the mean over tokens is undefined")
        gradients = self.gradients
        assert gradients is not None
        job = self.plan.job
        held = [g for g in gradients.values() if g.numel()]
        if held and totals.over != 1.0:
            torch._foreach_div_(held, totals.over)
        if self.on_gradients is not None:
            self.on_gradients(gradients)
        if held and job.clip is not None and (factor := job.clip / (totals.norm + 1e-6)) < 1.0:  # the arithmetic of torch's clip_grad_norm_
            torch._foreach_mul_(held, factor)
        self.part.optimizer.step(gradients, rate_at(job.rate, self.step, job.steps))
        self.part.statistics.write()
        self.gradients = None
        self.part.drop_gradients()

    def _begin_forward(self, _stage: int, microbatch: int) -> None:
        """The rows that the next forward is for; those that stand in for others draw as the last of them."""
        share = self._rows.shares[microbatch]
        total = -(-self._rows.samples // self.plan.rows_per_microbatch)
        self.part.statistics.begin_pass(microbatch, total, counts=share.counts)
        if self.draws is not None:
            start = self._starts[microbatch]
            self.draws.begin_pass(microbatch, range(start, start + share.size))

    def _agree(
        self, sums: StepSums, squared: float, ids: Mapping[int, Sequence[int]], *, change: bool, seconds: float, saved: int, coming: int
    ) -> Totals:
        """The sums over all ranks, equal to the bit on each: every rank adds the same numbers in the same order."""
        digest = sum(row_hash(i) for part in ids.values() for i in part) & _HASH_MASK if self.counts else 0
        loss, tokens = (sums.loss, sums.tokens) if self.counts else (0.0, 0)
        if self.groups.control is not None:
            numbers = torch.tensor([loss, squared, seconds], dtype=torch.float64).view(torch.int64)
            mine = torch.cat([numbers, torch.tensor([tokens, digest, change, saved, coming], dtype=torch.int64)]).to(self.groups.device)
            everyone = torch.stack(self.groups.control.gather(mine)).cpu()
            floats = everyone[:, :3].contiguous().view(torch.float64)
            loss, squared = floats[:, :2].sum(dim=0).tolist()
            seconds = float(floats[:, 2].max())
            tokens, digest = int(everyone[:, 3].sum()), sum(everyone[:, 4].tolist()) & _HASH_MASK
            change, saved = bool(everyone[:, 5].any()), int(everyone[:, 6].min())
            same_data(self.plan, f"step {self.step + 1}", everyone[:, 7].tolist())
        return Totals(loss, squared, float(tokens) if self.objective.over_tokens else 1.0, digest, change, seconds, saved, coming)


def same_data(plan: Plan, what: str, coming: Sequence[int]) -> None:
    """All ranks read one stream; who sees its end alone would leave the others waiting. Raises RunError if they do not read as many samples each."""
    if len(set(coming)) == 1:
        return
    least, most = coming.index(min(coming)), coming.index(max(coming))
    raise RunError(
        f"the data is not the same on all ranks: for {what} rank {plan.ranks[least]} reads {coming[least]} samples and rank "
        f"{plan.ranks[most]} reads {coming[most]}; every rank reads all of an iterable and takes its rows, so it must not split itself by rank"
    )


def _draws(plan: Plan, rank: int, device: torch.device) -> Draws:
    """Random numbers of a rank: those of the rows that it sees, and its part of them where a tensor is split."""
    at = plan.coordinate(rank)
    return Draws(plan.facts, plan.job.seed, at.shard, (at.tensor, plan.tensor_size), device)
