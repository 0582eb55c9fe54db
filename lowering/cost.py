"""The cost model: what a plan takes in memory, on the wire and in time, from shapes and schedules alone.

Bytes are exact for what PDSL itself places: parameters, gradients, optimizer state, transfers, collectives of a ring. Activations rest on what the
probe saw autograd save in the formats of the plan on one process, and on a tensor rank where parameters are split. Time is in FLOPs of one sample, so it
compares plans and cuts and gives the bubble; it is no prediction of seconds.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod

from attrs import evolve, frozen

from pdsl.lowering.boxes import box, box_shape
from pdsl.lowering.crossings import local_layer
from pdsl.lowering.facts import LayerFacts, ParameterFacts, item_bytes
from pdsl.lowering.ownership import owned_parameters, summed_over
from pdsl.lowering.plan import Plan, StageCut, Template
from pdsl.lowering.precision import compute_format, sum_format
from pdsl.lowering.programs import template_timeline
from pdsl.lowering.schedule import Op
from pdsl.lowering.stage_memory import features_given, optimizer_states
from pdsl.lowering.tensor_traffic import tensor_traffic, tokens_of
from pdsl.lowering.units import gathers, reductions, unit_groups

__all__ = [
    "CostReport", "RankMemory", "RankTraffic", "TemplateTime", "boundary_bytes", "cost", "is_trained", "peak_memory", "ring_all_reduce",
]  # fmt: skip

_FP32 = 4


@frozen
class RankMemory:
    """Bytes of one rank at its worst moment, by cause.

    `parameters`, `gradients` and `optimizer` are the rank's own shards and stay. `activations` is the peak over the rank's row of the schedule of
    what autograd keeps from a forward to its backward. `transient` is what the step adds on top of the shards: parameters made whole for the step,
    their whole gradients until they are reduced. `boundary` holds tensors received from neighbours: inputs, kept from a forward to its backward, and
    one gradient.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int
    boundary: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient + self.boundary


@frozen
class RankTraffic:
    """Bytes that one rank sends in one step, by kind. Collectives count as rings.

    `all_gather` makes sharded parameters whole, `reduce_scatter` returns their gradients, `gradient_sum` adds gradients over pipelines and other
    holders of the same box, `tensor` is what tensor parallelism exchanges inside layers, `point_to_point` activations and gradients between stages.
    """

    rank: int
    all_gather: int
    reduce_scatter: int
    gradient_sum: int
    tensor: int
    point_to_point: int

    @property
    def total(self) -> int:
        return self.all_gather + self.reduce_scatter + self.gradient_sum + self.tensor + self.point_to_point


@frozen
class TemplateTime:
    """The simulated step of one template: its makespan in FLOPs per sample (backward twice the forward), and the share of it that positions idle."""

    template: int
    makespan: Fraction
    bubble: Fraction


@frozen
class CostReport:
    """All costs of a plan. `memory` and `traffic` are by rank.

    `step_time` is the longest makespan times the samples of a microbatch on a rank, over the tensor ranks that share the work: FLOPs on the critical path
    of one step. `bubble` is the share of the step that the ranks of all pipelines idle, waiting for the slowest pipeline included. `ideal` is
    the step time without any bubble: all work spread evenly over all ranks.
    """

    memory: tuple[RankMemory, ...]
    traffic: tuple[RankTraffic, ...]
    templates: tuple[TemplateTime, ...]
    step_time: Fraction
    ideal: Fraction
    bubble: Fraction


