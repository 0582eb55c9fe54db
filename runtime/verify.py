"""Comparison with one process: the same model, data and seed in plain torch, against what the ranks of a plan computed.

The oracle knows nothing of stages, groups or microbatches: it builds the whole model, takes the whole batch at once, calls backward once. The
ranks give the boxes they hold; the boxes are put together and compared by parameter.

Adam divides a gradient by its own size, so where a gradient is almost zero the last bit of its rounding becomes a step as large as any other. Two
correct runs therefore drift apart, one process against itself with another order of sums too. So each step is compared by itself: the oracle
computes loss and gradients at the ranks' own weights, and updates them with the ranks' own gradients; nothing is left to amplify.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from pdsl.grammar.errors import RunError
from pdsl.lowering.boxes import box
from pdsl.lowering.ownership import holders, owned_parameters
from pdsl.lowering.plan import Plan
from pdsl.lowering.precision import applies
from pdsl.lowering.probe_numerics import layer_modules
from pdsl.runtime.build import build
from pdsl.runtime.draws import row_seeded
from pdsl.runtime.feed import make_samples
from pdsl.runtime.objective import make_objective
from pdsl.runtime.optimizer import make_optimizer, rate_at
from pdsl.runtime.precision import Formats
from pdsl.runtime.session import Session

__all__ = ["Deviation", "Trace", "VerifyReport", "assemble", "compare", "oracle", "verify_rank"]

_ROUNDINGS = 4


@frozen
class Deviation:
    """How far one tensor is from the oracle's: ||ours - theirs|| / ||theirs||, and the norm of theirs."""

    what: str
    step: int
    relative: float
    norm: float


@frozen
class VerifyReport:
    """The result of a comparison: every deviation, the largest first, and the tolerance it was held against."""

    steps: int
    tolerance: float
    deviations: tuple[Deviation, ...]
    losses: tuple[float, ...]
    expected_losses: tuple[float, ...]

    @property
    def ok(self) -> bool:
        return all(d.relative <= self.tolerance for d in self.deviations)

    @property
    def worst(self) -> Deviation:
        return self.deviations[0]


@frozen
class Trace:
    """What happened over a few steps: losses and norms, every gradient of every step before clipping, the weights after every step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    weights: tuple[Mapping[str, torch.Tensor], ...]


def verify_rank(plan: Plan, rank: int, store: dist.Store | None, *, steps: int, local_rank: int | None = None) -> dict[str, Any]:
    """Take a few steps as one rank; losses and this rank's boxes of gradients and weights, as plain data."""
    samples = make_samples(plan)
    kept: list[dict[str, torch.Tensor]] = []
    weights: list[dict[str, torch.Tensor]] = []
    results = []
    with Session(plan, rank, store, local_rank=local_rank) as session:
        session.on_gradients = lambda grads: kept.append({n: g.detach().cpu().clone() for n, g in grads.items()})
        for step in range(steps):
            if not samples.count(step):
                raise RunError(f"the data ends after {step} steps, {steps} are to be compared")
            results.append(session.step_shares(samples.take(step, session.places), samples.ids(step, session.places)))
            weights.append({n: t.detach().cpu().clone() for n, t in session.weights.items()})
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results], "gradients": kept, "weights": weights}


def assemble(plan: Plan, ranks: list[dict[str, Any]]) -> Trace:
    """Put the boxes of all ranks together. Copies of one box must agree to the bit, as must losses and norms: RunError if not."""
    first = ranks[0]
    for rank, result in enumerate(ranks):
        if result["losses"] != first["losses"] or result["norms"] != first["norms"]:
            raise RunError(f"rank {rank} reports another loss or norm than rank 0: {result['losses']} and {first['losses']}")
    steps = len(first["losses"])
    gradients = tuple(_whole(plan, [r["gradients"][s] for r in ranks]) for s in range(steps))
    weights = tuple(_whole(plan, [r["weights"][s] for r in ranks]) for s in range(steps))
    return Trace(tuple(first["losses"]), tuple(first["norms"]), gradients, weights)


