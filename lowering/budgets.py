"""From a spec to its Budget: which sizes pipelines may have, and the cut for each, all that is needed to plan anew without the spec."""

from __future__ import annotations

from collections.abc import Iterable

from pdsl.grammar.errors import PlanError
from pdsl.lowering.elastic import Sizing, positions_range, sizing
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.layouts import parameter_layouts
from pdsl.lowering.mesh import Mesh, axis_roles, build_mesh
from pdsl.lowering.plan import Budget, ParameterLayout, StageCut
from pdsl.lowering.schedules import SCHEDULES
from pdsl.lowering.spec import Spec
from pdsl.lowering.stage_memory import StageMemory, fits_in, optimizer_states
from pdsl.lowering.templates import Fits, cuts_for_sizes

__all__ = [
    "domain_nodes",
    "elastic_budget",
    "fixed_budget",
    "islands_of_node",
    "loses",
    "memory_least",
    "misfit",
    "sizing_of",
    "stage_memory_of",
]


def loses(spec: Spec) -> int:
    """How many units the spec wants to lose at once."""
    return spec.fault_budget.lose if spec.fault_budget is not None else 0


def domain_nodes(spec: Spec) -> int:
    """Nodes that share a failure domain, if that is the unit which is lost; else 1."""
    budget, domain = spec.fault_budget, spec.cluster.domain
    nodes = domain.get("nodes") if domain is not None and budget is not None and budget.unit == "domain" else None
    return nodes if isinstance(nodes, int) else 1


def islands_of_node(spec: Spec, mesh: Mesh) -> int | None:
    """Islands of one node, or None if a node has no whole number of them."""
    island = mesh.shard_size * mesh.tensor_size
    per_node = spec.cluster.ranks_per_node or island
    return per_node // island if per_node % island == 0 else None


def sizing_of(spec: Spec, mesh: Mesh) -> Sizing | None:
    """The sizes of pipelines if they may differ, also for a mesh that was made without knowing the number of ranks."""
    return mesh.sizing or sizing(spec, axis_roles(spec), mesh.world_size)