def cost(plan: Plan) -> CostReport:
    """The costs of a plan."""
    ranks = plan.ranks
    times = tuple(_template_time(plan, i) for i in range(len(plan.templates)))
    slowest = max(times[p.template].makespan for p in plan.pipelines)
    work = sum((times[p.template].makespan * (1 - times[p.template].bubble) * len(p.islands) for p in plan.pipelines), Fraction(0))
    even = work / sum(len(p.islands) for p in plan.pipelines)
    scale = Fraction(plan.rows_per_rank, plan.tensor_size)
    alike: dict[tuple[int, int, int, int], tuple[RankMemory, RankTraffic]] = {}
    for rank in ranks:
        place = _place(plan, rank)
        if place not in alike:
            alike[place] = _memory(plan, rank), _traffic(plan, rank)
    return CostReport(
        memory=tuple(evolve(alike[_place(plan, rank)][0], rank=rank) for rank in ranks),
        traffic=tuple(evolve(alike[_place(plan, rank)][1], rank=rank) for rank in ranks),
        templates=times,
        step_time=slowest * scale,
        ideal=even * scale,
        bubble=1 - even / slowest,
    )


def peak_memory(plan: Plan) -> int:
    """Bytes of the rank that needs most, as `cost` finds them, without the rest of it. The first rank of an island has the largest boxes."""
    first = {_place(plan, island[0]): island[0] for p in plan.pipelines for island in p.islands if island}
    return max(_memory(plan, rank).total for rank in first.values())


def _place(plan: Plan, rank: int) -> tuple[int, int, int, int]:
    """Ranks at the same place of pipelines of one template cost the same, so each place is computed once."""
    at = plan.coordinate(rank)
    return (plan.pipelines[at.pipeline].template, at.position, at.shard, at.tensor)


def _template_time(plan: Plan, index: int) -> TemplateTime:
    timeline = template_timeline(plan, plan.templates[index])
    return TemplateTime(index, Fraction(timeline.makespan), Fraction(timeline.bubble))


# --- boxes --------------------------------------------------------------------------------------------------------------------------------


def is_trained(plan: Plan, parameter: ParameterFacts) -> bool:
    """Whether a parameter gets a gradient: it wants one, and no frozen layer uses it."""
    return parameter.trainable and min(parameter.layers) >= plan.frozen_layers


def _box_numel(plan: Plan, p: ParameterFacts, shard: int, tensor: int) -> int:
    return prod(box_shape(box(plan, p, shard, tensor)))


def _whole_numel(plan: Plan, p: ParameterFacts, tensor: int) -> int:
    """Elements of a parameter once its shards are gathered; what tensor parallelism splits stays split."""
    shards = range(plan.shard_size) if plan.layout(p.name).sharded else range(1)
    return sum(_box_numel(plan, p, shard, tensor) for shard in shards)


def _computed(plan: Plan, p: ParameterFacts) -> int:
    """Bytes of an element in the format that layers compute in."""
    return item_bytes(compute_format(plan.precision, plan.facts, p))


def _summed(plan: Plan, p: ParameterFacts) -> int:
    """Bytes of an element of a sum of gradients."""
    return item_bytes(sum_format(plan.precision, p))


# --- memory -------------------------------------------------------------------------------------------------------------------------------


def _memory(plan: Plan, rank: int) -> RankMemory:
    at = plan.coordinate(rank)
    owned = owned_parameters(plan, rank)
    parameters = gradients = elements = 0
    for p in owned:
        size = _box_numel(plan, p, at.shard, at.tensor)
        parameters += size * item_bytes(p.dtype)
        if is_trained(plan, p):
            gradients += size * item_bytes(p.dtype)
            elements += size
    activations, boundary = _peaks(plan, plan.template(at.pipeline), at.position)
    waits = plan.offload == "params"  # weights and final gradients then lie on the host, like the optimizer's state
    return RankMemory(
        rank=rank,
        parameters=0 if waits else parameters,
        gradients=0 if waits else gradients,
        optimizer=optimizer_states(plan.job.optimizer) * elements * _FP32 if plan.offload == "none" else 0,
        activations=activations,
        transient=_transient(plan, rank, owned),
        boundary=boundary,
    )


