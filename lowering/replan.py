"""A plan after a loss or a join: the next plan from the last one, without the spec.

Two answers. *Re-route*: pipelines that are still whole take over the microbatches of those that are not; nothing moves, and it can be done in the
middle of a step. *Re-template*: the nodes that are there form new pipelines, every one of them is used, and layers move. Both are pure, so all
ranks find the same plan by themselves and compare hashes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType

from attrs import evolve

from pdsl.grammar.errors import PlanError
from pdsl.lowering.instantiate import instantiate
from pdsl.lowering.ownership import islands_using
from pdsl.lowering.plan import Budget, Pipeline, Plan, StageCut, Template
from pdsl.lowering.programs import template_timeline
from pdsl.lowering.roles import assign_roles
from pdsl.lowering.templates import rescheduled_cut, template_of

__all__ = ["copies", "layers_held", "redo", "reroute", "rescheduled", "retemplate", "step_time"]


def _budget(plan: Plan) -> Budget:
    if plan.budget is None:
        raise PlanError(f"{plan.name} has no fault budget: its plan cannot change while it runs")
    return plan.budget


def rescheduled(plan: Plan, template: Template, microbatches: int) -> Template:
    """The same cut with the schedule for another count of microbatches."""
    if template.schedule.microbatches == microbatches:
        return template
    budget = _budget(plan)
    return rescheduled_cut(budget, template.stages, microbatches, plan.job.accumulate)


def step_time(plan: Plan) -> Fraction:
    """Simulated time of a step, in FLOPs of one sample: the slowest pipeline's."""
    times = [template_timeline(plan, plan.template(i)).makespan for i, p in enumerate(plan.pipelines) if p.microbatches]
    return max((Fraction(t) for t in times), default=Fraction(0))


# --- re-route -------------------------------------------------------------------------------------------------------------------------


def reroute(
    plan: Plan, lost: Collection[int], *, generation: int, finished: Mapping[int, Collection[int]] = MappingProxyType({})
) -> Plan | None:
    """The plan without the lost nodes in which every layer stays where it is; None if no pipeline is whole any more.

    Microbatches of broken pipelines go one by one to the whole pipeline that would be done first. What is left of a broken pipeline keeps its
    layers up to date and computes nothing. `finished` are microbatches that a pipeline has run already in the step under way: they are its own.
    """
    gone = frozenset(lost)
    shrunk = [
        evolve(p, islands=tuple(() if any(plan.node(r) in gone for r in island) else island for island in p.islands))
        for p in plan.pipelines
    ]
    kept = [i for i, p in enumerate(shrunk) if any(p.islands)]
    alive = [shrunk[i] for i in kept]
    whole = [i for i, p in enumerate(alive) if p.whole]
    if not whole:
        return None
    done = {i: set(finished.get(kept[i], ())) for i in whole}
    elsewhere = {i: set().union(*(done[j] for j in whole if j != i)) for i in whole}
    taken = {i: sorted(set(alive[i].microbatches) - elsewhere[i] | done[i]) for i in whole}
    orphans = sorted(set(range(plan.microbatches)).difference(*taken.values()))
    speed = {i: _pace(plan, plan.templates[alive[i].template]) for i in whole}
    for microbatch in orphans:
        first = min(whole, key=lambda i: (speed[i][0] + speed[i][1] * (len(taken[i]) + 1), i))
        taken[first].append(microbatch)
    return _with_microbatches(
        evolve(plan, pipelines=tuple(alive), generation=generation), {i: tuple(taken.get(i, ())) for i in range(len(alive))}
    )


def _pace(plan: Plan, template: Template) -> tuple[Fraction, Fraction]:
    """Filling time and time for each further microbatch of a template. A position runs all of its stages for each."""
    flops = [0] * template.positions
    for s in template.stages:
        flops[s.position] += sum(layer.flops for layer in plan.facts.layers[s.start : s.stop])
    slowest = Fraction(3 * max(1, *flops))
    return 3 * Fraction(sum(flops)) - slowest, slowest


def redo(plan: Plan, run: Mapping[int, Sequence[int]]) -> Plan:
    """The plan of an interrupted step that only runs some microbatches: `run` by pipeline; the others have their gradients already."""
    return _with_microbatches(plan, {i: tuple(run.get(i, ())) for i in range(len(plan.pipelines))})