def misfit(spec: Spec, mesh: Mesh, positions: Iterable[int] | None = None) -> str | None:
    """Why the pipelines of a mesh do not take whole nodes, so that the loss of a node would break more than one of them, or only a part of an island.

    None if they do. `positions` are the lengths of the pipelines, if they are not those of the mesh.
    """
    island = mesh.shard_size * mesh.tensor_size
    per_node = spec.cluster.ranks_per_node or island
    islands = islands_of_node(spec, mesh)
    if islands is None and per_node < island:
        return f"an island of {island} ranks (shard {mesh.shard_size} x tensor {mesh.tensor_size}) spans nodes of {per_node}"
    if islands is None:
        return f"a node of {per_node} ranks is no whole number of islands of {island} (shard {mesh.shard_size} x tensor {mesh.tensor_size})"
    for length in (mesh.positions,) if positions is None else positions:
        if length % islands:
            return f"a node has {islands} islands, and a pipeline of {length} position{'s' if length > 1 else ''} takes no whole nodes"
    if positions is not None or mesh.sizing is not None:
        return None
    owner: dict[int, int] = {}
    for pipeline in range(mesh.pipelines):
        for position in range(mesh.positions):
            ranks = mesh.islands(pipeline, position)
            nodes = {rank // per_node for rank in ranks}
            if len(nodes) > 1:
                return f"the island of ranks {', '.join(map(str, ranks[:8]))} lies on nodes {', '.join(map(str, sorted(nodes)))}"
            if owner.setdefault(ranks[0] // per_node, pipeline) != pipeline:
                return f"node {ranks[0] // per_node} has islands of pipelines {owner[ranks[0] // per_node]} and {pipeline}"
    return None


# --- budgets ----------------------------------------------------------------------------------------------------------------------------------------


def elastic_budget(spec: Spec, facts: ModelFacts, layouts: tuple[ParameterLayout, ...], mesh: Mesh, lengths: Iterable[int] = ()) -> Budget:
    """The budget of pipelines of different length: those of the pipeline axis, and `lengths` (positions) beside them.

    Sizes that memory or the layers do not allow are left out. Raises PlanError if none is left.
    """
    islands = islands_of_node(spec, mesh) or 1
    low, high = positions_range(spec, axis_roles(spec))
    asked = [n // islands for n in lengths]
    sizes = range(min([-(-low // islands), *asked]), max([high // islands, *asked]) + 1)
    virtual = spec.pipeline.virtual if spec.pipeline is not None else 1
    schedule = _cut_by(spec)
    most = sum(1 for layer in facts.layers if not layer.cut_before) + 1
    each = SCHEDULES[schedule].per_position(virtual)
    sizes = range(sizes.start, min(sizes.stop, most // (islands * each) + 1))
    found = cuts_for_sizes(facts, [n * islands for n in sizes], schedule=schedule, virtual=virtual, fits=_fits(spec, facts, layouts, mesh))
    cuts: list[tuple[StageCut, ...]] = []
    least = sizes.start
    for n, stages in zip(sizes, found, strict=True):
        if stages is not None:
            cuts.append(stages)
        elif cuts:
            break
        else:
            least = n + 1
    if not cuts:
        told = f"{low} to {high} positions" if low < high else f"{low} position{'s' if low > 1 else ''}"
        raise PlanError(f"no pipeline of {told} can be made of {len(facts.layers)} layers{_in_memory(spec)}")
    return _budget(spec, least, tuple(cuts), _asked_schedule(spec), virtual)


def _asked_schedule(spec: Spec) -> str:
    return spec.pipeline.schedule.name if spec.pipeline is not None else "one_f_one_b"


def _cut_by(spec: Spec) -> str:
    """The schedule for which layers are cut and memory is counted. Pipelines of every length whose schedule is searched for have one stage on each
    position, and room for what 1F1B holds. A schedule from a file is for one length, which a rule sees to.
    """
    asked = _asked_schedule(spec)
    return asked if asked in SCHEDULES else "one_f_one_b"


def fixed_budget(spec: Spec, mesh: Mesh, stages: tuple[StageCut, ...]) -> Budget:
    """The budget of a mesh of equal pipelines: one size. Raises PlanError if they do not take whole nodes."""
    reason = misfit(spec, mesh)
    if reason is not None:
        raise PlanError(f"fault_budget {{ lose = {loses(spec)} }} needs pipelines that take whole nodes: {reason}")
    islands = islands_of_node(spec, mesh) or 1
    virtual = spec.pipeline.virtual if spec.pipeline is not None else 1
    return _budget(spec, mesh.positions // islands, (stages,), _asked_schedule(spec), virtual)


def _budget(spec: Spec, least: int, cuts: tuple[tuple[StageCut, ...], ...], schedule: str, virtual: int) -> Budget:
    fault = spec.fault_budget
    if fault is None:
        return Budget(0, least, cuts, schedule, virtual)
    return Budget(fault.lose, least, cuts, schedule, virtual, fault.recover, domain_nodes(spec))


# --- memory -----------------------------------------------------------------------------------------------------------------------------------------


def memory_least(spec: Spec, facts: ModelFacts, world: int | None) -> int:
    """The fewest nodes of a pipeline that the memory of the devices allows; 1 where nothing is known, or where no size would do."""
    mesh = build_mesh(spec, world) if spec.cluster.memory is not None else None
    if mesh is None or mesh.sizing is None or spec.pipeline is None:
        return 1
    layouts = parameter_layouts(facts, spec.shard, shard_size=mesh.shard_size, tensor_size=mesh.tensor_size, axes=mesh.axes)
    pipeline, first = spec.pipeline, mesh.sizing
    for nodes in range(first.least, first.most + 1):
        at = build_mesh(spec, world, nodes)
        if at is None or at.sizing is None:
            return 1
        positions = nodes * first.islands_per_node
        fits = _fits(spec, facts, layouts, at)
        if cuts_for_sizes(facts, [positions], schedule=_cut_by(spec), virtual=pipeline.virtual, fits=fits)[0] is not None:
            return nodes
    return 1


def _fits(spec: Spec, facts: ModelFacts, layouts: tuple[ParameterLayout, ...], mesh: Mesh) -> Fits | None:
    if spec.cluster.memory is None or spec.train is None:
        return None
    pipeline = spec.pipeline
    each, rounds = (pipeline.microbatches if pipeline is not None else 1), spec.train.accumulate
    schedule, virtual = _cut_by(spec), pipeline.virtual if pipeline is not None else 1
    memory = stage_memory_of(spec, facts, layouts, mesh, each * rounds * mesh.pipelines)
    if memory is None:
        return None
    at_once = each if SCHEDULES[schedule].holds_all else each * rounds  # the rounds follow each other, or run through in one go
    return fits_in(memory, spec.cluster.memory, schedule, virtual, at_once)


def stage_memory_of(
    spec: Spec, facts: ModelFacts, layouts: tuple[ParameterLayout, ...], mesh: Mesh, microbatches: int
) -> StageMemory | None:
    """What layers take on a rank, where a step has so many microbatches over all pipelines; None without a `train` block."""
    if spec.train is None:
        return None
    rows = -(-spec.train.batch // (microbatches * mesh.shard_size))
    return StageMemory.of(
        facts,
        layouts,
        shard=mesh.shard_size,
        tensor=mesh.tensor_size,
        axes=mesh.axes,
        rows=rows,
        states=optimizer_states(spec.train.optimizer),
        gathers=spec.pipeline is not None,
        precision=spec.precision,
    )


def _in_memory(spec: Spec) -> str:
    return f" in {spec.cluster.memory} bytes of memory" if spec.cluster.memory is not None else ""