def _peaks(plan: Plan, template: Template, position: int) -> tuple[int, int]:
    """The most bytes of activations, and of received tensors, that a position holds at once: prefix sums over its row.

    A forward takes, the operation that ends with the weight gradients gives back. Between its halves a backward also keeps the gradients of what
    its weights gave. What is computed again is there for the time of its backward.
    """
    rows = plan.rows_per_rank
    again = [max(layer.again_bytes for layer in plan.facts.layers[s.start : s.stop]) * rows for s in template.stages]
    saved = [_stage_activation(plan, s) * rows for s in template.stages]
    row = template.schedule.rows[position]
    halved = {o.stage for o in row if o.op is Op.BACKWARD_INPUT and o.stage}  # the first stage has no input half
    between = [_half_bytes(plan, s) * rows if i in halved else 0 for i, s in enumerate(template.stages)]
    received = [
        boundary_bytes(local_layer(plan, s.start), rows) if i and _crosses(template, i) else 0 for i, s in enumerate(template.stages)
    ]
    activations = inputs = most_activations = most_inputs = 0
    for o in row:
        sign = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1, Op.BACKWARD_INPUT: 0}[o.op]
        if o.op is not Op.FORWARD:
            most_activations = max(most_activations, activations + again[o.stage])
        activations += sign * saved[o.stage] + {Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: -1}.get(o.op, 0) * between[o.stage]
        inputs += sign * received[o.stage]
        most_activations = max(most_activations, activations)
        most_inputs = max(most_inputs, inputs)
    after = [s for i, s in enumerate(template.stages) if i and template.stages[i - 1].position == position and _crosses(template, i)]
    gradient = max((boundary_bytes(local_layer(plan, s.start), rows, gradients=True) for s in after), default=0)
    return most_activations, most_inputs + gradient


def _crosses(template: Template, stage: int) -> bool:
    """Whether the input of a stage comes from another position."""
    return template.stages[stage - 1].position != template.stages[stage].position


def _stage_activation(plan: Plan, stage: StageCut) -> int:
    """Bytes that autograd saves for one sample in a stage, on one tensor rank; a frozen prefix saves nothing."""
    layers, tensor = plan.facts.layers, plan.facts.tensor
    own = range(max(stage.start, plan.frozen_layers), stage.stop)
    return sum(int(layers[i].activation_bytes * tensor.share(i)) if tensor is not None else layers[i].activation_bytes for i in own)


def _half_bytes(plan: Plan, stage: StageCut) -> int:
    """Bytes for one sample of the gradients that the weights of a stage wait for between the halves of a backward: of all that they gave."""
    total = 0
    for p in plan.facts.parameters:
        if not any(stage.start <= i < stage.stop for i in p.layers) or not is_trained(plan, p):
            continue
        shape = box_shape(box(plan, p, 0, 0)) if not plan.layout(p.name).sharded else p.shape
        total += features_given(p, shape) * tokens_of(plan.facts, p.layers[0]) * _summed(plan, p)
    return total


def boundary_bytes(layer: LayerFacts, rows: int, *, gradients: bool = False) -> int:
    """Bytes that cross the boundary into a layer for `rows` samples; only the tensors that get a gradient, if asked for."""
    return sum(prod(t.shape(rows)) * item_bytes(t.dtype) for t in layer.inputs if t.differentiable or not gradients)