def _with_microbatches(plan: Plan, counts: Mapping[int, tuple[int, ...]]) -> Plan:
    templates: dict[Template, int] = {}
    made = []
    for i, pipeline in enumerate(plan.pipelines):
        template = plan.templates[pipeline.template]
        if counts[i]:
            template = rescheduled(plan, template, len(counts[i]))
        index = templates.setdefault(template, len(templates))
        made.append(evolve(pipeline, template=index, microbatches=counts[i]))
    return evolve(plan, templates=tuple(templates), pipelines=tuple(made))


# --- re-template ----------------------------------------------------------------------------------------------------------------------


def retemplate(plan: Plan, nodes: Collection[int], held: Mapping[int, Collection[int]], *, generation: int) -> Plan:
    """A new plan over exactly these nodes, with as many pipelines as the budget asks for where that can be.

    `held` are the layers that each node has now; roles are given to nodes so that as many bytes as possible stay. Raises PlanError if the nodes
    cannot all be used.
    """
    budget = _budget(plan)
    live = sorted(nodes)
    shapes = instantiate(budget, plan.facts, len(live), plan.microbatches)
    kept = _Kept(plan)
    roles: list[tuple[int, int]] = []  # (pipeline, node of it)
    weights, current = [], []
    before = _roles_now(plan)
    for index, (count, _) in enumerate(shapes):
        for at in range(count):
            wanted = _layers_of(budget.cut(count), at, plan.islands_per_node)
            roles.append((index, at))
            weights.append([kept.bytes(wanted, held.get(node, ())) for node in live])
            current.append(next((j for j, node in enumerate(live) if before.get(node) == wanted), None))
    given = assign_roles(weights, current)
    node_of = {role: live[given[r]] for r, role in enumerate(roles)}
    templates: dict[Template, int] = {}
    pipelines, first = [], 0
    for index, (count, microbatches) in enumerate(shapes):
        template = template_of(budget, count, microbatches, plan.job.accumulate)
        islands = tuple(i for at in range(count) for i in _islands(plan, node_of[index, at]))
        number = templates.setdefault(template, len(templates))
        pipelines.append(Pipeline(number, islands, tuple(range(first, first + microbatches))))
        first += microbatches
    return evolve(plan, templates=tuple(templates), pipelines=tuple(pipelines), generation=generation)


def _islands(plan: Plan, node: int) -> list[tuple[int, ...]]:
    size = plan.shard_size * plan.tensor_size
    begin = node * plan.ranks_per_node
    return [tuple(range(a, a + size)) for a in range(begin, begin + plan.ranks_per_node, size)]


def _layers_of(cut: Sequence[StageCut], at: int, per_node: int) -> frozenset[int]:
    """Layers of the `at`-th node of a pipeline."""
    mine = range(at * per_node, (at + 1) * per_node)
    return frozenset(i for s in cut if s.position in mine for i in range(s.start, s.stop))


class _Kept:
    """Bytes of parameters that stay if a node takes a part. One that several layers use stays if any of them was there and any is wanted."""

    def __init__(self, plan: Plan) -> None:
        self._sizes = [1] * len(plan.facts.layers)  # a layer without parameters still weighs something: where it runs may be compiled
        self._shared = [(p.bytes, frozenset(p.layers)) for p in plan.facts.parameters if len(p.layers) > 1]
        for p in plan.facts.parameters:
            if len(p.layers) == 1:
                self._sizes[p.layers[0]] += p.bytes

    def bytes(self, wanted: frozenset[int], held: Collection[int]) -> int:
        """`wanted` and `held` are layers."""
        had = frozenset(held)
        shared = sum(size for size, layers in self._shared if layers & wanted and layers & had)
        return shared + sum(self._sizes[i] for i in wanted & had)


def _roles_now(plan: Plan) -> dict[int, frozenset[int]]:
    return {node: frozenset(layers) for node, layers in layers_held(plan).items()}


def layers_held(plan: Plan) -> dict[int, set[int]]:
    """The layers that each living node of a plan runs."""
    found: dict[int, set[int]] = {}
    for index, pipeline in enumerate(plan.pipelines):
        for s in plan.template(index).stages:
            for rank in pipeline.islands[s.position][:1]:
                found.setdefault(plan.node(rank), set()).update(range(s.start, s.stop))
    return found


def copies(plan: Plan) -> tuple[int, ...]:
    """For each layer the number of nodes that hold all of its parameters. Shards of one island are one copy; a tied parameter is where it is used."""
    nodes = {p.name: len({plan.node(island[0]) for island in islands_using(plan, p)}) for p in plan.facts.parameters}
    mine = [[nodes[p.name] for p in plan.facts.parameters if layer in p.layers] for layer in range(len(plan.facts.layers))]
    return tuple(min(counts, default=len(plan.pipelines)) for counts in mine)