def _whole(plan: Plan, ranks: list[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for rank, boxes in enumerate(ranks):
        at = plan.coordinate(rank)
        for p in owned_parameters(plan, rank):
            if p.name not in boxes:
                continue
            whole = found.setdefault(p.name, torch.full(p.shape, torch.nan, dtype=boxes[p.name].dtype))
            part = whole[tuple(slice(a, b) for a, b in box(plan, p, at.shard, at.tensor))]
            first = holders(plan, p, rank)[0]
            if first != rank and not torch.equal(part, boxes[p.name]):
                worst = float((part - boxes[p.name]).abs().max())
                if worst > 1e-5 * max(1e-30, float(part.abs().max())):
                    raise RunError(f"{p.name}: ranks {first} and {rank} hold the same part and differ by up to {worst:.3e}")
                continue
            part.copy_(boxes[p.name])
    return found


def oracle(plan: Plan, ranks: Trace) -> Trace:
    """The same steps in this process with plain torch: one model, whole batches, one backward a step.

    Below fp32 a sum depends on its parts: a gradient is rounded before it is added to others. There the batch is taken in the parts that ranks and
    microbatches have, whose gradients are added up in the format of the plan.

    Each step begins at the weights that the ranks had (the first at the model's own seeded build) and is updated with the ranks' gradients.
    """
    job, steps = plan.job, len(ranks.losses)
    model = build(plan, {p.name for p in plan.facts.parameters}, torch.device("cpu"))
    model.train()
    objective = make_objective(job)
    samples = make_samples(plan)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    formats = Formats(plan, model, dict(model.named_parameters()), (), layer_modules(plan.facts))
    optimizer = make_optimizer(job.optimizer, named.values())
    base = [g["lr"] for g in optimizer.param_groups]
    losses, norms, gradients, weights = [], [], [], []
    for step in range(steps):
        pieces = _pieces(plan, samples.count(step))
        rows = samples.take(step, pieces)
        optimizer.zero_grad()
        formats.refresh()
        loss, count = 0.0, 0
        for piece, read in rows.shares.items():
            share = objective.prepared(read)
            batch = share.batch
            single = plan.facts.sequential or len(plan.facts.inputs) == 0
            draws = row_seeded(model, plan.facts, seed=job.seed, step=step, places=pieces[piece], microbatch=piece)
            with draws if plan.facts.random else nullcontext():
                output = model(next(iter(batch.values()))) if single else model(**{n: batch[n] for n in plan.facts.inputs})
                weighted = objective(Formats.output(plan, output), share, rows.samples)
                weighted.loss.backward()
            loss, count = loss + float(weighted.loss.detach()), count + weighted.count
        over = count if objective.over_tokens else 1
        gradients.append(_taken_gradients(formats, named, over))
        norms.append(float(torch.nn.utils.get_total_norm([g if g.dtype is torch.float64 else g.float() for g in gradients[-1].values()])))
        _update(named, ranks.gradients[step], optimizer, [r * rate_at(job.rate, step, job.steps) for r in base], job.clip)
        losses.append(loss / over)
        weights.append({n: p.detach().clone() for n, p in named.items()})
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(ranks.weights[step].get(name, parameter))
    return Trace(tuple(losses), tuple(norms), tuple(gradients), tuple(weights))


def _pieces(plan: Plan, samples: int) -> dict[int, range]:
    """The parts in which the batch is taken: all of it at once, unless something is cast, or microbatches are normalised each by itself."""
    size = plan.rows_per_rank if applies(plan.precision, plan.facts) else max(1, samples)
    if plan.facts.statistics or plan.facts.updated:
        size = plan.rows_per_microbatch
    return {k: range(begin, min(begin + size, samples)) for k, begin in enumerate(range(0, samples, size))}


def _taken_gradients(formats: Formats, named: Mapping[str, nn.Parameter], over: int) -> dict[str, torch.Tensor]:
    """The gradients by name, in the format of the weights; the model is left without."""
    found = {}
    for name, weight in named.items():
        grad = formats.gradient(name)
        if grad is not None:
            found[name] = grad.detach().to(weight.dtype) / over
    formats.drop_gradients()
    return found


def _update(
    named: Mapping[str, nn.Parameter],
    gradients: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rates: list[float],
    clip: float | None,
) -> None:
    for name, parameter in named.items():
        parameter.grad = gradients[name].clone() if name in gradients else None
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(named.values(), clip)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.step()


def compare(ours: Trace, theirs: Trace, tolerance: float) -> VerifyReport:
    """Every loss, norm, gradient and weight of every step against the oracle's, by relative distance.

    A parameter that one side knows and the other does not is infinitely far. A gradient that is off by no more than four roundings of the global
    norm (5e-7 of it in fp32) counts as equal: where large terms cancel, as for a scale before a norm, that is all that two orders of a sum share.
    """
    found = []
    for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        found.append(Deviation("loss", step, _scalar(a, b), abs(b)))
        found.append(Deviation("gradient norm", step, _scalar(ours.norms[step], theirs.norms[step]), theirs.norms[step]))
        found += _tensors("gradient", step, ours.gradients[step], theirs.gradients[step], theirs.norms[step])
        found += _tensors("weight", step, ours.weights[step], theirs.weights[step], 0.0)
    found.sort(key=lambda d: -d.relative if d.relative == d.relative else float("-inf"))
    return VerifyReport(len(ours.losses), tolerance, tuple(found), ours.losses, theirs.losses)


def _scalar(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-30)


def _tensors(kind: str, step: int, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], scale: float) -> list[Deviation]:
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            found.append(Deviation(f"{kind} of {name}", step, float("inf"), 0.0))
            continue
        norm = float(theirs[name].double().norm())
        distance = float((ours[name].double() - theirs[name].double()).norm())
        eps = min(
            torch.finfo(theirs[name].dtype).eps, torch.finfo(torch.float32).eps
        )  # coarser formats need a coarser tolerance, said by the user
        close = distance <= _ROUNDINGS * eps * scale
        found.append(Deviation(f"{kind} of {name}", step, 0.0 if close else distance / max(norm, 1e-30), norm))
    return found
