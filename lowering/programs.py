"""Plan to programs: every rank's actions, with explicit peers, from one global order of transfers per pipeline."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from pdsl.grammar.errors import PlanError
from pdsl.lowering.buckets import rank_buckets
from pdsl.lowering.plan import Plan, Template
from pdsl.lowering.program import Action, ActionKind, Bucket, Program
from pdsl.lowering.schedule import Op, Operation
from pdsl.lowering.simulate import StageCosts, Timeline, flop_costs, simulate
from pdsl.lowering.transfers import Receive, Row, Send, Transfer, transfer_order

__all__ = ["program", "programs", "stage_costs", "template_timeline"]

_COMPUTE = {
    Op.FORWARD: ActionKind.FORWARD,
    Op.BACKWARD: ActionKind.BACKWARD,
    Op.BACKWARD_INPUT: ActionKind.BACKWARD_INPUT,
    Op.BACKWARD_WEIGHT: ActionKind.BACKWARD_WEIGHT,
}


def stage_costs(plan: Plan, template: Template) -> StageCosts:
    """Modelled cost of each stage: FLOPs per sample of a forward, the same again for each half of the backward. A stage without FLOPs
    counts as one, so that order and bubble stay defined. Nobody waits for an input gradient of the first stage, so its weight half does all. What is
    computed again is part of the backward.
    """
    forward = tuple(Fraction(max(1, sum(layer.flops for layer in plan.facts.layers[s.start : s.stop]))) for s in template.stages)
    again = tuple(sum(layer.again_flops for layer in plan.facts.layers[s.start : s.stop]) for s in template.stages)
    return flop_costs(forward, again)


@lru_cache(maxsize=64)
def _timeline(template: Template, costs: StageCosts) -> Timeline:
    return simulate(template.schedule, costs, template.search.hop if template.search is not None else 0)


def template_timeline(plan: Plan, template: Template) -> Timeline:
    """The simulated step of a template under modelled costs."""
    return _timeline(template, stage_costs(plan, template))


@lru_cache(maxsize=64)
def _rows(template: Template, costs: StageCosts) -> tuple[Row, ...]:
    return transfer_order(template.schedule, _timeline(template, costs))


def programs(plan: Plan) -> tuple[Program, ...]:
    """The programs of all ranks, by rank."""
    return tuple(program(plan, rank) for rank in plan.ranks)


def program(plan: Plan, rank: int) -> Program:
    """The program of one rank. Raises KeyError for a rank outside the plan, PlanError if its schedule does not go with how layers are sharded."""
    at = plan.coordinate(rank)
    pipeline = plan.pipelines[at.pipeline]
    buckets = rank_buckets(plan, rank)
    if not pipeline.microbatches:
        return _bystander(plan, rank, buckets)
    template = plan.templates[pipeline.template]
    index_in_island = pipeline.islands[at.position].index(rank)

    def peer(position: int) -> int:
        return pipeline.islands[position][index_in_island]

    row = _rows(template, stage_costs(plan, template))[at.position]
    _check_units(plan, template)
    last_backward = _last_backward(row)
    unsharded: set[int] = set()
    done: set[int] = set()
    issued: set[int] = set()
    actions: list[Action] = []
    for i, item in enumerate(row):
        if isinstance(item, Send):
            actions.append(_transfer(item.transfer, pipeline.microbatches, sends=True, peer=peer(item.transfer.receiver)))
            continue
        if isinstance(item, Receive):
            actions.append(_transfer(item.transfer, pipeline.microbatches, sends=False, peer=peer(item.transfer.sender)))
            continue
        if plan.shard_size > 1 and not plan.reshard and item.stage not in unsharded:
            unsharded.add(item.stage)
            actions.append(Action(ActionKind.UNSHARD, item.stage))
        ends_stage = last_backward.get(item.stage) == i
        if plan.shard_size > 1 and ends_stage:
            # ahead of the backward that it ends with: FSDP2 reshards a unit as soon as its own part of that backward is over
            actions.append(Action(ActionKind.RESHARD, item.stage))
        actions.append(Action(_COMPUTE[item.op], item.stage, pipeline.microbatches[item.microbatch]))
        if not ends_stage:
            continue
        done.add(item.stage)
        ready = [b for b in range(len(buckets)) if b not in issued and done.issuperset(buckets[b].stages)]
        issued.update(ready)
        actions += [Action(ActionKind.REDUCE, item.stage, bucket=b) for b in ready]
    actions.append(Action(ActionKind.STEP))
    return Program(rank, tuple(actions), _checked(buckets, issued))


def _check_units(plan: Plan, template: Template) -> None:
    """Raises PlanError if the units that a half left whole would be gone, or reduced, before the other half. torch computes wrong gradients then."""
    halves = any(o.op is Op.BACKWARD_WEIGHT for row in template.schedule.rows for o in row)
    if not halves or plan.shard_size == 1 or not (plan.reshard or plan.sharding.every):
        return
    key = "reshard = true" if plan.reshard else "sync = every"
    raise PlanError(
        f"{template.schedule.name} runs backwards in halves, between which sharded layers stay whole: memory {{ {key} }} cannot be had with it"
    )


def _bystander(plan: Plan, rank: int, buckets: tuple[Bucket, ...]) -> Program:
    """What a rank does whose pipeline takes no microbatches: it sums gradients and steps, so that what it holds stays what the others hold."""
    stage = plan.stages_of(rank)[0]
    sums = (Action(ActionKind.REDUCE, stage, bucket=b) for b in range(len(buckets)))
    return Program(rank, (*sums, Action(ActionKind.STEP)), buckets)


def _checked(buckets: tuple[Bucket, ...], issued: set[int]) -> tuple[Bucket, ...]:
    if len(issued) != len(buckets):
        raise AssertionError("a bucket of gradients is never summed")
    return buckets


def _last_backward(row: Row) -> dict[int, int]:
    """For each stage the index of the row item that makes its weight gradients final."""
    ends = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
    return {item.stage: i for i, item in enumerate(row) if isinstance(item, Operation) and item.op in ends}


def _transfer(transfer: Transfer, microbatches: tuple[int, ...], *, sends: bool, peer: int) -> Action:
    activation = transfer.kind == "activation"
    stage = transfer.from_stage if sends else transfer.to_stage
    kinds = (
        (ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_ACTIVATION)
        if activation
        else (ActionKind.SEND_GRADIENT, ActionKind.RECEIVE_GRADIENT)
    )
    return Action(kinds[0] if sends else kinds[1], stage, microbatches[transfer.microbatch], peer)
