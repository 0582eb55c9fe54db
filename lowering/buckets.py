"""Buckets: parameters whose gradients are summed together, in the order in which they become final."""

from __future__ import annotations

from attrs import frozen

from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.ownership import local_bytes, owned_parameters, stages_using, summed_over
from pdsl.lowering.plan import Plan
from pdsl.lowering.program import Bucket
from pdsl.lowering.units import root_parameters

__all__ = ["BUCKET_BYTES", "rank_buckets"]

BUCKET_BYTES = 8 << 20  # large enough to amortise one collective, small enough to start before the backward pass has ended


@frozen
class _Entry:
    parameter: ParameterFacts
    ranks: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]  # per pipeline; equal keys finish together on every rank


def rank_buckets(plan: Plan, rank: int) -> tuple[Bucket, ...]:
    """The buckets of a rank, deepest layers first, which is the order in which their gradients become final.

    Parameters share a bucket if they are summed over the same ranks, belong to the same stages in every pipeline and kind of layout, and fit
    BUCKET_BYTES. The cut depends on the plan alone, so all ranks of a bucket agree on it.
    """
    at = plan.coordinate(rank)
    pipelines = range(len(plan.pipelines))
    entries = [
        _Entry(p, ranks, tuple(stages_using(plan, i, p) for i in pipelines))
        for p in owned_parameters(plan, rank)
        if p.trainable and min(p.layers) >= plan.frozen_layers and len(ranks := summed_over(plan, p, rank)) > 1
    ]
    entries.sort(key=lambda e: -min(e.parameter.layers))  # a tied one is final when its lowest layer is

    kinds: dict[object, list[_Entry]] = {}
    for e in entries:
        kinds.setdefault((e.ranks, e.stages, plan.layout(e.parameter.name).sharded, e.parameter.dtype), []).append(e)

    mine, late = set(plan.stages_of(rank)), root_parameters(plan, rank)
    buckets = []
    for run in kinds.values():
        used = tuple(sorted(mine.intersection(run[0].stages[at.pipeline])))
        for part in _fill(plan, run):
            names = tuple(e.parameter.name for e in part)
            buckets.append(Bucket(names, run[0].ranks, used if late.isdisjoint(names) else tuple(sorted(mine))))
    return tuple(buckets)


def _fill(plan: Plan, run: list[_Entry]) -> list[list[_Entry]]:
    parts: list[list[_Entry]] = []
    room = 0
    for entry in run:
        size = local_bytes(plan, entry.parameter)
        if not parts or size > room:
            parts.append([])
            room = BUCKET_BYTES
        parts[-1].append(entry)
        room -= size
    return parts
