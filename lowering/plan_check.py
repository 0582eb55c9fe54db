"""What is wrong with a plan: facts that lie between its parts, so that no part can tell by itself.

The planner makes none of these mistakes. A plan that was written to a file may have been changed there by hand, or by a program.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pdsl.lowering.plan import Plan, Template
from pdsl.lowering.schedule_check import check_schedule

__all__ = ["check_plan"]


def check_plan(plan: Plan) -> tuple[str, ...]:
    """All findings about a plan; empty if it can be run. If its numbers do not fit together, nothing beyond is looked at."""
    for part in (_sizes, _facts, _templates, _pipelines, _layouts, _job):
        findings = tuple(part(plan))
        if findings:
            return findings
    return ()


def _sizes(plan: Plan) -> Iterator[str]:
    sizes = {"shard_size": plan.shard_size, "tensor_size": plan.tensor_size, "ranks_per_node": plan.ranks_per_node}
    sizes |= {f"job.{name}": getattr(plan.job, name) for name in ("batch", "steps", "accumulate")}
    for name, size in sizes.items():
        if size < 1:
            yield f"{name} is {size}: it is at least 1"
    if plan.device not in ("auto", "cpu", "cuda"):
        yield f'device is "{plan.device}": it is auto, cpu or cuda'


def _facts(plan: Plan) -> Iterator[str]:
    layers, parameters = plan.facts.layers, plan.facts.parameters
    if not layers:
        yield "the model has no layers"
    known = {p.name for p in parameters}
    for layer in layers:
        yield from (f"layer {layer.name} uses {name}, which is no parameter" for name in layer.parameters if name not in known)
    for p in parameters:
        if not p.layers or not all(0 <= i < len(layers) for i in p.layers):
            yield f"{p.name} is used in layers {list(p.layers)}: the model has layers 0 to {len(layers) - 1}"


def _templates(plan: Plan) -> Iterator[str]:
    for index, template in enumerate(plan.templates):
        yield from (f"template {index}: {finding}" for finding in (*_stages(plan, template), *check_schedule(template.schedule)))


def _stages(plan: Plan, template: Template) -> Iterator[str]:
    stages, schedule = template.stages, template.schedule
    if len(stages) != schedule.stages:
        yield f"{len(stages)} stages, and its schedule runs {schedule.stages}"
    elif tuple(s.position for s in stages) != schedule.placement:
        yield "its stages and its schedule disagree about positions"
    bounds = [(s.start, s.stop) for s in stages]
    ends = [0, *(stop for _, stop in bounds)]
    if [start for start, _ in bounds] != ends[:-1] or ends[-1] != len(plan.facts.layers) or any(a >= b for a, b in bounds):
        yield f"its stages hold layers {', '.join(f'{a} to {b}' for a, b in bounds)}: they must take 0 to {len(plan.facts.layers)} in turn"


def _pipelines(plan: Plan) -> Iterator[str]:
    if not plan.pipelines:
        yield "there is no pipeline"
        return
    size = plan.shard_size * plan.tensor_size
    for index, pipeline in enumerate(plan.pipelines):
        if not 0 <= pipeline.template < len(plan.templates):
            yield f"pipeline {index} follows template {pipeline.template}, and there are {len(plan.templates)}"
            continue
        template = plan.templates[pipeline.template]
        if len(pipeline.islands) != template.positions:
            yield f"pipeline {index} has {len(pipeline.islands)} islands, and its template {template.positions} positions"
        if any(len(island) != size for island in pipeline.islands if island):
            yield f"pipeline {index} has an island that is not of {size} ranks (shard {plan.shard_size} x tensor {plan.tensor_size})"
        if not pipeline.whole and (pipeline.microbatches or plan.budget is None):
            yield f"pipeline {index} has lost an island, and cannot take microbatches {list(pipeline.microbatches)}"
        if pipeline.microbatches and len(pipeline.microbatches) != template.schedule.microbatches:
            yield f"pipeline {index} takes {len(pipeline.microbatches)} microbatches, and its schedule {template.schedule.microbatches}"
    ranks = sorted(chain.from_iterable(island for p in plan.pipelines for island in p.islands))
    if len(set(ranks)) != len(ranks) or (ranks and ranks[0] < 0):
        yield f"the islands hold ranks {ranks}: each must be there once"
    elif plan.budget is None and ranks != list(range(len(ranks))):
        yield f"the islands hold ranks {ranks}: each of 0 to {len(ranks) - 1} must be there once"
    microbatches = sorted(chain.from_iterable(p.microbatches for p in plan.pipelines))
    if microbatches != list(range(plan.microbatches)):
        yield f"the pipelines take microbatches {microbatches}: each of 0 to {plan.microbatches - 1} must be there once"


def _layouts(plan: Plan) -> Iterator[str]:
    parameters = plan.facts.parameters
    if [layout.name for layout in plan.layouts] != [p.name for p in parameters]:
        yield "the layouts are not those of the parameters of the model, in their order"
        return
    for layout, p in zip(plan.layouts, parameters, strict=True):
        if layout.tensor_dim is not None and not 0 <= layout.tensor_dim < len(p.shape):
            yield f"{p.name} is split in dim {layout.tensor_dim}, and has {len(p.shape)}"
        if layout.second is not None and not 0 <= layout.second[0] < len(p.shape):
            yield f"{p.name} is split in dim {layout.second[0]}, and has {len(p.shape)}"
        if layout.sharded and not p.shape:
            yield f"{p.name} is sharded, and has no dims"
        named = {*layout.shard_axes, *layout.summed, *(a for _, axes in layout.splits for a in axes)}
        unknown = named - {a.name for a in (*plan.shard_axes, *plan.tensor_axes)}
        if unknown:
            yield f"{p.name} is laid out over {', '.join(sorted(unknown))}, no axis of the island"


def _job(plan: Plan) -> Iterator[str]:
    from pdsl.lowering.blocks import BLOCKS

    parts = plan.microbatches * plan.shard_size
    if plan.job.batch % parts:
        yield f"a batch of {plan.job.batch} is not divided by {plan.microbatches} microbatches x {plan.shard_size} shard ranks = {parts}"
    train = BLOCKS["train"]
    for name in ("optimizer", "rate", "loss"):
        key, call = train.key(name), getattr(plan.job, name)
        if key is not None and key.call(call.name) is None:
            yield f"job.{name} is {call.name}: there are {', '.join(c.name for c in key.calls)}"
    if plan.job.objective not in ("model", "cross_entropy", "mse") and ":" not in plan.job.objective:
        yield f'job.objective is "{plan.job.objective}": it is model, cross_entropy, mse or "module:function"'
