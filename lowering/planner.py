"""Spec and facts to Plan: layouts, cuts, templates, pipelines. Each step is a named pass, so that `pdsl plan --print-after` can show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from pdsl.grammar.errors import PlanError
from pdsl.lowering.auto import AutoStages, auto_stages, auto_template, basis_of
from pdsl.lowering.budgets import elastic_budget, fixed_budget, islands_of_node, loses, misfit, sizing_of
from pdsl.lowering.cuts import LayerCost, cut
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.instantiate import instantiate
from pdsl.lowering.layouts import parameter_layouts
from pdsl.lowering.mesh import Mesh
from pdsl.lowering.pending import pending
from pdsl.lowering.plan import (
    DEFAULT_SILENCE,
    Budget,
    Job,
    MeshAxis,
    ParameterLayout,
    Pipeline,
    Plan,
    Saving,
    Sharding,
    StageCut,
    Template,
    Validation,
)
from pdsl.lowering.schedule import Schedule, repeat
from pdsl.lowering.schedule_rows import RowsFile
from pdsl.lowering.schedules import SCHEDULES, single
from pdsl.lowering.searched import searches
from pdsl.lowering.simulate import StageCosts, simulate
from pdsl.lowering.spec import Spec, StageSpec
from pdsl.lowering.templates import template_of

__all__ = ["PASSES", "layer_costs", "plan"]


@frozen
class _Draft:
    """What the passes have found so far."""

    spec: Spec
    facts: ModelFacts
    mesh: Mesh
    lengths: tuple[
        tuple[int, int], ...
    ]  # (positions, microbatches) of every pipeline: of one round, or of the step if there is a budget to split
    asked: bool = False
    layouts: tuple[ParameterLayout, ...] = ()
    budget: Budget | None = None
    templates: tuple[Template, ...] = ()
    pipelines: tuple[Pipeline, ...] = ()

    @property
    def rounds(self) -> int:
        """Rounds of the schedule that make one step."""
        return self.spec.train.accumulate if self.spec.train is not None else 1


def plan(
    spec: Spec,
    facts: ModelFacts,
    mesh: Mesh,
    *,
    pipelines: Sequence[tuple[int, int]] | None = None,
    print_after: Callable[[str, object], None] | None = None,
) -> Plan:
    """The plan of a checked spec.

    Where pipelines may differ in length, nodes and microbatches are given to them so that the simulated step is shortest. `pipelines` asks for them
    by number: one (stages, microbatches) pair each, in place of the replica and pipeline axes of the mesh. `print_after` is called with the name and the result of every pass. Raises PlanError if no plan exists.
    """
    lengths = _asked(pipelines) if pipelines is not None else _rectangular(spec, mesh)
    draft = _Draft(spec, facts, mesh, lengths, asked=pipelines is not None)
    for name, step in _STEPS:
        draft = step(draft)
        if print_after is not None:
            print_after(name, getattr(draft, name))
    return _finish(draft)


def _asked(pipelines: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    given: list[tuple[object, ...]] = [tuple(pair) for pair in pipelines]
    if not given:
        raise PlanError("there is no pipeline: give at least one (stages, microbatches)")
    lengths = []
    for pair in given:
        match pair:
            case (int(stages), int(microbatches)) if stages >= 1 and microbatches >= 1:
                lengths.append((stages, microbatches))
            case _:
                raise PlanError(f"{pair} is no pipeline: give (stages, microbatches), both at least 1")
    return tuple(lengths)


def _rectangular(spec: Spec, mesh: Mesh) -> tuple[tuple[int, int], ...]:
    microbatches = spec.pipeline.microbatches if spec.pipeline is not None else 1
    return ((mesh.positions, microbatches),) * mesh.pipelines


# --- passes ---------------------------------------------------------------------------------------------------------------------------


def _layouts_pass(draft: _Draft) -> _Draft:
    mesh = draft.mesh
    layouts = parameter_layouts(draft.facts, draft.spec.shard, shard_size=mesh.shard_size, tensor_size=mesh.tensor_size, axes=mesh.axes)
    return evolve(draft, layouts=layouts)


def _budget_pass(draft: _Draft) -> _Draft:
    """The budget of pipelines that may differ in length, and who gets how many nodes and microbatches at first. A fixed mesh gets its budget at the end."""
    spec, facts, mesh = draft.spec, draft.facts, draft.mesh
    if spec.pipeline is not None and spec.pipeline.rows is not None and (loses(spec) or sizing_of(spec, mesh) is not None):
        raise PlanError(
            f"{spec.pipeline.rows.path} is for pipelines of one length and one count of microbatches, which a loss would change"
        )
    if draft.asked:
        return evolve(draft, budget=_asked_budget(draft)) if loses(spec) else draft
    sizes = sizing_of(spec, mesh)
    if sizes is None:
        return draft
    budget = _with_bases(draft, elastic_budget(spec, facts, draft.layouts, mesh))
    each = spec.pipeline.microbatches if spec.pipeline is not None else 1
    total = each * mesh.pipelines * draft.rounds
    found = instantiate(budget, facts, sizes.nodes, total, at_least=mesh.pipelines, at_most=mesh.pipelines)
    lengths = tuple((nodes * sizes.islands_per_node, microbatches) for nodes, microbatches in found)
    return evolve(draft, budget=budget, lengths=lengths)


def _asked_budget(draft: _Draft) -> Budget:
    lengths = [positions for positions, _ in draft.lengths]
    reason = misfit(draft.spec, draft.mesh, lengths)
    if reason is not None:
        raise PlanError(f"fault_budget {{ lose = {loses(draft.spec)} }} needs pipelines that take whole nodes: {reason}")
    return _with_bases(draft, elastic_budget(draft.spec, draft.facts, draft.layouts, draft.mesh, lengths))


# --- templates ------------------------------------------------------------------------------------------------------------------------


def _templates_pass(draft: _Draft) -> _Draft:
    unique = dict.fromkeys(draft.lengths)
    if draft.budget is None:
        return evolve(draft, templates=tuple(_template(draft, positions, microbatches) for positions, microbatches in unique))
    islands = islands_of_node(draft.spec, draft.mesh) or 1
    rounds = draft.rounds if draft.asked else 1  # what was asked for is per round, what was split is per step
    made = (template_of(draft.budget, positions // islands, count * rounds, draft.rounds) for positions, count in unique)
    return evolve(draft, templates=tuple(made))


def _template(draft: _Draft, positions: int, microbatches: int) -> Template:
    if positions > 1 and searches(draft.spec.pipeline):
        written = _explicit_cut(draft, len(draft.spec.pipeline.stages))
        return auto_template(_auto_stages(draft, positions, microbatches), written)
    schedule = _schedule(draft, positions, microbatches)
    bounds = _explicit_cut(draft, schedule.stages) or _balanced_cut(draft, schedule)
    return Template(tuple(StageCut(a, b, at) for (a, b), at in zip(bounds, schedule.placement, strict=True)), schedule)


def _schedule(draft: _Draft, positions: int, microbatches: int) -> Schedule:
    pipeline, rounds = draft.spec.pipeline, draft.rounds
    if pipeline is not None and pipeline.rows is not None:
        return _read_schedule(pipeline.rows, positions, microbatches, rounds)
    family = SCHEDULES.get(pipeline.schedule.name) if pipeline is not None else None
    if positions == 1 and (pipeline is None or family is None or family.per_position(pipeline.virtual) == 1):
        return single(microbatches * rounds)
    if pipeline is None or family is None:
        raise PlanError(f"pipelines of {positions} stages need a `pipeline over AXIS` block that names their schedule")
    reason = family.accepts(positions, microbatches, pipeline.virtual)
    if reason is not None:
        raise PlanError(f"{family.name} cannot run {microbatches} microbatches on {positions} positions: {reason}")
    return family.accumulate(positions, microbatches, pipeline.virtual, rounds)


def _read_schedule(rows: RowsFile, positions: int, microbatches: int, rounds: int) -> Schedule:
    made = rows.schedule
    if made is None:
        raise PlanError("; ".join(rows.findings[:3]))
    if (made.positions, made.microbatches) != (positions, microbatches):
        have = f"{made.positions} positions and {made.microbatches} microbatches"
        raise PlanError(f"{rows.path} is for {have}, not for {positions} and {microbatches}")
    return repeat(made, rounds)


def _auto_stages(draft: _Draft, positions: int, microbatches: int) -> AutoStages:
    per_step = draft.budget is not None and not draft.asked  # then the lengths are not of one round
    total = sum(count for _, count in draft.lengths) * (1 if per_step else draft.rounds)
    return auto_stages(draft.spec, draft.facts, draft.layouts, draft.mesh, positions=positions, microbatches=microbatches, of_step=total)


def _with_bases(draft: _Draft, budget: Budget) -> Budget:
    """The budget with what a search needs for each of its cuts, if schedules are searched for."""
    pipeline = draft.spec.pipeline
    if not searches(pipeline):
        return budget
    lengths = (max(stage.position for stage in stages) + 1 for stages in budget.cuts)
    asked = (_auto_stages(draft, positions, pipeline.microbatches) for positions in lengths)
    return evolve(budget, bases=tuple(map(basis_of, asked, budget.cuts)))


def _explicit_cut(draft: _Draft, stages: int) -> tuple[tuple[int, int], ...] | None:
    pipeline = draft.spec.pipeline
    if pipeline is None or not pipeline.stages:
        return None
    if len(pipeline.stages) != stages:
        raise PlanError(f"the spec lists {len(pipeline.stages)} stages where {stages} are needed")
    layers = draft.facts.layers
    owner = [_stage_naming(pipeline.stages, layer.modules) for layer in layers]
    for i, at in enumerate(owner):  # a layer without modules of its own goes with its neighbour
        if at < 0:
            owner[i] = owner[i - 1] if i > 0 else next((o for o in owner if o >= 0), 0)
    bounds = []
    for stage in range(stages):
        mine = [i for i, at in enumerate(owner) if at == stage]
        if not mine:
            raise PlanError(f'stage "{pipeline.stages[stage].name}" holds no layer')
        bounds.append((mine[0], mine[-1] + 1))
    return tuple(bounds)


def _stage_naming(stages: tuple[StageSpec, ...], modules: tuple[str, ...]) -> int:
    """Index of the stage whose patterns cover the first of the modules; -1 if there are none."""
    if not modules:
        return -1
    return next((i for i, s in enumerate(stages) if any(p.covers_module(modules[0]) for p in s.modules)), -1)


def layer_costs(facts: ModelFacts) -> tuple[LayerCost, ...]:
    """Modelled cost of each layer per sample: FLOPs of the forward, twice that for the backward and what it computes again; memory in bytes of its
    parameters.
    """
    sizes = {p.name: p.bytes for p in facts.parameters}
    return tuple(
        LayerCost(layer.flops, 2 * layer.flops + layer.again_flops, sum(sizes[n] for n in layer.parameters)) for layer in facts.layers
    )


def _balanced_cut(draft: _Draft, schedule: Schedule) -> tuple[tuple[int, int], ...]:
    layers = draft.facts.layers
    if schedule.stages == 1:
        return ((0, len(layers)),)

    def step_time(bounds: tuple[tuple[int, int], ...]) -> object:
        forward = tuple(max(1, sum(layer.flops for layer in layers[a:b])) for a, b in bounds)
        again = tuple(sum(layer.again_flops for layer in layers[a:b]) for a, b in bounds)
        whole = tuple(f + a for f, a in zip(forward, again, strict=True))
        return simulate(schedule, StageCosts(forward, whole, forward)).makespan

    allowed = tuple(not layer.cut_before for layer in layers)
    try:
        return cut(layer_costs(draft.facts), schedule.stages, allowed=allowed, score=step_time)
    except ValueError as error:
        reasons = "; ".join(f"{layer.name}: {layer.cut_before}" for layer in layers[1:] if layer.cut_before)
        raise PlanError(f"{error}" + (f" (no stage may begin at {reasons})" if reasons else "")) from None


# --- pipelines ------------------------------------------------------------------------------------------------------------------------


def _pipelines_pass(draft: _Draft) -> _Draft:
    order = list(dict.fromkeys(draft.lengths))
    islands = _islands(draft)
    made, first = [], 0
    for index, (positions, microbatches) in enumerate(draft.lengths):
        count = microbatches * (1 if draft.budget is not None and not draft.asked else draft.rounds)
        made.append(Pipeline(order.index((positions, microbatches)), islands[index], tuple(range(first, first + count))))
        first += count
    return evolve(draft, pipelines=tuple(made))


def _islands(draft: _Draft) -> list[tuple[tuple[int, ...], ...]]:
    mesh = draft.mesh
    if draft.budget is None and draft.lengths == _rectangular(draft.spec, mesh):
        return [tuple(mesh.islands(p, position) for position in range(mesh.positions)) for p in range(mesh.pipelines)]
    size, first, found = mesh.shard_size * mesh.tensor_size, 0, []
    for positions, _ in draft.lengths:
        starts = range(first, first + positions * size, size)
        found.append(tuple(tuple(range(a, a + size)) for a in starts))
        first += positions * size
    return found


_STEPS: tuple[tuple[str, Callable[[_Draft], _Draft]], ...] = (
    ("layouts", _layouts_pass),
    ("budget", _budget_pass),
    ("templates", _templates_pass),
    ("pipelines", _pipelines_pass),
)
PASSES = tuple(name for name, _ in _STEPS)


def _finish(draft: _Draft) -> Plan:
    spec, mesh = draft.spec, draft.mesh
    made = Plan(
        name=spec.name,
        axes=tuple(MeshAxis(a.name, a.size, a.role) for a in mesh.axes),
        shard_size=mesh.shard_size,
        tensor_size=mesh.tensor_size,
        ranks_per_node=spec.cluster.ranks_per_node or mesh.shard_size * mesh.tensor_size,
        device=spec.cluster.device,
        facts=draft.facts,
        layouts=draft.layouts,
        templates=draft.templates,
        pipelines=draft.pipelines,
        microbatches=sum(len(p.microbatches) for p in draft.pipelines),
        job=_job(spec),
        saving=_saving(spec),
        validation=_validation(spec),
        sharding=_sharding(spec),
        compile=_COMPILERS[spec.train.compile] if spec.train is not None else "",
        precision=spec.precision,
        offload=spec.memory.offload,
        silence=float(spec.fault_budget.silence) if spec.fault_budget is not None else DEFAULT_SILENCE,
        budget=draft.budget or (_with_bases(draft, fixed_budget(spec, mesh, draft.templates[0].stages)) if loses(spec) else None),
        pending=tuple(f"{path}: {what}" for path, what in pending(spec)),
    )
    _check_batch(made)
    return made


_COMPILERS = {"false": "", "true": "inductor", "aot_eager": "aot_eager"}


def _sharding(spec: Spec) -> Sharding:
    asked = spec.memory
    return Sharding(spec.reshards, asked.group, asked.prefetch, asked.sync == "every")


def _saving(spec: Spec) -> Saving | None:
    asked = spec.checkpoint
    return None if asked is None else Saving(asked.path, asked.every, asked.keep, asked.mode == "async")


def _validation(spec: Spec) -> Validation | None:
    asked = spec.validate
    return None if asked is None else Validation(asked.data, asked.every, asked.samples)


def _job(spec: Spec) -> Job:
    model = spec.model
    if model is None:
        raise PlanError("the spec names no model; nothing can be planned")
    train = spec.train
    if train is None:
        raise PlanError("the spec has no `train` block; the batch decides the plan")
    return Job(
        factory=model.factory,
        arguments=model.arguments,
        data=train.data,
        batch=train.batch,
        steps=train.steps,
        accumulate=train.accumulate,
        optimizer=train.optimizer,
        rate=train.rate,
        clip=float(train.clip) if train.clip is not None else None,
        loss=train.loss,
        objective=train.objective,
        last=train.last,
        seed=train.seed,
        shared=train.shared,
        directory=spec.directory,
    )


def _check_batch(made: Plan) -> None:
    parts = made.microbatches * made.shard_size
    if made.job.batch % parts:
        raise PlanError(
            f"a batch of {made.job.batch} samples cannot be divided into {made.microbatches} microbatches over {made.shard_size} shard ranks: "
            f"{made.job.batch} % {parts} = {made.job.batch % parts}; {made.job.batch - made.job.batch % parts} or "
            f"{made.job.batch + parts - made.job.batch % parts} would do"
        )