def _transient(plan: Plan, rank: int, owned: tuple[ParameterFacts, ...]) -> int:
    """Bytes of gathered parameters and whole gradients beyond the shards themselves, and of what layers compute with in place of weights that are not sharded.

    Without resharding every sharded parameter of the rank's stages is whole for the step. With resharding there are the unit in use and those
    gathered ahead, besides what stays whole from a forward to the next backward: the root's unit, and the last one of each other stage.
    Whole gradients add up in place over the microbatches, or are one unit's, and the root's, where each is reduced as it comes.
    """
    at = plan.coordinate(rank)
    waits = plan.offload == "params"
    lower = [p for p in owned if not plan.layout(p.name).sharded and (waits or compute_format(plan.precision, plan.facts, p) != p.dtype)]
    copies = sum(_box_numel(plan, p, at.shard, at.tensor) * _computed(plan, p) for p in lower)
    if plan.shard_size == 1:
        return copies
    sharded = [p for p in owned if plan.layout(p.name).sharded]
    numel = {p.name: _whole_numel(plan, p, at.tensor) for p in sharded}
    whole = {p.name: numel[p.name] * _computed(plan, p) for p in sharded}
    groups = unit_groups(plan, rank)
    layers = {i for stage in groups.values() for group in stage for i in group}
    root = [p.name for p in sharded if not layers.intersection(p.layers)]
    units = {s: [[p.name for p in sharded if set(group).intersection(p.layers)] for group in stage] for s, stage in groups.items()}
    trained = {p.name for p in sharded if is_trained(plan, p)}
    gathered = _gathered(plan, {s: [sum(whole[n] for n in unit) for unit in stage] for s, stage in units.items()})
    if reductions(plan, rank) < len(plan.pipelines[at.pipeline].microbatches):
        gradients = sum(numel[p.name] * _summed(plan, p) for p in sharded if p.name in trained)
    else:
        largest = max((sum(whole[n] for n in unit if n in trained) for stage in units.values() for unit in stage), default=0)
        gradients = largest + sum(whole[n] for n in root if n in trained)
    return copies + sum(whole[n] for n in root) + gathered + gradients


def _gathered(plan: Plan, units: dict[int, list[int]]) -> int:
    """The most bytes of units that are whole at once, of the sizes of each stage's units."""
    if not plan.reshard:
        return sum(size for stage in units.values() for size in stage)
    kept = {s: stage[-1] for s, stage in units.items() if stage}
    running = [sum(sorted(stage)[-1 - plan.sharding.prefetch :]) + sum(kept.values()) - kept[s] for s, stage in units.items() if stage]
    return max(running, default=0)


# --- traffic ------------------------------------------------------------------------------------------------------------------------------


def ring_all_reduce(size: int, ranks: int) -> int:
    """Bytes that each of `ranks` sends to sum `size` bytes in a ring: 2 * size * (n - 1) / n, rounded up."""
    return -(-2 * size * (ranks - 1) // ranks) if ranks > 1 else 0


def _traffic(plan: Plan, rank: int) -> RankTraffic:
    at = plan.coordinate(rank)
    others = plan.shard_size - 1
    gather = scatter = summed = 0
    gathered, reduced = gathers(plan, rank), reductions(plan, rank)
    for p in owned_parameters(plan, rank):
        trained = is_trained(plan, p)
        if plan.layout(p.name).sharded:
            padded = _box_numel(plan, p, 0, at.tensor)  # a ring moves shards of equal size: all are padded to the first
            gather += others * padded * gathered[p.name] * _computed(plan, p)
            scatter += others * padded * reduced * _summed(plan, p) if trained else 0
        if trained:
            size = _box_numel(plan, p, at.shard, at.tensor) * _summed(plan, p)
            summed += ring_all_reduce(size, len(summed_over(plan, p, rank)))
    between = _point_to_point(plan, plan.template(at.pipeline), at.position)
    return RankTraffic(rank, gather, scatter, summed, tensor_traffic(plan, rank), between)


def _point_to_point(plan: Plan, template: Template, position: int) -> int:
    """Activations that a position sends forward and gradients that it sends back, over its row."""
    rows, stages = plan.rows_per_rank, template.stages
    total = 0
    for o in template.schedule.rows[position]:
        if o.op is Op.FORWARD and o.stage + 1 < len(stages) and _crosses(template, o.stage + 1):
            total += boundary_bytes(local_layer(plan, stages[o.stage + 1].start), rows)
        elif o.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and o.stage and _crosses(template, o.stage):
            total += boundary_bytes(local_layer(plan, stages[o.stage].start), rows, gradients=True)
    return total
