"""A session: one rank of a plan, ready to take steps.

The commit point of a step lies after its last collective (the sums, then one gather of loss, norm and counts) and before the optimizer writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from pdsl.grammar.errors import RunError
from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.plan import Job, Plan
from pdsl.lowering.programs import program
from pdsl.runtime.build import build
from pdsl.runtime.engine import Engine, Totals
from pdsl.runtime.faults import in_words
from pdsl.runtime.groups import Groups, device_of
from pdsl.runtime.meshes import island_mesh, leave_island
from pdsl.runtime.objective import make_objective
from pdsl.runtime.optimizer import OptimizerFactory
from pdsl.runtime.part import Part
from pdsl.runtime.rows import Batch, Share, StepRows, rank_rows, real_places, shares, split_batch
from pdsl.runtime.validation import Validated, make_validator

__all__ = ["Session", "StepResult", "agree_on_plan"]


@frozen
class StepResult:
    """What every rank knows after a step: the same numbers everywhere.

    `loss` is the loss of the step over the global batch, `grad_norm` the global norm before clipping, `digest` a hash of the sample ids that
    were consumed (of their places in the batch if the session was given no ids), in hex.
    """

    step: int
    loss: float
    grad_norm: float
    samples: int
    seconds: float
    digest: str

    @classmethod
    def of(cls, step: int, totals: Totals, samples: int, seconds: float) -> StepResult:
        """The result of a 0-based step."""
        return cls(step, totals.loss / totals.over, totals.norm, samples, seconds, f"{totals.digest:016x}")


class Session:
    """One rank of a plan. Use it as a context manager; `step` takes the global batch, the same on every rank.

    `model` replaces the factory of the plan: a module with its weights, or a function that builds one. `optimizer` is a function from
    the local parameters to a torch optimizer that works element by element.
    Raises RunError if the ranks hold different plans.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        store: dist.Store | None,
        *,
        local_rank: int | None = None,
        model: nn.Module | Callable[..., nn.Module] | None = None,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        if store is None and plan.world_size > 1:
            raise RunError(f"a plan of {plan.world_size} ranks needs a store through which they meet")
        self.plan, self.rank = plan, rank
        self.device = device_of(plan, rank if local_rank is None else local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if store is not None:
            with in_words(lambda: "at the start, when all ranks compare their plans", plan.silence):
                agree_on_plan(plan, rank, store, plan.silence)
        owned = {p.name for p in owned_parameters(plan, rank)}
        timeout = timedelta(seconds=plan.silence)
        built = build(plan, owned, self.device, model=model)
        mesh = island_mesh(plan, plan.island(rank), rank, store, self.device, timeout) if store is not None else None
        self.part = Part(plan, rank, mesh, built, optimizer)
        self._program = program(plan, rank)
        self.groups = Groups(plan, self._program, store, self.device, timeout)
        self.engine = Engine.of(plan, self._program, self.part, self.groups, make_objective(plan.job))
        self.validator = make_validator(plan)
        self._closed = False
        self._places = rank_rows(plan, rank)
        self.steps_taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Drop the groups. A closed session takes no more steps."""
        self._closed = True
        self.groups.close()
        if len(self.plan.island(self.rank)) > 1:
            leave_island()

    @property
    def model(self) -> nn.Module:
        """The model of which this rank runs its layers; parameters of other layers have no memory."""
        return self.part.model

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trainable parameters that this rank owns, by canonical name, after sharding."""
        return self.part.parameters

    @property
    def on_gradients(self) -> Callable[[Mapping[str, torch.Tensor]], None] | None:
        """Called with the summed local gradients of each step, before clipping."""
        return self.engine.on_gradients

    @on_gradients.setter
    def on_gradients(self, call: Callable[[Mapping[str, torch.Tensor]], None] | None) -> None:
        self.engine.on_gradients = call

    @property
    def places(self) -> Mapping[int, range]:
        """For each microbatch that this rank takes part in (by global id), its places in the global batch."""
        return self._places

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The boxes of the trainable parameters that this rank owns, by name."""
        return self.part.optimizer.weights

    def step(self, batch: Batch, ids: Sequence[int] | None = None) -> StepResult:
        """One optimizer step on a global batch: a mapping of names to tensors with one row per sample, the same on every rank.

        `ids` are the sample ids of the rows, for the digest. Raises RunError if the batch has another size than the plan's, or holds no tensors.
        """
        job = self.plan.job
        size = _check_batch(batch, job)
        if ids is not None and len(ids) != size:
            raise RunError(f"there are {len(ids)} sample ids for a batch of {size}")
        rows = shares(self._places, size, lambda places: split_batch(batch, places, job.shared))
        everything = range(size) if ids is None else ids
        return self.step_shares(rows, {m: [everything[i] for i in real_places(part, size)] for m, part in self._places.items()})

    def validate(self) -> Validated:
        """The loss on the held-out data of the spec, the same on every rank; training goes on as if there had been none.

        Raises RunError if the spec has no held-out data.
        """
        return self.validator.run(self.plan, self.engine, self.steps_taken)

    def step_rows(self, rows: Mapping[int, Batch], ids: Mapping[int, Sequence[int]]) -> StepResult:
        """As `step`, with only the rows of this rank, by global microbatch id: those of a full batch."""
        each = self.plan.rows_per_rank
        return self.step_shares(StepRows({m: Share(batch, each) for m, batch in rows.items()}, self.plan.job.batch), ids)

    def step_shares(self, rows: StepRows, ids: Mapping[int, Sequence[int]], coming: int = 0) -> StepResult:
        """As `step`, with what a source of samples gives for this rank, the ids of the samples in each microbatch, and how many the next step will have."""
        if self._closed:
            raise RunError("the session is closed: it takes no more steps")
        begin = time.perf_counter()
        engine = self.engine
        engine.step = self.steps_taken
        totals = engine.sum_up(engine.compute(rows), ids, coming=coming)
        engine.apply(totals)
        self.steps_taken += 1
        return StepResult.of(self.steps_taken - 1, totals, rows.samples, time.perf_counter() - begin)


def _check_batch(batch: object, job: Job) -> int:
    """The number of its rows. Raises RunError if a batch is no dict of tensors with as many rows each as the plan is made for, or up to so many with `last = pad`."""
    if not isinstance(batch, Mapping):
        raise RunError(f"the batch is a {type(batch).__name__}: expected a dict of tensors by name")
    sizes: dict[str, int] = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and name not in job.shared):
            what = "a tensor without dims" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            whole = (
                "" if value is None or isinstance(value, Mapping) else f'; what all rows share is named in train {{ shared = ["{name}"] }}'
            )
            raise RunError(f'batch entry "{name}" is {what}: expected a tensor with one row per sample{whole}')
        if name not in job.shared:
            sizes[name] = value.shape[0]
    short = len(set(sizes.values())) == 1 and 0 < next(iter(sizes.values())) < job.batch
    for name, size in sizes.items():
        if size != job.batch and not (short and job.last == "pad"):
            why = (
                "; with train { last = pad } it may have fewer"
                if short
                else f'; what all rows share is named in train {{ shared = ["{name}"] }}'
            )
            raise RunError(f'batch entry "{name}" has {size} rows, the plan is made for a batch of {job.batch}{why}')
    return next(iter(sizes.values()), job.batch)


def agree_on_plan(plan: Plan, rank: int, store: dist.Store, timeout: float) -> None:
    """All ranks hold the same plan, or none starts: the hashes are compared before any group is made."""
    key = f"plan{plan.generation}/"
    store.set(f"{key}{rank}", plan.hash)
    keys = [f"{key}{r}" for r in plan.ranks]
    store.wait(keys, timedelta(seconds=timeout))
    others = {r: store.get(k).decode() for r, k in zip(plan.ranks, keys, strict=True)}
    different = [r for r, h in others.items() if h != plan.hash]
    if different:
        raise RunError(
            f"rank {different[0]} holds plan {others[different[0]][:12]}, rank {rank} holds {plan.hash[:12]}: all ranks need one plan"
        )
