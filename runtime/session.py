"""A session: one rank of a plan, ready to take steps.

The commit point of a step lies after its last collective (the sums, then one gather of loss, norm and counts) and before the optimizer writes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from math import sqrt
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from pdsl.grammar.errors import RunError
from pdsl.lowering.boxes import box, box_shape
from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.pending import require_executable
from pdsl.lowering.plan import Plan
from pdsl.lowering.programs import program
from pdsl.runtime.build import build
from pdsl.runtime.executor import Executor
from pdsl.runtime.faults import in_words
from pdsl.runtime.gradients import Reducer, local_tensor
from pdsl.runtime.groups import Groups, device_of
from pdsl.runtime.objective import make_objective
from pdsl.runtime.optimizer import LocalOptimizer, OptimizerFactory, rate_at
from pdsl.runtime.rows import Batch, rank_rows, row_hash, split_batch
from pdsl.runtime.shard import apply_tensor_parallel, live_names, shard_layers
from pdsl.runtime.stage import StageRunner

__all__ = ["Session", "StepResult"]

_HASH_MASK = (1 << 63) - 1


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


class Session:
    """One rank of a plan. Use it as a context manager; `step` takes the global batch, the same on every rank.

    `model` replaces the factory of the plan: a module with its weights, or a function that builds one. `optimizer` is a function from
    the local parameters to a torch optimizer that works element by element.
    Raises RunError if the ranks hold different plans, NotExecuted if the plan asks for what this version cannot run.
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
        require_executable(plan.pending)
        if store is None and plan.world_size > 1:
            raise RunError(f"a plan of {plan.world_size} ranks needs a store through which they meet")
        self.plan, self.rank = plan, rank
        self.device = device_of(plan, rank if local_rank is None else local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if store is not None:
            with in_words(lambda: "at the start, when all ranks compare their plans", plan.silence):
                _agree(plan, rank, store, plan.silence)
        self._program = program(plan, rank)
        owned = owned_parameters(plan, rank)
        self.model = build(plan, {p.name for p in owned}, self.device, model=model)
        self.model.train()
        names = live_names(self.model, plan, rank)
        self.groups = Groups(plan, self._program, store, self.device, timedelta(seconds=plan.silence))
        mesh = self.groups.mesh
        if mesh is not None and plan.tensor_size > 1:
            apply_tensor_parallel(self.model, plan, rank, mesh, names)
        stages = plan.template(plan.coordinate(rank).pipeline).stages
        runner = StageRunner(self.model, plan.facts, {s: (stages[s].start, stages[s].stop) for s in plan.stages_of(rank)})
        units = shard_layers(runner, self.model, plan, rank, mesh, names) if mesh is not None and plan.shard_size > 1 else None
        named = dict(self.model.named_parameters(remove_duplicate=False))
        self.parameters = {p.name: named[names[p.name]] for p in owned if p.trainable}
        _check_boxes(plan, rank, self.parameters)
        self._reducer = Reducer(plan, self._program, self.parameters, self.groups, units.settle if units is not None else lambda: None)
        self._optimizer = LocalOptimizer(plan.job.optimizer, self.parameters, optimizer)
        self._objective = make_objective(plan.job)
        self._executor = Executor(plan, self._program, self.groups, runner, self._objective, self._reducer, units)
        if plan.facts.random:
            self._executor.before_forward = self._begin_forward
            runner.before_layer = self._seed_layer
        self._closed = False
        self._microbatch = 0
        self._places = rank_rows(plan, rank)
        self.steps_taken = 0
        self.on_gradients: Callable[[Mapping[str, torch.Tensor]], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Drop the groups. A closed session takes no more steps."""
        self._closed = True
        self.groups.close()

    @property
    def places(self) -> Mapping[int, range]:
        """For each microbatch that this rank takes part in (by global id), its places in the global batch."""
        return self._places

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The boxes of the trainable parameters that this rank owns, by name."""
        return self._optimizer.weights

    def step(self, batch: Batch, ids: Sequence[int] | None = None) -> StepResult:
        """One optimizer step on a global batch: a mapping of names to tensors with one row per sample, the same on every rank.

        `ids` are the sample ids of the rows, for the digest. Raises RunError if the batch has another size than the plan's, or holds no tensors.
        """
        size = self.plan.job.batch
        _check_batch(batch, size)
        if ids is not None and len(ids) != size:
            raise RunError(f"there are {len(ids)} sample ids for a batch of {size}")
        rows = {m: split_batch(batch, places) for m, places in self._places.items()}
        everything = range(size) if ids is None else ids
        return self.step_rows(rows, {m: [everything[i] for i in places] for m, places in self._places.items()})

    def step_rows(self, rows: Mapping[int, Batch], ids: Mapping[int, Sequence[int]]) -> StepResult:
        """As `step`, with only the rows of this rank, by global microbatch id."""
        if self._closed:
            raise RunError("the session is closed: it takes no more steps")
        begin = time.perf_counter()
        on_device = {m: {n: t.to(self.device) for n, t in batch.items()} for m, batch in rows.items()}
        sums = self._executor.step(on_device)
        with in_words(lambda: f"at the sums of step {self.steps_taken}", self.plan.silence):
            gradients = self._reducer.finish()
            loss, squared, tokens, digest = self._agree_on_sums(sums.loss, sums.tokens, self._reducer.squared_norm(gradients), ids)
        over = float(tokens) if self._objective.over_tokens else 1.0
        if over == 0:
            raise RunError(f"step {self.steps_taken}: no token of the batch counts; the mean over tokens is undefined")
        norm = sqrt(squared) / over
        self._apply(gradients, norm, over)
        self.steps_taken += 1
        seconds = time.perf_counter() - begin
        return StepResult(self.steps_taken - 1, loss / over, norm, self.plan.job.batch, seconds, f"{digest:016x}")

    def _begin_forward(self, _stage: int, microbatch: int) -> None:
        self._microbatch = microbatch

    def _seed_layer(self, layer: int) -> None:
        """Random numbers inside a layer depend on (seed, step, microbatch, layer) and the rows it sees, never on the placement of layers."""
        shard = self.plan.coordinate(self.rank).shard
        key = f"{self.plan.job.seed}/{self.steps_taken}/{self._microbatch}/{shard}/{layer}"
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1)

    @torch.no_grad()
    def _apply(self, gradients: dict[str, torch.Tensor], norm: float, over: float) -> None:
        job = self.plan.job
        held = [g for g in gradients.values() if g.numel()]
        if held and over != 1.0:
            torch._foreach_div_(held, over)
        if self.on_gradients is not None:
            self.on_gradients(gradients)
        if held and job.clip is not None and (factor := job.clip / (norm + 1e-6)) < 1.0:  # the arithmetic of torch's clip_grad_norm_
            torch._foreach_mul_(held, factor)
        self._optimizer.step(gradients, rate_at(job.rate, self.steps_taken, job.steps))
        for parameter in self.parameters.values():
            parameter.grad = None

    def _agree_on_sums(self, loss: float, tokens: int, squared: float, ids: Mapping[int, Sequence[int]]) -> tuple[float, float, int, int]:
        """The sums over all ranks, equal to the bit on each: every rank adds the same numbers in the same order."""
        at = self.plan.coordinate(self.rank)
        last = self.plan.template(at.pipeline).stages[-1].position
        counts = at.position == last and at.tensor == 0
        digest = sum(row_hash(i) for part in ids.values() for i in part) & _HASH_MASK if counts else 0
        if not counts:
            loss, tokens = 0.0, 0
        if self.groups.control is None:
            return loss, squared, tokens, digest
        numbers = torch.tensor([loss, squared], dtype=torch.float64).view(torch.int64)
        mine = torch.cat([numbers, torch.tensor([tokens, digest], dtype=torch.int64)]).to(self.device)
        everyone = torch.stack(self.groups.control.gather(mine)).cpu()
        floats = everyone[:, :2].contiguous().view(torch.float64)
        total = floats.sum(dim=0).tolist()
        digests = sum(everyone[:, 3].tolist()) & _HASH_MASK
        return total[0], total[1], int(everyone[:, 2].sum()), digests


def _check_batch(batch: object, size: int) -> None:
    """Raises RunError if a batch is no dict of tensors with `size` rows each."""
    if not isinstance(batch, Mapping):
        raise RunError(f"the batch is a {type(batch).__name__}: expected a dict of tensors by name")
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            what = "a tensor without dims" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise RunError(f'batch entry "{name}" is {what}: expected a tensor with one row per sample')
        if value.shape[0] != size:
            raise RunError(f'batch entry "{name}" has {value.shape[0]} rows, the plan is made for a batch of {size}')


def _check_boxes(plan: Plan, rank: int, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises RunError if torch holds another part of a parameter than the plan says: sums and norms would be wrong without a word."""
    at = plan.coordinate(rank)
    for p in plan.facts.parameters:
        if p.name not in parameters:
            continue
        held, planned = tuple(local_tensor(parameters[p.name]).shape), box_shape(box(plan, p, at.shard, at.tensor))
        if held != planned:
            raise RunError(f"{p.name}: rank {rank} holds a part of shape {held}, the plan says {planned} ({plan.layout(p.name).style})")


def _agree(plan: Plan, rank: int, store: dist.Store, timeout: float) -> None:
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
